"""What one call takes of an allocator, by its own account: the greatest sum of bytes that it had given at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch._C._profiler import _EventType

from torch_mlc.runtime.pool.pool import POOL


class Event(NamedTuple):
    """Memory given (``nbytes`` above zero) or taken back, at ``time`` in nanoseconds."""

    time: int
    address: int
    nbytes: int


def peak_of(step: Callable[[], object], device: str) -> int:
    """The most bytes held at a time by one call of ``step``, beyond what was held before it; its result counts.

    On the CPU all that torch's allocator gives counts, inside of library ops too, and nothing that others give
    (packed operands of BLAS, code); on a GPU what the caching allocator has given out. What was there before the
    call and goes during it is not subtracted on the CPU. Blocks that compiled programs use again count from the begin
    on, as long as they are not given back: also those that nobody uses.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = POOL.places()
        step()
    return peak(events_of(profile), kept)


def events_of(profile: torch.profiler.profile) -> list[Event]:
    """Every allocation on the CPU that a profile has seen."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    found = []
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation and event.typed[1].device.type == "cpu":
            found.append(Event(event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    return found


def peak(events: Iterable[Event], kept: Mapping[int, int] = MappingProxyType({})) -> int:
    """The greatest sum, of what is ``kept`` (bytes by address) before the first event too. Other memory that was given
    before does not count when it is taken back."""
    held = dict(kept)
    now = most = sum(held.values())
    for event in sorted(events, key=lambda e: e.time):
        if event.nbytes > 0:
            held[event.address] = event.nbytes
            now += event.nbytes
            most = max(most, now)
        else:
            now -= held.pop(event.address, 0)
    return most
