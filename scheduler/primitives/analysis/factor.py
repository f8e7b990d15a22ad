"""A positive number by which all of a reduction's elements are multiplied, taken away from them where they are made."""

from __future__ import annotations

import math
from dataclasses import replace

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Const, Expr, Load, Select, loads
from ....ir.nest.loops import Block, LoopNest, Node, Store, Update, blocks, map_nodes


def without_factor(nest: LoopNest, block: Block, value: Expr) -> tuple[float, LoopNest, Expr]:
    """The factor, the nest whose blocks do not multiply by it any more, and what the block reads then.

    ``value`` is one that ``block`` reduces. Rounding is monotone, so that the maximum of products is the product of the
    maximum, and a choice of minus infinity stays one. One and nothing changed where there is no such number.
    """
    factor, changed = _without(value)
    if factor != 1.0:
        return factor, nest, changed
    if not isinstance(value, Load) or value.buffer not in {b.name for b in nest.locals}:
        return 1.0, nest, value
    found = [(b, s) for b, _ in blocks(nest) for s in b.body if isinstance(s, Store) and s.buffer == value.buffer]
    if len(found) != 1 or _reads(nest, value.buffer) != 1:
        return 1.0, nest, value
    ((maker, store),) = found
    factor, nest, changed = _in_place(nest, maker, store)
    return factor, nest, value


def _in_place(nest: LoopNest, maker: Block, store: Store) -> tuple[float, LoopNest, Expr]:
    factor, changed = _without(store.value)
    if factor == 1.0:
        return without_factor(nest, maker, store.value)

    def visit(n: Node) -> Node | None:
        if n is not maker:
            return None
        return replace(maker, body=tuple(replace(s, value=changed) if s is store else s for s in maker.body))  # type: ignore[arg-type]

    return factor, replace(nest, body=map_nodes(nest.body, visit)), changed


def _reads(nest: LoopNest, buffer: str) -> int:
    """How many places read a buffer, or add to it."""
    count = 0
    for b, _ in blocks(nest):
        for s in b.body:
            values = s.values if isinstance(s, Update) else (s.value,)
            count += sum(ld.buffer == buffer for v in values for ld in loads(v))
            count += sum(t.buffer == buffer for t in s.targets) if isinstance(s, Update) else 0
    return count


def _without(value: Expr) -> tuple[float, Expr]:
    match value:
        case Call("mul", (x, Const(number, _)), DType.FLOAT32) | Call("mul", (Const(number, _), x), DType.FLOAT32):
            # Maxima of what is left are as large as those before, or there would be infinities beside numbers.
            return (float(number), x) if 0 < number <= 1 else (1.0, value)
        case Select(condition, a, Const() as lowest) if lowest.value == -math.inf:
            factor, inner = _without(a)
            return factor, Select(condition, inner, lowest)
        case Select(condition, Const() as lowest, b) if lowest.value == -math.inf:
            factor, inner = _without(b)
            return factor, Select(condition, lowest, inner)
    return 1.0, value
