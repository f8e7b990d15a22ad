"""Products of what changes with a weight that does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .known import is_view
from .worth import Worth

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """``x @ weight + bias``, ``weight`` of shape (inner, columns)."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def columns(self) -> int:
        return int(self.weight.meta["val"].shape[1])


def weight_product(node: fx.Node, known: set[fx.Node]) -> WeightProduct | None:
    """The product that a node is: None where its weight changes, or its bias does or is no row of numbers."""
    if node.target is aten.mm.default:
        x, weight = node.args
        bias = None
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
        if bias not in known or bias.meta["val"].shape != weight.meta["val"].shape[1:]:
            return None
    else:
        return None
    if weight not in known or x in known or weight.meta["val"].is_complex():
        return None
    return WeightProduct(node, x, weight, bias)


def is_memory(weight: fx.Node, worth: Worth) -> bool:
    """Whether a weight is memory as it is: a parameter, or what is kept, or a view of one."""
    while weight.op == "call_function" and is_view(weight):
        weight = weight.all_input_nodes[0]
    return weight.op == "placeholder" or worth.keeps(weight)


__all__ = ["WeightProduct", "is_memory", "weight_product"]
