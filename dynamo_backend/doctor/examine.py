"""The stages of `torch-mlc doctor` in order, each in a process of its own.

Nothing here imports torch, which may be what is broken.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...runtime.settings.variables import PREFIX, STRICT_PREFIX
from ...runtime.stages.process import run_checks
from .finding import Finding, Row, finding_of, row

DEFAULT_TARGET = "cuda:sm_90"
_CHILD = (sys.executable, "-m", f"{__name__.rpartition('.')[0]}.child")
_PROGRAMS = ("pointwise", "softmax", "norm backward", "product", "dynamic shape", "training step")


@dataclass(frozen=True, slots=True)
class DoctorStage:
    """Checks that share a process, unless one of them ends it. ``each`` and ``seconds`` are the most that one of them
    and all may take. ``plain``: without the user's settings."""

    name: str
    checks: tuple[str, ...]
    each: float = 60.0
    seconds: float = 180.0
    plain: bool = True


INSTALLATION = DoctorStage(
    "installation", ("python", "packages", "imports", "settings", "cache", "processor"), plain=False
)  # fmt: skip
CPU = DoctorStage("CPU", _PROGRAMS)
DRIVER = DoctorStage("driver", ("driver",))
GPU = DoctorStage("GPU", ("context", *_PROGRAMS, "backward in a thread", "two streams", "CUDA graph", "bandwidth"))
ABSENT = DoctorStage("absent GPU", ("target", *_PROGRAMS))


def examine(
    target: str | None,
    tell: Callable[[Finding], None],
    *,
    begin: Callable[[DoctorStage], None] = lambda stage: None,
    child: Sequence[str] = _CHILD,
    environment: Mapping[str, str] | None = None,
    stages: Sequence[str] = (),
) -> list[Finding]:
    """Run the stages and ``tell`` each finding as it comes; ``begin`` is told of each stage.

    Without a GPU here, programs are compiled for a ``target`` (cuda:sm_90 unless named); with one they are only where
    it is named. ``child`` is the command of a process, ``stages`` those to run: all that there are for this machine.
    """
    found: list[Finding] = []
    given = dict(os.environ if environment is None else environment)

    def run(stage: DoctorStage) -> None:
        if stages and stage.name not in stages:
            return
        begin(stage)

        def on_row(check: str, told: Row) -> None:
            found.append(finding_of(stage.name, check, told))
            tell(found[-1])

        command = (*child, stage.name, target or DEFAULT_TARGET)
        left = run_checks(
            command, stage.checks, on_row, each=stage.each, seconds=stage.seconds,
            environment=plain_environment(given) if stage.plain else given,
        )  # fmt: skip
        for check in left:
            on_row(check, row("warning", "not reached in the time of the stage", "try again when the machine is idle"))

    run(INSTALLATION)
    run(CPU)
    run(DRIVER)
    here = any(f.stage == DRIVER.name and f.figures.get("gpu") for f in found)
    if here:
        run(GPU)
    if not here or target is not None:
        run(ABSENT)
    return found


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings of ours."""
    return {k: v for k, v in environment.items() if not k.startswith((PREFIX, STRICT_PREFIX))}


def timed(call: Callable[[], list[Finding]]) -> tuple[list[Finding], float]:
    """The findings, and the seconds that they took."""
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin
