"""The GPU of an opened model, in LLVM IR: its context, weights in its memory, and the machine code of all kernels.

What is there of a model on a GPU is let go of with the model, and where opening it fails half way.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.target import Target
from ...host.native.launch import RECORD, RECORD_BYTES, VARIANT_WORDS
from ..codes import CODES, SAY
from ..constants import Constants, struct
from ..library import GpuVariant
from ..routine import Routine
from .driver import driven, driven_anyway, function_of, refused

# Attributes of devices and functions, by the driver's numbers.
_MAJOR, _MINOR, _POOLS = 75, 76, 115
_MAX_SHARED = 8
# Bytes of shared memory that a kernel has without asking.
_SHARED_LIMIT = 48 << 10
# The least driver that launches kernels early in captures too (CUDA 12.3).
_EARLY = 12030
# From this capability on machine code is for one processor alone ("sm_90a").
_EXACT = (9, 0)

TYPES = """
; number and handle of the GPU, its context, weights in its memory, records of the kernels, modules, how many modules
; are loaded, the kernels of the variant, whether memory is given in the order of streams
%Device = type { i32, i32, ptr, i64, ptr, ptr, i64, ptr, i32 }
; capability, whether for that alone, kernels, how many, cubins, how many, pointers and arguments of each kernel
%GpuVariant = type { i32, i32, i32, ptr, i64, ptr, i64, ptr }
; machine code, its function, kernel, what it assumes, threads, shared memory, parameters, whether it is launched early
%Cubin = type { ptr, ptr, i64, i64, i32, i32, i64, i64 }
"""
NUMBER, HANDLE, CONTEXT, WEIGHTS, RECORDS, MODULES, LOADED, KERNELS, POOLS = range(9)
_WORDS = {name: k for k, name in enumerate(RECORD)}
# Words of a record before its variants.
_HEAD = len(RECORD)


def device_text(constants: Constants, variants: Sequence[GpuVariant], first: int, nbytes: int) -> str:
    """``@begin_device`` and ``@end_device`` for kernels of ``variants`` and so many bytes of weights, which begin at
    ``first`` in their file."""
    _tables(constants, variants)
    return _begin(constants, variants, first, nbytes) + _load(constants) + _end()


def launcher_symbol(kernel: str, variant: int) -> str:
    """The name of what launches a kernel of a variant."""
    return f"{kernel}.gpu{variant}"


def _tables(constants: Constants, variants: Sequence[GpuVariant]) -> None:
    rows = []
    for v, variant in enumerate(variants):
        cubins, kernels = [], []
        for k, kernel in enumerate(variant.kernels):
            pointers = len(kernel.source.params)
            arguments = pointers + len(kernel.source.symbols) + bool(kernel.scratch)
            kernels.append(struct(("i64", pointers), ("i64", arguments)))
            for c in kernel.cubins:
                mask = c.assumes | (1 << 63 if c.far else 0)
                cubins.append(struct(
                    ("ptr", constants.data(c.image)), ("ptr", constants.text(c.entry)), ("i64", k),
                    ("i64", mask - (1 << 64) if mask >> 63 else mask), ("i32", c.threads), ("i32", c.shared),
                    ("i64", c.parameters), ("i64", int(c.dependent)),
                ))  # fmt: skip
        names = [f'@"{launcher_symbol(k.name, v)}"' for k in variant.kernels]
        rows.append(struct(
            ("i32", variant.target.capability[0]), ("i32", variant.target.capability[1]),
            ("i32", int(variant.target.capability >= _EXACT)), ("ptr", constants.array(f"launchers{v}", "ptr", names)),
            ("i64", len(kernels)), ("ptr", constants.array(f"cubins{v}", "%Cubin", cubins)), ("i64", len(cubins)),
            ("ptr", constants.array(f"shapes{v}", "{ i64, i64 }", kernels)),
        ))  # fmt: skip
    constants.array("gpus", "%GpuVariant", rows)


def told(targets: Sequence[Target]) -> str:
    """Architectures, as sentences have them."""
    return ", ".join(t.arch for t in targets)


def _begin(constants: Constants, variants: Sequence[GpuVariant], first: int, nbytes: int) -> str:
    t, r = constants.text, Routine()
    names = t(told([v.target for v in variants]))
    number = r.load("i32", "%Options", "%options", 4)
    mapped = r.load("ptr", "%Model", "%model", 0)
    given = r.value("call i32 @load_driver(ptr %text)")
    with r.when(r.value(f"icmp ne i32 {given}, 0"), "no.driver"):
        r.line(f"ret i32 {given}")
    device = r.value("call ptr @calloc(i64 1, i64 ptrtoint (ptr getelementptr (%Device, ptr null, i32 1) to i64))")
    with r.when(r.value(f"icmp eq ptr {device}, null"), "no.memory"):
        r.value(f"{SAY} {t('open: the system has no memory left')})")
        r.line(f"ret i32 {CODES['memory']}")
    r.store("ptr", device, "%Model", "%model", 4)
    r.store("i32", number, "%Device", device, NUMBER)
    place = r.value("alloca i64")
    r.line(f"store i64 0, ptr {place}")
    driven(r, constants, "cuInit", "0")
    driven(r, constants, "cuDeviceGetCount", place)
    count = r.value(f"load i32, ptr {place}")
    with r.when(r.value(f"icmp uge i32 {number}, {count}"), "no.device"):
        r.value(f"{SAY} {t('open: GPU %d is asked for, and this machine has %d of them')}, i32 {number}, i32 {count})")
        r.line(f"ret i32 {CODES['device']}")
    driven(r, constants, "cuDeviceGet", place, number)
    handle = r.value(f"load i32, ptr {place}")
    r.store("i32", handle, "%Device", device, HANDLE)
    driven(r, constants, "cuDeviceGetAttribute", place, str(_MAJOR), handle)
    major = r.value(f"load i32, ptr {place}")
    driven(r, constants, "cuDeviceGetAttribute", place, str(_MINOR), handle)
    minor = r.value(f"load i32, ptr {place}")
    variant = r.value(f"call ptr @variant_for(i32 {major}, i32 {minor})")
    with r.when(r.value(f"icmp eq ptr {variant}, null"), "no.code"):
        r.value(f"{SAY} {t('open: GPU %d is of compute capability %d.%d, and the library has code for %s')}, "
                f"i32 {number}, i32 {major}, i32 {minor}, ptr {names})")  # fmt: skip
        r.line(f"ret i32 {CODES['device']}")
    pools = r.value("alloca i32")
    r.line(f"store i32 0, ptr {pools}")
    driven(r, constants, "cuDeviceGetAttribute", pools, str(_POOLS), handle)
    told_pools = r.value(f"load i32, ptr {pools}")
    has_pools = [r.value(f"icmp ne i32 {told_pools}, 0")]
    for name in ("cuMemAllocAsync", "cuMemFreeAsync"):
        has_pools.append(r.value(f"icmp ne ptr {function_of(r, name)}, null"))
    both = r.value(f"and i1 {has_pools[1]}, {has_pools[2]}")
    orders = r.value(f"and i1 {has_pools[0]}, {both}")
    r.store("i32", r.value(f"zext i1 {orders} to i32"), "%Device", device, POOLS)
    driven(r, constants, "cuDevicePrimaryCtxRetain", place, handle)
    context = r.value(f"load ptr, ptr {place}")
    r.store("ptr", context, "%Device", device, CONTEXT)
    driven(r, constants, "cuCtxPushCurrent_v2", context)
    filled = r.value(f"call i32 @fill_device(ptr %text, ptr {device}, ptr {variant}, ptr {mapped})")
    driven(r, constants, "cuCtxPopCurrent_v2", place)
    with r.when(r.value(f"icmp ne i32 {filled}, 0"), "not.filled"):
        r.line(f"ret i32 {filled}")
    # What was mapped is not read again.
    weights = r.load("i64", "%Device", device, WEIGHTS)
    origin = r.value(f"inttoptr i64 {r.value(f'sub i64 {weights}, {first}')} to ptr")
    r.line(f"call void @point_to_weights(ptr {origin}, ptr {r.load('ptr', '%Model', '%model', 1)})")
    r.line(f"call void @unmap_weights(ptr {mapped})")
    r.store("ptr", "null", "%Model", "%model", 0)
    r.line("ret i32 0")
    what, status = r.failed()
    refused(r, t("open"), what, status)
    begun = r.text(
        "\n; Make the GPU of the options the one of a model whose weights are mapped. Whatever it returns,\n"
        "; @end_device lets go of what is there.\n"
        "define internal i32 @begin_device(ptr %text, ptr %model, ptr %options)"
    )
    return begun + _variant_for(len(variants)) + _fill(constants, first, nbytes)


def _variant_for(count: int) -> str:
    r = Routine()
    with r.each(count) as k:
        variant = r.item("%GpuVariant", "@gpus", k)
        major, minor, exact = (r.load("i32", "%GpuVariant", variant, f) for f in range(3))
        same = r.value(f"icmp eq i32 %minor, {minor}")
        later = r.value(f"icmp uge i32 %minor, {minor}")
        alone = r.value(f"icmp ne i32 {exact}, 0")
        runs = r.value(f"select i1 {alone}, i1 {same}, i1 {later}")
        family = r.value(f"icmp eq i32 %major, {major}")
        with r.when(r.value(f"and i1 {runs}, {family}"), "fits"):
            r.line(f"ret ptr {variant}")
    r.line("ret ptr null")
    return r.text("\n; The first variant that a compute capability runs; null where none is.\n"
                  "define internal ptr @variant_for(i32 %major, i32 %minor)")  # fmt: skip


def _fill(constants: Constants, first: int, nbytes: int) -> str:
    """Weights and kernels to the GPU whose context is current."""
    t, r = constants.text, Routine()
    place = r.value("alloca i64")
    if nbytes:
        driven(r, constants, "cuMemAlloc_v2", place, str(nbytes))
        weights = r.value(f"load i64, ptr {place}")
        r.store("i64", weights, "%Device", "%device", WEIGHTS)
        data = r.value(f"getelementptr inbounds i8, ptr %mapped, i64 {first}")
        driven(r, constants, "cuMemcpyHtoD_v2", weights, data, str(nbytes))
    code = r.value("call i32 @load_kernels(ptr %text, ptr %device, ptr %variant)")
    r.line(f"ret i32 {code}")
    if r.failures:
        what, status = r.failed()
        refused(r, t("open"), what, status)
    return r.text("\ndefine internal i32 @fill_device(ptr %text, ptr %device, ptr %variant, ptr %mapped)")


def _load(constants: Constants) -> str:
    """Load all machine code of a variant, and write the records that launches read."""
    t, r = constants.text, Routine()
    place = r.value("alloca i64")
    launchers = r.load("ptr", "%GpuVariant", "%variant", 3)
    r.store("ptr", launchers, "%Device", "%device", KERNELS)
    kernels = r.load("i64", "%GpuVariant", "%variant", 4)
    cubins = r.load("ptr", "%GpuVariant", "%variant", 5)
    count = r.load("i64", "%GpuVariant", "%variant", 6)
    shapes = r.load("ptr", "%GpuVariant", "%variant", 7)
    records = r.value(f"call ptr @calloc(i64 {r.value(f'call i64 @llvm.umax.i64(i64 {kernels}, i64 1)')}, "
                      f"i64 {RECORD_BYTES})")  # fmt: skip
    modules = r.value(f"call ptr @calloc(i64 {r.value(f'call i64 @llvm.umax.i64(i64 {count}, i64 1)')}, i64 8)")
    r.store("ptr", records, "%Device", "%device", RECORDS)
    r.store("ptr", modules, "%Device", "%device", MODULES)
    none = [r.value(f"icmp eq ptr {p}, null") for p in (records, modules)]
    with r.when(r.value(f"or i1 {none[0]}, {none[1]}"), "no.memory"):
        r.value(f"{SAY} {t('open: the system has no memory left')})")
        r.line(f"ret i32 {CODES['memory']}")
    r.line(f"store i64 0, ptr {place}")
    driven(r, constants, "cuDriverGetVersion", place)
    version = r.value(f"load i32, ptr {place}")
    recent = r.value(f"icmp sge i32 {version}, {_EARLY}")
    launch, early = function_of(r, "cuLaunchKernel"), function_of(r, "cuLaunchKernelEx")
    early = r.value(f"select i1 {recent}, ptr {early}, ptr null")
    with r.each(kernels, "kernel") as k:
        record = r.value(f"getelementptr inbounds i8, ptr {records}, i64 {r.value(f'mul i64 {k}, {RECORD_BYTES}')}")
        shape = r.item("{ i64, i64 }", shapes, k)
        for word, kind, value in (
            ("pointers", "i64", r.load("i64", "{ i64, i64 }", shape, 0)),
            ("arguments", "i64", r.load("i64", "{ i64, i64 }", shape, 1)),
            ("relaxable", "i64", "-1"), ("launcher", "ptr", launch), ("early_launcher", "ptr", early),
        ):  # fmt: skip
            r.store(kind, value, "i64", record, _WORDS[word])
    with r.each(count, "cubin") as k:
        cubin = r.item("%Cubin", cubins, k)
        image, entry = (r.load("ptr", "%Cubin", cubin, f) for f in (0, 1))
        driven(r, constants, "cuModuleLoadData", place, image)
        module = r.value(f"load ptr, ptr {place}")
        r.store("ptr", module, "ptr", modules, k)
        r.store("i64", r.value(f"add i64 {k}, 1"), "%Device", "%device", LOADED)
        driven(r, constants, "cuModuleGetFunction", place, module, entry)
        function = r.value(f"load ptr, ptr {place}")
        shared = r.load("i32", "%Cubin", cubin, 5)
        with r.when(r.value(f"icmp ugt i32 {shared}, {_SHARED_LIMIT}"), "large"):
            driven(r, constants, "cuFuncSetAttribute", function, str(_MAX_SHARED), shared)
        kernel = r.load("i64", "%Cubin", cubin, 2)
        record = r.value(
            f"getelementptr inbounds i8, ptr {records}, i64 {r.value(f'mul i64 {kernel}, {RECORD_BYTES}')}"
        )
        number = r.load("i64", "i64", record, _WORDS["variants"])
        words = r.value(f"mul i64 {number}, {VARIANT_WORDS}")
        variant = r.item("i64", record, r.value(f"add i64 {words}, {_HEAD}"))
        wide = [r.value(f"zext i32 {r.load('i32', '%Cubin', cubin, f)} to i64") for f in (4, 5)]
        for number_of, (kind, value) in enumerate((
            ("i64", r.load("i64", "%Cubin", cubin, 3)), ("ptr", function), ("i64", wide[0]), ("i64", wide[1]),
            ("i64", r.load("i64", "%Cubin", cubin, 6)), ("i64", r.load("i64", "%Cubin", cubin, 7)),
        )):  # fmt: skip
            r.store(kind, value, "i64", variant, number_of)
        r.store("i64", r.value(f"add i64 {number}, 1"), "i64", record, _WORDS["variants"])
    r.line("ret i32 0")
    what, status = r.failed()
    refused(r, t("open"), what, status)
    return r.text("\n; Load the machine code of a variant, and write what launches read of it.\n"
                  "define internal i32 @load_kernels(ptr %text, ptr %device, ptr %variant)")  # fmt: skip


def _end() -> str:
    """Let go of all that a model has on its GPU, however far it came; what the driver says to that is of no use."""
    r = Routine()
    with r.when(r.value("icmp eq ptr %device, null"), "none"):
        r.line("ret void")
    context = r.load("ptr", "%Device", "%device", CONTEXT)
    with r.when(r.value(f"icmp ne ptr {context}, null"), "held"):
        place = r.value("alloca ptr")
        pushed = driven_anyway(r, "cuCtxPushCurrent_v2", context)
        modules = r.load("ptr", "%Device", "%device", MODULES)
        with r.each(r.load("i64", "%Device", "%device", LOADED), "module") as k:
            driven_anyway(r, "cuModuleUnload", r.load("ptr", "ptr", modules, k))
        weights = r.load("i64", "%Device", "%device", WEIGHTS)
        with r.when(r.value(f"icmp ne i64 {weights}, 0"), "weights"):
            driven_anyway(r, "cuMemFree_v2", weights)
        with r.when(r.value(f"icmp eq i32 {pushed}, 0"), "pushed"):
            driven_anyway(r, "cuCtxPopCurrent_v2", place)
        driven_anyway(r, "cuDevicePrimaryCtxRelease_v2", r.load("i32", "%Device", "%device", HANDLE))
    for kept in (RECORDS, MODULES):
        r.line(f"call void @free(ptr {r.load('ptr', '%Device', '%device', kept)})")
    r.line("call void @free(ptr %device)")
    r.line("ret void")
    return r.text(
        "\n; Let go of all that there is of a model on its GPU.\ndefine internal void @end_device(ptr %device)"
    )
