"""Loading and launching GPU binaries through the driver's C interface (CUDA's and HIP's are alike), with no compiler
at hand."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from ..ir.errors import MlcError

# Bytes of shared memory that a CUDA kernel has without asking.
_SHARED_LIMIT = 48 << 10
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INVALID_CONTEXT = 201


class GpuDriverError(MlcError):
    """The driver refused to load or launch a kernel; its own words are in the text."""


class Driver(Protocol):
    """What a kernel needs of a GPU driver. ``arguments`` of a launch is an array of pointers to the arguments'
    values; ``launcher`` is the address of the C function that launches (``cuLaunchKernel``)."""

    launcher: int

    def load(self, code: bytes, name: str, shared: int) -> Any: ...

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: int, arguments: Any
    ) -> None: ...


class CDriver:
    """libcuda or libamdhip64 through ctypes; both have these functions with the same arguments."""

    def __init__(self, kind: str, library: Any = None) -> None:
        """``library`` has the driver's functions; by default it is the one of this machine."""
        self.kind = kind
        name, prefix = ("libcuda.so.1", "cu") if kind == "cuda" else ("libamdhip64.so", "hip")
        try:
            library = ctypes.CDLL(name) if library is None else library
        except OSError as error:
            raise GpuDriverError(f"no {kind} driver on this machine: {error}") from error
        self._load = getattr(library, f"{prefix}ModuleLoadData")
        self._get = getattr(library, f"{prefix}ModuleGetFunction")
        self._error = getattr(library, "cuGetErrorString", None) if kind == "cuda" else None
        self._set = getattr(library, f"{prefix}FuncSetAttribute")
        self._launch = getattr(library, f"{prefix}LaunchKernel" if kind == "cuda" else "hipModuleLaunchKernel")
        unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
        self.launcher = ctypes.cast(self._launch, pointer).value or 0

    def load(self, code: bytes, name: str, shared: int) -> Any:
        """The kernel ``name`` of a cubin or code object, in the current context, allowed ``shared`` bytes."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._load(ctypes.byref(module), code), f"load {name}")
        self._check(self._get(ctypes.byref(function), module, name.encode()), f"find {name}")
        if self.kind == "cuda" and shared > _SHARED_LIMIT:
            self._check(self._set(function, _MAX_DYNAMIC_SHARED, shared), f"reserve {shared} bytes for {name}")
        return function

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: int, arguments: Any
    ) -> None:
        """Put one launch of ``grid`` blocks of ``threads`` threads on the stream."""
        status = self._launch(function, *grid, threads, 1, 1, shared, stream, arguments, None)
        if status:
            self._check(status, f"launch a grid of {grid}")

    def _check(self, status: int, what: str) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        if self._error is not None:
            self._error(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "error"
        hint = "; this thread has no context, call torch.cuda.set_device first" if status == _INVALID_CONTEXT else ""
        raise GpuDriverError(f"could not {what}: {reason} ({self.kind} status {status}){hint}")
