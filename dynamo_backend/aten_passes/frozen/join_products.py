"""Products of one operand with several weights are one product with the weights side by side.

Queries, keys and values, or gate and up of a gated MLP, read the same rows. Joined, the rows are read once and one call
of the library multiplies; each result is a view of some columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ....scheduler.cost.frozen import is_for_libraries, joint_pays
from ....scheduler.decisions import Alternative
from ...tracing.hints import hint_of
from ..context import AtenContext
from ..write import NodeWriter, tidy
from .known import hoist, is_view, known_of, memories
from .part import FOR
from .weight_products import WeightProduct, is_memory, weight_product
from .worth import Worth

aten = torch.ops.aten


def join_products(gm: fx.GraphModule, context: AtenContext) -> int:
    """Join, in place, products of one operand with weights that do not change; how many are gone."""
    graph = gm.graph
    known = known_of(graph, context.frozen)
    worth = Worth.of(graph, context.target)
    groups: dict[tuple[fx.Node, bool, torch.dtype], list[WeightProduct]] = {}
    for node in graph.nodes:
        product = weight_product(node, known)
        if product is not None and is_memory(product.weight, worth) and memories(node).isdisjoint(worth.leaving):
            key = product.x, product.bias is None, product.weight.meta["val"].dtype
            groups.setdefault(key, []).append(product)
    gone = 0
    for products in groups.values():
        if _pays(products, context):
            if not gone:
                hoist(graph, known)
            gone += _joined(graph, products)
    if gone:
        tidy(graph)
        graph.lint()
    return gone


def _pays(products: Sequence[WeightProduct], context: AtenContext) -> bool:
    x = products[0].x.meta["val"]
    target = context.target(str(x.device))
    sizes = [(hint_of(x.shape[0]), hint_of(x.shape[1]), p.columns) for p in products]
    if not is_for_libraries(target) or len(sizes) < 2:
        return False
    return context.decide(
        "joined-weights", (*sizes, x.dtype), (Alternative("joined"), Alternative("apart")),
        joint_pays(sizes, x.dtype.itemsize, target), at=products[0].node.name,
        nbytes=sum(k * n for _, k, n in sizes) * x.dtype.itemsize,
    )  # fmt: skip


def _joined(graph: fx.Graph, products: Sequence[WeightProduct]) -> int:
    """How many products are gone: none where what looks at a result could not look at some columns of another."""
    first = products[0]
    out = NodeWriter(graph, first.node)
    with graph.inserting_before(first.node):
        weight = out.call(aten.cat.default, [out.call(aten.t.default, p.weight) for p in products], 0)
        weight.meta[FOR] = f"{len(products)} weights side by side"
        turned = out.call(aten.t.default, weight)
        if first.bias is None:
            joint = out.call(aten.mm.default, first.x, turned)
        else:
            bias = out.call(aten.cat.default, [p.bias for p in products], 0)
            bias.meta[FOR] = f"{len(products)} biases side by side"
            joint = out.call(aten.addmm.default, bias, first.x, turned)
        parts, begin = [], 0
        for p in products:
            parts.append(out.call(aten.slice.Tensor, joint, 1, begin, begin + p.columns))
            begin += p.columns
    views: dict[fx.Node, Any] = {}
    with out.mode, torch.no_grad():
        fits = all(_look(p.node, part.meta["val"], views) for p, part in zip(products, parts, strict=True))
    if not fits:
        return 0  # nobody reads what was written
    for node, value in views.items():
        node.meta["val"] = value
    for p, part in zip(products, parts, strict=True):
        p.node.replace_all_uses_with(part)
    return len(products) - 1


def _look(node: fx.Node, value: Any, views: dict[fx.Node, Any]) -> bool:
    """Whether all views of a node are views of another ``value`` of it, too, which are put into ``views``."""
    views[node] = value
    for user in node.users:
        if user.op != "call_function" or not is_view(user):
            continue
        try:
            args, kwargs = map_arg((user.args, user.kwargs), lambda n: views.get(n, n.meta["val"]))
            seen = user.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):
            return False
        if not _look(user, seen, views):
            return False
    return True
