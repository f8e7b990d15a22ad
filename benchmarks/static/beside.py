"""The suite ``predicted``: our kernels and Inductor's for the same graphs, as the model predicts both."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import torch_mlc
from torch_mlc.dynamo_backend.reports.library_time import call_seconds
from torch_mlc.dynamo_backend.reports.report import GraphReport
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import Target, TargetError, gpu_target

from ..machine import describe_versions
from ..models.spec import Size
from .inductor.calls import Launch, calls_of
from .inductor.capture import Program, programs_of
from .inductor.kernels import InductorKernel, inductor_kernel
from .workloads import WORKLOADS

SCHEMA, VERSION = "torch-mlc-predicted", 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of either compiler: what one of its ``calls`` takes, moves and issues. ``how`` is our rule, or the
    parameters of Inductor's configuration."""

    name: str
    calls: int
    seconds: float
    bound: str
    moved: int
    slots: float
    registers: int | None
    spills: int | None
    how: str


@dataclass(frozen=True, slots=True)
class Side:
    """What one compiler makes of a graph: kernels, and library calls by op, how many, their seconds and bytes."""

    kernels: tuple[Kernel, ...]
    libraries: tuple[tuple[str, int, float, int], ...]

    @property
    def launches(self) -> int:
        return sum(k.calls for k in self.kernels) + sum(n for _, n, _, _ in self.libraries)

    @property
    def in_kernels(self) -> float:
        """Seconds of its own kernels."""
        return sum(k.calls * k.seconds for k in self.kernels)

    @property
    def seconds(self) -> float:
        return self.in_kernels + sum(s for _, _, s, _ in self.libraries)

    @property
    def moved(self) -> int:
        return sum(k.calls * k.moved for k in self.kernels) + sum(b for _, _, _, b in self.libraries)

    @property
    def slots_a_byte(self) -> float | None:
        """Instructions of its kernels over the bytes that those visit."""
        moved = sum(k.calls * k.moved for k in self.kernels)
        return sum(k.calls * k.slots for k in self.kernels) / moved if moved else None


@dataclass(frozen=True, slots=True)
class Pair:
    """One graph of a workload by both compilers."""

    workload: str
    graph: str
    ours: Side
    theirs: Side

    @property
    def ratio(self) -> float:
        """How many times as long Inductor's is predicted to take."""
        return self.theirs.seconds / self.ours.seconds if self.ours.seconds else math.nan


@dataclass(slots=True)
class PredictedReport:
    """A whole run. ``failed`` are workloads that have no pair, and why."""

    target: str
    size: str
    command: list[str]
    created: str
    versions: dict[str, Any]
    pairs: list[Pair] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        body["pairs"] = [
            {**asdict(p), "ratio": p.ratio, "ours": _side_json(p.ours), "theirs": _side_json(p.theirs)}
            for p in self.pairs
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")


def _side_json(side: Side) -> dict[str, Any]:
    return {
        **asdict(side),
        "seconds": side.seconds,
        "moved": side.moved,
        "launches": side.launches,
        "slots_a_byte": side.slots_a_byte,
    }


def run_predicted(names: Sequence[str], size: Size, target: str, before: Callable[[str], None]) -> PredictedReport:
    """Compare workloads by name; ``before(name)`` is called ahead of each. Raises TargetError."""
    gpu = gpu_target(target)
    if gpu.kind != "cuda":
        raise TargetError(f"{target}: Inductor's kernels are made for CUDA alone here")
    report = PredictedReport(
        target,
        size,
        ["python", "-m", "benchmarks", *sys.argv[1:]],
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        dict(describe_versions()),
    )
    for name in names:
        before(name)
        try:
            report.pairs += pairs_of(name, size, gpu)
        except Exception as error:  # one workload must not hide the others
            report.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return report


def pairs_of(name: str, size: Size, target: Target) -> list[Pair]:
    """Both compilers' kernels of each graph of a workload."""
    workload = WORKLOADS[name]
    theirs = [_theirs(p, target) for p in programs_of(workload, size, target)]
    made = workload.make(size)
    graphs = torch_mlc.explain(
        made.function, *made.inputs, training=workload.training, target=str(target), options={"cache": False}
    ).graphs
    return [Pair(name, g.name, _ours(g), t) for g, t in zip(graphs, theirs, strict=True)]


def _ours(graph: GraphReport) -> Side:
    kernels = []
    for k in graph.kernels:
        if k.prediction is None or k.traffic is None:
            raise ValueError(f"{k.name} has no prediction: {k.error}")
        r, slots = k.resources, k.issue.slots if k.issue is not None else 0.0
        registers, spills = (r.registers, r.spills) if r is not None else (None, None)
        kernels.append(
            Kernel(
                k.name,
                k.calls,
                k.prediction.seconds,
                k.prediction.bound,
                k.traffic.moved,
                slots,
                registers,
                spills,
                k.rule,
            )
        )
    return Side(tuple(kernels), tuple((c.op, c.calls, c.seconds or 0.0, c.moved) for c in graph.libraries))


def _theirs(program: Program, target: Target) -> Side:
    calls = calls_of(program)
    made: dict[Launch, InductorKernel] = {}
    kernels, libraries = [], {}
    for launch in calls.launches:
        if launch not in made:
            made[launch] = inductor_kernel(launch, target)
    for launch, k in made.items():
        how = ", ".join(f"{n}={v}" for n, v in k.parameters.items())
        kernels.append(
            Kernel(
                k.name,
                calls.launches.count(launch),
                k.prediction.seconds,
                k.prediction.bound,
                k.moved,
                k.slots,
                k.registers,
                k.spills,
                how,
            )
        )
    for c in calls.libraries:
        many, seconds, moved = libraries.get(c.op, (0, 0.0, 0))
        each = call_seconds(c.operations, DType.from_torch(c.dtype), c.moved, target)
        libraries[c.op] = many + 1, seconds + each, moved + c.moved
    return Side(tuple(kernels), tuple((op, *of) for op, of in libraries.items()))


def print_predicted(report: PredictedReport, console: Console) -> None:
    """A row for each graph, then the mean, and what failed."""
    ratios = [p.ratio for p in report.pairs if math.isfinite(p.ratio)]
    mean = f"; in the mean Inductor takes {statistics.geometric_mean(ratios):.2f} times as long" if ratios else ""
    compilers = f"torch {report.versions.get('torch')}, Triton {report.versions.get('triton')}"
    table = Table(title=f"predicted, {report.target}, {compilers}{mean}", title_style="")
    table.add_column("workload")
    table.add_column("graph")
    columns = ("us", "Inductor", "ratio", "MiB", "Inductor", "launches", "Inductor", "slots/B", "Inductor")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for p in report.pairs:
        o, t = p.ours, p.theirs
        table.add_row(
            p.workload, p.graph, f"{o.seconds * 1e6:.1f}", f"{t.seconds * 1e6:.1f}", f"{p.ratio:.2f}",
            f"{o.moved / 2**20:.1f}", f"{t.moved / 2**20:.1f}", str(o.launches), str(t.launches),
            _digits(o.slots_a_byte), _digits(t.slots_a_byte),
        )  # fmt: skip
    console.print(table)
    console.print(
        "times are predicted by a model that no measurement has corrected; of Inductor's kernels the configuration "
        "counts that it predicts to be fastest of those that Inductor would measure",
        style="dim",
    )
    for name, error in report.failed.items():
        console.print(f"not compared: {name}: {error}", style="bold red")


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
