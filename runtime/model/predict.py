"""The time of a launch on a GPU that need not be here: the longest of what its parts need, each by itself.

As in roofline models, the parts of a GPU work side by side, and the slowest says how long it takes. Beside the rates of
pipes and memory there is the time of a program alone: programs that are resident together hide one another's waiting,
but as many rounds of them as the launch needs take as many times as long (Little's law). No measurement has corrected
this model so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.machine import Machine
from .work import Work

# What a kernel reaches of the rate that bounds it, until measurements tell.
EFFICIENCY = 0.85
# Bounds that are near to one another are not reached together: times are added up by this norm.
_NORM = 6
ISSUE, PRODUCTS, SHARED, L2, MEMORY, LATENCY, LAUNCH = (
    "issue", "tensor cores", "shared memory", "L2", "memory", "latency", "launch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """``seconds`` of a launch, from the end of the one before it; ``bounds`` are the seconds that each part of the GPU
    would need by itself, by its name ("issue", "memory", "fma", …)."""

    seconds: float
    bounds: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The part that needs the longest."""
        return max(self.bounds, key=self.bounds.__getitem__)

    def __str__(self) -> str:
        return f"{microseconds(self.seconds)}, bound by {self.bound}"


def microseconds(seconds: float) -> str:
    """A time as people read it."""
    us = seconds * 1e6
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"


def predict(work: Work, machine: Machine) -> Prediction:
    """How long a launch takes on a machine.

    Raises ValueError for a machine that is no GPU, and where not one program fits on a multiprocessor.
    """
    pipes = machine.pipes
    if pipes is None:
        raise ValueError(f"{machine.part} has no pipes that are known")
    if work.resident < 1 and work.programs:
        raise ValueError(f"a program takes more than a multiprocessor of {machine.part} has")
    second = machine.clock * 1e9
    # The multiprocessor that has most programs.
    each = math.ceil(work.programs / machine.cores)
    product = pipes.product if work.grouped else pipes.warp_product
    clocks = {
        ISSUE: each * work.slots / pipes.issue,
        **{pipe.value: each * lanes / getattr(pipes, pipe.value) for pipe, lanes in work.lanes.items()},
        PRODUCTS: each * work.products / product,
        SHARED: each * work.cached / pipes.shared,
        L2: work.moved / machine.cores / pipes.fabric,
    }
    bounds = {name: n / second for name, n in clocks.items()}
    bounds[MEMORY] = work.memory / machine.bandwidth * 1e-9
    bounds[LATENCY] = _latency(work, machine, max(bounds.values())) / second
    bounds[LAUNCH] = machine.launch * 1e-9
    longest = sum(t**_NORM for name, t in bounds.items() if name != LAUNCH) ** (1 / _NORM)
    return Prediction(longest / EFFICIENCY + bounds[LAUNCH], bounds)


def _latency(work: Work, machine: Machine, others: float) -> float:
    """Clocks of all rounds of programs. Memory answers the later the fuller it is."""
    if not work.programs:
        return 0.0
    idle, full = work.alone
    rounds = math.ceil(work.programs / (machine.cores * work.resident))
    memory = work.memory / machine.bandwidth * 1e-9
    least = max(others, rounds * idle / (machine.clock * 1e9))
    use = min(memory / least, 1.0) if least else 0.0
    return rounds * (idle + (full - idle) * use)
