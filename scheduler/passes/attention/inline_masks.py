"""Masks of attention are computed where scores are: comparisons of positions with numbers that are read.

Layers share a mask, and each would read from memory what a comparison tells, without knowing which keys it hides. In
place, tiles of keys that it hides are left out, by positions alone or by the numbers (``live_ends``).
"""

from __future__ import annotations

from dataclasses import replace

from ....ir.expr.monoid import ATTENTION
from ....ir.expr.ops import OPS
from ....ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, length, loads, rewrite
from ....ir.graph.graph import Compute, Graph, Node, Reduction
from ....ir.target import has_kernels
from ...cost.attention import MASK_NODES, MASK_OPERATIONS, MASK_STEPS
from ...facts.definitions import Definitions
from ...facts.order import in_order


def inline_masks(graph: Graph) -> Graph:
    """Compute masks of positions in the functions of scores that read them; the same graph where there are none."""
    found = Definitions(graph)
    scores = {
        ld.buffer
        for n in graph.nodes
        if isinstance(n, Reduction) and n.monoid is ATTENTION and has_kernels(n.types[0].device)
        for ld in loads(n.values[0])
    }
    changed: dict[str, Node] = {}
    for name in scores:
        node = found.makers.get(name)
        if isinstance(node, Compute):
            extents = dict(zip(node.axes, node.type.shape, strict=True))
            value = _with_masks(node.value, found.within(extents))
            if value is not node.value:
                changed[name] = replace(node, value=value)
    if not changed:
        return graph
    return in_order(graph, [changed.get(n.names[0], n) if n.names else n for n in graph.nodes])


def _with_masks(value: Expr, found: Definitions) -> Expr:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and isinstance(found.makers.get(found.base(e).buffer), Compute):
            mask = _mask(e, found, MASK_STEPS)
            if mask is not None and length(mask) <= MASK_NODES and _compares(mask):
                return mask
        return None

    return rewrite(value, leaf)


def _mask(e: Expr, found: Definitions, depth: int) -> Expr | None:
    """A value over positions, constants, and integers and booleans that are in memory; None where it is of another
    kind."""
    match e:
        case Const() | IndexValue():
            return e
        case Load():
            inner = found.step(e) if depth else None
            if inner is not None:
                return _mask(inner, found, depth - 1)
            base = found.base(e)
            kept = not base.dtype.is_float and not isinstance(found.makers.get(base.buffer), Compute)
            return base if kept else None
        case Cast(inner, dtype):
            made = _mask(inner, found, depth)
            return None if made is None else Cast(made, dtype, e.when_stored)
        case Call(fn, args, dtype) if OPS[fn].flops <= MASK_OPERATIONS:
            parts = [_mask(a, found, depth) for a in args]
            return None if None in parts else Call(fn, tuple(parts), dtype)  # type: ignore[arg-type]
        case Select(c, a, b):
            three = [_mask(x, found, depth) for x in (c, a, b)]
            return None if None in three else Select(*three)  # type: ignore[arg-type]
    return None


def _compares(mask: Expr) -> bool:
    """Whether positions are compared in it: what only reads is read as well where it lies."""
    match mask:
        case Call(fn, args, _):
            ordered = fn in ("lt", "le", "gt", "ge") and any(_has_position(a) for a in args)
            return ordered or any(map(_compares, args))
        case Cast(inner, _):
            return _compares(inner)
        case Select(c, a, b):
            return any(map(_compares, (c, a, b)))
    return False


def _has_position(e: Expr) -> bool:
    match e:
        case IndexValue(index, _):
            return bool(index.free_symbols)
        case Call(_, args, _):
            return any(map(_has_position, args))
        case Cast(inner, _):
            return _has_position(inner)
    return False
