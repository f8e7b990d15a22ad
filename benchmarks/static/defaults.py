"""The suite ``defaults``: how far default schedules are from the best that rules offer, as times are predicted."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

import torch_mlc
from torch_mlc.dynamo_backend.compiling.predicting import PredictingMeasurer
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import design_space
from torch_mlc.scheduler.rules.registry import Candidate

from ..models.spec import Size
from ..steps import Keep
from .compared import COMPARED
from .results import Form, TargetResults

# A gap below this says nothing: no measurement has corrected the model.
WORTH = 1.1
# Defaults so near to the best are as good.
NEAR = 1.03


@dataclass(frozen=True, slots=True)
class Gap:
    """A kernel: seconds of its default schedule as predicted, and of the best of ``tried`` schedules, with the
    parameters of that. ``failed`` of them did not compile. ``key``: its structural hash."""

    workload: str
    kernel: str
    key: str
    rule: str
    default: float
    best: float
    best_rule: str
    parameters: dict[str, Any]
    tried: int
    failed: int

    @property
    def ratio(self) -> float:
        """How much longer the default takes."""
        return self.default / self.best


def _gap_json(gap: Gap) -> dict[str, Any]:
    return {**asdict(gap), "ratio": gap.ratio}


def _gap_of(body: Mapping[str, Any]) -> Gap:
    return Gap(**{name: value for name, value in body.items() if name != "ratio"})


FORM = Form("torch-mlc-defaults", 1, "gaps", _gap_json, _gap_of)


def compare(results: TargetResults[Gap], name: str, keep: Keep) -> None:
    """Compare the kernels of a workload, each with what rules offer; what others have too is known already.

    Of each kernel as many schedules are compiled as the setting ``tries`` says: the default, then those that differ in
    one parameter, then others.
    """
    seen = {g.key for g in results.rows}
    for k in _kernels(name, results.about["size"], results.target):
        if k.workload in seen or k.nest is None or k.nest.table:
            continue
        seen.add(k.workload)
        gap = _gap(name, k, results.about["tries"])
        if isinstance(gap, Gap):
            results.rows.append(gap)
        else:
            results.progress.failed[f"{name}: {k.name}"] = gap
        keep()


def _kernels(name: str, size: Size, target: str) -> tuple[KernelReport, ...]:
    workload = COMPARED[name]
    made = workload.make(size)
    options = {"cache": False}
    return torch_mlc.explain(
        made.function, *made.inputs, training=workload.training, target=target, options=options
    ).kernels


def _gap(workload: str, kernel: KernelReport, tries: int) -> Gap | str:
    assert kernel.nest is not None and kernel.target is not None
    try:
        space = design_space(kernel.nest, kernel.target)
    except ScheduleError as error:
        return error.reason
    found: list[Candidate] = []
    for c in islice(space.candidates(), 4 * tries):
        if all(c.schedule.nest != other.schedule.nest for other in found):
            found.append(c)
        if len(found) == tries:
            break
    measurer = PredictingMeasurer(kernel.target, workers=max((os.cpu_count() or 2) // 2, 1))
    results = list(measurer.measure([c.schedule for c in found]))
    # The default as it was compiled in the end, with lighter tiles where those of the rule were too heavy.
    default = kernel.prediction.seconds if kernel.prediction is not None else None
    known = [(r, c) for r, c in zip(results, found, strict=True) if isinstance(r, float)]
    if default is None or not known:
        return kernel.error or next((str(r) for r in results if isinstance(r, Exception)), "no schedule applies")
    best, chosen = min(known, key=lambda pair: pair[0])
    failed = len(results) - len(known)
    return Gap(
        workload,
        kernel.name,
        kernel.workload,
        kernel.rule,
        default,
        min(best, default),
        chosen.rule,
        dict(chosen.params),
        len(found),
        failed,
    )


def print_defaults(results: TargetResults[Gap], console: Console) -> None:
    """The kernels, the widest gap first, then the rules, and what failed."""
    gaps = sorted(results.rows, key=lambda g: -g.ratio)
    wide = sum(g.ratio >= WORTH for g in gaps)
    table = Table(title=f"defaults, {results.target}: {wide} of {len(gaps)} kernels {WORTH:g} times the best or more")
    for column in ("workload", "kernel", "rule"):
        table.add_column(column)
    for column in ("default, us", "best, us", "gap", "tried"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("best by")
    for g in gaps:
        chosen = f"{g.best_rule}({', '.join(f'{k}={v}' for k, v in g.parameters.items())})" if g.ratio > 1 else "itself"
        table.add_row(
            g.workload, g.kernel, g.rule, f"{g.default * 1e6:.1f}", f"{g.best * 1e6:.1f}", f"{g.ratio:.2f}",
            str(g.tried), chosen,
        )  # fmt: skip
    console.print(table)
    console.print(_by_rule(gaps))
    console.print("times are predicted by a model that no measurement has corrected", style="dim")
    for name, error in results.progress.failed.items():
        console.print(f"not compared: {name}: {error}", style="bold red")


def _by_rule(gaps: Sequence[Gap]) -> Table:
    """How near defaults are to the best, rule by rule and all together."""
    table = Table(title=f"by rule: the mean gap, and kernels within {NEAR - 1:.0%} of the best")
    table.add_column("rule")
    for column in ("kernels", "mean gap", "near", "worst"):
        table.add_column(column, justify="right")
    rules = sorted({g.rule for g in gaps})
    for rule, of in [*((r, [g.ratio for g in gaps if g.rule == r]) for r in rules), ("all", [g.ratio for g in gaps])]:
        if of:
            near = sum(r <= NEAR for r in of)
            table.add_row(rule, str(len(of)), f"{statistics.geometric_mean(of):.3f}", str(near), f"{max(of):.2f}")
    return table
