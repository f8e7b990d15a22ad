"""The suite ``static``: what machine code and loops tell of a compiler without running anything, against targets.

Workloads are compiled from fake tensors for a GPU that need not be here. Figures of Inductor are constants, and not
measured again.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch_mlc
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.dynamo_backend.compiling.kernels import emit
from torch_mlc.dynamo_backend.compiling.lighter import fitting_code
from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.runtime.compile.device_library import device_library
from torch_mlc.runtime.compile.kernels import KernelCode, compile_source, kernel_store
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

from ..machine import describe_machine
from ..models.spec import Size
from ..steps import Keep, begun, read_json, same_run
from .memory import memory_rows
from .report import SCHEMA, VERSION, Row, StaticReport, print_static, workload_json
from .slots import HELD, SLOTS_A_BYTE
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


# A kernel, graph, workload or all of them, as the JSON has it.
Facts: TypeAlias = Mapping[str, Any]
Known: TypeAlias = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A workload and what became of it; ``seconds`` of CPU time by kernel, in the order of its kernels."""

    workload: Workload
    size: Size
    report: Report
    seconds: tuple[float, ...]

    def to_json(self) -> Facts:
        """What the JSON says of the workload, and rows are made of."""
        return workload_json(self.report, self.seconds)


def begin_static(size: Size, target: str) -> StaticReport:
    """A run with nothing done."""
    return StaticReport(
        target=target, size=size, machine=describe_machine("cpu"), inductor_source=INDUCTOR_SOURCE, **begun()
    )


def resume_static(path: Path, size: Size, target: str) -> tuple[StaticReport, list[str]]:
    """The run in a file, and the versions that have changed since. Raises ValueError where it is none of this size and
    target."""
    body = read_json(path, SCHEMA, VERSION)
    changed = same_run(path, body, {"target": target, "size": size, "versions": begun()["versions"]})
    return StaticReport.from_json(body), changed


def compile_static(report: StaticReport, name: str, _: Keep) -> None:
    """Compile a workload, and make the rows of all that is compiled."""
    compiled = compile_workload(WORKLOADS[name], report.size, report.target)
    report.memory[name] = memory_rows(name, compiled.report.kernels)
    report.workloads[name] = compiled.to_json()
    report.rows = rows_of(report.workloads, report.size, report.target, report.memory)


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


def rows_of(
    workloads: Facts, size: Size, target: str, memory: Mapping[str, Sequence[Row]] = MappingProxyType({})
) -> list[Row]:
    """The table: rows of single workloads, those about ``memory`` among them, then those over all kernels. What was not
    compiled has no row."""
    return [
        *_gpt_rows(workloads),
        *_ratio_rows(workloads, size),
        *_read_rows(workloads),
        *_slot_rows(workloads),
        *(row for name in workloads for row in memory.get(name, ())),
        *_kernel_rows(workloads, gpu_target(target)),
    ]


# --- single workloads -------------------------------------------------------------------------------------------------


def _graph(workload: Facts, which: int) -> Any:
    return list(workload.values())[which]


def _kernels(workload: Facts) -> list[Any]:
    return [k for graph in workload.values() for k in graph["kernels"]]


def _gpt_rows(workloads: Facts) -> list[Row]:
    if GPT_STEP not in workloads:
        return []
    forward, backward = (_graph(workloads[GPT_STEP], k) for k in (0, 1))
    calls = [sum(g["library_calls"].values()) for g in (forward, backward)]
    launches = [g["launches"] for g in (forward, backward)]
    detail = (
        f"{launches[0]} + {launches[1]} kernels, {calls[0]} + {calls[1]} library calls; Inductor 53 + 201, 61 + 110"
    )
    rows = [
        Row(f"{GPT_STEP}: launches", sum(launches + calls), LAUNCHES, INDUCTOR_LAUNCHES, detail=detail, digits=0),
        _ratio(f"{GPT_STEP}: bytes over inputs and outputs, forward", forward, GPT_FORWARD, INDUCTOR_GPT_FORWARD),
        _ratio(f"{GPT_STEP}: bytes over inputs and outputs, backward", backward, GPT_BACKWARD, INDUCTOR_GPT_BACKWARD),
    ]
    if GPT_FEW in workloads:
        few, many = (len(_kernels(workloads[name])) for name in (GPT_FEW, GPT_STEP))
        detail = f"{many} kernels; {few} with fewer layers"
        rows.append(Row("distinct cubins per repeated layer", many / few, 1, detail=detail, digits=2))
    return rows


def _ratio(name: str, graph: Facts, target: float, inductor: float | None, compulsory: int | None = None) -> Row:
    kernels, libraries = graph["kernel_bytes"], graph["library_bytes"]
    over = graph["compulsory_bytes"] if compulsory is None else compulsory
    detail = f"{kernels / 2**20:.1f} MiB in kernels, {libraries / 2**20:.1f} in library calls, over {over / 2**20:.1f}"
    return Row(name, (kernels + libraries) / over, target, inductor, detail=detail, digits=_digits(target))


def _digits(target: float) -> int:
    """The digits after the point with which a target is given; values are compared as exactly."""
    return max(1, len(f"{target:g}".partition(".")[2]))


def _ratio_rows(workloads: Facts, size: Size) -> list[Row]:
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
        if name in workloads:
            compulsory = WORKLOADS[name].compulsory
            base = compulsory(size) if compulsory is not None else None
            rows.append(_ratio(f"{name}: bytes over the least", _graph(workloads[name], which), target, inductor, base))
    return rows


def _read_rows(workloads: Facts) -> list[Row]:
    """Of graphs over rows of one width: how often their large inputs are read, by all their kernels together."""
    rows = []
    for family in ("softmax rows", "RMS norm rows"):
        for n in COLUMNS:
            found = [(name, w) for name, w in workloads.items() if name.startswith(f"{family}, N={n},")]
            if found:
                value, worst = max((max(_graph(w, 0)["reads"].values()), name) for name, w in found)
                inductor = INDUCTOR_READS if n > INDUCTOR_PERSISTENT else 1
                name = f"{family}, N={n}: reads per input"
                rows.append(Row(name, value, READS, inductor, detail=worst.rpartition(" ")[2], digits=2))
    return rows


def _slot_rows(workloads: Facts) -> list[Row]:
    """Of graphs that memory ought to bind: the instruction slots of all their kernels over the bytes they have
    to move."""
    rows = []
    for name in HELD:
        counted = [
            (k["issue"]["slots"] * k["calls"], k["least_bytes"] * k["calls"], k)
            for k in (_kernels(workloads[name]) if name in workloads else ())
            if k["issue"] is not None and k["least_bytes"] is not None
        ]
        if counted:
            value = sum(slots for slots, _, _ in counted) / max(sum(least for _, least, _ in counted), 1)
            worst = max(counted, key=lambda found: found[0])[2]
            detail = f"most in {worst['name']}"
            if guessed := [k["name"] for _, _, k in counted if k["issue"]["guessed"]]:
                value, detail = math.inf, f"not known: how often loops of {_some(guessed)} run"
            rows.append(Row(f"{name}: slots a byte", value, SLOTS_A_BYTE, detail=detail, digits=1))
    return rows


# --- all kernels ------------------------------------------------------------------------------------------------------


def _kernel_rows(workloads: Facts, target: Target) -> list[Row]:
    kernels = [(name, k) for name, w in workloads.items() for k in _kernels(w)]
    if not kernels:
        return []
    failed = [f"{name}: {k['name']}" for name, k in kernels if k["resources"] is None]
    known = [(name, k) for name, k in kernels if k["resources"] is not None]
    rows = [Row("kernels that do not compile", len(failed), 0, detail=_some(failed), digits=0)]
    if not known:
        return rows
    rows += [
        _worst("spilled bytes", known, lambda r: r["spills"], 0),
        _worst("shared memory, KiB", known, lambda r: r["shared"] / 1024, target.shared_bytes / 1024),
    ]
    aligned = [(name, k) for name, k in known if WORKLOADS[name].aligned]
    if aligned:
        rows += [_wide("loads", aligned), _wide("stores", aligned)]
    products = [(name, k) for name, k in known if k["product"]]
    if products:
        by = "group_products" if target.has_group_products else "warp_products"
        many = [(name, k) for name, k in products if not k["few_rows"]]
        plain = [f"{name}: {k['name']}" for name, k in many if not k["resources"][by]]
        share = 1 - len(plain) / max(len(many), 1)
        detail = f"{len(many)} contractions" + (f"; without: {_some(plain)}" if plain else "")
        what = f"contractions of 64 or more rows with {'wgmma' if target.has_group_products else 'mma'}"
        rows.append(Row(what, share, 1, at_least=True, detail=detail, digits=2))
    for what, most, product in (
        ("compile CPU seconds per memory-bound kernel", SECONDS, False),
        ("compile CPU seconds per contraction", SECONDS_OF_PRODUCTS, True),
    ):
        chosen = [math.inf if (s := k["compile_cpu_s"]) is None else s for _, k in kernels if k["product"] is product]
        if chosen:
            detail = f"mean of {len(chosen)}; median {statistics.median(chosen):.2f}, worst {max(chosen):.2f}"
            rows.append(Row(what, statistics.fmean(chosen), most, detail=detail, digits=2))
    return rows


def _worst(what: str, known: Known, of: Callable[[Any], float], most: float) -> Row:
    name, k = max(known, key=lambda entry: of(entry[1]["resources"]))
    over = sum(of(k["resources"]) > most for _, k in known)
    value = of(k["resources"])
    return Row(f"{what}, worst kernel", value, most, detail=f"{name}: {k['name']}; {over} over", digits=0)


def _wide(what: str, known: Known) -> Row:
    found = [(f"{name}: {k['name']}", k["calls"], *k["wide_bytes"][what]) for name, k in known]
    share = sum(w * calls for _, calls, w, _ in found) / max(sum(n * calls for _, calls, _, n in found), 1)
    below = sorted((w / n, name) for name, _, w, n in found if n and w < WIDE * n)
    detail = f"arrays weighted by bytes; {len(below)} of {len(known)} kernels below {WIDE:.0%}"
    detail += f", worst {below[0][1]} {below[0][0]:.0%}" if below else ""
    return Row(f"16-byte share of {what}, aligned rows", share, WIDE, at_least=True, detail=detail, digits=2)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


__all__ = [
    "WORKLOADS", "Compiled", "begin_static", "compile_static", "compile_workload", "print_static", "resume_static",
    "rows_of",
]  # fmt: skip
