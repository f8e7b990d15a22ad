"""What passes over graphs and their calls may ask of the compilation that they are part of."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..ir.passes import Setting
from ..ir.target import Target, gpu_target


def usual_gpu(device: str) -> Target:
    """The GPU that decisions are made for where nobody says which one it is."""
    return gpu_target("cuda:sm_90")


@dataclass(frozen=True, slots=True)
class Context:
    """``numerics`` is "fast" or "eager"; ``target_of`` gives the machine that a GPU ("cuda:0") is; ``given`` are
    inputs whose memory goes when they are read last.
    """

    numerics: str = "fast"
    target_of: Callable[[str], Target] = usual_gpu
    given: Collection[str] = ()

    @property
    def fast(self) -> bool:
        """Whether float32 is kept between fused operations where the graph rounds to a half type."""
        return self.numerics != "eager"


# What holds where nobody says otherwise.
USUAL = Context()
# With eager's rounding, what these passes read through is rounded to half types where eager writes it.
FAST: Setting[Context] = Setting("fast numerics", lambda context: context.fast)
