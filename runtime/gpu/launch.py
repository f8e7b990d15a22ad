"""A GPU kernel as a callable of tensors and sizes.

A call checks that the pointers are aligned as the code assumes, and that indices fit into 32 bits where it assumes
that; where they do not, it compiles the variant that assumes less. Everything else about a launch is settled once for
each variant and device.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch

from ...codegen.host.native.launch import MOST_POINTERS
from ...codegen.kernel import ALIGNMENT, INDEX_MAX, KernelSource, wide_source
from ...ir.expr.value import symbol
from ...ir.oracle.text import index_text
from ...ir.target import Target
from ..model_lines import current_line
from ..triton.compile import GpuBinary, compile_triton
from .checks import LATE, launch_text, launches_checked
from .driver import Driver, GpuDriverError, driver_of
from .records import LaunchRecord

# How an argument lies at the begin of its word.
_FORMATS = {"ptr": "Q", "i32": "i4x", "i64": "q"}
Compile = Callable[[KernelSource, Target, tuple[bool, ...]], GpuBinary]
# A device, which pointers are aligned, and whether indices take 64 bits though the kernel has a form with 32.
Variant: TypeAlias = tuple[int, tuple[bool, ...], bool]


@dataclass(slots=True)
class _Loaded:
    """A variant on one device: the function, and the memory through which its arguments pass, a word for each."""

    function: Any
    binary: GpuBinary
    words: Any
    pointers: Any
    arguments: struct.Struct
    lock: threading.Lock = field(default_factory=threading.Lock)


def _loaded(driver: Driver, binary: GpuBinary, device: int) -> _Loaded:
    count = len(binary.arguments) + binary.scratch
    words = (ctypes.c_uint64 * count)()
    pointers = (ctypes.c_void_p * count)(*(ctypes.addressof(words) + 8 * k for k in range(count)))
    arguments = struct.Struct("=" + "".join(_FORMATS[k] for k in binary.arguments))
    function = driver.load(binary.code, binary.name, binary.shared, device)
    return _Loaded(function, binary, words, pointers, arguments)


class GpuKernel:
    """One kernel on the GPUs of this machine: ``kernel(tensors, sizes)`` launches it on the current stream.

    ``compile`` makes a binary of a variant; a cache of bytes goes there. ``driver`` stands for the machine's own, and
    ``scratch(bytes, device)`` for its memory. ``checked`` waits for each launch, so that a kernel that fails is the one
    that is named.
    """

    def __init__(
        self,
        source: KernelSource,
        target: Target,
        compile: Compile = compile_triton,
        driver: Driver | None = None,
        stream: Callable[[int], int] | None = None,
        scratch: Callable[[int, int], torch.Tensor] | None = None,
        *,
        checked: bool = False,
    ) -> None:
        self.source = source
        self.target = target
        self._compile = compile
        self._driver = driver_of(target.kind) if driver is None else driver
        self._scratch = _device_bytes if scratch is None else scratch
        self._stream = torch._C._cuda_getCurrentRawStream if stream is None else stream
        self._checked = checked or launches_checked()
        self.grid = grid_function(source)
        self.reach = reach_function(source)
        described = _described(source)
        self._described = frozenset(k for k, b in enumerate(source.params) if b.name in described)
        self.by_address = takes_addresses(source)
        self._relaxable = tuple(b.align == 0 or b.align % ALIGNMENT == 0 for b in source.params)
        self._variants: dict[Variant, _Loaded] = {}
        self._records: dict[int, LaunchRecord] = {}
        self._launchers: dict[int, Callable[..., int]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
        """Launch over ``tensors`` (the parameters in order, outputs included) and ``sizes``; nothing where the grid
        is empty."""
        grid = self.grid(*sizes)
        if 0 in grid:
            return
        if self._described:
            tensors = [_aligned(t) if k in self._described else t for k, t in enumerate(tensors)]
        device = tensors[0].get_device() if tensors else torch.cuda.current_device()
        self._launch_at(device, grid, (*(t.data_ptr() for t in tensors), *sizes))

    def at(self, device: int, *numbers: int) -> None:
        """Launch on a device over the addresses of its parameters and, behind them, sizes; not for kernels with tile
        descriptors, which want tensors."""
        sizes = numbers[len(self._relaxable) :]
        grid = self.grid(*sizes)
        launch = self._launchers.get(device) or self._launcher(device)
        if launch(*grid, self.reach(*sizes), self._stream(device), *numbers):
            # A variant that is not loaded yet, or what the driver refuses, which is told as an error.
            self._launch_at(device, grid, numbers)

    def _launch_at(self, device: int, grid: tuple[int, int, int], numbers: Sequence[int]) -> None:
        bits = 0
        for address in numbers[: len(self._relaxable)]:
            bits |= address
        aligned = self._relaxable
        if bits % ALIGNMENT:
            aligned = tuple(r and a % ALIGNMENT == 0 for r, a in zip(aligned, numbers))
        self.launch(device, aligned, grid, numbers, self.reach(*numbers[len(self._relaxable) :]) > INDEX_MAX)

    def launch(
        self,
        device: int,
        aligned: tuple[bool, ...],
        grid: tuple[int, int, int],
        arguments: Sequence[int],
        far: bool = False,
    ) -> None:
        """Launch the variant for pointers that are so aligned, and where ``far`` for indices of 64 bits, with these
        numbers as arguments."""
        variant = device, aligned, far
        loaded = self._variants.get(variant) or self._load(variant)
        binary = loaded.binary
        # Another thread must not change the words before the driver has copied them.
        with loaded.lock:
            loaded.arguments.pack_into(loaded.words, 0, *arguments)
            if binary.scratch_bytes:
                # The allocator gives the memory to somebody else after this launch on the stream, and not before.
                scratch = self._scratch(math.prod(grid) * binary.scratch_bytes, device)
                loaded.words[len(binary.arguments)] = scratch.data_ptr()
            try:
                stream = self._stream(device)
                early = binary.dependent and not self._checked
                self._driver.launch(
                    device, loaded.function, grid, binary.threads, binary.shared, stream, loaded.pointers, early
                )
                if self._checked:
                    self._driver.wait(device, stream)
            except GpuDriverError as error:
                given = f" {launch_text(self.source, grid, arguments)}" if self._checked else ""
                raise self._named(error, given) from None

    def _load(self, variant: Variant) -> _Loaded:
        device, aligned, far = variant
        source = wide_source(self.source) if far else self.source
        binary = self._compile(source, self.target, aligned)
        try:
            loaded = _loaded(self._driver, binary, device)
        except GpuDriverError as error:
            raise self._named(error) from None
        self._variants[variant] = loaded
        if device in self._records and not self._checked:
            _publish(loaded, self._records[device], variant)
        return loaded

    def _named(self, error: GpuDriverError, given: str = "") -> GpuDriverError:
        """An error with the kernel, what it was given, and the line of the model."""
        hint = LATE if error.late and not self._checked else ""
        return GpuDriverError(f"{self.source.name}: {error}{given}{hint}{_told()}")

    # --- for machine code -------------------------------------------------------------------------------------------

    def _launcher(self, device: int) -> Callable[..., int]:
        few = len(self._relaxable) <= MOST_POINTERS and not self._checked
        found = self._launchers[device] = self.record(device).function() if few else _left_to_python
        return found

    def record(self, device: int) -> LaunchRecord:
        """What launches from machine code read of this kernel; it lives as long as the kernel. Where launches are
        checked it has no variants, so that Python is asked for each."""
        found = self._records.get(device)
        if found is None:
            driver = self._driver
            context = driver.context(device)
            found = LaunchRecord(
                self._relaxable, len(self.source.symbols), driver.launcher, context, driver.early_launcher
            )
            found = self._records.setdefault(device, found)
            if self._checked:
                return found
            for variant, loaded in [*self._variants.items()]:
                if variant[0] == device:
                    _publish(loaded, found, variant)
        return found


def takes_addresses(source: KernelSource) -> bool:
    """Whether addresses are enough for a launch: arrays of tile descriptors may have to be copied first."""
    return not _described(source)


def _described(source: KernelSource) -> list[str]:
    """The parameters over which a kernel makes tile descriptors."""
    return [name for name in str(source.option("descriptors", "")).split(",") if name]


def _left_to_python(*_: int) -> int:
    """What launches a kernel of more pointers than a record knows of: nothing."""
    return -1


def _publish(loaded: _Loaded, record: LaunchRecord, variant: Variant) -> None:
    """Let machine code launch a variant, unless it wants memory at each launch."""
    binary = loaded.binary
    if not binary.scratch_bytes:
        function = getattr(loaded.function, "value", loaded.function)
        _, aligned, far = variant
        shape = binary.threads, binary.shared, len(loaded.words)
        record.add(aligned, function, *shape, far=far, dependent=binary.dependent)


def _told() -> str:
    where = current_line()
    return f"; from {where}" if where else ""


def _device_bytes(size: int, device: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it starts at an address from which whole tiles cannot be copied."""
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def grid_function(source: KernelSource) -> Callable[..., tuple[int, int, int]]:
    """The grid of a call from its sizes, three numbers."""
    grid = [*source.grid, sympy.S.One, sympy.S.One, sympy.S.One][:3]
    if all(g.is_Integer for g in grid):
        fixed = (int(grid[0]), int(grid[1]), int(grid[2]))
        return lambda *sizes: fixed
    made: Callable[..., tuple[int, int, int]] = _function(source, grid, "({})")
    return made


def reach_function(source: KernelSource) -> Callable[..., int]:
    """How far the indices of a call reach, from its sizes; zero where that decides nothing."""
    if source.reach is None or source.reach.is_Integer:
        return lambda *sizes: 0
    made: Callable[..., int] = _function(source, [source.reach], "{}")
    return made


def _function(source: KernelSource, exprs: Sequence[sympy.Expr], form: str) -> Any:
    names = [symbol(s) for s in source.symbols]
    text = form.format(", ".join(index_text(e, lambda s: s.name) for e in exprs))
    code = f"lambda {', '.join(s.name for s in names)}: {text}"
    return eval(code, {"__builtins__": {}, "min": min, "max": max})
