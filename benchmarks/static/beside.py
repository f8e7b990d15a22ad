"""The suite ``predicted``: our kernels and Inductor's for the same graphs, as the model predicts both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

import torch_mlc
from torch_mlc.dynamo_backend.reports.library_time import call_seconds
from torch_mlc.dynamo_backend.reports.report import GraphReport
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import Target, TargetError, gpu_target
from torch_mlc.scheduler.cost.alignment import copying_time, rates_left, wants_aligned

from ..models.spec import Size
from ..steps import Keep
from .compared import COMPARED
from .inductor.calls import Call, Launch, calls_of
from .inductor.capture import Program, programs_of
from .inductor.kernels import InductorKernel, inductor_kernel
from .kernel_graphs import KERNEL_GRAPHS
from .made import Workload
from .results import Form, TargetResults

WORKLOADS: Mapping[str, Workload] = MappingProxyType({**COMPARED, **KERNEL_GRAPHS})


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of either compiler: what one of its ``calls`` takes, moves and issues. ``how`` is our rule, or the
    parameters of Inductor's configuration; ``slots`` is None where it is not known how often a loop runs."""

    name: str
    calls: int
    seconds: float
    bound: str
    moved: int
    slots: float | None
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
        """Instructions of its kernels over the bytes that those visit; None where those of one are not known."""
        moved = sum(k.calls * k.moved for k in self.kernels)
        slots = [k.calls * k.slots for k in self.kernels if k.slots is not None]
        return sum(slots) / moved if moved and len(slots) == len(self.kernels) else None


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

    @property
    def note(self) -> str:
        """Which library calls are in the times, by the data sheet, and so are alike for both as far as both make
        them."""
        ours, theirs = ({op: n for op, n, _, _ in side.libraries} for side in (self.ours, self.theirs))
        both = {op: min(n, theirs[op]) for op, n in ours.items() if op in theirs}
        parts = {
            "of both": both,
            "of ours": {op: n - both.get(op, 0) for op, n in ours.items()},
            "of Inductor": {op: n - both.get(op, 0) for op, n in theirs.items()},
        }
        told = [
            f"{', '.join(f'{n} {op}' for op, n in of.items() if n)} {whose}"
            for whose, of in parts.items()
            if any(of.values())
        ]
        return "; ".join(told)


def _side_json(side: Side) -> dict[str, Any]:
    return {
        **asdict(side),
        "seconds": side.seconds,
        "moved": side.moved,
        "launches": side.launches,
        "slots_a_byte": side.slots_a_byte,
    }


def _pair_json(p: Pair) -> dict[str, Any]:
    return {
        **asdict(p),
        "ratio": p.ratio,
        "library_calls": p.note,
        "ours": _side_json(p.ours),
        "theirs": _side_json(p.theirs),
    }


def _side(body: Mapping[str, Any]) -> Side:
    return Side(tuple(Kernel(**k) for k in body["kernels"]), tuple((*c,) for c in body["libraries"]))


def _pair(body: Mapping[str, Any]) -> Pair:
    return Pair(body["workload"], body["graph"], _side(body["ours"]), _side(body["theirs"]))


FORM = Form("torch-mlc-predicted", 1, "pairs", _pair_json, _pair)


def cuda_target(target: str) -> Target:
    """A target that Inductor writes kernels for here. Raises TargetError."""
    found = gpu_target(target)
    if found.kind != "cuda":
        raise TargetError(f"{target}: Inductor's kernels are made for CUDA alone here")
    return found


def compare(results: TargetResults[Pair], name: str, _: Keep) -> None:
    """Predict both compilers' kernels of a workload."""
    results.rows += pairs_of(name, results.about["size"], gpu_target(results.target))


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
        r, slots = k.resources, k.issue.known_slots if k.issue is not None else None
        registers, spills = (r.registers, r.spills) if r is not None else (None, None)
        kernels.append(
            Kernel(
                k.name,
                k.calls,
                k.prediction.seconds,
                k.prediction.bound,
                round(k.traffic.moved * k.rows),
                slots,
                registers,
                spills,
                k.rule,
            )
        )
    libraries: dict[str, tuple[int, float, int]] = {}
    for c in graph.libraries:
        many, seconds, moved = libraries.get(op := _packet(c.op), (0, 0.0, 0))
        libraries[op] = many + c.calls, seconds + (c.seconds or 0.0), moved + c.moved
    return Side(tuple(kernels), tuple((op, *of) for op, of in libraries.items()))


def _packet(op: str) -> str:
    """The name of an op without its namespace and overload, as both compilers' calls have it."""
    return op.rpartition("::")[2].partition(".")[0]


def _theirs(program: Program, target: Target) -> Side:
    calls = calls_of(program)
    made: dict[Launch, InductorKernel] = {}
    kernels: list[Kernel] = []
    libraries: dict[str, tuple[int, float, int]] = {}
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
        each, bytes_of_it = call_time(c, target)
        libraries[c.op] = many + 1, seconds + each, moved + bytes_of_it
    return Side(tuple(kernels), tuple((op, *of) for op, of in libraries.items()))


def call_time(call: Call, target: Target) -> tuple[float, int]:
    """Seconds and bytes of a library's call. On a GPU Inductor measures products whose rows begin anywhere against
    such of padded copies; here the faster of both counts."""
    dtype = DType.from_torch(call.dtype)
    if not wants_aligned(target, dtype) or dtype not in target.machine.multiplied:
        return call_seconds(call.operations, dtype, call.moved, target, narrow=call.narrow), call.moved
    left = rates_left(call.even_operands, call.even_result)
    as_is = call_seconds(call.operations, dtype, call.moved, target, left, call.narrow), call.moved
    if left == (1.0, 1.0):
        return as_is
    copies = sum(copying_time(target.machine, n) for n in call.padded) * 1e-9
    padded = call_seconds(call.operations, dtype, call.moved, target) + copies
    return min(as_is, (padded, call.moved + 2 * sum(call.padded)))


def print_predicted(results: TargetResults[Pair], console: Console) -> None:
    """A row for each graph, then the mean, and what failed."""
    ratios = [p.ratio for p in results.rows if math.isfinite(p.ratio)]
    mean = f"; in the mean Inductor takes {statistics.geometric_mean(ratios):.2f} times as long" if ratios else ""
    compilers = f"torch {results.versions.get('torch')}, Triton {results.versions.get('triton')}"
    table = Table(title=f"predicted, {results.target}, {compilers}{mean}", title_style="")
    table.add_column("workload")
    table.add_column("graph")
    columns = ("us", "Inductor", "ratio", "MiB", "Inductor", "launches", "Inductor", "slots/B", "Inductor")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("library calls", style="dim")
    for p in results.rows:
        o, t = p.ours, p.theirs
        table.add_row(
            p.workload, p.graph, f"{o.seconds * 1e6:.1f}", f"{t.seconds * 1e6:.1f}", f"{p.ratio:.2f}",
            f"{o.moved / 2**20:.1f}", f"{t.moved / 2**20:.1f}", str(o.launches), str(t.launches),
            _digits(o.slots_a_byte), _digits(t.slots_a_byte), p.note,
        )  # fmt: skip
    console.print(table)
    console.print(
        "times are predicted by a model that no measurement has corrected; of Inductor's kernels the configuration "
        "counts that it predicts to be fastest of those that Inductor would measure; library calls take what the data "
        "sheet says",
        style="dim",
    )
    for name, error in results.progress.failed.items():
        console.print(f"not compared: {name}: {error}", style="bold red")


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
