"""Going through the machine code of a thread in the order in which it runs, each loop as often as it runs.

Of a loop that runs often a few iterations are gone through, and those behind them take as long as the last of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .code import Blocks, Code, MachineLoop

# Iterations of a loop that are gone through, as many more than are in flight; those behind them take as long as the
# second half of these.
_ITERATIONS = 16
# The same of iterations that have more than others.
_RARE = 4


class Walker(Protocol):
    """What somebody notes on the way."""

    def step(self, k: int) -> None:
        """Instruction ``k`` runs."""
        ...

    def mark(self) -> tuple[float, ...]:
        """Sums so far."""
        ...

    def later(self, sums: tuple[float, ...]) -> None:
        """As if a stretch had been run that adds ``sums`` to those of ``mark``."""
        ...


def walk(code: Code, runs: Sequence[float], walker: Walker) -> None:
    """Go through a program; ``runs`` is how often each instruction runs in it (``Counted.runs``). What most programs
    leave out is left out."""
    live = [k for k, n in enumerate(runs) if n >= 0.5]
    _region(code, runs, live, 1.0, Blocks.of(code).loops(), walker)


def _region(
    code: Code,
    runs: Sequence[float],
    places: Sequence[int],
    around: float,
    loops: Sequence[MachineLoop],
    walker: Walker,
) -> None:
    """Go through instructions in order, through each loop among them as often as it runs; ``around`` is how often they
    run themselves."""
    inside = set(places)
    mine = [lp for lp in loops if lp.first in inside]
    outer = [lp for lp in mine if not any(lp.body < other.body for other in mine)]
    of = {k: lp for lp in outer for k in lp.body}
    done: set[int] = set()
    for k in places:
        loop = of.get(k)
        if loop is None:
            walker.step(k)
        elif loop.first not in done:
            done.add(loop.first)
            times = max(round(runs[loop.first] / around), 1)
            body = [k for k in places if k in loop.body]
            _loop(code, runs, loop, body, [lp for lp in mine if lp.body < loop.body], times, walker)


def _loop(
    code: Code,
    runs: Sequence[float],
    loop: MachineLoop,
    places: Sequence[int],
    inner: Sequence[MachineLoop],
    times: int,
    walker: Walker,
) -> None:
    most = _ITERATIONS
    for body, count in _iterations(runs, loop, places, times):
        half = most // 2
        before = walker.mark()
        for n in range(min(count, most)):
            if n == half:
                before = walker.mark()
            _region(code, runs, body, runs[loop.first], inner, walker)
        if count > most:
            each = (count - most) / (most - half)
            walker.later(tuple((now - then) * each for now, then in zip(walker.mark(), before, strict=True)))
        most = _RARE


def _iterations(
    runs: Sequence[float], loop: MachineLoop, places: Sequence[int], times: int
) -> Iterator[tuple[list[int], int]]:
    """The instructions of an iteration, and how many iterations have them: first those that have only what most of them
    have, then those with what fewer and fewer have. Where a loop is made of two, what stands behind the inner one is in
    one iteration of many."""
    counts = {}
    for k in places:
        share = runs[k] / runs[loop.first]
        counts[k] = times if 2 * share > 1 else max(round(times * share), 1)
    levels = sorted(set(counts.values()), reverse=True)
    for n, fewer in zip(levels, [*levels[1:], 0], strict=True):
        yield [k for k in places if counts[k] >= n], n - fewer
