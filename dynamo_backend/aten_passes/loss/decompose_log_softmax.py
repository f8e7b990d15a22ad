"""Log-softmaxes of a loss as what they are made of, so that no log-probabilities are written for the backward."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from ...converters import CONVERTERS
from ..joint_graph import backward_of
from ..write import NodeWriter

aten = torch.ops.aten


def decompose_log_softmax(gm: fx.GraphModule) -> int:
    """Write log-softmaxes as element-wise ops and reductions of their rows, and the results not to be saved; how many.

    What reads them then makes them of the logits and two numbers a row: a loss, forward and backward, reads logits,
    which a product has written anyway, and no log-probabilities are written. Those that something needs in memory
    stay: results of the graph, and what library calls read.
    """
    backward = backward_of(gm.graph)
    nodes = [
        n
        for n in gm.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
        if n not in backward and not backward.isdisjoint(n.users) and _is_passing(n)
    ]
    for node in nodes:
        x, dim, *_ = node.args
        with gm.graph.inserting_before(node):
            out = NodeWriter(gm.graph, node)
            kind = node.meta["val"].dtype
            wide = torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
            shifted = out.cast(x, wide)  # type: ignore[arg-type]
            shifted = out.call(aten.sub.Tensor, shifted, out.call(aten.amax.default, shifted, [dim], True))
            total = out.call(aten.sum.dim_IntList, out.call(aten.exp.default, shifted), [dim], True)
            result = out.call(aten.sub.Tensor, shifted, out.call(aten.log.default, total))
            rounded = out.cast(result, kind)
        for made in (result, rounded):
            made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        out.replace(node, rounded)
        gm.graph.erase_node(node)
    if nodes:
        gm.graph.lint()
        gm.recompile()
    return len(nodes)


def _is_passing(node: fx.Node) -> bool:
    """Whether everything that reads a log-softmax is computed by kernels of ours, and its rows have elements."""
    if any(statically_known_true(n == 0) for n in node.meta["val"].shape):
        return False
    return all(user.op == "call_function" and str(user.target) in CONVERTERS for user in node.users)
