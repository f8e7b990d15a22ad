"""Scores whose largest the backward takes from what is saved are read from there too.

The forward is to save the largest score of a row and the sum, and the backward makes the scores again. Where scores are
no larger than what they are made of, the partitioner saves them instead, rounded to their type, and lets the backward
take maximum and sum. Scores that are made again need not be rounded: a weight of one would be the exponential of what
rounding has taken off the score.
"""

from __future__ import annotations

import torch
from torch import fx

from ..write import COPY_OF, tidy

aten = torch.ops.aten


def read_saved(backward: fx.GraphModule) -> int:
    """Let a backward that takes maxima of saved values read those in the place of copies of them; how many copies there
    were."""
    given = {n.name: n for n in backward.graph.find_nodes(op="placeholder") if _has_maximum(n)}
    done = 0
    for node in list(backward.graph.nodes) if given else ():
        saved = given.get(node.meta.get(COPY_OF, ""))
        if saved is not None and node is not saved:
            node.replace_all_uses_with(saved)
            done += 1
    if done:
        tidy(backward.graph)
    return done


def _has_maximum(node: fx.Node) -> bool:
    """Whether the largest of a value, as it is or in a wider type, is taken here."""
    targets = {u.target for u in node.users}
    return aten.amax.default in targets or any(
        u.target is aten._to_copy.default and _has_maximum(u) for u in node.users
    )
