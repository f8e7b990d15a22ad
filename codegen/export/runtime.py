"""The module of LLVM IR around the host programs and kernels of a library: all that it needs of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...ir.target import Target
from ..kernel import EmitError
from . import contexts, draws, interface, opening, processor, products, tables, team, weights
from .checking import checks
from .constants import Constants, struct
from .gpu import contexts as gpu_contexts
from .gpu import device, driver, launches
from .library import ExportedModel
from .opening import Opened
from .platform import platform_of
from .processor import required
from .signature import signature_text

# What libraries have of the C library and the library of mathematics, by the names under which systems load them.
# Threads were a library of their own up to glibc 2.33; later ones still have it, without content, and musl knows the
# name. So it is asked for.
NEEDED = ("libc.so.6", "libm.so.6", "libpthread.so.0")
# Loading libraries was one of its own too, up to the same version.
LOADING = ("libdl.so.2",)
_SYSTEM = (
    "calloc", "close", "free", "getauxval", "getpid", "lseek", "malloc", "memcmp", "memcpy", "memmove", "memset",
    "mmap", "munmap", "open", "posix_memalign", "pthread_attr_destroy", "pthread_attr_init",
    "pthread_attr_setstacksize", "pthread_create", "pthread_join", "pthread_sigmask", "snprintf", "strlen", "syscall",
    "__tls_get_addr", "dlerror", "dlopen", "dlsym",
)  # fmt: skip
_MATHEMATICS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh", "erf",
    "erfc", "exp", "exp2", "expm1", "fabs", "floor", "fma", "fmax", "fmin", "fmod", "frexp", "hypot", "ldexp",
    "lgamma", "log", "log10", "log1p", "log2", "nearbyint", "nextafter", "pow", "remainder", "rint", "round",
    "roundeven", "sin", "sinh", "sqrt", "tan", "tanh", "tgamma", "trunc",
)  # fmt: skip
IMPORTS = frozenset((*_SYSTEM, *_MATHEMATICS, *(f"{n}f" for n in _MATHEMATICS)))
"""Everything that a library may take from the system."""

_DECLARATIONS = """
declare i32 @snprintf(ptr, i64, ptr, ...)
declare ptr @malloc(i64)
declare ptr @calloc(i64, i64)
declare void @free(ptr)
declare i32 @posix_memalign(ptr, i64, i64)
"""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """The file of weights: its header, the bytes of data behind it, and where each weight begins and how many bytes it
    has, in order of the model's; places count from the begin of the file."""

    header: bytes
    data_bytes: int
    places: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """Where data begin."""
        return 8 + len(self.header)


def loads_libraries(model: ExportedModel) -> bool:
    """Whether a library loads another one when it is opened: a driver, or one of products."""
    return bool(model.gpus or model.products)


def shown_by(model: ExportedModel) -> list[str]:
    """What a library shows."""
    more = [name for name, has in (("stream", bool(model.gpus)), ("seed", model.draws)) if has]
    return interface.exported_names(model.name, *more)


def needed_by(model: ExportedModel) -> tuple[str, ...]:
    """The libraries that a library is linked to."""
    return (*NEEDED, *LOADING) if loads_libraries(model) else NEEDED


def runtime_text(model: ExportedModel, placed: PlacedWeights, data_hash: int | None = None) -> str:
    """One module of LLVM IR. ``data_hash`` is that of the data of the weights, where the library is to know it.

    Raises: EmitError where the parts of the model do not fit together, and for what has no code in a library.
    """
    check_model(model)
    platform = platform_of(model.machine)
    constants = Constants()
    words = tables.scratch_words(model)
    code = tables.function_tables(model, constants)
    homes, mutable_bytes = _homes(model, placed)
    rows = [
        struct(("i64", at), ("i64", size), ("i64", home)) for (at, size), home in zip(placed.places, homes, strict=True)
    ]
    if not rows:
        rows = [struct(("i64", 0), ("i64", 0), ("i64", -1))]
    constants.array("weights", "%Weight", rows)
    types = tables.type_table(constants)
    variants = _variants(model, constants)
    gpu, count = bool(model.gpus), len(model.weights)
    opened = Opened(gpu, data_hash is not None, model.products)
    body = [
        team.team_text(platform),
        checks.checks_text(constants, types, gpu),
        weights.weights_text(constants, placed.header, placed.data_bytes, count),
        (gpu_contexts if gpu else contexts).contexts_text(constants, count, mutable_bytes, words),
        contexts.holders_text(gpu),
        processor.processor_text(model.machine, [required(t, model.machine) for t in variants]),
        processor.choice_text(len(variants)),
        interface.interface_text(
            model.name, constants, len(model.functions), count, words, signature_text(model), opened
        ),
    ]
    if data_hash is not None:
        body.append(weights.data_hash_text(placed.first, placed.data_bytes, data_hash))
    if gpu:
        body += [
            driver.driver_text(constants),
            device.device_text(constants, model.gpus, placed.first, placed.data_bytes),
            launches.launches_text(constants, model.gpus),
        ]
    if model.draws:
        body.append(draws.draws_text(model.name, constants, gpu))
    if model.products:
        body.append(products.products_text(constants, model.products))
    more = gpu_contexts.FIELDS if gpu else ""
    head = [
        tables.TYPES, team.TEAM_TYPE, opening.TYPES, contexts.types_text(more), processor.TYPES,
        device.TYPES if gpu else "",
    ]  # fmt: skip
    declared = [_DECLARATIONS, team.DECLARATIONS, weights.DECLARATIONS]
    if loads_libraries(model):
        declared.append(driver.DECLARATIONS)
    words_text = [f'@word_{w} = internal constant [{len(w) + 1} x i8] c"{w}\\00"' for w in ("input", "result")]
    text = "\n".join([*head, *declared, *words_text, *constants.lines, *_stubs(model), *code, *body])
    return f"; The library {model.name}\n{text}\n"


def variant_symbol(kernel: str, number: int) -> str:
    """The name of a kernel among those of several variants."""
    return f"{kernel}.{number}"


def all_variants(model: ExportedModel) -> list[Target]:
    """The targets that kernels are compiled for, the first that fits is taken; the last is the least."""
    return [*(v.target for v in model.variants), model.target]


def check_model(model: ExportedModel) -> None:
    """Raises: EmitError for names that C or the linker would not take, and for variants that lack kernels."""
    for what, names in (("model", [model.name]), ("function", [f.name for f in model.functions])):
        for name in names:
            if not _IDENTIFIER.fullmatch(name):
                raise EmitError(f"the {what} {name!r} has a name that is no identifier of C")
    if not model.functions:
        raise EmitError(f"the model {model.name} has no function: there is nothing to call")
    kernels = [k.name for k in model.kernels]
    for what, names in (
        ("functions", [f.name for f in model.functions]),
        ("kernels", kernels),
        ("weights", [w.name for w in model.weights]),
    ):
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise EmitError(f"two {what} of {model.name} have the name {', '.join(twice)}")
    taken = sorted({*kernels, *model.kernel_names} & (IMPORTS | set(interface.exported_names(model.name))))
    if taken:
        raise EmitError(f"kernels may not have names of the system or of the library: {', '.join(taken)}")
    if model.gpus and (model.kernels or model.variants):
        raise EmitError(f"{model.name} has kernels for GPUs and for processors; a library has one of both")
    for gpu in model.gpus:
        if tuple(k.name for k in gpu.kernels) != model.kernel_names:
            raise EmitError(f"the variant for {gpu.target.arch} has other kernels than {model.gpus[0].target.arch}'s")
    for variant in model.variants:
        other = {k.name for k in variant.kernels}
        if other != set(kernels):
            raise EmitError(
                f"the variant for {variant.target.arch} has other kernels than the model: "
                f"{', '.join(sorted(other ^ set(kernels)))}"
            )


def _homes(model: ExportedModel, placed: PlacedWeights) -> tuple[list[int], int]:
    """Where in a context each weight is copied to, -1 for those that are not, and the bytes of all copies."""
    homes, at = [], 0
    for weight, (_, size) in zip(model.weights, placed.places, strict=True):
        homes.append(at if weight.mutable else -1)
        at += -(-size // 64) * 64 if weight.mutable else 0
    return homes, at


def _variants(model: ExportedModel, constants: Constants) -> list[Target]:
    targets = all_variants(model)
    rows = []
    for k, target in enumerate(targets):
        table, count = processor.requirements(f"requirements{k}", target, model.machine, constants)
        kernels = f"@kernels{k}" if model.variants and model.kernels else "null"
        rows.append(struct(("ptr", table), ("i64", count), ("ptr", kernels), ("ptr", constants.text(target.arch))))
    constants.array("variants", "%Variant", rows)
    constants.lines.append(f"@least = internal constant %Variant {rows[-1]}")
    constants.lines.append("@kernels = internal global ptr null\n@chosen = internal global i64 0")
    return targets


def _stubs(model: ExportedModel) -> list[str]:
    """Kernels by their names, where there are several variants: jumps through the table of the one that was chosen."""
    if not model.variants:
        return []
    lines = []
    names = [k.name for k in model.kernels]
    for v in range(len(model.variants) + 1):
        lines += [f"declare hidden void @{_quoted(variant_symbol(n, v))}(ptr)" for n in names]
        items = ", ".join(f"ptr @{_quoted(variant_symbol(n, v))}" for n in names)
        if names:
            lines.append(f"@kernels{v} = internal constant [{len(names)} x ptr] [{items}]")
    for k, n in enumerate(names):
        lines.append(f"""
define hidden void @{_quoted(n)}(ptr %arguments) {{
  %table = load atomic ptr, ptr @kernels monotonic, align 8
  %at = getelementptr inbounds ptr, ptr %table, i64 {k}
  %kernel = load ptr, ptr %at
  tail call void %kernel(ptr %arguments)
  ret void
}}""")
    return lines


def _quoted(name: str) -> str:
    return f'"{name}"'
