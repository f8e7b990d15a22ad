"""Triton's pipeline over one kernel that is described by plain data.

The stages are run one after the other here rather than through ``triton.compile``, which would keep a cache on disk
beside ours. Nothing of ours is imported, and Triton only when a kernel is compiled: a worker runs this file as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# How the names of the files begin that hold the texts of kernels.
KERNEL_FILE = "<torch_mlc kernel"


@dataclass(frozen=True, slots=True)
class Request:
    """A kernel to be compiled; every field is plain JSON.

    ``text`` is a Python module with the kernel ``name``, ``signature`` has Triton's types of its arguments by name,
    ``divisors`` by position what arguments are multiples of. ``library`` is a file that stands in for libdevice.
    """

    name: str
    text: str
    signature: dict[str, str]
    divisors: dict[str, int]
    options: dict[str, int | str | bool | None]
    kind: str
    arch: str
    warp: int
    library: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a kernel: ``code`` is a cubin or a code object, ``assembly`` its text, which takes ``parameters``
    pointers and numbers; bytes of shared memory and of each program's scratch memory."""

    name: str
    warps: int
    shared: int
    scratch_bytes: int
    parameters: int
    code: bytes
    assembly: str


def run_stages(request: Request) -> Answer:
    """Machine code of a kernel. Raises whatever Triton raises."""
    compiler = importlib.import_module("triton.compiler.compiler")
    ir = importlib.import_module("triton._C.libtriton").ir
    divisors = {(int(k),): [["tt.divisibility", d]] for k, d in request.divisors.items()}
    src = compiler.ASTSource(load_function(request.name, request.text), request.signature, {}, divisors)
    target = gpu_target(request.kind, request.arch, request.warp)
    backend = compiler.make_backend(target)
    wanted: dict[str, Any] = {k: v for k, v in request.options.items() if v is not None}
    if request.library is not None:
        wanted["extern_libs"] = {"libdevice": request.library}
    options = backend.parse_options(wanted)
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    pipeline: dict[str, Any] = {}
    backend.add_stages(pipeline, options, src.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = src.make_ir(target, options, functions, modules, context)
    results: dict[str, Any] = {}
    for name, stage in pipeline.items():
        module = stage(module, metadata)
        results[name] = module
    code, assembly = ("cubin", "ptx") if request.kind == "cuda" else ("hsaco", "amdgcn")
    name, text = str(metadata["name"]), results[assembly]
    return Answer(
        name,
        int(metadata["num_warps"]),
        int(metadata["shared"]),
        int(metadata.get("global_scratch_size") or 0),
        _parameter_count(text, name, request.kind),
        results[code],
        text,
    )


def load_function(name: str, text: str) -> Any:
    """The function of a module's text, decorated by whatever ``triton.jit`` is in this process.

    The text goes into ``linecache`` under a name made of its hash while the decorator reads it, and is taken out again.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"{KERNEL_FILE} {digest}>"
    module = types.ModuleType(f"torch_mlc_kernel_{digest}")
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    try:
        exec(compile(text, filename, "exec"), module.__dict__)
    finally:
        linecache.cache.pop(filename, None)  # another thread may have loaded the same text
    return module.__dict__[name]


def gpu_target(kind: str, arch: str, warp: int) -> Any:
    """Triton's word for a target."""
    base = importlib.import_module("triton.backends.compiler")
    return base.GPUTarget(kind, int(arch.removeprefix("sm_")) if kind == "cuda" else arch, warp)


def _parameter_count(assembly: str, name: str, kind: str) -> int:
    """How many parameters the machine code takes: Triton adds pointers to scratch memory after ours."""
    if kind == "cuda":
        entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", assembly, re.DOTALL)
        return entry.group(1).count(".param") if entry else 0
    arguments = re.search(r"\.args:(.*?)\.group_segment_fixed_size", assembly, re.DOTALL)
    return len(re.findall(r"\.value_kind:\s*(?:global_buffer|by_value)", arguments.group(1))) if arguments else 0


def answer_parts(answer: Answer) -> tuple[dict[str, Any], tuple[bytes, bytes]]:
    """An answer as JSON and two runs of bytes, for a pipe."""
    plain = {k: getattr(answer, k) for k in ("name", "warps", "shared", "scratch_bytes", "parameters")}
    return plain, (answer.code, answer.assembly.encode())


def answer_of(plain: Mapping[str, Any], code: bytes, assembly: bytes) -> Answer:
    """The inverse of ``answer_parts``."""
    return Answer(**plain, code=code, assembly=assembly.decode())
