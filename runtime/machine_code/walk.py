"""Going through the machine code of a thread in the order in which it runs, each loop as often as it runs.

Of a loop that runs often a few iterations are gone through, and those behind them take as long as the last of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .code import Blocks, Code, MachineLoop

# Iterations of a loop that are gone through, as many more than are in flight; those behind them take as long as the
# second half of these.
_ITERATIONS = 16


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
    """Go through a program; ``runs`` is how often each instruction runs in it (``Counted.runs``)."""
    live = [k for k, n in enumerate(runs) if n > 0]
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
    mine = [lp for lp in loops if lp.body <= inside]
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
            _loop(code, runs, loop, [lp for lp in mine if lp is not loop], times, walker)


def _loop(
    code: Code, runs: Sequence[float], loop: MachineLoop, loops: Sequence[MachineLoop], times: int, walker: Walker
) -> None:
    body = sorted(k for k in loop.body if runs[k] > 0)
    half = _ITERATIONS // 2
    before = walker.mark()
    for n in range(min(times, _ITERATIONS)):
        if n == half:
            before = walker.mark()
        _region(code, runs, body, runs[loop.first], [lp for lp in loops if lp.body < loop.body], walker)
    if times > _ITERATIONS:
        each = (times - _ITERATIONS) / half
        walker.later(tuple((now - then) * each for now, then in zip(walker.mark(), before, strict=True)))
