"""A GPU's driver played by the CPU: launches are written down, and done by ATen ops on memory of the CPU.

``PlayedLibrary`` has the functions of libcuda that are called, as C functions, so that the same ones are called from
Python and from machine code.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
import sympy
import torch

from tests.runtime.played_memory import PlayedMemory
from torch_mlc.codegen.host.native.native import DROP_GUARD, GET_STREAM, MAKE_GUARD
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import Target
from torch_mlc.runtime.compile import kernels
from torch_mlc.runtime.compile.fallback import AtenKernel
from torch_mlc.runtime.compile.kernels import KernelCode, compile_source, gpu_binary, source_to_json
from torch_mlc.runtime.cpu import compile_object, load_object, symbol_address
from torch_mlc.runtime.gpu import context as gpu_context
from torch_mlc.runtime.gpu import launch as gpu_launch
from torch_mlc.runtime.gpu import table as gpu_table
from torch_mlc.runtime.gpu.driver import CDriver
from torch_mlc.runtime.targets import target_for
from torch_mlc.runtime.triton.compile import GpuBinary, default_alignment, signature

I32, U32, POINTER = ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p
CELLS: Mapping[str, Any] = {"ptr": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
FAILED, NO_MEMORY, NO_CONTEXT, OTHER_CONTEXT, ILLEGAL = 719, 2, 201, 400, 700
WORDS = {
    1: b"invalid argument", FAILED: b"unspecified launch failure", NO_MEMORY: b"out of memory",
    NO_CONTEXT: b"invalid device context", OTHER_CONTEXT: b"invalid resource handle",
    ILLEGAL: b"an illegal memory access was encountered",
}  # fmt: skip


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
  %other = icmp ne i32 %index, 0
  br i1 %other, label %exchange, label %done
exchange:
  %before = call i32 EXCHANGE(i32 %index)
  %before.at = getelementptr i64, ptr WORDS, i64 4
  %flagged = or i32 %before, 256
  store i32 %flagged, ptr %before.at
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
  %before.at = getelementptr i64, ptr WORDS, i64 4
  %flagged = load i32, ptr %before.at
  %none.before = icmp eq i32 %flagged, 0
  br i1 %none.before, label %done, label %restore
restore:
  store i32 0, ptr %before.at
  %before = and i32 %flagged, 255
  %now = call i32 EXCHANGE(i32 %before)
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
    early: bool = False

    @property
    def without_addresses(self) -> tuple[object, ...]:
        return (self.kernel, self.grid, self.block, self.shared, self.stream, self.arguments[self.pointers :])


@dataclass
class Kernel:
    """What runs in a kernel's place."""

    code: KernelCode
    function: TensorFunction

    def run(self, launched: Launched, memory: PlayedMemory) -> None:
        if self.function.table:
            table, programs = launched.arguments
            memory.used(launched.stream, table, programs)
            self.rows(table, programs, launched.grid[0])
            return
        self.row(launched.arguments)

    def row(self, numbers: Sequence[int]) -> None:
        f = self.function
        known = dict(zip(self.code.symbols, numbers[len(f.params) :], strict=True))
        tensors = [_tensor(b, a, known) for b, a in zip(f.params, numbers, strict=False)]
        AtenKernel(f).run(tensors, [known[s.name] for s in f.symbols.symbols])

    def rows(self, table: int, programs: int, count: int) -> None:
        width = len(self.function.params) + len(self.code.symbols)
        places = (ctypes.c_int32 * (4 * count)).from_address(programs)
        numbers = ctypes.c_int64 * width
        for k in dict.fromkeys(places[::4]):
            self.row(list(numbers.from_address(table + 8 * width * k)))


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
    """``failures`` are what the next launches return; ``forever`` what all others do.

    As with CUDA a thread begins without a context: only what makes one current for it lets it load and launch, and a
    function is of the context that it was loaded in. Kernels run ``late`` break the context where they are named, which
    whatever comes next is told.
    """

    kernels: dict[str, Kernel] = field(default_factory=dict)
    launches: list[Launched] = field(default_factory=list)
    attributes: list[tuple[str, int, int]] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    forever: int = 0
    errors: list[Exception] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    # Kernels that read what they must not, and what all calls return from then on.
    illegal: set[str] = field(default_factory=set)
    broken: int = 0
    waits: list[int] = field(default_factory=list)
    # Kernels that were refused for want of a context, and whether the driver refuses to set one.
    refused: list[str] = field(default_factory=list)
    no_contexts: bool = False
    version: int = 12080
    capturing: bool = False
    # Of each module and function, its context; contexts by thread; devices whose primary context is in use.
    homes: list[int] = field(default_factory=list)
    threads: threading.local = field(default_factory=threading.local)
    retained: list[int] = field(default_factory=list)
    # The stream, guards made and dropped, what making one returns, and the GPU of before, where that is another one.
    words: Any = field(default_factory=lambda: (ctypes.c_int64 * 5)())

    def __post_init__(self) -> None:
        self.memory = PlayedMemory(self)

        def c(function: Any, *kinds: Any) -> Any:
            return ctypes.CFUNCTYPE(I32, *kinds)(function)

        self.cuModuleLoadData = c(self._load, ctypes.POINTER(POINTER), POINTER)
        self.cuModuleGetFunction = c(self._get, ctypes.POINTER(POINTER), POINTER, ctypes.c_char_p)
        self.cuFuncSetAttribute = c(self._set, POINTER, I32, I32)
        self.cuInit = c(lambda flags: 0, U32)
        self.cuDeviceGet = c(self._device, ctypes.POINTER(I32), I32)
        self.cuDevicePrimaryCtxRetain = c(self._retain, ctypes.POINTER(POINTER), I32)
        self.cuCtxGetCurrent = c(self._current, ctypes.POINTER(POINTER))
        self.cuCtxSetCurrent = c(self._make_current, POINTER)
        self.cuCtxGetDevice = c(self._current_device, ctypes.POINTER(I32))
        self.cuStreamSynchronize = c(self._synchronize, POINTER)
        self.cuStreamIsCapturing = c(self._is_capturing, POINTER, ctypes.POINTER(I32))
        self.cuGetErrorString = c(self._told, I32, ctypes.POINTER(ctypes.c_char_p))
        self.cuLaunchKernel = c(self._launch, POINTER, *[U32] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)
        self.cuLaunchKernelEx = c(self._launch_early, POINTER, POINTER, ctypes.POINTER(POINTER), POINTER)
        self.cuDriverGetVersion = c(self._version, ctypes.POINTER(I32))
        # Machine code, for it is called while a Python error may be set.
        self.exchanged = c(self.exchange, I32)
        text = TORCH.replace("WORDS", f"inttoptr (i64 {ctypes.addressof(self.words)} to ptr)")
        where = ctypes.cast(self.exchanged, POINTER).value
        text = text.replace("EXCHANGE", f"inttoptr (i64 {where} to ptr)")
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
        driver = CDriver("cuda", self)
        patch.setattr(gpu_launch, "driver_of", lambda kind: driver)
        patch.setattr(
            kernels, "compile_triton", lambda source, target, aligned: replace(
                gpu_binary(played_code(source, target, "")), aligned=aligned
            ),
        )  # fmt: skip
        patch.setattr(gpu_context, "_driver", lambda: driver)
        patch.setattr(gpu_context, "_giver", lambda index: gpu_context.context_giver(driver, index))
        patch.setattr(gpu_context, "_exchange", self.exchange)
        patch.setattr(gpu_context, "_give_back", self.exchange)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)
        init = gpu_table.GpuTableKernel.__init__

        def uploading(kernel: Any, *args: Any, **named: Any) -> None:
            init(kernel, *args, **{**named, "memory": self.memory})

        patch.setattr(gpu_table.GpuTableKernel, "__init__", uploading)

    def find(self, name: str) -> int:
        """The address of a function of torch's; those about GPUs are played."""
        return self.torch.addresses.get(name) or symbol_address(name)

    def know(self, kernels: Iterable[Kernel]) -> None:
        self.kernels.update({k.code.name: k for k in kernels})

    # --- contexts -----------------------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """The current context of this thread; those of devices are their indices and 100, 0 is none."""
        return getattr(self.threads, "context", 0)

    @context.setter
    def context(self, context: int) -> None:
        self.threads.context = context

    def exchange(self, device: int) -> int:
        """Make a GPU the current one, as CUDA's runtime does: a thread without a context has GPU 0 already."""
        before = self.context % 100
        if device != before:
            self.context = 100 + device
        return before

    def _device(self, handle: Any, ordinal: int) -> int:
        handle[0] = max(ordinal, 0)  # tensors of the CPU stand for those of the first GPU
        return 0

    def _retain(self, context: Any, device: int) -> int:
        self.retained.append(device)
        context[0] = 100 + device
        return 0

    def _current(self, context: Any) -> int:
        context[0] = self.context or None
        return 0

    def _make_current(self, context: int | None) -> int:
        if self.no_contexts:
            return NO_MEMORY
        self.context = context or 0
        return 0

    def _current_device(self, device: Any) -> int:
        if not self.context:
            return NO_CONTEXT
        device[0] = self.context % 100
        return 0

    # --- the driver's functions -------------------------------------------------------------------------------------

    def _load(self, module: Any, code: int) -> int:
        if not self.context:
            return NO_CONTEXT
        module[0] = self.context
        return self.broken

    def _get(self, function: Any, module: int, name: bytes) -> int:
        self.functions.append(name.decode())
        self.homes.append(module)
        function[0] = len(self.functions)
        return 0

    def _synchronize(self, stream: int | None) -> int:
        self.waits.append(stream or 0)
        return self.broken

    def _is_capturing(self, stream: int | None, state: Any) -> int:
        state[0] = int(self.capturing)
        return 0

    def _set(self, function: int, attribute: int, value: int) -> int:
        self.attributes.append((self.functions[function - 1], attribute, value))
        return 0

    def _told(self, status: int, text: Any) -> int:
        text[0] = WORDS[status]
        return 0

    def _version(self, version: Any) -> int:
        version[0] = self.version
        return 0

    def _launch_early(self, config: int, function: int, parameters: Any, extra: Any) -> int:
        """``cuLaunchKernelEx``, by the layout of ``CUlaunchConfig``."""
        shape = (U32 * 7).from_address(config)
        stream, attributes = (POINTER * 2).from_address(config + 32)
        count = U32.from_address(config + 48).value
        number, _, flag = (I32 * 3).from_address(attributes)
        if (count, number, flag) != (1, 6, 1):
            self.errors.append(ValueError(f"{count} attributes, of which the first is {number}: {flag}"))
            return FAILED
        status = self._launch(function, *shape, stream, parameters, extra)
        if not status and self.launches:
            self.launches[-1] = replace(self.launches[-1], early=True)
        return status

    def _launch(self, function: int, *rest: Any) -> int:
        if not self.context:
            self.refused.append(self.functions[function - 1])
            return NO_CONTEXT
        if self.context % 100 != self.homes[function - 1] % 100:
            return OTHER_CONTEXT
        status = self.failures.pop(0) if self.failures else self.broken or self.forever
        if status:
            return status
        try:
            if self.functions[function - 1] in self.illegal:
                self.broken = ILLEGAL
                return 0  # and is told later
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
            kernel.run(launched, self.memory)
        except Exception as error:  # nothing may leave a C function
            self.errors.append(error)
            return FAILED
        return 0
