"""Schedules that the shipped model picks: nothing is measured, and the same nest gets the same schedule."""

from __future__ import annotations

import numpy as np

from ..schedule.schedule import Schedule
from .features import draft_features
from .space import Space
from .strategies import Ranker

# Drafts that are scored; how far the first must be ahead of the default, in standard deviations of their scores; and
# how many of them are replayed until one is legal.
DRAFTS, CLEARLY, REPLAYS = 192, 0.5, 3


def chosen_by_model(space: Space, ranker: Ranker) -> Schedule | None:
    """The schedule that ``ranker`` (of drafts) puts first, of those nearest to the default; None where that is the
    default, or is not clearly ahead of it. Counts bound the time it takes, not a clock."""
    drafts = list(dict.fromkeys([space.default(), *space.listed(DRAFTS)]))
    scores = np.asarray(ranker.scores(draft_features(space, drafts)), np.float64)
    if not np.isfinite(scores).all():
        return None
    least = scores[0] + CLEARLY * scores.std()
    ahead = [int(k) for k in np.argsort(-scores, kind="stable") if scores[k] > least]
    for k in ahead[:REPLAYS]:
        schedule = space.replayed(drafts[k])
        if schedule is not None:
            return schedule
    return None
