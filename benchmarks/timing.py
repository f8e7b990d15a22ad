"""Times calls: warm-up, interleaved rounds, CPU clock or CUDA events, caches flushed between calls on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from .stats import CLOCKS, calls_for, interleave, seconds_each, warm

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """``least_s``: seconds of calls in one sample; ``warmup_s``: seconds of calls before the first.

    ``flush``: overwrite a buffer larger than the last cache before every call, outside the timed part.
    ``clock``: on a CPU the wall's, or that of the process ("cpu"), which other processes disturb less: the time of all
    threads together.
    """

    device: str
    rounds: int
    least_s: float = 5e-3
    warmup_s: float = 0.05
    flush: bool = False
    clock: str = "wall"


@dataclass(slots=True)
class Samples:
    """Seconds per call, one entry a round, and how many calls each entry averages."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 1


class Clock:
    """Times batches of calls on one device.

    On CUDA the time is that between two events around the calls, so it is the device's and not that of the launches,
    except where the launches are the slower of the two.
    """

    def __init__(self, device: str, flush: bool, clock: str = "wall") -> None:
        self.now = CLOCKS[clock]
        self.cuda = torch.device(device).type == "cuda"
        # Four times the last-level cache of the machines we know (50 MB L2, 32 MB L3 a slice).
        self.flusher = torch.empty(200_000_000 if flush else 0, dtype=torch.int8, device=device)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, call: Call, calls: int) -> float:
        """Mean seconds per call."""
        if self.flusher.numel():
            return sum(self._flushed(call, calls)) / calls
        if not self.cuda:
            return seconds_each(call, calls, self.now)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / calls

    def _flushed(self, call: Call, calls: int) -> list[float]:
        if not self.cuda:
            seconds = []
            for _ in range(calls):
                self.flusher.zero_()
                start = self.now()
                call()
                seconds.append(self.now() - start)
            return seconds
        pairs = []
        for _ in range(calls):
            self.flusher.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        self.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]


def warm_up(clock: Clock, call: Call, settings: TimingSettings) -> int:
    """Call for ``warmup_s`` and at least three times; returns the calls that one sample needs."""

    def whole() -> None:
        call()
        clock.synchronize()

    clock.synchronize()
    warm(whole, settings.warmup_s)
    return calls_for(clock.time(call, 2), settings.least_s)


def measure(calls: Mapping[str, Call], settings: TimingSettings, on_round: Call = lambda: None) -> dict[str, Samples]:
    """Samples of every peer, taken in interleaved rounds. ``on_round`` is told of each finished round."""
    clock = Clock(settings.device, settings.flush, settings.clock)
    samples = {name: Samples(calls=warm_up(clock, call, settings)) for name, call in calls.items()}
    for order in interleave(list(calls), settings.rounds):
        for name in order:
            samples[name].seconds.append(clock.time(calls[name], samples[name].calls))
        on_round()
    return samples
