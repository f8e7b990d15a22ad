"""FlexAttention calls as plain operations: scores, the user's functions of them, softmax, product.

What comes out is attention as anybody might write it, which the graph pass ``rewrite_attention`` finds like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..tracing.fake_device import retarget
from .decompositions import decomposition_table

aten = torch.ops.aten
# What reports and reviews of a node need; its value is that of the traced node.
_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten")


def decompose_flex_attention(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with every FlexAttention call whose statistics nobody reads written out; the same object if none is.

    A call whose log-sum-exp is kept for a backward stays whole.
    """
    if not any(_is_flex_attention(n) for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if _is_flex_attention(node):
            env[node] = (_inline(graph, gm, node, env, attributes), None, None)
        elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            if node.op == "get_attr":
                attributes[node.target] = _attribute(gm, node.target)
            env[node] = graph.node_copy(node, env.__getitem__)
    decomposed = fx.GraphModule(attributes, graph)
    decomposed.meta = gm.meta
    decomposed.graph.eliminate_dead_code()
    return decomposed


def _is_flex_attention(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not flex_attention:
        return False
    return all(u.target is operator.getitem and (u.args[1] == 0 or not u.users) for u in node.users)


def _attribute(gm: fx.GraphModule, name: str) -> Any:
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _inline(
    graph: fx.Graph, gm: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], attributes: dict[str, Any]
) -> fx.Node:
    """The call's operations written into a graph; the node of the result, laid out as the call's."""
    query, key, value, score_mod, block_mask, scale, _, *rest = node.args
    buffers: list[Any] = [*rest, (), ()][:2]
    functions = [_attribute(gm, f.target) for f in (score_mod, block_mask[-1])]  # type: ignore[union-attr,index]
    # A scale that varies with sizes is traced as if it were a tensor.
    varying = [scale] if isinstance(scale, fx.Node) else []
    operands: list[Any] = [query, key, value, *varying, *buffers[0], *buffers[1]]
    count = len(buffers[0])

    def run(q: Any, k: Any, v: Any, *more: Any) -> Any:
        if any(isinstance(n, int) and n == 0 for n in q.shape[:-1]):
            return q.new_empty((*q.shape[:-1], v.shape[-1]))  # torch divides by the number of heads
        mask, factor = (functions[1],), more[0] if varying else scale
        more = more[len(varying) :]
        return math_attention(q, k, v, functions[0], mask, factor, {}, tuple(more[:count]), tuple(more[count:]))[0]

    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in operands]
    number = values[0].new_empty((), dtype=torch.float64)
    traced = _trace(run, [number if isinstance(v, torch.SymFloat) else v for v in values])
    inside: dict[fx.Node, Any] = {}
    given = iter(operands)
    place = {k: node.meta[k] for k in _PLACE if k in node.meta}
    for n in traced.graph.nodes:
        match n.op:
            case "placeholder":
                outer = next(given)
                inside[n] = env[outer] if isinstance(outer, fx.Node) else outer
            case "output":
                result = inside[n.args[0]]
            case "call_function" if n.target is aten.lift_fresh_copy.default or _is_number(n):
                # A constant of the user's function, as a tensor that tracing made of a number.
                inside[n] = inside.get(n.args[0], n.args[0])
            case _:
                args, kwargs = (map_arg(x, inside.__getitem__) for x in (n.args, n.kwargs))
                # Names of their own, so that those of the other nodes stay what they are.
                copy = inside[n] = graph.create_node(n.op, n.target, args, kwargs, f"{node.name}_{n.name}", n.type)
                copy.meta = {**n.meta, **place}
                if n.op == "get_attr":
                    copy.target = f"{node.name}_{n.target}"
                    attributes[copy.target] = _attribute(traced, n.target)
    laid_out = graph.call_function(aten.clone.default, (result,))
    laid_out.meta.update(place, val=node.meta["val"][0])
    return laid_out


def _is_number(node: fx.Node) -> bool:
    """Whether a node converts a number: batching makes tensors of those in the user's function."""
    return node.target is aten._to_copy.default and not isinstance(node.args[0], fx.Node)


def _trace(fn: Any, values: Sequence[Any]) -> fx.GraphModule:
    first = next(v for v in tree_leaves(values) if isinstance(v, FakeTensor))
    elsewhere = first.device.type == "cuda" and not torch.cuda.is_available()
    with first.fake_mode, torch.no_grad():
        if elsewhere:  # tracing computes with constants, which have to be somewhere
            values = [_on_cpu(v) if isinstance(v, FakeTensor) else v for v in values]
        traced = make_fx(fn, decomposition_table=decomposition_table(), tracing_mode="real")(*values)
    if elsewhere:
        retarget([traced], str(first.device))
    return traced


def _on_cpu(value: FakeTensor) -> torch.Tensor:
    """A tensor like it, at the same place of its memory: views of it are told by their places."""
    memory = torch.empty(value.untyped_storage().nbytes() // value.dtype.itemsize, dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())
