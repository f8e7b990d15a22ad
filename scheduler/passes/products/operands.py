"""Products of matrices, and what their operands and the functions between them are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from ....ir.expr.value import Call, Const, Expr, Load, cast, free_symbols, is_value, length
from ....ir.expr.value import loads as loads_of
from ....ir.graph.graph import Compute, Library, Ref, TensorType, uses
from ...facts.definitions import Definitions, keeps, unrounded
from ...facts.fusion_nodes import is_cheap, is_drawn

# A function of other tensors than scores beyond so many nodes is made apart.
MAX_APART = 64


@dataclass(frozen=True, slots=True)
class Product:
    """``node[b, i, j] = beta * added[b, i, j] + alpha * sum over e of left[b, i, e] * right[b, e, j]``, b only if
    ``rank`` is 3."""

    node: Library
    left: str
    right: str
    rank: int
    added: str | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def name(self) -> str:
        return self.node.names[0]

    @property
    def type(self) -> TensorType:
        kind = self.node.types[0]
        assert kind is not None
        return kind


def product_of(node: object) -> Product | None:
    """The matrix product that a library call is, if it is one."""
    if not isinstance(node, Library):
        return None
    tensors = [a.name for a in node.args if isinstance(a, Ref)]
    match node.target:
        case "aten::bmm.default" | "aten::mm.default" if len(tensors) == len(node.args) == 2:
            return Product(node, tensors[0], tensors[1], 3 if "bmm" in node.target else 2)
        case "aten::baddbmm.default" | "aten::addmm.default" if len(tensors) == len(node.args) == 3:
            factors: dict[str, Any] = dict(node.kwargs)
            numbers = (factors.get("alpha", 1), factors.get("beta", 1))
            if all(isinstance(x, (int, float)) for x in numbers) and factors.keys() <= {"alpha", "beta"}:
                rank = 3 if "baddbmm" in node.target else 2
                return Product(node, tensors[1], tensors[2], rank, tensors[0], *map(float, numbers))
    return None


def mentions(index: object, *axes: sympy.Symbol) -> bool:
    if is_value(index):
        return not free_symbols(index).isdisjoint(axes)
    assert isinstance(index, sympy.Basic)
    return not index.free_symbols.isdisjoint(axes)


def made_of(found: Definitions, name: str) -> set[str]:
    """Every tensor that depends on one."""
    result = {name}
    for node in found.graph.nodes:
        if not result.isdisjoint(uses(node)):
            result.update(node.names)
    return result


def is_simple(found: Definitions, made: Compute) -> bool:
    """Whether a tensor that is no score is better computed where it is read than read from memory.

    Random numbers are, since as many as scores would have to be written.
    """
    if is_drawn(made.value):
        return True
    if not is_cheap(made.value) or length(made.value) > MAX_APART:
        return False
    gathers = [ld for ld in loads_of(made.value) if any(is_value(i) for i in ld.indices)]
    extents = dict(zip(made.axes, made.type.shape, strict=True))
    return all(found.within(extents).settled_load(ld) is not None for ld in gathers)


def operand(found: Definitions, load: Load) -> Expr:
    return scaled(found, load, constants=False)[0]


def scaled(found: Definitions, load: Load, constants: bool = True) -> tuple[Expr, float]:
    """An operand read through views, copies and conversions that lose nothing; and the constants that multiply it."""
    kind, scale = load.dtype.compute, 1.0
    current = found.base(load)
    while True:
        made = found.makers.get(current.buffer)
        if not isinstance(made, Compute):
            break
        value = unrounded(found.moved(made.value, made.axes, current.indices))
        factor = 1.0
        if constants and isinstance(value, Call) and value.fn == "mul":
            for x, c in (value.args, value.args[::-1]):
                if isinstance(c, Const) and isinstance(unrounded(x), Load):
                    value, factor = unrounded(x), float(c.value)
                    break
        if not isinstance(value, Load) or any(is_value(i) for i in value.indices):
            break
        if not keeps(value.dtype, current.dtype):
            break
        current, scale = found.base(value), scale * factor
    return cast(current, kind), scale
