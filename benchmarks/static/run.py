"""The suite ``static``: what machine code and loops tell of a compiler without running anything, against targets.

Workloads are compiled from fake tensors for a GPU that need not be here. Figures of Inductor are constants, and not
measured again.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeAlias

import torch_mlc
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling.kernels import emit
from torch_mlc.dynamo_backend.compiling.lighter import fitting_code
from torch_mlc.dynamo_backend.reports.report import GraphReport, KernelReport, Report
from torch_mlc.ir.target import Target, TargetError, gpu_target
from torch_mlc.runtime.compile.device_library import device_library
from torch_mlc.runtime.compile.kernels import KernelCode, compile_source, kernel_store
from torch_mlc.runtime.triton.report import ResourceReport
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

from ..machine import describe_machine, describe_versions
from ..models.spec import Size
from .memory import memory_rows
from .report import Row, StaticReport, print_static, workload_json
from .slots import HELD, SLOTS_A_BYTE
from .widths import wide_bytes
from .workloads import COLUMNS, GPT_FEW, GPT_STEP, NORMS, WORKLOADS, Workload

INDUCTOR_SOURCE = (
    "constants, taken from what Inductor of torch 2.11 generates for sm_90 with default settings; its bytes of GPT-2 "
    "are its own count, which leaves out that a loop reads an array again"
)
LAUNCHES, INDUCTOR_LAUNCHES = 240, 53 + 201 + 61 + 110
GPT_FORWARD, INDUCTOR_GPT_FORWARD = 1.7, 2.15
GPT_BACKWARD, INDUCTOR_GPT_BACKWARD = 2.8, 4.00
NORM_BACKWARD, INDUCTOR_NORM_BACKWARD = 1.0, {4096: 1.00, 16384: 1.67}
INT8, INDUCTOR_INT8 = 1.05, 4.97
SOFTCAP, INDUCTOR_SOFTCAP = 1.1, 15.9
BATCH_NORM, INDUCTOR_BATCH_NORM = 1.45, 1.71
READS, INDUCTOR_READS = 1, 2
INDUCTOR_PERSISTENT = 1024
WIDE = 0.95
SECONDS, SECONDS_OF_PRODUCTS = 0.15, 0.7


@dataclass(frozen=True, slots=True)
class Compiled:
    """A workload and what became of it; ``seconds`` of CPU time by kernel, in the order of its kernels."""

    workload: Workload
    size: Size
    report: Report
    seconds: tuple[float, ...]

    def graph(self, which: int) -> GraphReport:
        return self.report.graphs[which]

    @property
    def kernels(self) -> tuple[tuple[KernelReport, float], ...]:
        return tuple(zip(self.report.kernels, self.seconds, strict=True))


def run_static(names: Sequence[str], size: Size, target: str, before: Callable[[str], None]) -> StaticReport:
    """Compile workloads by name; ``before(name)`` is called ahead of each. Raises: TargetError."""
    gpu_target(target)
    report = StaticReport(
        target=target,
        size=size,
        command=["python", "-m", "benchmarks", *sys.argv[1:]],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=describe_machine("cpu"),
        versions=describe_versions(),
        inductor_source=INDUCTOR_SOURCE,
    )
    compiled = []
    for name in names:
        before(name)
        try:
            done = compile_workload(WORKLOADS[name], size, target)
        except Exception as error:  # one workload must not hide the others
            report.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        compiled.append(done)
        report.workloads[name] = workload_json(done.report, done.seconds)
    report.rows = rows_of(compiled, target)
    return report


Known: TypeAlias = Sequence[tuple[Compiled, KernelReport, ResourceReport]]


def compile_workload(workload: Workload, size: Size, target: str) -> Compiled:
    """Compile a workload from fake tensors, then each of its kernels once more for the time that it takes."""
    made = workload.make(size)
    # Kernels are compiled in this process both times, so that what it does once is done.
    options = {"cache": False, "compile_workers": 0}
    report = torch_mlc.explain(made.function, *made.inputs, training=workload.training, target=target, options=options)
    return Compiled(workload, size, report, tuple(map(kernel_seconds, report.kernels)))


def kernel_seconds(kernel: KernelReport) -> float:
    """CPU seconds from a fused function to machine code, of this process and of the assembler that it runs.

    Everything that a process does once (imports, caches of the compiler) has been done. Infinite where the kernel does
    not compile.
    """
    if kernel.function is None or kernel.target is None or kernel.error:
        return float("inf")
    before = sum(os.times()[:4])
    target, nest = kernel.target, lower_to_loops(kernel.function, kernel.target)
    schedule = default_schedule(nest, target)
    source = emit(schedule.nest, target)
    library = device_library(kernel_store(None), source, target)

    def make(source: KernelSource) -> KernelCode:
        return compile_source(source, target, kernel.name, library)

    fitting_code(nest, target, schedule, source, make)
    return sum(os.times()[:4]) - before


def rows_of(compiled: Sequence[Compiled], target: str) -> list[Row]:
    """The table: rows of single workloads, then those over all kernels. What was not compiled has no row."""
    by_name = {c.workload.name: c for c in compiled}
    return [
        *_gpt_rows(by_name),
        *_ratio_rows(by_name),
        *_read_rows(by_name),
        *_slot_rows(by_name),
        *(row for c in compiled for row in memory_rows(c.workload.name, c.report.kernels)),
        *_kernel_rows(compiled, gpu_target(target)),
    ]


# --- single workloads -------------------------------------------------------------------------------------------------


def _gpt_rows(by_name: dict[str, Compiled]) -> list[Row]:
    if GPT_STEP not in by_name:
        return []
    forward, backward = (by_name[GPT_STEP].graph(k) for k in (0, 1))
    calls = [sum(c.calls for c in g.libraries) for g in (forward, backward)]
    detail = (
        f"{forward.launches} + {backward.launches} kernels, {calls[0]} + {calls[1]} library calls; Inductor 53 + 201, "
        "61 + 110"
    )
    total = forward.launches + backward.launches + sum(calls)
    rows = [
        Row(f"{GPT_STEP}: launches", total, LAUNCHES, INDUCTOR_LAUNCHES, detail=detail, digits=0),
        _ratio(f"{GPT_STEP}: bytes over inputs and outputs, forward", forward, GPT_FORWARD, INDUCTOR_GPT_FORWARD),
        _ratio(f"{GPT_STEP}: bytes over inputs and outputs, backward", backward, GPT_BACKWARD, INDUCTOR_GPT_BACKWARD),
    ]
    if GPT_FEW in by_name:
        few, many = len(by_name[GPT_FEW].report.kernels), len(by_name[GPT_STEP].report.kernels)
        detail = f"{many} kernels; {few} with fewer layers"
        rows.append(Row("distinct cubins per repeated layer", many / few, 1, detail=detail, digits=2))
    return rows


def _ratio(name: str, graph: GraphReport, target: float, inductor: float | None, compulsory: int | None = None) -> Row:
    t = graph.traffic
    over = t.compulsory if compulsory is None else compulsory
    detail = (
        f"{t.kernels / 2**20:.1f} MiB in kernels, {t.libraries / 2**20:.1f} in library calls, over {over / 2**20:.1f}"
    )
    return Row(name, t.moved / over, target, inductor, detail=detail, digits=_digits(target))


def _digits(target: float) -> int:
    """The digits after the point with which a target is given; values are compared as exactly."""
    return max(1, len(f"{target:g}".partition(".")[2]))


def _ratio_rows(by_name: dict[str, Compiled]) -> list[Row]:
    wanted: list[tuple[str, int, float, float | None]] = [
        *(
            (f"{norm} norm backward, N={n}", 1, NORM_BACKWARD, INDUCTOR_NORM_BACKWARD[n])
            for _, n in NORMS
            for norm in ("layer", "RMS")
        ),
        ("int8-weight linear", 0, INT8, INDUCTOR_INT8),
        ("softcap attention forward", 0, SOFTCAP, INDUCTOR_SOFTCAP),
        ("batch norm + ReLU backward", 1, BATCH_NORM, INDUCTOR_BATCH_NORM),
    ]
    rows = []
    for name, which, target, inductor in wanted:
        if name in by_name:
            c = by_name[name]
            base = c.workload.compulsory(c.size) if c.workload.compulsory is not None else None
            rows.append(_ratio(f"{name}: bytes over the least", c.graph(which), target, inductor, base))
    return rows


def _read_rows(by_name: dict[str, Compiled]) -> list[Row]:
    """Of graphs over rows of one width: how often their large inputs are read, by all their kernels together."""
    rows = []
    for family in ("softmax rows", "RMS norm rows"):
        for n in COLUMNS:
            found = [c for name, c in by_name.items() if name.startswith(f"{family}, N={n},")]
            if found:
                value, worst = max((max(c.graph(0).traffic.reads.values()), c.workload.name) for c in found)
                inductor = INDUCTOR_READS if n > INDUCTOR_PERSISTENT else 1
                name = f"{family}, N={n}: reads per input"
                rows.append(Row(name, value, READS, inductor, detail=worst.rpartition(" ")[2], digits=2))
    return rows


def _slot_rows(by_name: dict[str, Compiled]) -> list[Row]:
    """Of graphs that memory ought to bind: the instruction slots of all their kernels over the bytes they have
    to move."""
    rows = []
    for name in HELD:
        counted = [
            (k.issue.slots * k.calls, k.traffic.least * k.calls, k)
            for k in (by_name[name].report.kernels if name in by_name else ())
            if k.issue is not None and k.traffic is not None
        ]
        if counted:
            value = sum(slots for slots, _, _ in counted) / max(sum(least for _, least, _ in counted), 1)
            worst = max(counted, key=lambda found: found[0])[2]
            detail = f"most in {worst.name}"
            rows.append(Row(f"{name}: slots a byte", value, SLOTS_A_BYTE, detail=detail, digits=1))
    return rows


# --- all kernels ------------------------------------------------------------------------------------------------------


def _kernel_rows(compiled: Sequence[Compiled], target: Target) -> list[Row]:
    kernels = [(c, k, s) for c in compiled for k, s in c.kernels]
    if not kernels:
        return []
    failed = [f"{c.workload.name}: {k.name}" for c, k, _ in kernels if k.resources is None]
    known = [(c, k, k.resources) for c, k, _ in kernels if k.resources is not None]
    rows = [Row("kernels that do not compile", len(failed), 0, detail=_some(failed), digits=0)]
    if not known:
        return rows
    rows += [
        _worst("spilled bytes", known, lambda r: r.spills, 0),
        _worst("shared memory, KiB", known, lambda r: r.shared / 1024, target.shared_bytes / 1024),
    ]
    aligned = [(c, k, r) for c, k, r in known if c.workload.aligned]
    if aligned:
        rows += [_wide("loads", aligned, stores=False), _wide("stores", aligned, stores=True)]
    products = [(c, k, r) for c, k, r in known if is_product(k)]
    if products:
        by_groups = target.has_group_products
        plain = [f"{c.workload.name}: {k.name}" for c, k, r in products if not _tensor_cores(r, by_groups)]
        share = 1 - len(plain) / len(products)
        detail = f"{len(products)} contractions" + (f"; without: {_some(plain)}" if plain else "")
        name = f"contractions of 64 or more rows with {'wgmma' if by_groups else 'mma'}"
        rows.append(Row(name, share, 1, at_least=True, detail=detail, digits=2))
    for name, most, chosen in (
        ("compile CPU seconds per memory-bound kernel", SECONDS, [s for _, k, s in kernels if not is_product(k)]),
        ("compile CPU seconds per contraction", SECONDS_OF_PRODUCTS, [s for _, k, s in kernels if is_product(k)]),
    ):
        if chosen:
            detail = f"mean of {len(chosen)}; median {statistics.median(chosen):.2f}, worst {max(chosen):.2f}"
            rows.append(Row(name, statistics.fmean(chosen), most, detail=detail, digits=2))
    return rows


def _tensor_cores(resources: ResourceReport, by_groups: bool) -> int:
    return resources.group_products if by_groups else resources.warp_products


def is_product(kernel: KernelReport) -> bool:
    """Whether a kernel's source multiplies matrices."""
    return "tl.dot(" in kernel.source


def _worst(name: str, known: Known, of: Callable[[ResourceReport], float], most: float) -> Row:
    c, k, r = max(known, key=lambda entry: of(entry[2]))
    over = sum(of(r) > most for _, _, r in known)
    return Row(f"{name}, worst kernel", of(r), most, detail=f"{c.workload.name}: {k.name}; {over} over", digits=0)


def _wide(what: str, known: Known, *, stores: bool) -> Row:
    found = [(c, k, *wide_bytes(k, stores=stores)) for c, k, _ in known]
    share = sum(w * k.calls for _, k, w, _ in found) / max(sum(n * k.calls for _, k, _, n in found), 1)
    below = sorted((w / n, f"{c.workload.name}: {k.name}") for c, k, w, n in found if n and w < WIDE * n)
    detail = f"arrays weighted by bytes; {len(below)} of {len(known)} kernels below {WIDE:.0%}"
    detail += f", worst {below[0][1]} {below[0][0]:.0%}" if below else ""
    return Row(f"16-byte share of {what}, aligned rows", share, WIDE, at_least=True, detail=detail, digits=2)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = [
    "WORKLOADS", "Compiled", "TargetError", "compile_workload", "is_product", "print_static", "rows_of", "run_static",
]  # fmt: skip
