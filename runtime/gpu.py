"""GPU kernels: Triton source to machine code, without a GPU, and the resources that the code takes.

The compiler's stages are run one after the other here rather than through ``triton.compile``, which would keep a
cache on disk beside ours. Triton is imported when a GPU kernel is compiled and never before.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import re
import types
from dataclasses import dataclass, replace
from typing import Any

from ..codegen.kernel import ALIGNMENT, KernelSource
from ..codegen.triton.table import ALIGNED, PARAMETERS, UNALIGNED
from ..ir.dtypes import DType
from ..ir.errors import MlcError
from ..ir.target import Target
from .gpu_report import ResourceReport, report_amd, report_nvidia

_POINTERS: dict[DType, str] = {
    DType.FLOAT64: "*fp64", DType.FLOAT32: "*fp32", DType.FLOAT16: "*fp16", DType.BFLOAT16: "*bf16",
    DType.FLOAT8_E4M3FN: "*fp8e4nv", DType.FLOAT8_E5M2: "*fp8e5",
    DType.INT64: "*i64", DType.INT32: "*i32", DType.INT16: "*i16", DType.INT8: "*i8",
    DType.UINT64: "*u64", DType.UINT32: "*u32", DType.UINT16: "*u16", DType.UINT8: "*u8", DType.BOOL: "*i1",
}  # fmt: skip
# What warps of different parts do to the registers they have.
_SPECIALIZED = "setmaxnreg"


class GpuCompileError(MlcError):
    """Triton or the assembler behind it refused a kernel; the text is what they said, and the kernel's source."""


@dataclass(frozen=True, slots=True)
class GpuBinary:
    """The machine code of one kernel, and what a launch needs to know.

    ``code`` is a cubin or a code object, ``assembly`` its PTX or AMDGCN text. ``arguments`` are "ptr", "i32" or "i64"
    in call order, and ``scratch`` pointers follow them, null but for the first where each program wants
    ``scratch_bytes`` of memory there. ``threads`` is the size of a block; ``shared`` bytes of
    shared memory. ``aligned`` says of each pointer whether the code relies on 16-byte alignment.
    """

    name: str
    kind: str
    arch: str
    code: bytes
    assembly: str
    arguments: tuple[str, ...]
    scratch: int
    threads: int
    shared: int
    aligned: tuple[bool, ...]
    scratch_bytes: int = 0


def load_source(source: KernelSource) -> Any:
    """The kernel's function, decorated by whatever ``triton.jit`` is in this process.

    The text goes into ``linecache`` under a name made of its hash while the decorator reads it, and is taken out again.
    """
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:16]
    filename = f"<torch_mlc kernel {digest}>"
    module = types.ModuleType(f"torch_mlc_kernel_{digest}")
    linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    try:
        exec(compile(source.text, filename, "exec"), module.__dict__)
    finally:
        del linecache.cache[filename]
    return module.__dict__[source.name]


def signature(source: KernelSource) -> dict[str, str]:
    """Triton's types of the kernel's arguments, by name."""
    if source.option("table"):
        return dict(zip(PARAMETERS, ("*i64", "*i32"), strict=True))
    types_ = {f"{b.name}_ptr": _POINTERS[b.dtype] for b in source.params}
    types_.update(dict.fromkeys(source.symbols, str(source.option("index", "i64"))))
    return types_


def default_alignment(source: KernelSource) -> tuple[bool, ...]:
    """Pointers taken to be aligned: all whose buffer does not say less. Calls check them."""
    return tuple(b.align == 0 or b.align % ALIGNMENT == 0 for b in source.params)


def compile_triton(
    source: KernelSource, target: Target, aligned: tuple[bool, ...] | None = None, library: str | None = None
) -> GpuBinary:
    """Machine code of a kernel for a target that this machine need not have.

    ``aligned`` says which pointers are multiples of 16 bytes (the default: ``default_alignment``). ``library`` is a
    file that stands in for libdevice (``device_library``). Raises GpuCompileError.
    """
    aligned = default_alignment(source) if aligned is None else aligned
    compiler = importlib.import_module("triton.compiler.compiler")
    try:
        if source.option("table") and aligned != default_alignment(source):
            source = replace(source, text=source.text.replace(ALIGNED, UNALIGNED, 1))
        src = compiler.ASTSource(load_source(source), signature(source), {}, _attributes(source, aligned))
        metadata, stages = _run_stages(src, target, _options(source, library))
    except Exception as error:  # the compiler raises errors of many kinds, none of them ours
        raise GpuCompileError(f"{source.name} does not compile for {target}: {error}\n{source.text}") from error
    if source.option("warp_specialize") and _SPECIALIZED not in stages.get("ptx", ""):
        raise GpuCompileError(f"{source.name}: the compiler gave no warps parts of the work, as was asked for {target}")
    code, assembly = ("cubin", "ptx") if target.kind == "cuda" else ("hsaco", "amdgcn")
    arguments = tuple("ptr" if t.startswith("*") else t for t in signature(source).values())
    return GpuBinary(
        metadata["name"],
        target.kind,
        target.arch,
        stages[code],
        stages[assembly],
        arguments,
        _parameter_count(stages[assembly], metadata["name"], target.kind) - len(arguments),
        int(metadata["num_warps"]) * target.warp,
        int(metadata["shared"]),
        aligned,
        int(metadata.get("global_scratch_size") or 0),
    )


def resource_report(binary: GpuBinary) -> ResourceReport:
    """Registers, spills, shared memory, 16-byte accesses, tensor-core instructions and occupancy of a binary."""
    if binary.kind == "cuda":
        return report_nvidia(binary.arch, binary.code, binary.assembly, binary.shared, binary.threads)
    return report_amd(binary.arch, binary.assembly, binary.shared, binary.threads)


def gpu_backend(target: Target) -> Any:
    """Triton's compiler for a target."""
    compiler = importlib.import_module("triton.compiler.compiler")
    return compiler.make_backend(_gpu_target(target))


def _gpu_target(target: Target) -> Any:
    base = importlib.import_module("triton.backends.compiler")
    arch: int | str = int(target.arch.removeprefix("sm_")) if target.kind == "cuda" else target.arch
    return base.GPUTarget(target.kind, arch, target.warp)


def _options(source: KernelSource, library: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {k: source.option(k) for k in ("num_warps", "num_stages", "enable_fp_fusion")}
    options["extern_libs"] = None if library is None else {"libdevice": library}
    return {k: v for k, v in options.items() if v is not None}


def _attributes(source: KernelSource, aligned: tuple[bool, ...]) -> dict[tuple[int, ...], list[list[Any]]]:
    """Divisibility of the arguments, as Triton takes it: pointers in bytes, sizes in units."""
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    if source.option("table"):
        return {(k,): [["tt.divisibility", ALIGNMENT]] for k in range(len(PARAMETERS))}
    for k, is_aligned in enumerate(aligned):
        if is_aligned:
            attributes[(k,)] = [["tt.divisibility", ALIGNMENT]]
    for k, name in enumerate(source.symbols, len(source.params)):
        divisor = int(source.option(f"divisor:{name}", 1) or 1)
        power = min(divisor & -divisor, ALIGNMENT)
        if power > 1:
            attributes[(k,)] = [["tt.divisibility", power]]
    return attributes


def _run_stages(src: Any, target: Target, wanted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and the result of every stage of Triton's pipeline by name ("ttir" … "cubin")."""
    ir = importlib.import_module("triton._C.libtriton").ir
    backend = gpu_backend(target)
    options = backend.parse_options(wanted)
    metadata: dict[str, Any] = {"target": _gpu_target(target), **options.__dict__}
    pipeline: dict[str, Any] = {}
    backend.add_stages(pipeline, options, src.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = src.make_ir(metadata["target"], options, functions, modules, context)
    results: dict[str, Any] = {}
    for name, stage in pipeline.items():
        module = stage(module, metadata)
        results[name] = module
    return metadata, results


def _parameter_count(assembly: str, name: str, kind: str) -> int:
    """How many parameters the machine code takes: Triton adds pointers to scratch memory after ours."""
    if kind == "cuda":
        entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", assembly, re.DOTALL)
        return entry.group(1).count(".param") if entry else 0
    arguments = re.search(r"\.args:(.*?)\.group_segment_fixed_size", assembly, re.DOTALL)
    return len(re.findall(r"\.value_kind:\s*(?:global_buffer|by_value)", arguments.group(1))) if arguments else 0
