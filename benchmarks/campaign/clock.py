"""Times of a campaign: those of the device, of CUDA graphs where launches would take longer than kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from ..stats import interleave
from ..timing import Clock

Call = Callable[[], object]
# Kernels below this are timed within a graph, so many calls of them; a launch of torch's takes five to ten µs.
GRAPH_SECONDS, GRAPH_CALLS = 50e-6, 20
_ROUNDS, _LEAST_SECONDS, _WARM_CALLS = 9, 5e-3, 3


@dataclass(frozen=True, slots=True)
class Timed:
    """``seconds`` of a call, the median of rounds, all ``samples``, and ``how``: "graph" or "calls"."""

    seconds: float
    samples: tuple[float, ...]
    how: str


def timed(calls: Mapping[str, Call], device: str) -> dict[str, Timed]:
    """The time of each call, in rounds in which each has its turn."""
    clock = Clock(device, flush=False)
    runs: dict[str, tuple[Call, int, int, str]] = {}
    for name, call in calls.items():
        for _ in range(_WARM_CALLS):
            call()
        once = clock.time(call, _WARM_CALLS)
        each, how = 1, "calls"
        if clock.cuda and once < GRAPH_SECONDS:
            replay = captured(call)
            if replay is not None:
                call, each, how = replay, GRAPH_CALLS, "graph"
                once = clock.time(call, 1)
        runs[name] = call, max(1, int(_LEAST_SECONDS / max(once, 1e-7))), each, how
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for order in interleave(list(runs), _ROUNDS):
        for name in order:
            call, count, each, _ = runs[name]
            samples[name].append(clock.time(call, count) / each)
    return {name: Timed(median(s), tuple(s), runs[name][3]) for name, s in samples.items()}


def captured(call: Call) -> Call | None:
    """Many calls as one graph; None where they cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay
