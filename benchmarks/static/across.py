"""The suite ``slots``: what the workloads of the suite ``static`` take of several GPUs, a row for each workload and
target, with a gate on their instruction slots a byte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import torch_mlc
from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.ir.target import gpu_target

from ..steps import Keep
from .report import kernel_json
from .results import Form, TargetResults
from .slots import SLOTS_A_BYTE
from .workloads import GPT_FEW, GPT_STEP, WORKLOADS

# The GPU whose limit was measured.
MEASURED = (9, 0)
# Why the kernels of a workload may issue more than their GPU does in the time of the bytes that they move.
MULTIPLIES = "multiplies many rows: its time is that of the tensor cores"
NOT_BOUND_BY_MEMORY: Mapping[str, str] = MappingProxyType({
    GPT_STEP: MULTIPLIES, GPT_FEW: MULTIPLIES, "softcap attention forward": MULTIPLIES,
    "linear + GELU": MULTIPLIES, "gated MLP": MULTIPLIES,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the kernels of a workload take of a target, all of its graphs together.

    ``bytes_over`` is what kernels and library calls move over the graphs' inputs and outputs, ``reads`` how often the
    input that is read most often is. ``slots_a_byte`` are over the bytes that kernels have to move, None where nobody
    knows how often a loop runs; ``limit`` is what the GPU issues in the time of a byte of its memory. Of single
    kernels: the most ``registers`` of a thread, ``spills`` in bytes a thread, ``shared`` memory in bytes a block, and
    the least KiB ``in_flight`` on a multiprocessor, of kernels of which machine code tells. ``wide_loads`` and
    ``wide_stores`` are the shares of accesses of 16 bytes, by bytes. ``kernels`` have these figures one by one, as the
    suite ``static`` has them; ``error`` names those that did not compile."""

    target: str
    workload: str
    launches: int
    library_calls: int
    bytes_over: float
    reads: float
    slots_a_byte: float | None
    limit: float
    registers: int
    spills: int
    shared: int
    in_flight: float | None
    wide_loads: float
    wide_stores: float
    kernels: tuple[Mapping[str, Any], ...] = ()
    error: str = ""

    @property
    def why(self) -> str:
        """Why more slots than the limit are no fault; "" where they are one."""
        return NOT_BOUND_BY_MEMORY.get(self.workload, "")

    @property
    def is_over(self) -> bool:
        """Whether the kernels are bound by their instructions, or did not compile, and nothing says why."""
        if self.error:
            return True
        if not self.launches or self.why:
            return False
        return self.slots_a_byte is None or round(self.slots_a_byte, 1) > round(self.limit, 1)


def slots_limit(target: str) -> float:
    """Slots that a GPU issues in the time in which it copies a byte: of sm_90 as measured, of others by data sheet."""
    machine = gpu_target(target).machine
    return SLOTS_A_BYTE if gpu_target(target).capability == MEASURED else machine.slots_a_byte


def footprint(report: Report, workload: str, target: str) -> Footprint:
    """The figures of a workload that was compiled for a target."""
    kernels = [(kernel_json(k, math.inf), k.calls) for g in report.graphs for k in g.kernels]
    known = [k for k, _ in kernels if k["resources"] is not None]
    counted = [(k, calls) for k, calls in kernels if k["issue"] is not None and k["least_bytes"]]
    slots = None
    if counted and not any(k["issue"]["guessed"] for k, _ in counted):
        least = sum(k["least_bytes"] * calls for k, calls in counted)
        slots = sum(k["issue"]["slots"] * calls for k, calls in counted) / least
    flights = [k["bytes_in_flight"] / 1024 for k in known if k["bytes_in_flight"] is not None]
    moved = sum(g.traffic.moved for g in report.graphs)
    return Footprint(
        target,
        workload,
        sum(g.launches for g in report.graphs),
        sum(c.calls for g in report.graphs for c in g.libraries),
        moved / max(sum(g.traffic.compulsory for g in report.graphs), 1),
        max((times for g in report.graphs for times in g.traffic.reads.values()), default=0.0),
        slots,
        slots_limit(target),
        *(max((k["resources"][what] for k in known), default=0) for what in ("registers", "spills", "shared")),
        min(flights, default=None),
        *(_share([(*k["wide_bytes"][what], calls) for k, calls in kernels]) for what in ("loads", "stores")),
        tuple(k for k, _ in kernels),
        ", ".join(f"{k['name']}: {k['error']}" for k, _ in kernels if k["error"]),
    )


def _share(accesses: Sequence[tuple[float, float, int]]) -> float:
    """The share of wide accesses in all, by bytes; 1 where there are none."""
    whole = sum(total * calls for _, total, calls in accesses)
    return sum(wide * calls for wide, _, calls in accesses) / whole if whole else 1.0


def _read(body: Mapping[str, Any]) -> Footprint:
    named = {k: v for k, v in body.items() if k not in ("why", "is_over")}
    return Footprint(**{**named, "kernels": tuple(body["kernels"])})


def _write(row: Footprint) -> dict[str, Any]:
    return {**asdict(row), "why": row.why, "is_over": row.is_over}


FORM = Form("torch-mlc-slots", 1, "rows", _write, _read)


def compare(results: TargetResults[Footprint], name: str, keep: Keep) -> None:
    """Compile a workload for each target that has no row of it yet."""
    for target in results.target.split(","):
        if any((row.target, row.workload) == (target, name) for row in results.rows):
            continue
        workload = WORKLOADS[name]
        made = workload.make(results.about["size"])
        report = torch_mlc.explain(
            made.function, *made.inputs, training=workload.training, target=target, options={"cache": False}
        )
        results.rows.append(footprint(report, name, target))
        keep()


def over(results: TargetResults[Footprint], *, measured: bool = False) -> list[str]:
    """The rows that are over their limit, where nothing says why; with ``measured`` those of the GPU whose limit was
    measured, which the gate stops."""
    return [
        f"{r.workload} for {r.target}"
        for r in results.rows
        if r.is_over and (not measured or gpu_target(r.target).capability == MEASURED)
    ]


def print_slots(results: TargetResults[Footprint], console: Console) -> None:
    """A row for each workload and target, then why some are over the limit, and what failed."""
    above = over(results)
    title = f"slots, Triton {results.versions.get('triton')}, size {results.about['size']}: {len(above)} of "
    table = Table(title=f"{title}{len(results.rows)} over the limit", title_style="")
    for column in ("workload", "target"):
        table.add_column(column, no_wrap=True)
    for column in (
        "kernels", "calls", "bytes", "reads", "slots a byte", "limit", "registers", "spills", "shared", "KiB in flight",
        "wide loads", "stores",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for r in results.rows:
        slots = Text("not known" if r.slots_a_byte is None else f"{r.slots_a_byte:.2f}")
        if not r.launches:
            slots = Text("-")
        elif r.is_over:
            slots.stylize("bold red")
        table.add_row(
            r.workload, r.target, str(r.launches), str(r.library_calls), f"{r.bytes_over:.2f}", f"{r.reads:.2f}", slots,
            "-" if r.why else f"{r.limit:.1f}", str(r.registers), str(r.spills), str(r.shared),
            "-" if r.in_flight is None else f"{r.in_flight:.1f}", f"{r.wide_loads:.2f}", f"{r.wide_stores:.2f}",
        )  # fmt: skip
    console.print(table)
    for name, why in dict.fromkeys((r.workload, r.why) for r in results.rows if r.why):
        console.print(f"{name}: {why}", style="dim")
    for row in results.rows:
        if row.error:
            console.print(f"{row.workload} for {row.target}: {row.error}", style="bold red")
    for text in above:
        console.print(f"over the limit: {text}", style="bold red")
    for name, error in results.progress.failed.items():
        console.print(f"not compiled: {name}: {error}", style="bold red")
