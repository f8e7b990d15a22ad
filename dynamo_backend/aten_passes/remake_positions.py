"""Positions that forward and backward read are made in both: what no data go into is not saved.

The partitioner saves what an op that it does not fuse reads in the backward, such as the indices of an embedding. A
backward that counts by itself knows where each gradient goes, and needs no scatter.
"""

from __future__ import annotations

import torch
from torch import fx

from .joint_graph import backward_of
from .write import copied_for_backward

aten = torch.ops.aten

_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step, torch.ops.prims.iota.default)
_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.slice.Tensor,
    aten.permute.default, aten.transpose.int, aten.t.default,
)  # fmt: skip


def remake_positions(graph: fx.Graph) -> int:
    """Let the backward make whole numbers that count, and views of them, for itself; how many nodes it has more."""
    made: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            continue
        if node.target in _COUNTS or (node.target in _VIEWS and node.args[0] in made):
            made.add(node)
    if not made:
        return 0
    backward = {n for n in backward_of(graph) if n.op != "output"}
    wanted = {n for n in made if not backward.isdisjoint(n.users)}
    for node in reversed(list(graph.nodes)):
        if node in wanted:
            wanted.update(n for n in node.all_input_nodes if n in made)
    copies = copied_for_backward(graph, wanted, {})
    for node, copy in copies.items():
        for user in list(node.users):
            if user in backward:
                user.replace_input_with(node, copy)
    return len(copies)
