"""What a tensor's elements are, read off the nodes that make them: one step at a time, through views and copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.index import Extents, simplify
from ...ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, is_value, rewrite
from ...ir.graph.facts import makers_of, users_of
from ...ir.graph.graph import Compute, Graph, Node, Reduction
from .views import ViewMap, map_value, views_of

_ARITHMETIC = {"add": sympy.Add, "mul": sympy.Mul, "sub": lambda a, b: a - b}


def keeps(origin: DType, kind: DType) -> bool:
    """Whether a conversion from ``origin`` to ``kind`` keeps every value."""
    if origin is kind:
        return True
    return origin.is_float and (kind is DType.FLOAT64 or (kind is DType.FLOAT32 and origin.is_half))


def is_rounding(e: Expr) -> bool:
    """A conversion between floating types that says how precise a value may be and not what it is: one that loses
    nothing, or is made when stored."""
    if not isinstance(e, Cast) or not e.value.dtype.is_float:
        return False
    return keeps(e.value.dtype, e.dtype) or e.when_stored


def unrounded(e: Expr) -> Expr:
    """The value inside conversions between floating types that do not change what it is."""
    while isinstance(e, Cast) and is_rounding(e):
        e = e.value
    return e


@dataclass(slots=True)
class Definitions:
    """The nodes of a graph by the tensors that they make, for following loads to where values come from.

    ``extents`` bounds the axes in which positions are given.
    """

    graph: Graph
    extents: Extents = field(default_factory=dict)

    @property
    def views(self) -> ViewMap:
        return views_of(self.graph)

    @property
    def makers(self) -> Mapping[str, Node]:
        return makers_of(self.graph)

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a tensor by this name."""
        return [self.graph.nodes[k] for k in users_of(self.graph).get(name, ())]

    def within(self, extents: Extents) -> Definitions:
        """The same definitions for positions in other axes."""
        return Definitions(self.graph, extents)

    def base(self, load: Load) -> Load:
        """The load read through all views."""
        name, indices = self.views.access(load.buffer, load.indices, self.extents)
        return load if name == load.buffer else Load(name, indices, load.dtype)

    def moved(self, value: Expr, axes: tuple[sympy.Symbol, ...], indices: tuple[object, ...]) -> Expr:
        """A node's value at a position of its axes."""
        value = map_value(value, dict(zip(axes, indices, strict=True)))
        return rewrite(value, lambda _: None, lambda i: simplify(i, self.extents, self.views.table))

    def step(self, load: Load) -> Expr | None:
        """What a load reads, in terms of the next nodes back; None where that is no element-wise node."""
        base = self.base(load)
        made = self.makers.get(base.buffer)
        if isinstance(made, Compute):
            return self.moved(made.value, made.axes, base.indices)
        return None

    def peel(self, e: Expr) -> Expr:
        """The first value that is neither such a conversion (``is_rounding``) nor read from an element-wise node."""
        while True:
            if isinstance(e, Load):
                inner = self.step(e)
                if inner is None:
                    return self.base(e)
                e = inner
            elif is_rounding(e):
                e = unrounded(e)
            else:
                return e

    def state(self, e: Expr) -> tuple[Reduction, int, Load] | None:
        """The reduction that a value is a result of, which of its components, and the load of it."""
        e = self.peel(e)
        if not isinstance(e, Load):
            return None
        made = self.makers.get(e.buffer)
        return (made, made.names.index(e.buffer), e) if isinstance(made, Reduction) else None

    def same(self, a: Expr, b: Expr) -> bool:
        """Whether two values are proved equal, but for conversions between floating types on the way."""
        a, b = unrounded(a), unrounded(b)
        if a == b:
            return True
        if isinstance(a, Load) and (inner := self._deeper(a)) is not None:
            return self.same(inner, b)
        if isinstance(b, Load) and (inner := self._deeper(b)) is not None:
            return self.same(a, inner)
        match a, b:
            case Call(), Call():
                return a.fn == b.fn and all(map(self.same, a.args, b.args))
            case Cast(), Cast():
                return a.dtype is b.dtype and self.same(a.value, b.value)
            case Select(), Select():
                return (
                    self.same(a.condition, b.condition)
                    and self.same(a.if_true, b.if_true)
                    and self.same(a.if_false, b.if_false)
                )
        return False

    def _deeper(self, load: Load) -> Expr | None:
        inner = self.step(load)
        if inner is None:
            base = self.base(load)
            return base if base != load else None
        return inner

    # --- positions that are computed ----------------------------------------------------------------------------------

    def settled(self, e: Expr) -> sympy.Expr | None:
        """An integer value as an index expression in the axes, where it is one whatever the data."""
        match e:
            case IndexValue(index, _):
                return index
            case Const(value, dtype) if dtype.is_int:
                return sympy.Integer(int(value))
            case Cast(inner, dtype) if dtype is DType.INT64 and inner.dtype.is_int:
                return self.settled(inner)
            case Load():
                deeper = self.step(e)
                return None if deeper is None else self.settled(deeper)
            case Call("check_bounds", (x, low, high, _), _):
                index, first, end = map(self.settled, (x, low, high))
                if index is None or first is None or end is None:
                    return None
                return index if self.is_position(index - first) and self.is_position(end - index - 1) else None
            case Call(fn, args, dtype) if fn in _ARITHMETIC and dtype is DType.INT64:
                known = [self.settled(a) for a in args]
                return None if None in known else sympy.expand(_ARITHMETIC[fn](*known))
            case Select(Call("lt", (x, Const(0, _)), _), _, y):
                # A position that may count from the end, and is known not to.
                index = self.settled(y)
                if index is not None and self.same(x, y) and self.is_position(index):
                    return index
        return None

    def is_position(self, index: sympy.Expr) -> bool:
        """Whether an index is proved not to be negative: it is not where each axis in turn is at the end that makes the
        index least."""
        least = sympy.expand(index)
        for axis, extent in self.extents.items():
            slope = least.coeff(axis)
            if slope.is_Integer and axis not in (least - slope * axis).free_symbols:
                least = sympy.expand(least.xreplace({axis: sympy.S.Zero if slope >= 0 else extent - 1}))
        return self.views.table.bounds(least, dict(self.extents))[0] >= 0

    def settled_load(self, load: Load) -> Load | None:
        """The load with every computed position as an index expression; None where data decide one."""
        indices = [self.settled(i) if is_value(i) else i for i in load.indices]
        return None if any(i is None for i in indices) else Load(load.buffer, tuple(indices), load.dtype)
