"""A GPU's driver played by the CPU: launches are written down, and done by ATen ops on memory of the CPU.

``PlayedLibrary`` has the functions of libcuda that are called, as C functions, so that the same ones are called from
Python and from machine code.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import pytest
import sympy
import torch

from torch_mlc.codegen.host_native import DROP_GUARD, GET_STREAM, MAKE_GUARD
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.loops import Buffer
from torch_mlc.ir.target import Target
from torch_mlc.runtime import gpu_launch, gpu_table, kernels
from torch_mlc.runtime.cpu import compile_object, load_object, symbol_address
from torch_mlc.runtime.fallback import AtenKernel
from torch_mlc.runtime.gpu import GpuBinary, default_alignment, signature
from torch_mlc.runtime.gpu_driver import CDriver
from torch_mlc.runtime.kernels import KernelCode, compile_source, gpu_binary, source_to_json
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.function import TensorFunction

I32, U32, POINTER = ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p
CELLS: Mapping[str, Any] = {"ptr": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
FAILED, NO_MEMORY = 719, 2
WORDS = {1: b"invalid argument", FAILED: b"unspecified launch failure", NO_MEMORY: b"out of memory"}


# Pointers to scratch memory that Triton puts behind the arguments.
SCRATCH = 2


def played_code(source: KernelSource, target: Target, key: str, *_: object) -> KernelCode:
    """A kernel that needs no machine code: all that a launch knows of it is there."""
    if source.language != "triton":
        return compile_source(source, target, key)
    arguments = ["ptr" if t.startswith("*") else t for t in signature(source).values()]
    binary = GpuBinary(
        source.name, target.kind, target.arch, b"", "", tuple(arguments), SCRATCH,
        32 * int(source.option("num_warps") or 4), 1024, default_alignment(source),
    )  # fmt: skip
    described = {k: v for k, v in asdict(binary).items() if k not in ("code", "assembly")}
    meta = {"binary": described, "code": 0, "source": source_to_json(source), "target": asdict(target)}
    return KernelCode(key, source.name, "triton", source.symbols, b"", json.loads(json.dumps(meta)))


TORCH_FUNCTIONS = (MAKE_GUARD, DROP_GUARD, GET_STREAM)
TORCH = f"""
define i32 @{MAKE_GUARD}(i32 %index, ptr %guard) {{
entry:
  %refused.at = getelementptr i64, ptr WORDS, i64 3
  %refused = load i32, ptr %refused.at
  %fine = icmp eq i32 %refused, 0
  br i1 %fine, label %make, label %done
make:
  %made.at = getelementptr i64, ptr WORDS, i64 1
  %made = atomicrmw add ptr %made.at, i64 1 seq_cst
  store ptr %made.at, ptr %guard
  br label %done
done:
  ret i32 %refused
}}
define i32 @{DROP_GUARD}(ptr %guard) {{
entry:
  %none = icmp eq ptr %guard, null
  br i1 %none, label %done, label %drop
drop:
  %dropped.at = getelementptr i64, ptr WORDS, i64 2
  %dropped = atomicrmw add ptr %dropped.at, i64 1 seq_cst
  br label %done
done:
  ret i32 0
}}
define i32 @{GET_STREAM}(i32 %index, ptr %stream) {{
  %current = load i64, ptr WORDS
  store i64 %current, ptr %stream
  ret i32 0
}}
"""


@dataclass(frozen=True)
class Launched:
    """One launch: parameters as they lie in memory, by the kinds that the kernel's binary has, and scratch pointers."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    arguments: tuple[int, ...]
    scratch: tuple[int, ...]
    pointers: int

    @property
    def without_addresses(self) -> tuple[object, ...]:
        return (self.kernel, self.grid, self.block, self.shared, self.stream, self.arguments[self.pointers :])


@dataclass
class Kernel:
    """What runs in a kernel's place."""

    code: KernelCode
    function: TensorFunction

    def run(self, arguments: Sequence[int]) -> None:
        f = self.function
        if f.table:
            self.rows(*arguments)
            return
        self.row(arguments)

    def row(self, numbers: Sequence[int]) -> None:
        f = self.function
        known = dict(zip(self.code.symbols, numbers[len(f.params) :], strict=True))
        tensors = [_tensor(b, a, known) for b, a in zip(f.params, numbers, strict=False)]
        AtenKernel(f).run(tensors, [known[s.name] for s in f.symbols.symbols])

    def rows(self, table: int, programs: int) -> None:
        width = len(self.function.params) + len(self.code.symbols)
        memory = PlayedLibrary.uploads
        places = next(t for t in memory if t.data_ptr() == programs)
        rows = next(t for t in memory if t.data_ptr() == table)
        assert rows.shape[1] == width
        for k in dict.fromkeys(places[:, 0].tolist()):
            self.row(rows[k].tolist())


def _tensor(buffer: Buffer, address: int, known: Mapping[str, int]) -> torch.Tensor:
    """Memory of the CPU as the tensor of a parameter."""

    def number(e: sympy.Expr) -> int:
        return int(e.xreplace({s: sympy.Integer(known[s.name]) for s in e.free_symbols}))

    shape, strides = [number(e) for e in buffer.shape], [number(e) for e in buffer.strides]
    if 0 in shape:
        return torch.empty(shape, dtype=buffer.dtype.torch)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (span * buffer.dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=buffer.dtype.torch).as_strided(shape, strides)


@dataclass
class PlayedLibrary:
    """``failures`` are what the next launches return; ``forever`` what all others do."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    launches: list[Launched] = field(default_factory=list)
    attributes: list[tuple[str, int, int]] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    forever: int = 0
    errors: list[Exception] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    # The stream, guards made and dropped, and what making one returns.
    words: Any = field(default_factory=lambda: (ctypes.c_int64 * 4)())
    # What tables were copied to.
    uploads: ClassVar[list[torch.Tensor]] = []

    def __post_init__(self) -> None:
        def c(function: Any, *kinds: Any) -> Any:
            return ctypes.CFUNCTYPE(I32, *kinds)(function)

        self.cuModuleLoadData = c(self._load, ctypes.POINTER(POINTER), POINTER)
        self.cuModuleGetFunction = c(self._get, ctypes.POINTER(POINTER), POINTER, ctypes.c_char_p)
        self.cuFuncSetAttribute = c(self._set, POINTER, I32, I32)
        self.cuGetErrorString = c(self._told, I32, ctypes.POINTER(ctypes.c_char_p))
        self.cuLaunchKernel = c(self._launch, POINTER, *[U32] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)
        # Machine code, for it is called while a Python error may be set.
        text = TORCH.replace("WORDS", f"inttoptr (i64 {ctypes.addressof(self.words)} to ptr)")
        self.torch = load_object(compile_object([text], target_for("cpu", None, None)), TORCH_FUNCTIONS)
        self.stream = 7

    @property
    def stream(self) -> int:
        """The current stream."""
        return self.words[0]

    @stream.setter
    def stream(self, stream: int) -> None:
        self.words[0] = stream

    @property
    def guards(self) -> tuple[int, int]:
        """How often the GPU was made current, and let go of."""
        return self.words[1], self.words[2]

    def play(self, patch: pytest.MonkeyPatch) -> None:
        """Let kernels that are loaded from now on be launched here."""
        patch.setattr(gpu_launch, "CDriver", lambda kind: CDriver(kind, self))
        patch.setattr(
            kernels, "compile_triton", lambda source, target, aligned: replace(
                gpu_binary(played_code(source, target, "")), aligned=aligned
            ),
        )  # fmt: skip
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)
        init = gpu_table.GpuTableKernel.__init__

        def uploading(kernel: Any, *args: Any, **named: Any) -> None:
            init(kernel, *args, **{**named, "upload": self.upload})

        patch.setattr(gpu_table.GpuTableKernel, "__init__", uploading)

    def upload(self, array: Any, device: int) -> torch.Tensor:
        self.uploads.append(torch.from_numpy(array.copy()))
        return self.uploads[-1]

    def find(self, name: str) -> int:
        """The address of a function of torch's; those about GPUs are played."""
        return self.torch.addresses.get(name) or symbol_address(name)

    def know(self, kernels: Iterable[Kernel]) -> None:
        self.kernels.update({k.code.name: k for k in kernels})

    # --- the driver's functions -------------------------------------------------------------------------------------

    def _load(self, module: Any, code: int) -> int:
        module[0] = 1
        return 0

    def _get(self, function: Any, module: int, name: bytes) -> int:
        self.functions.append(name.decode())
        function[0] = len(self.functions)
        return 0

    def _set(self, function: int, attribute: int, value: int) -> int:
        self.attributes.append((self.functions[function - 1], attribute, value))
        return 0

    def _told(self, status: int, text: Any) -> int:
        text[0] = WORDS[status]
        return 0

    def _launch(self, function: int, *rest: Any) -> int:
        status = self.failures.pop(0) if self.failures else self.forever
        if status:
            return status
        try:
            *shape, stream, parameters, _ = rest
            kernel = self.kernels[self.functions[function - 1]]
            binary = gpu_binary(kernel.code)
            kinds = (*binary.arguments, *["ptr"] * binary.scratch)
            values = tuple(CELLS[kind].from_address(parameters[k]).value for k, kind in enumerate(kinds))
            count = len(binary.arguments)
            launched = Launched(
                binary.name, tuple(shape[:3]), tuple(shape[3:6]), shape[6], stream or 0, values[:count],
                values[count:], binary.arguments.count("ptr"),
            )  # fmt: skip
            self.launches.append(launched)
            kernel.run(launched.arguments)
        except Exception as error:  # nothing may leave a C function
            self.errors.append(error)
            return FAILED
        return 0
