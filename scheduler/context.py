"""What passes over graphs and their calls may ask of the compilation that they are part of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ..ir.graph.graph import Graph
from ..ir.passes import Setting
from ..ir.target import TargetOf, usual_target
from .decisions import Alternative, Decider
from .numerics import Numerics, is_fast, passes_left_out


@dataclass(frozen=True, slots=True)
class PassContext:
    """``numerics`` is "fast" or "eager", or says it by places; ``target_of`` gives the machine that a device
    ("cuda:0") is; ``given`` are inputs whose memory goes when they are read last, and ``owned`` those that may be
    written over then, for the program has that memory alone. ``copy_streams``: copies between devices may run beside
    calls, on streams of their own. ``tables``: a launch may read of a table what it works on, which on a GPU a host
    program of torch's process fills. ``decider`` is who is asked about decisions; without one the cost model's stand.
    ``fused_time`` says how long a graph takes once what follows substitution is done to it, and it is fused; without it
    estimates choose among graphs.
    """

    numerics: Numerics = "fast"
    target_of: TargetOf = usual_target
    given: Collection[str] = ()
    copy_streams: bool = True
    tables: bool = True
    decider: Decider | None = field(default=None, repr=False)
    owned: Collection[str] = ()
    fused_time: Callable[[Graph, PassContext], float] | None = field(default=None, repr=False)

    @property
    def fast(self) -> bool:
        """Whether float32 is kept between fused operations where the graph rounds to a half type."""
        return is_fast(self.numerics)

    @property
    def left_out(self) -> frozenset[str]:
        """The passes that are not to run."""
        return passes_left_out(self.numerics)

    def decide(
        self, kind: str, key: Callable[[], str], options: Sequence[Alternative], default: str, *, at: str = "",
        nbytes: int = 0, reason: str = "", beside: str = "",
    ) -> str:  # fmt: skip
        """The way to take at a place, as ``Decider.decide`` says: ``default`` unless somebody chose otherwise."""
        if self.decider is None:
            return default
        return self.decider.decide(kind, key, options, default, at=at, nbytes=nbytes, reason=reason, beside=beside)


# What holds where nobody says otherwise.
USUAL = PassContext()
# With eager's rounding, what these passes read through is rounded to half types where eager writes it.
FAST: Setting[PassContext] = Setting("fast numerics", lambda context: context.fast)
