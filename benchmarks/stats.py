"""Samples and their statistics: clocks, the order of interleaved rounds, medians with quartiles, geometric means of
ratios. Processes without torch use it too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

T = TypeVar("T")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
# Calls before the first that is timed, at least and at most.
LEAST_WARM, MOST_WARM = 3, 1000


class Spread(NamedTuple):
    """Median and the 25th and 75th percentile, in the unit of the samples."""

    median: float
    q25: float
    q75: float


class Geomean(NamedTuple):
    """Geometric mean of ``count`` ratios; NaN of none."""

    value: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive method: the extremes are possible values). Raises: ValueError without samples."""
    if not samples:
        raise ValueError("spread of no samples; a case without samples has an error instead")
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, q25, q75)


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Between which samples the median of what they are drawn from lies with at least that confidence, whatever its
    distribution: each is as likely below it as above. Fewer than six are too few for 95 %: then it is the extremes.
    Raises: ValueError without samples."""
    if not samples:
        raise ValueError("an interval of no samples")
    ordered, count = sorted(samples), len(samples)
    # Of each number of samples, how likely no more of them are below the median.
    fewer = accumulate(math.comb(count, k) / 2**count for k in range(count // 2))
    out = max(sum(2 * chance <= 1 - confidence for chance in fewer) - 1, 0)
    return ordered[out], ordered[-1 - out]


def geomean(ratios: Sequence[float]) -> Geomean:
    """Geometric mean. Raises: ValueError for a ratio that is not a positive finite number."""
    for ratio in ratios:
        if not (math.isfinite(ratio) and ratio > 0):
            raise ValueError(f"geomean of {ratio}: ratios are positive and finite")
    value = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    return Geomean(value, len(ratios))


def interleave(names: Sequence[T], rounds: int) -> Iterator[tuple[T, ...]]:
    """For each round all names once, the order rotated by one from round to round.

    Interleaving gives slow drifts of the machine (clocks, neighbours) to all peers alike; rotation does the same
    for what a peer leaves behind for the next one (caches, allocator).
    """
    for index in range(rounds):
        start = index % len(names)
        yield (*names[start:], *names[:start])


def calls_for(seconds_per_call: float, least_seconds: float) -> int:
    """How many calls make a sample of at least ``least_seconds``, between 1 and 10,000."""
    if seconds_per_call <= 0:
        return 10_000
    return min(10_000, max(1, math.ceil(least_seconds / seconds_per_call)))


def seconds_each(call: Callable[[], object], calls: int, now: Callable[[], float]) -> float:
    """Mean seconds of some calls, one after another."""
    start = now()
    for _ in range(calls):
        call()
    return (now() - start) / calls


def warm(call: Callable[[], object], seconds: float) -> None:
    """Call for so many seconds of the wall's clock, and some times at least."""
    count, start = 0, time.perf_counter()
    while count < LEAST_WARM or (count < MOST_WARM and time.perf_counter() - start < seconds):
        call()
        count += 1
