"""The suite ``defaults``: how far default schedules are from the best that rules offer, as times are predicted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import torch_mlc
from torch_mlc.dynamo_backend.compiling.predicting import PredictingMeasurer
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import design_space
from torch_mlc.scheduler.rules.registry import Candidate

from ..machine import describe_versions
from ..models.spec import Size
from .workloads import WORKLOADS

SCHEMA, VERSION = "torch-mlc-defaults", 1
# A gap below this says nothing: no measurement has corrected the model.
WORTH = 1.1


@dataclass(frozen=True, slots=True)
class Gap:
    """A kernel: seconds of its default schedule as predicted, and of the best of ``tried`` schedules, with the
    parameters of that. ``failed`` of them did not compile."""

    workload: str
    kernel: str
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


@dataclass(slots=True)
class DefaultsReport:
    """A whole run. ``failed`` are workloads and kernels of which nothing is known, and why."""

    target: str
    size: str
    command: list[str]
    created: str
    versions: dict[str, Any]
    gaps: list[Gap] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        body["gaps"] = [{**asdict(g), "ratio": g.ratio} for g in self.gaps]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")


def run_defaults(
    names: Sequence[str], size: Size, target: str, tries: int, before: Callable[[str], None]
) -> DefaultsReport:
    """Compare the kernels of workloads by name, each kernel once; ``before(name)`` is called ahead of each workload.

    ``tries`` schedules of each are compiled: the default, then those that differ in one parameter, then others.
    Raises TargetError.
    """
    gpu_target(target)
    report = DefaultsReport(
        target,
        size,
        ["python", "-m", "benchmarks", *sys.argv[1:]],
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        dict(describe_versions()),
    )
    seen: set[str] = set()
    for name in names:
        before(name)
        try:
            kernels = _kernels(name, size, target)
        except Exception as error:  # one workload must not hide the others
            report.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        for k in kernels:
            if k.workload in seen or k.nest is None or k.nest.table:
                continue
            seen.add(k.workload)
            gap = _gap(name, k, tries)
            if isinstance(gap, Gap):
                report.gaps.append(gap)
            else:
                report.failed[f"{name}: {k.name}"] = gap
    report.gaps.sort(key=lambda g: -g.ratio)
    return report


def _kernels(name: str, size: Size, target: str) -> tuple[KernelReport, ...]:
    workload = WORKLOADS[name]
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
        kernel.rule,
        default,
        min(best, default),
        chosen.rule,
        dict(chosen.params),
        len(found),
        failed,
    )


def print_defaults(report: DefaultsReport, console: Console) -> None:
    """The kernels, the widest gap first, and what failed."""
    wide = sum(g.ratio >= WORTH for g in report.gaps)
    table = Table(
        title=f"defaults, {report.target}: {wide} of {len(report.gaps)} kernels {WORTH:g} times the best or more"
    )
    for column in ("workload", "kernel", "rule"):
        table.add_column(column)
    for column in ("default, us", "best, us", "gap", "tried"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("best by")
    for g in report.gaps:
        chosen = f"{g.best_rule}({', '.join(f'{k}={v}' for k, v in g.parameters.items())})" if g.ratio > 1 else "itself"
        table.add_row(
            g.workload, g.kernel, g.rule, f"{g.default * 1e6:.1f}", f"{g.best * 1e6:.1f}", f"{g.ratio:.2f}",
            str(g.tried), chosen,
        )  # fmt: skip
    console.print(table)
    console.print("times are predicted by a model that no measurement has corrected", style="dim")
    for name, error in report.failed.items():
        console.print(f"not compared: {name}: {error}", style="bold red")
