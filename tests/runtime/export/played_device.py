"""A GPU for libraries, played by the CPU behind a shared object that has the names of libcuda's functions.

Addresses of its memory are no addresses of the host: what reads there without the driver ends the process. Kernels are
done by ATen ops. All that a library asks for is counted: contexts, modules, memory, streams.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.codegen.export.library import LaunchedKernel
from torch_mlc.codegen.kernel import ALIGNMENT
from torch_mlc.dynamo_backend.export import graphs as exporting
from torch_mlc.dynamo_backend.export import kernels as exported_kernels
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.runtime.compile.fallback import AtenKernel
from torch_mlc.runtime.gpu.driver import LaunchConfig
from torch_mlc.runtime.triton.compile import signature

# What is added to an address of the host: such addresses are nobody's.
FAR_AWAY = 1 << 60
OUT_OF_MEMORY, NO_CONTEXT, FAILED = 2, 201, 719
# What needs no context.
_ANYWHERE = {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute",
             "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxPushCurrent_v2"}  # fmt: skip
_WORDS = {OUT_OF_MEMORY: b"out of memory", FAILED: b"unspecified launch failure"}
_I32, _U64, _POINTER = ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p
_TO = ctypes.POINTER


@dataclass(frozen=True)
class PlayedKernel:
    """What machine code stands for: the function, its variant, and how parameters lie."""

    function: TensorFunction
    kernel: LaunchedKernel
    number: int

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple("ptr" if t.startswith("*") else t for t in signature(self.kernel.source).values())


@contextmanager
def known_kernels(patch: pytest.MonkeyPatch) -> Iterator[dict[bytes, PlayedKernel]]:
    """Within it, exports tell which function each machine code is of."""
    functions: dict[int, TensorFunction] = {}
    kept: list[Any] = []
    found: dict[bytes, PlayedKernel] = {}
    write, compiled = exporting.written_for_gpu, exported_kernels._compiled

    def written(function: Any, *rest: Any) -> Any:
        text = write(function, *rest)
        functions[id(text)] = function
        kept.append(text)
        return text

    def noted(name: str, text: Any, *rest: Any) -> LaunchedKernel:
        kernel = compiled(name, text, *rest)
        for k, cubin in enumerate(kernel.cubins):
            found[cubin.image] = PlayedKernel(functions[id(text.gpu)], kernel, k)
        return kernel

    patch.setattr(exporting, "written_for_gpu", written)
    patch.setattr(exported_kernels, "_compiled", noted)
    yield found
    patch.undo()


@dataclass(frozen=True)
class Launched:
    """One launch."""

    kernel: str
    variant: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    arguments: tuple[int, ...]
    early: bool


@dataclass
class PlayedGpu:
    """``images`` are what machine code stands for. ``fail`` is the number of the call that fails, with ``status``; with
    ``capability`` and ``pools`` devices differ."""

    images: Mapping[bytes, PlayedKernel]
    capability: tuple[int, int] = (9, 0)
    pools: bool = True
    version: int = 12080
    count: int = 2
    fail: int | None = None
    status: int = FAILED
    calls: list[str] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)
    modules: dict[int, PlayedKernel] = field(default_factory=dict)
    streams: set[int] = field(default_factory=set)
    retained: Counter[int] = field(default_factory=Counter)
    stacks: Any = field(default_factory=threading.local)
    errors: list[BaseException] = field(default_factory=list)
    attributes: list[tuple[str, int]] = field(default_factory=list)
    given: set[int] = field(default_factory=set)

    def play(self) -> None:
        """Be what libcuda does from here on."""
        library, self._kept = library_of_names(), []
        for name, (kinds, function) in self._functions().items():
            c = ctypes.CFUNCTYPE(_I32, *kinds)(self._counted(name, function))
            self._kept.append(c)
            _POINTER.in_dll(library, f"played_{name}").value = ctypes.cast(c, _POINTER).value

    @property
    def nothing(self) -> bool:
        """Whether nobody holds anything."""
        return not (self.memory or self.modules or self.streams or +self.retained or self.stack)

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.stacks, "contexts"):
            self.stacks.contexts = []
        found: list[int] = self.stacks.contexts
        return found

    def _counted(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*given: Any) -> int:
            if name == "cuGetErrorString":
                return function(*given)
            number = len(self.calls)
            self.calls.append(name)
            if number == self.fail:
                # Giving back is never refused for good: it is done, and tells of what happened before.
                if name in ("cuMemFree_v2", "cuMemFreeAsync", "cuModuleUnload", "cuStreamDestroy_v2",
                            "cuDevicePrimaryCtxRelease_v2", "cuCtxPopCurrent_v2"):  # fmt: skip
                    function(*given)
                return self.status
            if name not in _ANYWHERE and not self.stack and self.fail is not None:
                return NO_CONTEXT
            try:
                return function(*given)
            except BaseException as error:
                self.errors.append(error)
                return FAILED

        return call

    def _functions(self) -> dict[str, tuple[tuple[Any, ...], Callable[..., int]]]:
        pointers, numbers = _TO(_POINTER), _TO(_I32)
        launch = (_POINTER, *[ctypes.c_uint32] * 7, _POINTER, _TO(_POINTER), _POINTER)
        return {
            "cuInit": ((_I32,), lambda flags: 0),
            "cuDriverGetVersion": ((numbers,), lambda place: _put(place, self.version)),
            "cuDeviceGetCount": ((numbers,), lambda place: _put(place, self.count)),
            "cuDeviceGet": ((numbers, _I32), lambda place, k: _put(place, 40 + k)),
            "cuDeviceGetAttribute": ((numbers, _I32, _I32), self._attribute),
            "cuDevicePrimaryCtxRetain": ((pointers, _I32), self._retain),
            "cuDevicePrimaryCtxRelease_v2": ((_I32,), self._release),
            "cuCtxPushCurrent_v2": ((_POINTER,), lambda c: self.stack.append(c) or 0),
            "cuCtxPopCurrent_v2": ((pointers,), lambda place: _put(place, self.stack.pop())),
            "cuCtxSynchronize": ((), lambda: self._current() * 0),
            "cuModuleLoadData": ((pointers, _POINTER), self._load),
            "cuModuleUnload": ((_POINTER,), lambda m: self.modules.pop(m) is None or 0),
            "cuModuleGetFunction": ((pointers, _POINTER, ctypes.c_char_p), self._function),
            "cuFuncSetAttribute": ((_POINTER, _I32, _I32), self._set),
            "cuMemAlloc_v2": ((_TO(_U64), ctypes.c_size_t), lambda place, n: self._allocate(place, n, None)),
            "cuMemFree_v2": ((_U64,), lambda a: self._free(a, None)),
            "cuMemAllocAsync": ((_TO(_U64), ctypes.c_size_t, _POINTER), self._allocate),
            "cuMemFreeAsync": ((_U64, _POINTER), self._free),
            "cuMemcpyHtoD_v2": ((_U64, _POINTER, ctypes.c_size_t), self._upload),
            "cuMemcpyHtoDAsync_v2": (
                (_U64, _POINTER, ctypes.c_size_t, _POINTER),
                lambda a, b, n, stream: self._upload(a, b, n),
            ),
            "cuMemcpyDtoDAsync_v2": ((_U64, _U64, ctypes.c_size_t, _POINTER), self._copy),
            "cuStreamCreate": ((pointers, ctypes.c_uint32), self._stream),
            "cuStreamDestroy_v2": ((_POINTER,), lambda s: self.streams.remove(s) or 0),
            "cuStreamSynchronize": ((_POINTER,), lambda s: self._current() * 0),
            "cuGetErrorString": (
                (_I32, _TO(ctypes.c_char_p)),
                lambda n, place: _put(place, _WORDS.get(n, b"an error")),
            ),
            "cuLaunchKernel": (launch, self._launch),
            "cuLaunchKernelEx": ((_POINTER, _POINTER, _TO(_POINTER), _POINTER), self._launch_early),
        }

    # --- devices and memory -------------------------------------------------------------------------------------------

    def _current(self) -> int:
        assert self.stack, "no context is current"
        return self.stack[-1]

    def _attribute(self, place: Any, what: int, handle: int) -> int:
        assert 40 <= handle < 40 + self.count
        return _put(place, {75: self.capability[0], 76: self.capability[1], 115: int(self.pools)}[what])

    def _retain(self, place: Any, handle: int) -> int:
        self.retained[handle] += 1
        return _put(place, 100 + handle)

    def _release(self, handle: int) -> int:
        self.retained[handle] -= 1
        assert self.retained[handle] >= 0
        failed = self.calls[self.fail] if self.fail is not None and self.fail < len(self.calls) else ""
        if not self.retained[handle] and failed == "cuCtxPushCurrent_v2":
            # Whoever could not enter the context gave nothing back; what was in it ends with it.
            self.streams.clear()
            self.modules.clear()
            self.memory = {a: m for a, m in self.memory.items() if a in self.given}
        return 0

    def _allocate(self, place: Any, nbytes: int, stream: int | None) -> int:
        self._current()
        assert nbytes > 0 and (stream is None or stream in (0, *self.streams))
        memory = np.full(nbytes + 256, 0xA5, np.uint8)
        address = FAR_AWAY + (memory.ctypes.data + 255) // 256 * 256
        self.memory[address] = memory, nbytes
        return _put(place, address)

    def _free(self, address: int, stream: int | None) -> int:
        self._current()
        del self.memory[address]
        return 0

    def give(self, array: np.ndarray[Any, Any], offset: int = 0) -> OnGpu:
        """Memory of the caller's with the elements of an array, so many bytes behind a multiple of 256."""
        place = _U64()
        self.stack.append(140)
        self._allocate(ctypes.pointer(place), array.nbytes + offset + 1, None)
        self.stack.pop()
        self.given.add(place.value)
        found = OnGpu(self, place.value, place.value + offset, array.shape, array.dtype)
        ctypes.memmove(found.address - FAR_AWAY, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return found

    def host(self, address: int, nbytes: int) -> int:
        """The host's address of so many bytes. Raises AssertionError for what is nobody's memory."""
        for begin, (_, size) in self.memory.items():
            if begin <= address and address + nbytes <= begin + size:
                return address - FAR_AWAY
        raise AssertionError(f"{nbytes} bytes at {address:#x} are no memory of the GPU")

    def _upload(self, target: int, source: int, nbytes: int) -> int:
        self._current()
        ctypes.memmove(self.host(target, nbytes), source, nbytes)
        return 0

    def _copy(self, target: int, source: int, nbytes: int, stream: int | None) -> int:
        self._current()
        ctypes.memmove(self.host(target, nbytes), self.host(source, nbytes), nbytes)
        return 0

    def _stream(self, place: Any, flags: int) -> int:
        self._current()
        self.streams.add(stream := 7000 + len(self.calls))
        return _put(place, stream)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def _load(self, place: Any, image: int) -> int:
        self._current()
        assert image % 64 == 0
        header = ctypes.string_at(image, 64)  # which tells where the image ends
        alike = {data: k for data, k in self.images.items() if data[:64] == header}
        found = next(k for data, k in alike.items() if ctypes.string_at(image, len(data)) == data)
        self.modules[number := 9000 + len(self.calls)] = found
        return _put(place, number)

    def _function(self, place: Any, module: int, name: bytes) -> int:
        kernel = self.modules[module]
        assert name.decode() == kernel.kernel.cubins[kernel.number].entry
        return _put(place, module + 100_000)

    def _set(self, function: int, what: int, value: int) -> int:
        assert what == 8
        self.attributes.append((self.modules[function - 100_000].kernel.name, value))
        return 0

    def _launch(self, function: int, *rest: Any) -> int:
        x, y, z, threads, ty, tz, shared, stream, places, extra = rest
        assert (ty, tz, extra) == (1, 1, None)
        return self._run(function, (x, y, z), threads, shared, stream or 0, places, False)

    def _launch_early(self, config: int, function: int, places: Any, extra: int) -> int:
        c = LaunchConfig.from_address(config)
        assert (
            c.count == 1 and (c.attributes[0].number, c.attributes[0].flag) == (6, 1) and tuple(c.block)[1:] == (1, 1)
        )
        return self._run(function, tuple(c.grid), c.block[0], c.shared, c.stream or 0, places, True)

    def _run(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        stream: int,
        places: Any,
        early: bool,
    ) -> int:
        self._current()
        played = self.modules[function - 100_000]
        cubin = played.kernel.cubins[played.number]
        f, kinds = played.function, played.kinds
        assert (threads, shared) == (cubin.threads, cubin.shared) and min(grid) > 0
        cells = {"ptr": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
        numbers = tuple(cells[k].from_address(places[n]).value for n, k in enumerate(kinds))
        scratch = [_U64.from_address(places[n]).value for n in range(len(kinds), cubin.parameters)]
        pointers = len(f.params)
        for k, address in enumerate(numbers[:pointers]):
            assert not (cubin.assumes >> k & 1) or address % ALIGNMENT == 0, f"{f.name} takes pointer {k} for aligned"
        self.launches.append(
            Launched(played.kernel.name, played.number, grid, threads, shared, stream, numbers[pointers:], early)
        )
        if played.kernel.scratch:
            self.host(scratch[0], played.kernel.scratch * grid[0] * grid[1] * grid[2])
        else:
            assert not any(scratch)
        known = dict(zip(played.kernel.source.symbols, numbers[pointers:], strict=True))
        tensors = [self._tensor(b, a, known) for b, a in zip(f.params, numbers, strict=False)]
        AtenKernel(f).run(tensors, [known[s.name] for s in f.symbols.symbols])
        return 0

    def _tensor(self, buffer: Buffer, address: int, known: Mapping[str, int]) -> torch.Tensor:
        def number(e: sympy.Expr) -> int:
            return int(e.xreplace({s: sympy.Integer(known[s.name]) for s in e.free_symbols}))

        shape, strides = [number(e) for e in buffer.shape], [number(e) for e in buffer.strides]
        if 0 in shape:
            return torch.empty(shape, dtype=buffer.dtype.torch)
        nbytes = (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * buffer.dtype.itemsize
        raw = (ctypes.c_char * nbytes).from_address(self.host(address, nbytes))
        return torch.frombuffer(raw, dtype=buffer.dtype.torch).as_strided(shape, strides)


@dataclass
class OnGpu:
    """An array in the played GPU's memory."""

    gpu: PlayedGpu
    block: int
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3}

    def numpy(self) -> np.ndarray[Any, Any]:
        nbytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(ctypes.string_at(self.address - FAR_AWAY, nbytes), self.dtype).reshape(self.shape)

    def free(self) -> None:
        del self.gpu.memory[self.block]


def _put(place: Any, value: Any) -> int:
    place[0] = value
    return 0


@lru_cache(maxsize=1)
def library_of_names() -> ctypes.CDLL:
    """The shared object with the driver's names, as which libraries find it from here on."""
    path = Path(mkdtemp()) / "played.so"
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", path], check=True)
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def results(gpu: PlayedGpu, shapes: Sequence[Any], dtypes: Sequence[Any]) -> list[OnGpu]:
    """Memory for results, with elements that no result has."""
    return [gpu.give(np.full(s[0], 77, d)) for s, d in zip(shapes, dtypes, strict=True)]
