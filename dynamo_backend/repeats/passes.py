"""The passes from the calls of a few layers to those of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from ...ir.graph.graph import Graph
from ...ir.passes import Pass, Setting
from ...scheduler.fusion.fusion import CALLS, Fusion
from .layers import Layers
from .repeating import NotAlike, Repeating
from .roll import roll, unroll


@dataclass(frozen=True, slots=True)
class FewLayers:
    """What the calls of a few layers stand for: the ``layers`` of an ATen graph. ``static`` are the positions of
    parameters among its inputs, and ``called_after`` says which of its nodes names are made of.

    Where it is ``in_regions`` the others become calls of a region, else each is written out.
    """

    gm: fx.GraphModule
    layers: Layers
    static: frozenset[int]
    called_after: Mapping[str, str]
    in_regions: bool = True

    def of(self, graph: Graph) -> Repeating:
        return Repeating(graph, self.gm, self.layers, self.static, self.called_after)


IN_REGIONS: Setting[FewLayers] = Setting("a loop over layers", lambda few: few.in_regions)
WRITTEN_OUT: Setting[FewLayers] = Setting("layers written out", lambda few: not few.in_regions)


def roll_layers(fusion: Fusion, few: FewLayers) -> Fusion:
    """A layer becomes a region, which is called for all that are like it. Raises NotAlike."""
    return replace(fusion, graph=roll(few.of(fusion.graph)))


def unroll_layers(fusion: Fusion, few: FewLayers) -> Fusion:
    """What came out of a layer is written once for each that is like it. Raises NotAlike."""
    return replace(fusion, graph=unroll(few.of(fusion.graph)))


LAYER_PASSES: tuple[Pass[Fusion, FewLayers], ...] = (
    Pass("roll_layers", CALLS, roll_layers, needs=(IN_REGIONS,), raises=(NotAlike,)),
    Pass("unroll_layers", CALLS, unroll_layers, needs=(WRITTEN_OUT,), raises=(NotAlike,)),
)
