"""Loading and launching GPU binaries through the driver's C interface (CUDA's and HIP's are alike), with no compiler
at hand.

CUDA wants a context in each thread that loads or launches. torch makes one in threads that use a GPU through it, but
not in one that autograd or a user has only just started, for nothing tells GPU 0 from no GPU there. So modules are
loaded under the context of their device, programs make it current where they begin (``context``), and a launch that
meets none does so and is tried again. Contexts are the devices' primary ones, which are torch's too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

from ...ir.errors import MlcError
from .libraries import NoGpuLibrary, load_driver_library

# Bytes of shared memory that a CUDA kernel has without asking.
_SHARED_LIMIT = 48 << 10
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CUDA 12.3, whose graphs have edges between kernels of which one waits for the other itself.
_EARLY_IN_CAPTURES = 12030
_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# No context in this thread, and a function of another context than this thread's.
_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400
# What a kernel did that was launched before, told by whatever the driver is asked next: CUDA and HIP have the same
# numbers for memory that is not there or not aligned, instructions, assertions and time.
_LATE = frozenset((214, 700, 702, 710, 714, 715, 716, 717, 718, 719))


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: a number, and a value of 64 bytes, of which a flag takes the first four."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("flag", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )

    @staticmethod
    def early(grid: tuple[int, int, int], threads: int, shared: int, stream: int) -> LaunchConfig:
        """A launch that need not wait for the kernel ahead to end."""
        attribute = _LaunchAttribute(_EARLY, 0, 1)
        return LaunchConfig(grid, (threads, 1, 1), shared, stream, ctypes.pointer(attribute), 1)


class GpuDriverError(MlcError):
    """The driver refused to load or launch a kernel, or the kernel failed; its own words are in the text. ``late`` is
    true of errors that may be those of a kernel that was launched before."""

    def __init__(self, text: str, *, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


class Driver(Protocol):
    """What a kernel needs of a GPU driver. ``arguments`` of a launch is an array of pointers to the arguments'
    values; ``launcher`` is the address of the C function that launches (``cuLaunchKernel``), ``early_launcher`` of the
    one that may launch a kernel before the one ahead has ended (``cuLaunchKernelEx``), zero where there is none."""

    launcher: int
    early_launcher: int

    def load(self, code: bytes, name: str, shared: int, device: int) -> Any: ...

    def launch(
        self, device: int, function: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: int,
        arguments: Any, dependent: bool = False,
    ) -> None: ...  # fmt: skip

    def wait(self, device: int, stream: int) -> None: ...

    def context(self, device: int) -> tuple[int, int, int]: ...


class CDriver:
    """libcuda or libamdhip64 through ctypes; both have these functions with the same arguments."""

    def __init__(self, kind: str, library: Any = None) -> None:
        """``library`` has the driver's functions; by default it is the one of this machine."""
        self.kind = kind
        prefix = "cu" if kind == "cuda" else "hip"
        try:
            library = load_driver_library(kind) if library is None else library
        except NoGpuLibrary as error:
            raise GpuDriverError(str(error)) from error
        self._library = library
        self._load = getattr(library, f"{prefix}ModuleLoadData")
        self._get = getattr(library, f"{prefix}ModuleGetFunction")
        self._set = getattr(library, f"{prefix}FuncSetAttribute")
        self._launch = getattr(library, f"{prefix}LaunchKernel" if kind == "cuda" else "hipModuleLaunchKernel")
        self._wait = getattr(library, f"{prefix}StreamSynchronize")
        self._capturing = getattr(library, f"{prefix}StreamIsCapturing")
        unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
        self._launch.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
        self._wait.argtypes, self._capturing.argtypes = [pointer], [pointer, pointer]
        self.launcher = ctypes.cast(self._launch, pointer).value or 0
        self._early = self._early_function()
        self.early_launcher = ctypes.cast(self._early, pointer).value or 0 if self._early is not None else 0
        self._primary: dict[int, int] = {}

    def load(self, code: bytes, name: str, shared: int, device: int) -> Any:
        """The kernel ``name`` of a cubin or code object on a device, allowed ``shared`` bytes."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self._current(device):
            self.check(self._load(ctypes.byref(module), code), f"load {name}")
            self.check(self._get(ctypes.byref(function), module, name.encode()), f"find {name}")
            if self.kind == "cuda" and shared > _SHARED_LIMIT:
                self.check(self._set(function, _MAX_DYNAMIC_SHARED, shared), f"reserve {shared} bytes for {name}")
        return function

    def launch(
        self, device: int, function: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: int,
        arguments: Any, dependent: bool = False,
    ) -> None:  # fmt: skip
        """Put one launch of ``grid`` blocks of ``threads`` threads on a stream of a device. One that is ``dependent``
        may begin before the kernel ahead has ended, for which it waits itself, where the driver lets it."""
        early = self._early if dependent else None
        if early is None:
            launch = partial(self._launch, function, *grid, threads, 1, 1, shared, stream, arguments, None)
        else:
            config = LaunchConfig.early(grid, threads, shared, stream)
            launch = partial(early, ctypes.byref(config), function, arguments, None)
        status = launch()
        if status in (_INVALID_CONTEXT, _INVALID_HANDLE):
            with self._current(device):
                status = launch()
        if status:
            self.check(status, f"launch a grid of {grid}")

    def _early_function(self) -> Any:
        """What launches a kernel early; None where the driver does not, or not in captures."""
        version = ctypes.c_int(0)
        ask, found = (getattr(self._library, name, None) for name in ("cuDriverGetVersion", "cuLaunchKernelEx"))
        if self.kind != "cuda" or ask is None or found is None or ask(ctypes.byref(version)):
            return None
        return found if version.value >= _EARLY_IN_CAPTURES else None

    def wait(self, device: int, stream: int) -> None:
        """Wait for what a stream was given, unless that is being captured. Raises GpuDriverError for what its kernels
        did."""
        state = ctypes.c_int(0)
        with self._current(device):
            if self._capturing(stream, ctypes.byref(state)) or state.value:
                return
            status = self._wait(stream)
        if status:
            raise GpuDriverError(f"failed while it ran: {self._told(status)}")

    # --- contexts -----------------------------------------------------------------------------------------------------

    def context(self, device: int) -> tuple[int, int, int]:
        """Addresses of the functions that ask for the current context of a thread and set it, and the context of a
        device; zeros where threads need none."""
        if self.kind != "cuda":
            return 0, 0, 0
        functions = (self._library.cuCtxGetCurrent, self._library.cuCtxSetCurrent)
        get, set_ = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions)
        return get, set_, self._primary_of(device)

    def _primary_of(self, device: int) -> int:
        found = self._primary.get(device)
        if found is None:
            context, library, what = ctypes.c_void_p(), self._library, f"use GPU {device}"
            self.check(library.cuInit(0), what)
            self.check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._handle(device)), what)
            found = self._primary.setdefault(device, context.value or 0)
        return found

    def _handle(self, device: int) -> int:
        handle = ctypes.c_int()
        self.check(self._library.cuDeviceGet(ctypes.byref(handle), device), f"use GPU {device}")
        return handle.value

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Within it a device is this thread's current one. Afterwards the one of before is, but a thread that had none
        keeps GPU 0, which it would have used."""
        if self.kind != "cuda":
            yield from self._current_hip(device)
            return
        library, before, handle = self._library, ctypes.c_void_p(), ctypes.c_int(-1)
        primary = self._primary_of(device)
        self.check(library.cuCtxGetCurrent(ctypes.byref(before)), f"use GPU {device}")
        if before.value:
            self.check(library.cuCtxGetDevice(ctypes.byref(handle)), f"use GPU {device}")
            if handle.value == self._handle(device):
                yield  # its own context, or another one of the same device that the user chose
                return
        self.check(library.cuCtxSetCurrent(ctypes.c_void_p(primary)), f"use GPU {device}")
        try:
            yield
        finally:
            if before.value or device > 0:
                library.cuCtxSetCurrent(before)

    def _current_hip(self, device: int) -> Iterator[None]:
        before = ctypes.c_int()
        self.check(self._library.hipGetDevice(ctypes.byref(before)), f"use GPU {device}")
        if before.value == device:
            yield
            return
        self.check(self._library.hipSetDevice(device), f"use GPU {device}")
        try:
            yield
        finally:
            self._library.hipSetDevice(before.value)

    # --- errors -------------------------------------------------------------------------------------------------------

    def check(self, status: int, what: str) -> None:
        """Raises GpuDriverError where a status of the driver's is not zero; ``what`` it was asked to do."""
        if status == 0:
            return
        hint = ""
        if status == _INVALID_CONTEXT:
            hint = "; this thread has no context, call torch.cuda.set_device first"
        raise GpuDriverError(f"could not {what}: {self._told(status)}{hint}", late=status in _LATE)

    def _told(self, status: int) -> str:
        """The driver's words for a status."""
        text = ctypes.c_char_p()
        if self.kind == "cuda":
            self._library.cuGetErrorString(status, ctypes.byref(text))
        else:
            describe = self._library.hipGetErrorString
            describe.restype = ctypes.c_char_p
            text = ctypes.c_char_p(describe(status))
        return f"{text.value.decode() if text.value else 'error'} ({self.kind} status {status})"


@cache
def driver_of(kind: str) -> CDriver:
    """The driver of this machine, one a process and kind ("cuda", "hip"). Raises GpuDriverError."""
    return CDriver(kind)
