"""What a person sees of tuning: a bar on a terminal, and one line at the end."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ...scheduler.tuning.race import Estimate
from ...scheduler.tuning.search import Progress, SearchResult
from ..plain_text import counted


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
    """One line of how it goes: ``12 measured, 1 failed, 1.31x (1.28 to 1.33) of the default: cpu_row(unroll=4)``, with
    the bounds of what is known so far. ``done`` is what became of schedules ("predicted" where nothing runs)."""
    parts = [f"{state.measured} {done}"]
    if state.failed:
        parts.append(f"{state.failed} failed")
    if state.found is not None and state.found.count:
        parts.append(f"{_bounded(state.found)} of the default: {state.best}")
    return ", ".join(parts)


def _bounded(found: Estimate) -> str:
    least, most = 1.0 / found.high, 1.0 / found.low if found.low else math.inf
    if not found.low or found.high == math.inf:
        return f"{found.speedup:.2f}x"
    return f"{found.speedup:.2f}x ({least:.2f} to {most:.2f})"


def outcome_text(outcome: SearchResult) -> str:
    """What a search came to: ``1.31x (1.28 to 1.33) of the default, noise 1 %, 40 candidates, 3 failed``."""
    won = f"{_bounded(outcome.found)} of the default" if outcome.is_faster else "none faster"
    failed = f", {outcome.failed} failed" if outcome.failed else ""
    return f"{won}, noise {percent_text(outcome.sigma)}, {counted(len(outcome.trials), 'candidate')}{failed}"


def trials_table(outcome: SearchResult, limit: int = 12) -> list[str]:
    """The candidates of a search, the fastest first, as lines: what each took of the default's time, its place, that
    which the model gave it, and what it is."""
    timed = sorted((t for t in outcome.trials if t.found is not None), key=lambda t: t.found.ratio if t.found else 0.0)
    ranked = sorted((t for t in timed if t.score is not None), key=lambda t: -(t.score or 0.0))
    places = {id(t): k + 1 for k, t in enumerate(ranked)}
    lines = [f"{'of the default':>24}  {'measured':>8}  {'model':>5}  candidate"]
    for k, t in enumerate(timed[:limit]):
        assert t.found is not None
        verdict = f" ({t.verdict.value})" if t.verdict.value != "timed" else ""
        lines.append(f"{_bounded(t.found):>24}  {k + 1:>8}  {places.get(id(t), '-'):>5}  {t.told}{verdict}")
    more = [f"… and {len(timed) - limit} more"] if len(timed) > limit else []
    failed = [t for t in outcome.trials if t.found is None and t.reason]
    return [*lines, *more, *(f"{t.verdict.value:>24}  {t.told}: {t.reason.splitlines()[0]}" for t in failed[:limit])]


@dataclass(frozen=True, slots=True)
class Totals:
    """What tuning the kernels of a graph came to: ``seconds`` took it; ``before`` and ``after`` are seconds that the
    tuned kernels take in a run of the graph, by default and now; ``noise`` is the largest of a ratio, and ``hidden``
    the largest gain that it may hide."""

    kernels: int
    faster: int
    seconds: float
    before: float
    after: float
    noise: float
    hidden: float = 0.0

    @classmethod
    def of(cls, outcomes: Iterable[tuple[SearchResult, int]]) -> Totals:
        """Of searches, each with how often the graph calls its kernel."""
        found = list(outcomes)
        return cls(
            len(found), sum(o.is_faster for o, _ in found), sum(o.seconds for o, _ in found),
            sum(o.default_seconds * calls for o, calls in found),
            sum(o.default_seconds * calls * (o.found.ratio if o.is_faster else 1.0) for o, calls in found),
            max((o.sigma for o, _ in found), default=0.0), max((o.hidden for o, _ in found), default=0.0),
        )  # fmt: skip

    @property
    def speedup(self) -> float:
        """Of the tuned kernels together."""
        return self.before / self.after if self.after else 1.0

    def __str__(self) -> str:
        """``tuned 5 kernels in 12 s: 2 faster, 1.08x (noise 1 %)``."""
        what = "1 kernel" if self.kernels == 1 else f"{self.kernels} kernels"
        gain = f"{self.faster} faster, {self.speedup:.2f}x" if self.faster else "none faster than by default"
        return f"tuned {what} in {seconds_text(self.seconds)}: {gain} (noise {percent_text(self.noise)})"

    @property
    def warning(self) -> str:
        """What nobody could tell for noise; "" where it hides nothing."""
        if not self.hidden:
            return ""
        hidden, noise = percent_text(self.hidden), percent_text(self.noise)
        return (
            f"a kernel seemed {hidden} faster, which this machine's noise ({noise}) may "
            "be: it keeps its default schedule; tune where nothing else runs, or with a larger MLC_TUNE_BUDGET"
        )


def seconds_text(seconds: float) -> str:
    """Seconds as one tells them: 12 s, 2.0 s."""
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"


def percent_text(share: float) -> str:
    """A share in percent: 0.01 is 1 %."""
    if share == math.inf:
        return "unknown"
    percent = 100.0 * share
    return f"{percent:.0f} %" if percent >= 0.95 or percent == 0 else f"{percent:.1f} %"
