"""A space of what was recorded: strategies search it as they search the real one, and every answer is known.

Proposals of a strategy are recorded drafts. A neighbour of a draft is one that was recorded and differs in few
parameters and edits; it need not differ in one alone, for most of a space was never recorded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from torch_mlc.scheduler.tuning.space import Draft

Array: TypeAlias = "np.ndarray[Any, Any]"
# How much further away another rule is than another parameter or edit.
OTHER_RULE = 4.0


class Pool:
    """The candidates of one group. ``times`` are relative to the default's, infinite for what failed; ``default`` is
    the number of the default schedule."""

    def __init__(self, drafts: Sequence[Draft], times: Array) -> None:
        self.drafts, self.times = list(drafts), np.asarray(times, np.float64)
        self.number = {d: k for k, d in enumerate(self.drafts)}
        self.facts = [facts(d) for d in self.drafts]
        self.distance = np.array([[_distance(a, b) for b in self.facts] for a in self.facts])
        # Neighbours are drawn by their distance; oneself is none.
        weight = np.exp2(-self.distance) * (self.distance > 0)
        total = weight.sum(axis=1, keepdims=True)
        self._drawn = np.cumsum(weight / np.where(total > 0, total, 1), axis=1)

    @property
    def best(self) -> float:
        """The least time."""
        return float(self.times.min())

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that were recorded."""
        return tuple(dict.fromkeys(d.rule for d in self.drafts))

    # --- what strategies ask of a space -------------------------------------------------------------------------------

    def first(self) -> list[Draft]:
        """The default, then the other rules' first recorded drafts."""
        return [next(d for d in self.drafts if d.rule == rule) for rule in self.rules]

    def random(self, rng: random.Random) -> Draft:
        return rng.choice(self.drafts)

    def mutated(self, draft: Draft, rng: random.Random) -> Draft:
        row = self._drawn[self.number[draft]]
        return self.drafts[min(int(np.searchsorted(row, rng.random() * row[-1])), len(row) - 1)]

    def crossed(self, a: Draft, b: Draft, rng: random.Random) -> Draft:
        """One of the few that are nearest to both."""
        between = self.distance[self.number[a]] + self.distance[self.number[b]]
        nearest = np.argsort(between, kind="stable")[:6]
        return self.drafts[int(rng.choice(list(nearest)))]

    def replayed(self, draft: Draft) -> Draft:
        return draft

    def key(self, draft: Draft) -> Draft:
        """Recorded candidates have different nests."""
        return draft


Facts: TypeAlias = Mapping[str, Any]


def facts(draft: Draft) -> Facts:
    """A draft as one level of choices by name: the rule, parameters, edits by place."""
    of_params = {f"{draft.rule}.{k}": v for k, v in draft.params}
    return {"rule": draft.rule, **of_params, **{f"{e.kind} {e.at}": e.value for e in draft.edits}}


def _distance(a: Facts, b: Facts) -> float:
    if a is b:
        return 0.0
    differ = sum(a.get(k) != b.get(k) for k in a.keys() | b.keys() if k != "rule")
    return float(differ) + OTHER_RULE * (a["rule"] != b["rule"])
