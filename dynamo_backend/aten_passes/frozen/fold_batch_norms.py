"""A batch norm of running statistics behind a convolution or a product is part of its weight and bias.

``norm(conv(x, w) + b) = conv(x, w * s) + (b - mean) * s + shift`` with ``s = scale / sqrt(var + eps)`` for each
channel, which is made in double precision and rounded once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..context import AtenContext
from ..write import NodeWriter, tidy
from .known import known_of
from .part import FOR

aten = torch.ops.aten

_NORM = aten._native_batch_norm_legit_no_training.default


def fold_batch_norms(gm: fx.GraphModule, context: AtenContext) -> int:
    """Fold, in place, batch norms whose statistics do not change into what is in front of them; how many were."""
    graph = gm.graph
    known = known_of(graph, context.frozen)
    done = 0
    for norm in graph.find_nodes(op="call_function", target=_NORM):
        done += _is_foldable(norm, known) and _folded(graph, norm, known)
    if done:
        tidy(graph)
        graph.lint()
    return done


def _is_foldable(norm: fx.Node, known: set[fx.Node]) -> bool:
    """Whether a norm is of nothing but the channels, alone reads what it is of, and nobody reads its statistics."""
    x, *of_channels = norm.args[:5]
    results = [u for u in norm.users if u.target is operator.getitem]
    if not isinstance(x, fx.Node) or len(x.users) != 1 or len(results) != 1 or results[0].args[1] != 0:
        return False
    value = x.meta["val"]
    wide = value.dtype in (torch.float32, torch.float64)  # half types would round the weights, too
    return wide and all(n is None or n in known for n in of_channels)


def _folded(graph: fx.Graph, norm: fx.Node, known: set[fx.Node]) -> bool:
    """Whether what a norm is of could be written with other weights."""
    product: Any = norm.args[0]
    if product.target is aten.convolution.default:
        x, weight, bias, *rest = product.args
        dim = 1 if rest[3] else 0
        if rest[3] and rest[5] != 1:
            return False
    elif product.target is aten.addmm.default and not product.kwargs:
        bias, x, weight = product.args
        dim = 1
    elif product.target is aten.mm.default:
        (x, weight), bias = product.args, None
        dim = 1
    else:
        return False
    if weight not in known or (bias is not None and (bias not in known or _dims(bias) != 1)):
        return False
    (result,) = norm.users
    with graph.inserting_before(norm):
        new_weight, new_bias = _written(NodeWriter(graph, result), norm, weight, bias, dim)
        out = NodeWriter(graph, product)
        if product.target is aten.convolution.default:
            new = out.call(aten.convolution.default, x, new_weight, new_bias, *rest)
        else:
            new = out.call(aten.addmm.default, new_bias, x, new_weight)
    if new.meta["val"].stride() != result.meta["val"].stride():
        graph.erase_node(new)
        return False
    result.replace_all_uses_with(new)
    known |= {new_weight, new_bias}
    return True


def _dims(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _written(
    out: NodeWriter, norm: fx.Node, weight: fx.Node, bias: fx.Node | None, dim: int
) -> tuple[fx.Node, fx.Node]:
    """Weight and bias with a norm's scale and shift, channels of the weight along ``dim``."""
    scale, shift, mean, var = (n if isinstance(n, fx.Node) else None for n in norm.args[1:5])
    assert mean is not None and var is not None
    kind = weight.meta["val"].dtype

    def wide(node: fx.Node) -> fx.Node:
        return out.cast(node, torch.float64)

    factor = out.call(aten.rsqrt.default, out.call(aten.add.Tensor, wide(var), norm.args[6]))
    if scale is not None:
        factor = out.call(aten.mul.Tensor, factor, wide(scale))
    shape = [1] * _dims(weight)
    shape[dim] = -1
    new_weight = out.cast(out.call(aten.mul.Tensor, wide(weight), out.call(aten.view.default, factor, shape)), kind)
    moved = out.call(aten.neg.default, wide(mean))
    if bias is not None:
        moved = out.call(aten.add.Tensor, moved, wide(bias))
    moved = out.call(aten.mul.Tensor, moved, factor)
    if shift is not None:
        moved = out.call(aten.add.Tensor, moved, wide(shift))
    new_bias = out.cast(moved, kind)
    new_weight.meta[FOR], new_bias.meta[FOR] = "weight with its batch norm", "bias with its batch norm"
    return new_weight, new_bias
