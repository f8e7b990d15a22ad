"""Which entries of a user's numerics by place were for something, and the warning about those that were not."""

from __future__ import annotations

import warnings
from functools import lru_cache

from torch import fx

from ...scheduler.numerics import NumericsByPlace, NumericsPlace, nearest
from ..aten_passes.rounding.numerics import placed_nodes


class NumericsWarning(UserWarning):
    """An entry of numerics by place is for nothing in the graphs that were compiled."""


class NumericsUses:
    """The places that this process has met while it compiled with numerics by place."""

    def __init__(self) -> None:
        self._met: dict[NumericsPlace, None] = {}
        self._told: set[str] = set()
        self._waiting: list[str] = []

    def tell(self, numerics: NumericsByPlace, gm: fx.GraphModule, graph: str, complete: bool) -> None:
        """Note the places of a graph. Once an entry, warn that it was for none so far.

        A forward graph is not ``complete``: an entry may be for the backward, which is compiled after it.
        """
        self._met.update(dict.fromkeys(place for _, place in placed_nodes(gm)))
        self._waiting.append(graph)
        if not complete:
            return
        for name in numerics.unused(self._met):
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    NumericsWarning(
                        f"torch-mlc: the entry {name!r} of numerics is for no place of {', '.join(self._waiting)}."
                        f"{nearest(name, self._met)} torch_mlc.attribute prints the places that there are"
                    ),
                    stacklevel=2,
                )
        self._waiting.clear()


@lru_cache(maxsize=1)
def numerics_uses() -> NumericsUses:
    """The one of this process."""
    return NumericsUses()
