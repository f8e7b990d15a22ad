"""GPU kernels: Triton source to machine code, without a GPU, and the resources that the code takes.

Triton is imported when a GPU kernel is compiled in this process and never before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...codegen.kernel import ALIGNMENT, KernelSource
from ...codegen.triton.table import ALIGNED, PARAMETERS, UNALIGNED
from ...ir.errors import MlcError
from ...ir.expr.dtypes import DType
from ...ir.target import Target
from .report import ResourceReport, report_amd, report_nvidia, spilled_amd, spilled_nvidia
from .triton_stages import Answer, Request, gpu_target, load_function, run_stages

# What runs Triton over a kernel: this process, or another. Its errors are whatever Triton raises.
RunTriton: TypeAlias = Callable[[Request], Answer]

_POINTERS: dict[DType, str] = {
    DType.FLOAT64: "*fp64", DType.FLOAT32: "*fp32", DType.FLOAT16: "*fp16", DType.BFLOAT16: "*bf16",
    DType.FLOAT8_E4M3FN: "*fp8e4nv", DType.FLOAT8_E5M2: "*fp8e5",
    DType.INT64: "*i64", DType.INT32: "*i32", DType.INT16: "*i16", DType.INT8: "*i8",
    DType.UINT64: "*u64", DType.UINT32: "*u32", DType.UINT16: "*u16", DType.UINT8: "*u8", DType.BOOL: "*i1",
}  # fmt: skip
# What warps of different parts do to the registers they have, and what waits for the kernel ahead.
_SPECIALIZED, _WAITING = "setmaxnreg", "griddepcontrol.wait"
# First a kernel waits for what the one ahead of it has written. Then the next may come, which waits in the same way.
_DEPENDENT = "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n"


class GpuCompileError(MlcError):
    """Triton or the assembler behind it refused a kernel; the text is what they said, and the kernel's source."""


class SharedMemoryError(GpuCompileError):
    """A kernel compiles to more shared memory than a block of the target may have, so that no device would load it."""


class StoppedError(Exception):
    """Nobody wants the kernel any more, so that whoever was to run Triton did not, or not to the end."""


@dataclass(frozen=True, slots=True)
class GpuBinary:
    """The machine code of one kernel, and what a launch needs to know.

    ``code`` is a cubin or a code object, ``assembly`` its PTX or AMDGCN text. ``arguments`` are "ptr", "i32" or "i64"
    in call order, and ``scratch`` pointers follow them, null but for the first where each program wants
    ``scratch_bytes`` of memory there. ``threads`` is the size of a block; ``shared`` bytes of
    shared memory. ``aligned`` says of each pointer whether the code relies on 16-byte alignment. A kernel that is
    ``dependent`` waits for the one ahead before it touches memory, and may be launched before that has ended.
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
    dependent: bool = False


def load_source(source: KernelSource) -> Any:
    """The kernel's function, decorated by whatever ``triton.jit`` is in this process."""
    return load_function(source.name, source.text)


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
    source: KernelSource,
    target: Target,
    aligned: tuple[bool, ...] | None = None,
    library: str | None = None,
    run: RunTriton = run_stages,
) -> GpuBinary:
    """Machine code of a kernel for a target that this machine need not have.

    ``aligned`` says which pointers are multiples of 16 bytes (the default: ``default_alignment``). ``library`` is a
    file that stands in for libdevice (``device_library``); where registers do not suffice with it, Triton's own is
    tried as well. ``run`` is who runs Triton, by default this process. Raises GpuCompileError (SharedMemoryError
    where the target has not that much of it), and StoppedError where ``run`` does.
    """
    made = _compiled(source, target, aligned, library, run)
    if library is None or not (spilled := spilled_bytes(made)):
        return made
    other = _compiled(source, target, aligned, None, run)
    return other if spilled_bytes(other) < spilled else made


def _compiled(
    source: KernelSource, target: Target, aligned: tuple[bool, ...] | None, library: str | None, run: RunTriton
) -> GpuBinary:
    aligned = default_alignment(source) if aligned is None else aligned
    try:
        answer = run(_request(source, target, aligned, library))
    except StoppedError:
        raise
    except Exception as error:  # the compiler raises errors of many kinds, none of them ours
        raise GpuCompileError(f"{source.name} does not compile for {target}: {error}\n{source.text}") from error
    if source.option("warp_specialize") and (target.kind != "cuda" or _SPECIALIZED not in answer.assembly):
        raise GpuCompileError(f"{source.name}: the compiler gave no warps parts of the work, as was asked for {target}")
    if 0 < target.shared_bytes < answer.shared:
        raise SharedMemoryError(
            f"{source.name} takes {answer.shared:,} bytes of shared memory a block, of which {target} has "
            f"{target.shared_bytes:,}; smaller tiles, or fewer steps in flight (num_stages), take less"
        )
    arguments = tuple("ptr" if t.startswith("*") else t for t in signature(source).values())
    return GpuBinary(
        answer.name,
        target.kind,
        target.arch,
        answer.code,
        answer.assembly,
        arguments,
        answer.parameters - len(arguments),
        answer.warps * target.warp,
        answer.shared,
        aligned,
        answer.scratch_bytes,
        _WAITING in answer.assembly,
    )


def _request(source: KernelSource, target: Target, aligned: tuple[bool, ...], library: str | None) -> Request:
    text = source.text
    if source.option("table") and aligned != default_alignment(source):
        text = text.replace(ALIGNED, UNALIGNED, 1)
    if target.has_dependent_launches:
        text = _waiting(text, source.name)
    options = {k: source.option(k) for k in ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")}
    return Request(
        source.name, text, signature(source), _divisors(source, aligned), options, target.kind, target.arch,
        target.warp, library,
    )  # fmt: skip


def _waiting(text: str, name: str) -> str:
    """A kernel that waits for the one ahead of it before it does anything. Its lines keep their numbers where two empty
    ones stand before it, as the emitter leaves them."""
    head, definition, rest = text.partition(f"\n@triton.jit\ndef {name}(")
    parameters, line, body = rest.partition(":\n")
    assert definition and line, f"{name} is no kernel of its text"
    return f"{head.removesuffix(chr(10) * 2)}{definition}{parameters}{line}{_DEPENDENT}{body}"


def resource_report(binary: GpuBinary) -> ResourceReport:
    """Registers, spills, shared memory, 16-byte accesses, tensor-core instructions and occupancy of a binary."""
    if binary.kind == "cuda":
        return report_nvidia(binary.arch, binary.code, binary.assembly, binary.shared, binary.threads)
    return report_amd(binary.arch, binary.assembly, binary.shared, binary.threads)


def spilled_bytes(binary: GpuBinary) -> int:
    """Bytes of local memory a thread that registers did not hold."""
    return spilled_nvidia(binary.code) if binary.kind == "cuda" else spilled_amd(binary.assembly)


def gpu_backend(target: Target) -> Any:
    """Triton's compiler for a target."""
    compiler = importlib.import_module("triton.compiler.compiler")
    return compiler.make_backend(gpu_target(target.kind, target.arch, target.warp))


def _divisors(source: KernelSource, aligned: tuple[bool, ...]) -> dict[str, int]:
    """Divisibility of the arguments by position, as Triton takes it: pointers in bytes, sizes in units."""
    if source.option("table"):
        return {str(k): ALIGNMENT for k in range(len(PARAMETERS))}
    divisors = {str(k): ALIGNMENT for k, is_aligned in enumerate(aligned) if is_aligned}
    for k, name in enumerate(source.symbols, len(source.params)):
        divisor = int(source.option(f"divisor:{name}", 1) or 1)
        power = min(divisor & -divisor, ALIGNMENT)
        if power > 1:
            divisors[str(k)] = power
    return divisors
