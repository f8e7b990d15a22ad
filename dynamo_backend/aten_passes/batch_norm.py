"""What the backward of a batch norm is given: no running statistics, and no activation that it can make again."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..converters import CONVERTERS
from .context import AtenContext
from .joint_graph import backward_of
from .write import NodeWriter

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default)
# Arguments of native_batch_norm_backward.
_RUNNING_MEAN, _RUNNING_VAR, _TRAIN = 3, 4, 7


def forget_running_statistics(gm: fx.GraphModule) -> int:
    """Do not give running statistics to backwards of batch norm that use those of the batch; how many read them.

    Autograd names them all the same, so that the updated ones would be results, kept for the backward, and could not be
    written where the old ones are.
    """
    done = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[_TRAIN] is True:
            done += node.args[_RUNNING_MEAN] is not None
            node.update_arg(_RUNNING_MEAN, None)
            node.update_arg(_RUNNING_VAR, None)
    return done


def renormalize(gm: fx.GraphModule, context: AtenContext) -> int:
    """Let activations after batch norms be differentiated from what the norm was given; how many were.

    The backward of the norm reads that anyway, so what was normalised, or its ReLU, is made of it again and not read.
    CPUs round the statistics that they save of half types, from which that cannot be made; in a graph that was traced
    on one they are rounded, but not on the GPU where it is meant to run.
    """
    rounded = context.options.gpu is not None
    backward = backward_of(gm.graph)
    done = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        through = node.args[0]
        if node.args[_TRAIN] is not True or not isinstance(through, fx.Node) or through not in backward:
            continue
        if str(through.target) not in CONVERTERS or through.users.keys() != {node}:
            continue
        for k, given in enumerate(through.args):
            norm = _norm_behind(given, through, rounded) if isinstance(given, fx.Node) else None
            if norm is None or norm.args[0] is not node.args[1] or norm.args[1] is not node.args[2]:
                continue
            with gm.graph.inserting_before(through):
                through.update_arg(k, _normalized(gm.graph, norm))
            done += 1
    if done:
        gm.graph.lint()
        gm.recompile()
    return done


def _norm_behind(node: fx.Node, reader: fx.Node, rounded: bool) -> fx.Node | None:
    """The batch norm, with statistics of the batch in full precision, whose result a node is, or is as far as a
    backward of ReLU can tell."""
    while node.target in _SAME or (
        node.target is aten.relu.default and reader.target is aten.threshold_backward.default
    ):
        if node.target is aten.relu.default and reader.args[2] != 0:
            return None
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    norm = node.args[0]
    assert isinstance(norm, fx.Node)
    if norm.target is not aten._native_batch_norm_legit_functional.default or norm.args[5] is not True:
        return None
    mean = norm.meta["val"][1]
    return norm if rounded or mean.dtype in (torch.float32, torch.float64) else None


def _normalized(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    """The result of a batch norm made of its operand and the statistics that it saves."""
    x, weight, bias = norm.args[:3]
    assert isinstance(x, fx.Node)
    out = NodeWriter(graph, x)
    parts = {n.args[1]: n for n in norm.users}
    kind, rank = x.meta["val"].dtype, x.meta["val"].dim()
    wide = torch.float32 if kind in (torch.bfloat16, torch.float16) else kind

    def spread(value: fx.Node) -> fx.Node:
        value = out.cast(value, wide)
        for _ in range(rank - 2):
            value = out.call(aten.unsqueeze.default, value, -1)
        return value

    mean, rstd = (parts[k] for k in (1, 2))
    value = out.call(aten.sub.Tensor, out.cast(x, wide), spread(mean))
    value = out.call(aten.mul.Tensor, value, spread(rstd))
    for op, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if isinstance(operand, fx.Node):
            value = out.call(op, value, spread(operand))
    again = [value, out.cast(value, kind)]
    for made in again:
        made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return again[-1]
