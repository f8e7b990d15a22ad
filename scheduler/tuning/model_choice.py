"""Schedules that the shipped model picks: nothing is measured, and the same nest gets the same schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..schedule.schedule import Schedule
from .features import draft_features, nest_features
from .space import Draft, Space
from .strategies import Ranker

# Drafts that are scored, those nearest to the default; how many rules' own schedules they may start from, each of which
# takes milliseconds; how many drafts are applied and scored as nests.
DRAFTS, BASES, REPLAYS = 192, 4, 6
# Of what is known of similar nests, so many are scored as nests too.
SEEDS = 2


class ChoosingRanker(Ranker, Protocol):
    """A ranker that knows how far ahead of the default the best must be, for it to be faster on kernels it has not
    seen."""

    @property
    def margin(self) -> float:
        """In units of scores; infinite where no margin was enough."""
        ...


def chosen_by_model(
    space: Space, drafts: Ranker, nests: ChoosingRanker, seeds: Sequence[Draft] = ()
) -> Schedule | None:
    """The schedule that ``nests`` puts first, of ``seeds`` and of those that ``drafts`` does; None where that is the
    default, or is not clearly ahead of it. Counts bound the time it takes, not a clock."""
    if not math.isfinite(nests.margin):
        return None
    default = space.replayed(space.default())
    listed = _listed(space)
    if default is None or not listed:
        return None
    order = np.argsort(-np.asarray(drafts.scores(draft_features(space, listed)), np.float64), kind="stable")
    schedules = [default, *(s for d in seeds[:SEEDS] if (s := space.replayed(d)) is not None)]
    most = len(schedules) + REPLAYS
    for k in order[: 2 * REPLAYS]:
        schedule = space.replayed(listed[int(k)])
        if schedule is not None:
            schedules.append(schedule)
        if len(schedules) == most:
            break
    rows = np.stack([nest_features(space, s) for s in schedules])
    scores = np.asarray(nests.scores(rows), np.float64)
    best = int(np.argmax(scores))
    return schedules[best] if scores[best] > scores[0] + nests.margin else None


def _listed(space: Space) -> list[Draft]:
    """Drafts nearest to the default, and not itself, of the first few rules and parameters."""
    bases: set[Draft] = set()
    found: dict[Draft, None] = {}
    default = space.default()
    for draft in space.listed(2 * DRAFTS):
        base = space.plain(draft)
        if base in bases or len(bases) < BASES:
            bases.add(base)
            if draft != default:
                found[draft] = None
        if len(found) == DRAFTS:
            break
    return list(found)


__all__ = ["ChoosingRanker", "chosen_by_model"]
