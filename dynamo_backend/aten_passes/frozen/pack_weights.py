"""Weights of products that do not change are laid out once as oneDNN reads them.

BLAS puts a weight in order at each call. For few rows this is most of a product's time, and it is some of it for many.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

from ....scheduler.cost.frozen import packed_pays, packed_times
from ....scheduler.decisions import Alternative
from ..context import AtenContext
from ..write import NodeWriter, tidy
from .known import hoist, is_view, known_of
from .part import FOR
from .weight_products import WeightProduct, is_memory, weight_product
from .worth import Worth

aten = torch.ops.aten


def pack_weights(gm: fx.GraphModule, context: AtenContext) -> int:
    """Let products, in place, read weights in the layout of a library, where that is faster; how many do."""
    graph = gm.graph
    known = known_of(graph, context.frozen)
    worth = Worth.of(graph, context.target)
    products = [p for n in graph.nodes if (p := weight_product(n, known)) is not None]
    chosen = [p for p in products if is_memory(p.weight, worth) and _pays(p, context)]
    if not chosen:
        return 0
    hoist(graph, known)
    packed: dict[tuple[fx.Node, int], fx.Node] = {}
    for p in chosen:
        rows = int(p.x.meta["val"].shape[0])
        if (p.weight, rows) not in packed:
            packed[p.weight, rows] = _packed(graph, p, rows)
        with graph.inserting_before(p.node):
            out, multiply = NodeWriter(graph, p.node), torch.ops.mkldnn._linear_pointwise.default
            new = out.call(multiply, p.x, packed[p.weight, rows], p.bias, "none", [], "")
        assert new.meta["val"].stride() == p.node.meta["val"].stride()
        p.node.replace_all_uses_with(new)
    tidy(graph)
    graph.lint()
    return len(chosen)


def _pays(p: WeightProduct, context: AtenContext) -> bool:
    """Whether a product has a size that does not vary, for which its weight is laid out, and gains by it."""
    x, weight = p.x.meta["val"], p.weight.meta["val"]
    if not isinstance(x.shape[0], int):
        return False
    if p.bias is not None and p.bias.meta["val"].dtype is not x.dtype:
        return False
    inner, columns = weight.shape
    target = context.target(str(x.device))
    times = packed_times(x.shape[0], inner, columns, weight.dtype.itemsize, target)
    if times is None or not has_layout(weight.dtype):
        return False
    pays = packed_pays(x.shape[0], inner, columns, weight.dtype.itemsize, target)
    return context.decide(
        "packed-weight", (x.shape[0], inner, columns, weight.dtype),
        (Alternative("packed", times[0]), Alternative("plain", times[1])), pays, at=p.node.name,
        nbytes=weight.numel() * weight.dtype.itemsize,
    )  # fmt: skip


def _packed(graph: fx.Graph, p: WeightProduct, rows: int) -> fx.Node:
    """The weight of a product in the layout for so many rows. It has no strides; its node tells those of a plain one,
    which nothing but the library's op asks for."""
    out = NodeWriter(graph, p.node)
    with graph.inserting_after(p.weight):
        turned = out.call(aten.t.default, p.weight)
    with graph.inserting_after(turned):
        node = graph.call_function(torch.ops.mkldnn._reorder_linear_weight.default, (turned, rows))
    node.meta.update({k: v for k, v in p.node.meta.items() if k == "stack_trace"})
    with out.mode:
        node.meta["val"] = torch.empty_like(turned.meta["val"], memory_format=torch.contiguous_format)
    node.meta[FOR] = f"{told_of(p.weight)}, packed"
    return node


def told_of(weight: fx.Node) -> str:
    """What is said of a weight: what the pass that made it says, where one did."""
    while weight.op == "call_function" and FOR not in weight.meta and is_view(weight):
        weight = weight.all_input_nodes[0]
    return str(weight.meta.get(FOR, "weight"))


@cache
def has_layout(dtype: torch.dtype) -> bool:
    """Whether oneDNN of this torch, on this processor, multiplies weights of a type in a layout of its own."""
    if not torch.backends.mkldnn.is_available() or not dtype.is_floating_point:
        return False
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=dtype), 2)
            torch.ops.mkldnn._nbytes(packed)
            torch.ops.mkldnn._linear_pointwise(torch.ones(2, 16, dtype=dtype), packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return True
