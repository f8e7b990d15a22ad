"""Races: candidates are timed in turns with the default, and kept are the ratios to the default of the same round.

A machine slows down and speeds up for reasons of its own. What hits a whole round hits all that run in it, and leaves
ratios alone; what hits one sample is one ratio of many, and the median does not follow it. Two copies of the default
tell how far ratios of equals are from one all the same: the noise ``sigma``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import median

# How sure a gain has to be, the least that counts, and how many times the noise.
CONFIDENCE, LEAST_GAIN, NOISES = 0.95, 0.01, 2.0
# Rounds that follow each other closely are not independent: a slow phase of the machine covers several. This many are
# taken together as one, by their median.
TOGETHER = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate's time over the default's: ``ratio`` (the median, below one is faster), and between which bounds it
    is, each with the asked confidence by itself. ``count`` are the rounds."""

    ratio: float
    low: float
    high: float
    count: int

    @property
    def speedup(self) -> float:
        """The default's time over its own."""
        return 1.0 / self.ratio

    @property
    def gain(self) -> float:
        """The share of the default's time that is saved; below zero it is slower."""
        return 1.0 - self.ratio


NOTHING_KNOWN = Estimate(1.0, 0.0, math.inf, 0)


def estimate(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The median ratio and its bounds, by the order of the ratios alone, so that no distribution is presumed.

    With too few for a bound it is as wide as can be: 0 and infinity. Source: the sign test's interval of a median.
    """
    if not ratios:
        return NOTHING_KNOWN
    found = sorted(ratios)
    grouped = sorted(_together(ratios))
    outside = _outside(len(grouped), confidence)
    if outside is None:
        return Estimate(median(found), 0.0, math.inf, len(found))
    middle = median(found)
    low, high = grouped[outside], grouped[len(grouped) - 1 - outside]
    return Estimate(middle, min(low, middle), max(high, middle), len(found))


def _together(ratios: Sequence[float]) -> list[float]:
    """Medians of so many neighbours as are taken together; what is left over at the end goes to the last of them."""
    count = max(1, len(ratios) // TOGETHER)
    if count < 4:
        return list(ratios)
    cuts = [k * TOGETHER for k in range(count)] + [len(ratios)]
    return [median(ratios[a:b]) for a, b in pairwise(cuts)]


@cache
def _outside(count: int, confidence: float) -> int | None:
    """Of ``count`` values in order, how many on one side are beyond a bound of their median; None where even all of
    them make no bound."""
    total, chance = 0.0, 1.0 - confidence
    for k in range(count):
        total += math.comb(count, k) * 0.5**count
        if total > chance:
            return k - 1 if k else None
    return None


@dataclass(slots=True)
class Race:
    """Rounds of samples in seconds: each candidate's by its number, the default's, and that of its copy.

    ``default`` and ``twin`` are the numbers of the two. A round may be without some, who left the race or came later.
    """

    default: int
    twin: int
    rounds: list[Mapping[int, float]] = field(default_factory=list)

    def add(self, samples: Mapping[int, Sequence[float]]) -> None:
        """Rounds that ran one after the other: the k-th sample of each is of the k-th round."""
        count = max(map(len, samples.values()), default=0)
        self.rounds += [{n: s[k] for n, s in samples.items() if k < len(s)} for k in range(count)]

    def ratios(self, number: int, against: int | None = None) -> list[float]:
        """A candidate's time over the default's (or over ``against``) in each round of both, in order.

        One copy by itself, no mean of both: where samples are long now and then, a mean is so more often than one
        sample is, and equals would seem faster than it.
        """
        base = self.default if against is None else against
        return [s[number] / s[base] for s in self.rounds if number in s and s.get(base, 0.0) > 0]

    def estimate(self, number: int, confidence: float = CONFIDENCE) -> Estimate:
        """How a candidate compares with the default."""
        return estimate(self.ratios(number), confidence)

    def seconds(self, number: int) -> float:
        """Seconds a call, the median; infinite where there is no sample."""
        found = [s[number] for s in self.rounds if number in s]
        return median(found) if found else math.inf

    @property
    def sigma(self) -> float:
        """The noise of a ratio, relative: how far the copy of the default is from it, and how surely that is known.

        Infinite where there is no sample of the copy.
        """
        ratios = self.ratios(self.twin)
        if not ratios:
            return math.inf
        return math.hypot(median(ratios) - 1.0, spread(ratios))

    @property
    def threshold(self) -> float:
        """The share of the default's time that has to be saved for a gain to count."""
        return max(LEAST_GAIN, NOISES * self.sigma)

    def is_better(self, number: int, tries: int = 1) -> bool:
        """Whether a candidate beats the default: for sure, and by what counts. ``tries`` candidates are asked about in
        all, any of which might be taken; so each has to be surer. It has to beat both copies of the default. The
        samples may not be those it was chosen by."""
        confidence, threshold = 1.0 - (1.0 - CONFIDENCE) / tries, self.threshold
        both = [estimate(self.ratios(number, against), confidence) for against in (self.default, self.twin)]
        return all(found.high < 1.0 and found.gain > threshold for found in both)

    def is_behind(self, number: int, best: int) -> bool:
        """Whether a candidate is slower than the best one for sure, so that more rounds of it tell nothing."""
        return self.estimate(number).low > self.estimate(best).high


def spread(ratios: Sequence[float]) -> float:
    """The standard error of the median of ratios, by the median distance from it, so that a few of any size do not
    decide. Neighbours are taken together first."""
    grouped = _together(ratios)
    middle = median(grouped)
    distance = median(abs(r - middle) for r in grouped)
    return 1.4826 * 1.2533 * distance / math.sqrt(len(grouped))


def turns(numbers: Sequence[int], rounds: int, begun: int = 0) -> list[list[int]]:
    """The order of each round: everyone once, each round begins one further on, and every second cycle runs backwards,
    so that nobody always runs behind the same one. ``begun`` rounds were run before."""
    orders = []
    for k in range(begun, begun + rounds):
        first = k % max(len(numbers), 1)
        order = [*numbers[first:], *numbers[:first]]
        orders.append(order[::-1] if k // max(len(numbers), 1) % 2 else order)
    return orders
