"""Steps one after the other: every difference is the sum of those that the steps make, and large ones are halved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from .results import Results, ResultSpace
from .steps import Switch

# Of the whole difference: what is smaller is not looked into.
SMALL = 1e-3


@dataclass(frozen=True, slots=True)
class StepsBetween:
    """Steps ``begin`` to ``end`` (without it), and the norm of what they make together."""

    begin: int
    end: int
    norm: float


@dataclass(slots=True)
class Path:
    """The way from one run to another by ``steps``; ``run`` gives the results where so many of the first are switched.

    What was measured is kept: the difference between any two measured places is that of the steps between.
    """

    steps: Sequence[Switch]
    run: Callable[[int], Results]
    space: ResultSpace
    measured: dict[int, Results] = field(default_factory=dict)

    def at(self, count: int) -> Results:
        """The results after so many steps."""
        if count not in self.measured:
            self.measured[count] = self.run(count)
        return self.measured[count]

    def intervals(self) -> list[StepsBetween]:
        """What is between measured places, in order."""
        places = sorted(self.measured)
        return [StepsBetween(a, b, self._norm(a, b)) for a, b in pairwise(places)]

    def _norm(self, begin: int, end: int) -> float:
        one, other = self.measured[begin], self.measured[end]
        norm = torch.linalg.vector_norm(self.space.vector(one) - self.space.vector(other)).item()
        # Where nothing has a size, what is counted stands for it.
        return norm + self.space.counted(one, other)

    def bisect(self, runs: int, whole: float, layers: bool) -> None:
        """Halve the interval with the largest difference, until each is one place or small, or there are no ``runs``
        left. Equal places of layers stay together unless ``layers`` are told apart."""
        known: dict[tuple[int, int], float] = {}
        while runs > 0:
            places = sorted(self.measured)
            rows = []
            for a, b in pairwise(places):
                if (a, b) not in known:
                    known[a, b] = self._norm(a, b)
                middle = self._middle(a, b, layers)
                if middle is not None and known[a, b] > SMALL * whole:
                    rows.append((known[a, b], middle))
            if not rows:
                return
            self.at(max(rows)[1])
            runs -= 1

    def _middle(self, begin: int, end: int, layers: bool) -> int | None:
        """Where to cut an interval: between kinds before between places, and near the middle."""
        cuts = range(begin + 1, end)
        kinds = [k for k in cuts if self.steps[k - 1].kind != self.steps[k].kind]
        groups = [k for k in cuts if self.steps[k - 1].group != self.steps[k].group]
        found = kinds or groups or (list(cuts) if layers else [])
        return min(found, key=lambda k: abs(2 * k - begin - end), default=None)


__all__ = ["Path", "StepsBetween"]
