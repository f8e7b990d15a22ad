"""How well a model ranks candidates that were measured together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
# Times nearer than this are not told apart by measuring either.
APART = 0.05
# A choice that is slower than the default counts as a loss from here on; the share of kernels that may lose.
SLOWER, MAY_LOSE = 0.97, 0.02


def pairwise_accuracy(scores: Array, times: Array, apart: float = APART) -> float:
    """The share of pairs in the right order, of those whose times differ by more than ``apart`` of the lesser one.

    Equal scores count half. NaN where there are no such pairs. ``scores`` (higher is faster) and ``times`` are ``[n]``.
    """
    scores, times = np.asarray(scores, np.float64), np.asarray(times, np.float64)
    _checked(scores, times)
    faster, slower = np.nonzero(times[:, None] * (1 + apart) < times[None, :])
    if not len(faster):
        return math.nan
    difference = scores[faster] - scores[slower]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def regret(scores: Array, times: Array, count: int) -> float:
    """The least time among the ``count`` best by score, divided by the least of all: 1 is perfect. Of equal scores the
    first come first."""
    scores, times = np.asarray(scores, np.float64), np.asarray(times, np.float64)
    _checked(scores, times)
    if count < 1:
        raise ValueError(f"regret of the best {count}")
    chosen = np.argsort(-scores, kind="stable")[:count]
    return float(times[chosen].min() / times.min())


def _checked(scores: Array, times: Array) -> None:
    if scores.shape != times.shape or scores.ndim != 1 or not len(times):
        raise ValueError(f"scores {scores.shape} of times {times.shape}")
    if not (np.isfinite(times).all() and (times > 0).all() and np.isfinite(scores).all()):
        raise ValueError("scores are finite, and times are positive and finite")


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over ``groups``, arithmetic of pairs and geometric of regrets, and the medians of regrets."""

    pairwise: float
    regret1: float
    regret8: float
    median1: float
    median8: float
    groups: int


def figures(groups: Iterable[tuple[Array, Array]]) -> Figures:
    """Of scores and times, group by group."""
    pairs: list[float] = []
    ones: list[float] = []
    eights: list[float] = []
    for scores, times in groups:
        accuracy = pairwise_accuracy(scores, times)
        if not math.isnan(accuracy):
            pairs.append(accuracy)
        ones.append(regret(scores, times, 1))
        eights.append(regret(scores, times, 8))
    return Figures(
        float(np.mean(pairs)) if pairs else math.nan, _mean(ones), _mean(eights), _median(ones), _median(eights),
        len(ones),
    )  # fmt: skip


def _mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else math.nan


def _median(ratios: Sequence[float]) -> float:
    return float(np.median(ratios)) if ratios else math.nan


@dataclass(frozen=True, slots=True)
class Choosing:
    """What comes of taking the best by score where it is ahead of the default by ``margin``: in how many of ``groups``
    it is taken, the default's time over that of what is taken (geometric mean of all groups), and the least such."""

    margin: float
    taken: int
    groups: int
    gain: float
    worst: float


def choosing(groups: Iterable[tuple[Array, Array]]) -> Choosing:
    """The margin that gains most, of those by which at most ``MAY_LOSE`` of the groups become slower than ``SLOWER``;
    infinite where none gains. Each group is scores and times, the default's first."""
    ahead: list[tuple[float, float]] = []
    for scores, times in groups:
        best = int(np.argmax(scores))
        ahead.append((float(scores[best] - scores[0]), float(times[0] / times[best])))
    ahead.sort(reverse=True)
    found = Choosing(math.inf, 0, len(ahead), 1.0, 1.0)
    lost, total, worst = 0, 0.0, 1.0
    for k, (by, speedup) in enumerate(ahead):
        if by <= 0:
            break
        lost += speedup < SLOWER
        total += math.log(speedup)
        worst = min(worst, speedup)
        gain = math.exp(total / len(ahead))
        if lost <= MAY_LOSE * len(ahead) and gain > found.gain:
            least = ahead[k + 1][0] if k + 1 < len(ahead) else 0.0
            found = Choosing((by + max(least, 0.0)) / 2, k + 1, len(ahead), gain, worst)
    return found


class GroupError(ValueError):
    """Groups do not say what was measured together."""


def group_sizes(ids: Sequence[str]) -> list[int]:
    """The sizes of groups of rows, which lie together. Raises GroupError where a group is in two places, and where none
    has two rows: a model would train on either without a word, and learn nothing or nonsense."""
    sizes: list[int] = []
    seen: set[str] = set()
    last: str | None = None
    for name in ids:
        if name == last:
            sizes[-1] += 1
            continue
        if name in seen:
            raise GroupError(f"the rows of group {name!r} do not lie together")
        seen.add(name)
        sizes.append(1)
        last = name
    if not sizes or max(sizes) < 2:
        raise GroupError("no group has two rows to compare")
    return sizes
