"""NVIDIA's driver, in LLVM IR: its library is looked for when a model is opened, and its functions are found by name.

A library for GPUs opens on machines without a driver, and says so. Nothing is linked to.
"""

from __future__ import annotations

from ..codes import CODES, SAY
from ..constants import Constants
from ..routine import Routine

# Functions of the driver by what they take; each gives an i32, zero where all is well.
_NEEDED = {
    "cuInit": "i32", "cuDriverGetVersion": "ptr", "cuDeviceGetCount": "ptr", "cuDeviceGet": "ptr, i32",
    "cuDeviceGetAttribute": "ptr, i32, i32", "cuDevicePrimaryCtxRetain": "ptr, i32",
    "cuDevicePrimaryCtxRelease_v2": "i32", "cuCtxPushCurrent_v2": "ptr", "cuCtxPopCurrent_v2": "ptr",
    "cuCtxSynchronize": "", "cuModuleLoadData": "ptr, ptr", "cuModuleUnload": "ptr",
    "cuModuleGetFunction": "ptr, ptr, ptr", "cuFuncSetAttribute": "ptr, i32, i32", "cuMemAlloc_v2": "ptr, i64",
    "cuMemFree_v2": "i64", "cuMemcpyHtoD_v2": "i64, ptr, i64", "cuMemcpyDtoDAsync_v2": "i64, i64, i64, ptr",
    "cuMemcpyHtoDAsync_v2": "i64, ptr, i64, ptr",
    "cuStreamCreate": "ptr, i32", "cuStreamDestroy_v2": "ptr", "cuStreamSynchronize": "ptr",
    "cuGetErrorString": "i32, ptr", "cuLaunchKernel": "",
}  # fmt: skip
# Those that older drivers lack.
_OPTIONAL = {"cuLaunchKernelEx": "", "cuMemAllocAsync": "ptr, i64, ptr", "cuMemFreeAsync": "i64, ptr"}
_ALL = {**_NEEDED, **_OPTIONAL}
_PLACES = {name: k for k, name in enumerate(_ALL)}
# What the loader is asked for, in this order.
_LIBRARIES = ("libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1")
_NOW = 2  # RTLD_NOW

# What of the system's loader is asked.
DECLARATIONS = """
declare ptr @dlopen(ptr, i32)
declare ptr @dlsym(ptr, ptr)
declare ptr @dlerror()
"""


def function_of(r: Routine, name: str) -> str:
    """The address of a function of the driver."""
    return r.value(f"load ptr, ptr getelementptr inbounds (ptr, ptr @driver, i64 {_PLACES[name]})")


def driver_text(constants: Constants) -> str:
    """``@driver``, ``@load_driver``, ``@driver_failed``, and a function for each of the driver's."""
    table = f"\n@driver = internal global [{len(_ALL)} x ptr] zeroinitializer\n"
    return table + "".join(map(_wrapper, _ALL)) + _load(constants) + _failed(constants)


def _wrapper(name: str) -> str:
    kinds = [k for k in _ALL[name].split(", ") if k]
    r = Routine()
    given = ", ".join(f"{k} %a{n}" for n, k in enumerate(kinds))
    function = function_of(r, name)
    status = r.value(f"call i32 {function}({given})")
    r.line(f"ret i32 {status}")
    return r.text(f"\ndefine internal i32 @{name}({given})")


def _load(constants: Constants) -> str:
    """Find the driver and its functions: a code, with a sentence."""
    t, r = constants.text, Routine()
    old = t("open: the driver of NVIDIA on this machine has no %s: it is too old for this library")
    for name in _LIBRARIES:
        found = r.value(f"call ptr @dlopen(ptr {t(name)}, i32 {_NOW})")
        is_there = r.value(f"icmp ne ptr {found}, null")
        following = r.fresh("next")
        r.failures.append((r.block, found, ""))
        r.line(f"br i1 {is_there}, label %opened, label %{following}")
        r.label(following)
    why = r.value("call ptr @dlerror()")
    told = t("open: no driver of NVIDIA is on this machine (%s): install it, and give containers access to the GPU")
    r.value(f"{SAY} {told}, ptr {why})")
    r.line(f"ret i32 {CODES['device']}")
    r.label("opened")
    library = r.value(f"phi ptr {', '.join(f'[ {found}, %{block} ]' for block, found, _ in r.failures)}")
    for name, place in _PLACES.items():
        found = r.value(f"call ptr @dlsym(ptr {library}, ptr {t(name)})")
        r.line(f"store ptr {found}, ptr getelementptr inbounds (ptr, ptr @driver, i64 {place})")
        if name in _NEEDED:
            with r.when(r.value(f"icmp eq ptr {found}, null"), "lacks"):
                r.value(f"{SAY} {old}, ptr {t(name)})")
                r.line(f"ret i32 {CODES['device']}")
    r.line("ret i32 0")
    return r.text("\n; Find the driver and its functions. Others may do so at the same time, and find the same.\n"
                  "define internal i32 @load_driver(ptr %text)")  # fmt: skip


def _failed(constants: Constants) -> str:
    """What is told of a call of the driver's that failed."""
    t, r = constants.text, Routine()
    place = r.value("alloca ptr")
    r.line(f"store ptr null, ptr {place}")
    r.value(f"call i32 @cuGetErrorString(i32 %status, ptr {place})")
    told = r.value(f"load ptr, ptr {place}")
    none = r.value(f"icmp eq ptr {told}, null")
    words = r.value(f"select i1 {none}, ptr {t('an error that it has no words for')}, ptr {told}")
    r.value(f"{SAY} {t('%s: %s failed: %s (status %d)')}, ptr %whose, ptr %what, ptr {words}, i32 %status)")
    full = r.value("icmp eq i32 %status, 2")  # CUDA_ERROR_OUT_OF_MEMORY
    code = r.value(f"select i1 {full}, i32 {CODES['memory']}, i32 {CODES['device']}")
    r.line(f"ret i32 {code}")
    return r.text("\n; Tell in which call of the driver's somebody failed, and why: the code.\n"
                  "define internal i32 @driver_failed(ptr %text, ptr %whose, ptr %what, i32 %status)")  # fmt: skip


def driven(r: Routine, constants: Constants, name: str, *given: str) -> None:
    """Call a function of the driver; where it fails, the block ``failed`` has its name and status."""
    kinds = [k for k in _ALL[name].split(", ") if k]
    arguments = ", ".join(f"{k} {a}" for k, a in zip(kinds, given, strict=True))
    r.tried(constants.text(name), f"call i32 @{name}({arguments})")


def refused(r: Routine, whose: str, what: str, status: str) -> None:
    """Return the code of a failure of the driver, and leave its sentence: ``whose`` call it was, ``what`` failed (both
    pointers to text), and the driver's status."""
    code = r.value(f"call i32 @driver_failed(ptr %text, ptr {whose}, ptr {what}, i32 {status})")
    r.line(f"ret i32 {code}")


def driven_anyway(r: Routine, name: str, *given: str) -> str:
    """Call a function of the driver: its status."""
    kinds = [k for k in _ALL[name].split(", ") if k]
    arguments = ", ".join(f"{k} {a}" for k, a in zip(kinds, given, strict=True))
    return r.value(f"call i32 @{name}({arguments})")
