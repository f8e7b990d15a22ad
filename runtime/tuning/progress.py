"""What a person sees of tuning: one bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ...scheduler.tuning.tune import Progress


class TuneProgress:
    """A callback of ``tune`` that draws a bar over one kernel's budget, for as long as it is entered.

    Where ``stream`` (standard error) is no terminal it does nothing. ``done`` is as for ``story``.
    """

    def __init__(self, stream: TextIO | None = None, done: str = "measured") -> None:
        self._done = done
        self._stream = sys.stderr if stream is None else stream
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> TuneProgress:
        if self._stream.isatty():
            self._bar = Bar(
                TextColumn("tuning {task.description}"), BarColumn(), TextColumn("{task.fields[story]}"),
                TimeRemainingColumn(), console=Console(file=self._stream), transient=True,
            )  # fmt: skip
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __call__(self, state: Progress) -> None:
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(state.name, total=state.budget, story="")
        self._bar.update(self._task, completed=min(state.elapsed, state.budget), story=story(state, self._done))


def story(state: Progress, done: str = "measured") -> str:
    """One line of how it goes: ``12 measured, 1 failed, 1.31x of the default: cpu_row(unroll=4)``. ``done`` is what
    became of schedules ("predicted" where nothing runs)."""
    parts = [f"{state.measured} {done}"]
    if state.failed:
        parts.append(f"{state.failed} failed")
    if state.default_seconds and state.best_seconds:
        parts.append(f"{state.default_seconds / state.best_seconds:.2f}x of the default: {state.best}")
    return ", ".join(parts)
