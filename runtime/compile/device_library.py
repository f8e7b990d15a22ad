"""libdevice as GPU kernels call it, made ready once for all of them.

Functions of libdevice ask at every step whether denormal numbers are kept, and leave the answer to whoever compiles.
Every kernel that calls one parses the whole library and optimizes each copied body with both answers in it, which takes
longer than the rest of a small kernel. Here the question is answered once, as Triton answers it, and what remains of
the functions is kept as text. Triton's own LLVM does all of it, so that it can read what it wrote.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm

from ...codegen.kernel import KernelSource
from ...ir.expr.dtypes import DType
from ...ir.target import Target
from ..cache.fingerprint import environment_fingerprint, key_of
from ..triton.compile import gpu_backend
from .kernels import KIND_KERNEL, KernelCode, KernelStore

# What texts of kernels call, and what Triton's own functions come to; those of float32 end in f.
_NAMES = (
    "acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 fabs floor fma fmod "
    "hypot lgamma log log10 log1p log2 nearbyint nextafter pow rint round rsqrt sin sinh sqrt tan tanh trunc"
)
_NAMED = frozenset(_NAMES.split())
_OF_INTEGERS = ("umulhi", "umul64hi", "mulhi", "mul64hi", "clz", "clzll", "popc", "popcll", "brev", "brevll")
_TYPES = {"float": "f32", "i32": "i32", "i64": "i64"}
_CALL = re.compile(r"\blibdevice\.(\w+)")
_FLUSHED = re.compile(r'^(@\S+) = .*c"__CUDA_FTZ\\00"', re.MULTILINE)
_PREFIX, _READY = "__nv_", "ready_"


def device_library(store: KernelStore, source: KernelSource, target: Target) -> str | None:
    """A file of LLVM's with what a kernel calls, for ``compile_triton``; None where Triton's own library is to serve.

    That is so for AMD, for double precision, for functions that no kernel of ours had called, and where this version of
    Triton does otherwise than those that are known.
    """
    if target.kind != "cuda" or not hasattr(os, "memfd_create"):
        return None
    called = set(_CALL.findall(source.text))
    if not called.issubset(_NAMED) or "float64" in source.text or any(b.dtype is DType.FLOAT64 for b in source.params):
        return None
    key = key_of([environment_fingerprint(), "libdevice", target.arch])
    code = store.code(key)
    if code is None:
        with store.lock(KIND_KERNEL, key):
            code = store.code(key)
            if code is None:
                code = KernelCode(key, "libdevice", "llvm text", (), _made(target).encode())
                store.keep(code, f"libdevice for {target}")
    return _file(code.payload) if code.payload else None


@lru_cache(maxsize=4)
def _file(text: bytes) -> str:
    """The name of a file in memory, which lives as long as the process and needs nobody to remove it."""
    descriptor = os.memfd_create("torch-mlc-libdevice")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(text)
    return f"/proc/self/fd/{descriptor}"


def _made(target: Target) -> str:
    """The library as text; empty where Triton has it not as it is known here."""
    try:
        tools = _Tools(target)
        functions = tuple(_functions(tools.library))
        raw = tools.linked(functions, tools.library, optimize=False)
        found = _FLUSHED.search(raw)
        if found is None or not functions:
            return ""
        asked = re.compile(r"= (?:tail )?call i32 @__nvvm_reflect\(ptr[^@]*" + re.escape(found[1]) + r"\)[^\n]*")
        answered = re.sub(rf"define [^\n]*@{_READY}.*?\n}}\n", "", asked.sub("= add i32 1, 0", raw), flags=re.DOTALL)
        with tempfile.NamedTemporaryFile("w", suffix=".ll") as file:
            file.write(answered.replace("define internal ", "define "))
            file.flush()
            text = tools.linked(functions, file.name, optimize=True).replace(f"@{_READY}", "@")
        with tempfile.NamedTemporaryFile("w", suffix=".ll") as file:
            file.write(text)
            file.flush()
            whole = tools.linked(functions, file.name, optimize=False)
        missing = re.search(rf"^declare [^\n]*@{_PREFIX}", whole, re.MULTILINE)
        return "" if missing else text
    except Exception:  # bindings of a version that nobody has seen; Triton's library serves as it always did
        return ""


class _Tools:
    """Triton's LLVM, by the functions that Triton itself compiles kernels with."""

    def __init__(self, target: Target) -> None:
        libtriton = importlib.import_module("triton._C.libtriton")
        self._ir, self._llvm = libtriton.ir, libtriton.llvm
        self._backend = gpu_backend(target)
        options = self._backend.parse_options({"enable_fp_fusion": True})
        if not getattr(options, "enable_reflect_ftz", True):
            raise LookupError("denormal numbers are kept")
        self.library: str = dict(options.extern_libs)["libdevice"]
        self._llvm.init_targets()

    def linked(self, functions: Sequence[tuple[str, str, tuple[str, ...]]], library: str, *, optimize: bool) -> str:
        """The text of a module with a function for each of a library's that does nothing but call it."""
        context = self._ir.context()
        self._ir.load_dialects(context)
        self._backend.load_dialects(context)
        with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
            file.write("module {\n" + "".join(map(_caller, functions)) + "}\n")
            file.flush()
            module = self._ir.parse_mlir_module(file.name, context)
        llvm_context = self._llvm.context()
        found = self._llvm.to_module(module, llvm_context)
        self._llvm.link_extern_libs(found, [library])
        if optimize:
            self._llvm.optimize_module(found, self._llvm.OPTIMIZE_O3)
        return str(found)


def _functions(library: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, type of the result and types of the operands of what is called of a library, as MLIR has them."""
    module = llvm.parse_bitcode(Path(library).read_bytes())
    wanted = {_PREFIX + name for name in (*(f"{n}f" for n in _NAMES.split()), *_OF_INTEGERS)}
    for function in module.functions:
        parts = re.fullmatch(r"(\S+) \((.*)\)", str(function.global_value_type))
        if function.name not in wanted or parts is None:
            continue
        types = [_TYPES.get(t) for t in (parts[1], *filter(None, parts[2].split(", ")))]
        known = [t for t in types if t is not None]
        if len(known) == len(types):
            yield function.name, known[0], tuple(known[1:])


def _caller(function: tuple[str, str, tuple[str, ...]]) -> str:
    name, result, operands = function
    kind = f"({', '.join(operands)}) -> {result}"
    parameters = ", ".join(f"%a{k}: {t}" for k, t in enumerate(operands))
    values = ", ".join(f"%a{k}" for k in range(len(operands)))
    return (
        f"  llvm.func @{name}{kind}\n"
        f'  llvm.func @{_READY}{name}({parameters}) -> {result} attributes {{passthrough = ["alwaysinline"]}} {{\n'
        f"    %r = llvm.call @{name}({values}) : {kind}\n"
        f"    llvm.return %r : {result}\n"
        "  }\n"
    )
