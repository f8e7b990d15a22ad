"""Results that a caller may write over, saved for the backward as copies."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..context import AtenContext
from ..write import NodeWriter, give_results

aten = torch.ops.aten


def save_copies(forward: fx.GraphModule, context: AtenContext) -> int:
    """Save copies of results that a caller may write over, as eager lets it; how many copies there are.

    Eager saves what the gradient ops of the forward read, and not the names that are ``unread``. The min-cut may save a
    result instead and make those of it again, and attention is made again of what it gave; autograd refuses a backward
    where a result that was saved has been written.
    """
    results, unread = context.results, context.unread
    (end,) = forward.graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    returned = {v for v in values[:results] if isinstance(v, fx.Node) and v.op == "call_function"}
    copies = 0
    for k, saved in enumerate(values[results:], results):
        if saved in returned and saved.name in unread and isinstance(saved.meta.get("val"), torch.Tensor):
            # Before the inputs are written, which is the last that a graph does.
            with forward.graph.inserting_after(saved):
                copy = NodeWriter(forward.graph, saved).call(aten.clone.default, saved)
            # The backward is compiled for these strides; a part of something larger has others than its copy.
            pairs = zip(copy.meta["val"].stride(), saved.meta["val"].stride(), strict=True)
            if all(statically_known_true(a == b) for a, b in pairs):
                values[k] = copy
                copies += 1
            else:
                forward.graph.erase_node(copy)
    if copies:
        give_results(forward, values)
    return copies
