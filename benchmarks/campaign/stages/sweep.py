"""Schedules of kernels: what machine code tells of each, and its time. A model of time is trained on these rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.ir.errors import MlcError
from torch_mlc.runtime.tuning.measuring import measurer_for
from torch_mlc.scheduler.rules import design_space
from torch_mlc.scheduler.rules.registry import Candidate

from ..cases import NamedKernel
from ..figures import schedule_figures
from ..plan import Settings
from ..record import NOT_DONE, OK, WRONG, Row
from .timing import explained

# Schedules of each kernel, by size of the campaign, from the first to the last of its design space.
_SCHEDULES = {"tiny": 2, "small": 6, "full": 16}
_WORKERS = 8


def check(settings: Settings, name: str) -> Iterator[Row]:
    """The kernels of one function: a row for each schedule of each."""
    kernels = explained(NamedKernel.of(name), settings.target).kernels
    found = False
    for k in kernels:
        for row in swept(k, _SCHEDULES[settings.size], settings.gpu):
            found = True
            yield row
    if not found:
        yield {"status": NOT_DONE, "why": "no kernel of it has schedules to choose from"}


def swept(kernel: KernelReport, count: int, timed: bool) -> Iterator[Row]:
    """A row for each of ``count`` schedules of a kernel; with its time where it is ``timed``."""
    if kernel.nest is None or kernel.target is None:
        return
    nest, target = kernel.nest, kernel.target
    candidates = spread(list(design_space(nest, target).candidates()), count)
    measurer = measurer_for(nest, target, _WORKERS) if timed else None
    try:
        times = iter(measurer.measure([c.schedule for c in candidates])) if measurer is not None else None
        for c in candidates:
            row: Row = {
                "kernel": kernel.name, "workload": kernel.workload, "rule": c.rule, "params": dict(c.params),
                "trace": json.loads(c.schedule.trace.to_json()), "seconds": None, "status": OK, "target": str(target),
            }  # fmt: skip
            if times is not None:
                measured = next(times)
                if isinstance(measured, Exception):
                    row |= {"status": WRONG, "why": f"{type(measured).__name__}: {measured}"}
                else:
                    row["seconds"] = measured
            try:
                row |= schedule_figures(c.schedule, nest, target)
            except MlcError as error:  # it takes more than the target has, as some points of a space do
                row |= {"refused": f"{type(error).__name__}: {error}"}
                if row["status"] == WRONG:
                    row["status"] = NOT_DONE
            yield row
    finally:
        if measurer is not None:
            measurer.close()


def spread(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first, which is the default, and others evenly."""
    if len(candidates) <= count:
        return list(candidates)
    return [candidates[k * len(candidates) // count] for k in range(count)]
