"""Filters of convolutions that do not change are laid out once as kernels of ours read them.

A kernel that sums over taps and channels reads a row of filters for each of them: ``[*kernel, C, O]`` in memory, which
``decompose_as_product`` copies filters to at each call. Where images are few and small and channels many, that takes
longer than the convolution. A copy in that order, seen as filters again, is no copy at a call.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ..context import AtenContext
from ..write import NodeWriter, tidy
from .known import hoist, known_of
from .part import FOR
from .weight_products import is_memory
from .worth import Worth

aten = torch.ops.aten


def turn_filters(gm: fx.GraphModule, context: AtenContext) -> int:
    """Let convolutions that no library computes, in place, read filters in the order of their sums; how many do."""
    graph = gm.graph
    known = known_of(graph, context.frozen)
    worth = Worth.of(graph, context.target)
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    chosen = [n for n in convolutions if _sums_over_taps(n, known, context) and is_memory(n.args[1], worth)]
    if not chosen:
        return 0
    hoist(graph, known)
    turned: dict[fx.Node, fx.Node] = {}
    for node in chosen:
        weight = node.args[1]
        if weight not in turned:
            turned[weight] = _turned(graph, weight)
        node.args = (node.args[0], turned[weight], *node.args[2:])
    tidy(graph)
    graph.lint()
    return len(chosen)


def _sums_over_taps(node: fx.Node, known: set[fx.Node], context: AtenContext) -> bool:
    """Whether a convolution becomes a sum that reads its filters, which do not change, for each tap and channel."""
    x, weight, _, stride, _, _, transposed, _, groups = node.args
    if node.kwargs or weight not in known or x in known or transposed or groups != 1:
        return False
    kind = weight.meta["val"]
    if not all(isinstance(n, int) for n in kind.shape) or 0 in kind.shape:
        return False
    if math.prod(kind.shape[2:]) == 1 and max(stride) == 1:
        return False
    return not context.target(str(kind.device)).machine.calls_libraries


def _turned(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """Filters [O, C, *kernel] whose memory is [*kernel, C, O]."""
    rank = weight.meta["val"].dim()
    there = [*range(2, rank), 1, 0]
    back = [there.index(k) for k in range(rank)]
    after = weight.next
    while after.op == "placeholder":  # inputs come first
        after = after.next
    with graph.inserting_before(after):
        out = NodeWriter(graph, weight)
        lying = out.call(aten.permute.default, weight, there)
        copy = out.call(aten.clone.default, lying, memory_format=torch.contiguous_format)
        copy.meta[FOR] = "filters in the order of their sums"
        return out.call(aten.permute.default, copy, back)


__all__ = ["turn_filters"]
