"""A scale of columns in front of products with weights that do not change is part of these weights.

``(x * g + b) @ W + c = x @ (diag(g) W) + (b @ W + c)``. Weights and biases are made in double precision and rounded
once. It pays where ``x`` lies in memory, so that nothing is left to do in front of the product. A norm's scale can be
folded too, and norms of one tensor that differ in scale and shift alone are one then; but the norm's kernel stays, and
takes as long without them, so that only a decision by hand does it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ....scheduler.cost.frozen import folded_times, folding_pays
from ....scheduler.decisions import Alternative
from ...tracing.hints import hint_of
from ..context import AtenContext
from ..write import NodeWriter, tidy
from .known import is_view, known_of, memories, unwritten
from .part import FOR
from .weight_products import WeightProduct, is_memory, weight_product
from .worth import Worth

aten = torch.ops.aten

_WIDE = (torch.float32, torch.float64)  # half types would round the weights, too
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_NORMS = {aten.native_layer_norm.default: 2, aten._fused_rms_norm.default: 1}  # how many of scale and shift each takes
# What lies in memory whoever reads it.
_STORED = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default)


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """``node`` is rows times a ``scale``, plus a ``shift``, which have an element for each column; either may be None.
    ``plain`` is the rows where the graph has them, else ``norm`` makes them. ``products`` are all that reads the node,
    each with the views between, the first one first."""

    node: fx.Node
    scale: fx.Node | None
    shift: fx.Node | None
    plain: fx.Node | None
    norm: fx.Node | None
    products: tuple[tuple[WeightProduct, tuple[fx.Node, ...]], ...]

    @property
    def rows(self) -> Hashable:
        """Equal for those of the same rows."""
        if self.norm is None:
            return self.plain
        x, shape, *_, eps = self.norm.args
        return self.norm.target, x, tuple(shape), eps  # type: ignore[arg-type]


def fold_scales(gm: fx.GraphModule, context: AtenContext) -> int:
    """Fold, in place, scales and shifts of columns into weights behind them; how many products have others."""
    graph = gm.graph
    known = known_of(graph, context.frozen)
    worth = Worth.of(graph, context.target)
    groups: dict[Hashable, list[ScaledRows]] = {}
    for node in graph.nodes:
        found = _scaled_rows(node, known, worth)
        if found is not None:
            groups.setdefault(found.rows, []).append(found)
    done, written = 0, False
    # Rows are read by the products then, which stand behind what may write them.
    still = unwritten(graph, [g[0].plain for g in groups.values() if g[0].plain is not None])
    for group in groups.values():
        if (group[0].plain is None or group[0].plain in still) and _pays(group, context):
            written = True
            done += _folded(graph, group, context)
    if written:
        tidy(graph)
        graph.lint()
    return done


# --- what is there ----------------------------------------------------------------------------------------------------


def _scaled_rows(node: fx.Node, known: set[fx.Node], worth: Worth) -> ScaledRows | None:
    """What a node is, where products with weights that do not change alone read it, and nobody else needs it."""
    value = node.meta.get("val")
    if node.op != "call_function" or node in known or not isinstance(value, torch.Tensor):
        return None
    if value.dtype not in _WIDE or not value.dim() or not memories(node).isdisjoint(worth.leaving):
        return None
    parts = _of_norm(node) or _of_factors(node, known)
    if parts is None:
        return None
    scale, shift, plain, norm = parts
    width = value.shape[-1]
    if not isinstance(width, int):
        return None
    if not all(p is None or (p in known and _is_row(p, width, value.dtype)) for p in (scale, shift)):
        return None
    products = tuple(_products(node, width, known, ()))
    if not products or not all(p is not None and is_memory(p[0].weight, worth) for p in products):
        return None
    return ScaledRows(node, scale, shift, plain, norm, products)  # type: ignore[arg-type]


Parts = tuple[fx.Node | None, fx.Node | None, fx.Node | None, fx.Node | None]


def _of_norm(node: fx.Node) -> Parts | None:
    """Scale, shift and the norm, of a norm of the last dimension."""
    norm: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    count = _NORMS.get(norm.target) if isinstance(norm, fx.Node) else None
    if count is None or len(norm.args[1]) != 1:
        return None
    own = norm.args[2 : 2 + count]
    scale, shift = (own[0], own[1]) if count == 2 else (own[0], None)
    return None if scale is None and shift is None else (scale, shift, None, norm)


def _of_factors(node: fx.Node, known: set[fx.Node]) -> Parts | None:
    """Scale, shift and rows, of a sum or product that is written out."""
    shift: fx.Node | None = None
    if node.target is aten.add.Tensor and not node.kwargs:
        sides = _sides(node, known)
        if sides is None:
            return None
        node, shift = sides
        if node.target is not aten.mul.Tensor or len(node.users) != 1:
            return None
    if node.target is not aten.mul.Tensor:
        return None
    sides = _sides(node, known)
    if sides is None:
        return None
    return sides[1], shift, sides[0], None


def _sides(node: fx.Node, known: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Of two operands the one that changes, which has the type of the result, and the one that does not."""
    for a, b in (node.args[:2], node.args[1::-1]):
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and a not in known and b in known:
            have, want = a.meta["val"], node.meta["val"]
            if isinstance(have, torch.Tensor) and have.dtype is want.dtype and have.shape == want.shape:
                return a, b
    return None


def _is_row(node: fx.Node, width: int, dtype: torch.dtype) -> bool:
    """Whether a tensor is one row of elements of a type, whatever else its dimensions are."""
    value = node.meta["val"]
    return value.dtype is dtype and value.dim() > 0 and value.shape[-1] == width == value.numel()


def _products(
    node: fx.Node, width: int, known: set[fx.Node], views: tuple[fx.Node, ...]
) -> Iterator[tuple[WeightProduct, tuple[fx.Node, ...]] | None]:
    """The products that read a node, through views that leave rows as they are; None for each other reader."""
    for user in node.users:
        product = weight_product(user, known)
        if product is not None and product.x is node:
            yield product, views
        elif user.target in _VIEWS and user.users and _keeps_rows(user, width):
            yield from _products(user, width, known, (*views, user))
        else:
            yield None


def _keeps_rows(view: fx.Node, width: int) -> bool:
    shape = view.meta["val"].shape
    return bool(shape) and isinstance(shape[-1], int) and shape[-1] == width


# --- what it saves ----------------------------------------------------------------------------------------------------


def _pays(group: Sequence[ScaledRows], context: AtenContext) -> bool:
    """Whether the passes that multiply rows at each call take a noticeable share of their products' time."""
    products = [p for rows in group for p, _ in rows.products]
    x = products[0].x.meta["val"]
    target = context.target(str(x.device))
    sizes = [(hint_of(p.x.meta["val"].shape[0]), hint_of(p.x.meta["val"].shape[1]), p.columns) for p in products]
    passes = len(group) if _is_stored(group[0]) else 0
    times = folded_times(sizes, passes, x.dtype.itemsize, target)
    return context.decide(
        "folded-scale", (*sizes, passes, x.dtype),
        (Alternative("folded", times[0]), Alternative("apart", times[1])), folding_pays(*times, target),
        at=group[0].node.name, nbytes=sum(k * n for _, k, n in sizes) * x.dtype.itemsize,
    )  # fmt: skip


def _is_stored(rows: ScaledRows) -> bool:
    """Whether rows lie in memory as they are."""
    node = rows.plain
    while node is not None and node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node is not None and (node.op == "placeholder" or node.target in _STORED)


# --- what stands there instead ----------------------------------------------------------------------------------------


def _folded(graph: fx.Graph, group: Sequence[ScaledRows], context: AtenContext) -> int:
    """How many products have other weights: none where what is written would not be kept, or lie as it did."""
    plain = group[0].plain or _written_norm(graph, group[0])
    views: dict[Hashable, fx.Node] = {}
    found: list[tuple[fx.Node, fx.Node, fx.Node]] = []
    for rows in group:
        for product, between in rows.products:
            x = plain
            for view in between:
                key = x, view.target, str(view.args[1:])
                if key not in views:
                    with graph.inserting_before(view):
                        views[key] = NodeWriter(graph, view).call(view.target, x, *view.args[1:])
                x = views[key]
            found.append((product.node, *_written(graph, product, x, rows)))
    worth = Worth.of(graph, context.target)
    if not all(n.meta["val"].stride() == p.meta["val"].stride() and is_memory(w, worth) for p, n, w in found):
        return 0  # nobody reads what was written
    for product_node, new, _ in found:
        product_node.replace_all_uses_with(new)
    return len(found)


def _written_norm(graph: fx.Graph, rows: ScaledRows) -> fx.Node:
    """A norm without scale and shift."""
    norm = rows.norm
    assert norm is not None
    out, count = NodeWriter(graph, rows.node), _NORMS[norm.target]  # type: ignore[index]
    with graph.inserting_before(norm):
        made = out.call(norm.target, *norm.args[:2], *(None,) * count, *norm.args[2 + count :])
        return out.call(operator.getitem, made, 0)


def _written(graph: fx.Graph, product: WeightProduct, x: fx.Node, rows: ScaledRows) -> tuple[fx.Node, fx.Node]:
    """The product of rows as they are, and its weight."""
    kind, out = product.weight.meta["val"].dtype, NodeWriter(graph, product.node)

    def wide(node: fx.Node) -> fx.Node:
        node = node if node.meta["val"].dim() == 1 else out.call(aten.view.default, node, [-1])
        return out.cast(node, torch.float64)

    with graph.inserting_before(product.node):
        weight, bias = product.weight, product.bias
        exact = out.cast(weight, torch.float64)
        if rows.shift is not None:
            moved = out.call(aten.mm.default, out.call(aten.view.default, wide(rows.shift), [1, -1]), exact)
            moved = out.call(aten.view.default, moved, [-1])
            if bias is not None:
                moved = out.call(aten.add.Tensor, moved, wide(bias))
            bias = out.cast(moved, kind)
            bias.meta[FOR] = "bias with the shift in front of its product"
        if rows.scale is not None:
            scale = out.call(aten.view.default, wide(rows.scale), [-1, 1])
            weight = out.cast(out.call(aten.mul.Tensor, exact, scale), kind)
            weight.meta[FOR] = "weight with the scale in front of its product"
        if bias is None:
            return out.call(aten.mm.default, x, weight), weight
        return out.call(aten.addmm.default, bias, x, weight), weight


__all__ = ["fold_scales"]
