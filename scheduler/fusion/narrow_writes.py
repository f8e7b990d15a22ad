"""Functions that write new elements to a part of an input, and to the rest what is there, visit that part alone: a
slice of a cache is assigned, or sums are added to the rows of a table that data name."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from ...ir.expr.index import is_within, simplify
from ...ir.expr.monoid import SUM
from ...ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, call, conjuncts, const, rewrite
from ...ir.function.function import Dim, Output, TensorFunction
from ...ir.nest.data_ends import counted
from ...ir.nest.kept import is_element
from ..functions.scalars import is_elementwise

_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq"}


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What of a dimension is written: from ``begin`` to ``end``."""

    begin: sympy.Expr
    end: sympy.Expr


def narrowed(function: TensorFunction) -> TensorFunction:
    """A function that writes over its input, over the part of the domain where conditions on positions hold, where it
    writes what is there elsewhere; any other as it is."""
    function = _kept_without_terms(function)
    while (part := _narrowed(function)) is not function:
        function = part
    return function


def _kept_without_terms(function: TensorFunction) -> TensorFunction:
    """A function that adds sums to what it writes over, and says where data leave a sum no terms that what is there
    stays: nobody needs to visit it then."""
    if len(function.outputs) != 1 or len(function.inner) != 1:
        return function
    (out,) = function.outputs
    at, value = _written(function, out)
    if not isinstance(value, Call) or value.fn != "add":
        return function
    for old, total in (value.args, value.args[::-1]):
        count = _terms(function, total) if _is_old(old, out) else None
        if count is not None:
            return _rewritten(function, at, Select(call("lt", const(0, count.dtype), count), value, old))
    return function


def _terms(function: TensorFunction, total: Expr) -> Expr | None:
    """How many terms data give to a sum over the inner dimension, for each row; None for anything else."""
    rows = tuple(d.var for d in function.rows)
    if not isinstance(total, Load) or total.indices != rows:
        return None
    made = next((s for s in function.stages if total.buffer in s.results), None)
    if made is None or made.monoid != SUM or made.scan or made.axes is not None or made.over is not None:
        return None
    return counted(SUM, made.values[0], function.inner[0].var)


def _narrowed(function: TensorFunction) -> TensorFunction:
    """The function by its outermost choice."""
    if len(function.outputs) != 1 or function.inner or not is_elementwise(function):
        return function
    (out,) = function.outputs
    at, value = _written(function, out)
    if not isinstance(value, Select) or not _is_old(value.if_false, out) or len(function.stages[at].results) != 1:
        return function
    parts: dict[sympy.Symbol, _Stretch] = {}
    left: list[Expr] = []
    for condition in conjuncts(value.condition):
        left += [] if _takes(function, condition, parts) else [condition]
    parts = {v: p for v, p in parts.items() if p != _whole(function, v)}
    if not parts:
        return function
    new: Expr = value.if_true
    if left:
        condition = left[0]
        for other in left[1:]:
            condition = call("logical_and", condition, other)
        new = Select(condition, new, value.if_false)
    stages = _rewritten(function, at, new).stages
    rows = tuple(Dim(d.var, parts[d.var].end - parts[d.var].begin) if d.var in parts else d for d in function.rows)
    extents = {d.var: d.extent for d in rows}
    shift = {v: v + p.begin for v, p in parts.items()}

    def moved(i: sympy.Expr) -> sympy.Expr:
        return simplify(i.xreplace(shift), extents, function.symbols) if i.free_symbols else i

    return replace(
        function,
        rows=rows,
        stages=tuple(replace(s, values=tuple(rewrite(v, lambda _: None, moved) for v in s.values)) for s in stages),
        outputs=(replace(out, indices=tuple(map(moved, out.indices))),),
    )


def _written(function: TensorFunction, out: Output) -> tuple[int, Expr]:
    """The place of the stage that makes an output, and its value before it is converted to the output's type."""
    at = next(k for k, s in enumerate(function.stages) if out.result in s.results)
    value = function.stages[at].values[0]
    return at, value.value if isinstance(value, Cast) else value


def _rewritten(function: TensorFunction, at: int, new: Expr) -> TensorFunction:
    """The function with another value of a stage, converted as its value was."""
    stage = function.stages[at]
    stored = stage.values[0]
    if isinstance(stored, Cast):
        new = Cast(new, stored.dtype, stored.when_stored)
    return replace(function, stages=(*function.stages[:at], replace(stage, values=(new,)), *function.stages[at + 1 :]))


def _is_old(value: Expr, out: Output) -> bool:
    """Whether a value is the element that is written over."""
    return is_element(value, out.buffer.name, out.indices, out.buffer.dtype)


def _whole(function: TensorFunction, var: sympy.Symbol) -> _Stretch:
    return _Stretch(sympy.S.Zero, next(d.extent for d in function.rows if d.var == var))


def _takes(function: TensorFunction, condition: Expr, parts: dict[sympy.Symbol, _Stretch]) -> bool:
    """Make the part of a dimension what a condition leaves of it; whether that is all that the condition says."""
    if not isinstance(condition, Call) or condition.fn not in _MIRRORED:
        return False
    variables = {d.var for d in function.rows}
    fn, (a, b) = condition.fn, condition.args
    place, bound = _place(a, variables), _number(b, variables)
    if place is None or bound is None:
        fn, place, bound = _MIRRORED[fn], _place(b, variables), _number(a, variables)
    if place is None or bound is None:
        return False
    var, step = place
    extent, known = _whole(function, var).end, parts.get(var, _whole(function, var))
    limit = bound - step
    begin = {"ge": limit, "gt": limit + 1, "eq": limit}.get(fn, sympy.S.Zero)
    end = {"le": limit + 1, "lt": limit, "eq": limit + 1}.get(fn, extent)
    later, earlier = _later(known.begin, begin), _earlier(known.end, end, extent)
    if later is None or earlier is None:
        return False
    made = _Stretch(later, earlier)
    size = sympy.expand(made.end - made.begin)
    if not (size.is_Symbol or (size.is_Integer and size > 0)):
        return False
    if not is_within(made.begin + var, extent, {var: size}, function.symbols):
        return False
    parts[var] = made
    return True


def _later(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """The larger of two places, None where sizes decide which that is."""
    if a.is_Integer and b.is_Integer:
        return sympy.Max(a, b)
    return a if b in (0, a) else b if a == 0 else None


def _earlier(a: sympy.Expr, b: sympy.Expr, extent: sympy.Expr) -> sympy.Expr | None:
    """The smaller of two places up to ``extent``, None where sizes decide which that is."""
    if a.is_Integer and b.is_Integer:
        return sympy.Min(a, b)
    return a if b in (extent, a) else b if a == extent else None


def _place(e: Expr, variables: set[sympy.Symbol]) -> tuple[sympy.Symbol, sympy.Expr] | None:
    """The dimension, and what is added to it, of an index along one alone."""
    if not isinstance(e, IndexValue):
        return None
    moving = e.index.free_symbols & variables
    if len(moving) != 1:
        return None
    (var,) = moving
    step = sympy.expand(e.index - var)
    return None if var in step.free_symbols else (var, step)


def _number(e: Expr, variables: set[sympy.Symbol]) -> sympy.Expr | None:
    """What a bound is that no dimension moves."""
    if isinstance(e, Const) and isinstance(e.value, int):
        return sympy.Integer(e.value)
    if isinstance(e, IndexValue) and not e.index.free_symbols & variables:
        return e.index
    return None


__all__ = ["narrowed"]
