"""Results of a fused function that are but copies of parts, each the whole of an argument: what ``cat`` and ``stack``
become where other kernels have made what they join.

A part may have been taken apart or turned round on its way: where it lies in the result is read off index expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from ...ir.expr.index import Extents, simplify
from ...ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, is_value, symbol
from ...ir.function.function import TensorFunction
from ...ir.nest.loops import Buffer
from ..facts.domain import axes_in_row


@dataclass(frozen=True, slots=True)
class ConcatPart:
    """All of an argument, by its position, that is copied to ``offset`` elements behind the begin of a result, with
    these strides there."""

    given: int
    offset: sympy.Expr
    strides: tuple[sympy.Expr, ...]


def joins_of(function: TensorFunction) -> dict[int, list[ConcatPart]]:
    """The results, by position, that are but copies of two or more arguments."""
    if function.scatters or function.table:
        return {}
    found = {}
    for k, out in enumerate(function.outputs):
        stage = next(s for s in function.stages if out.result in s.results)
        if out.buffer in function.inputs or stage.monoid is not None or stage.axes is not None:
            continue
        parts = _parts(function, stage.values[0], out.buffer, out.indices)
        if parts is not None and len(parts) > 1 and len({p.given for p in parts}) == len(parts):
            found[k] = parts
    return found


def _parts(function: TensorFunction, value: Expr, out: Buffer, at: tuple[sympy.Expr, ...]) -> list[ConcatPart] | None:
    # A size that a number divides is a multiple of another, so that its quotients are no quotients.
    multiples = {z.symbol: z.divisor * symbol(f"{z.symbol.name}_by_{z.divisor}") for z in function.symbols.sizes}
    multiples = {s: m for s, m in multiples.items() if not m.is_Symbol}
    back = {next(iter(m.free_symbols)): FloorDiv(s, m.as_coeff_Mul()[0]) for s, m in multiples.items()}
    extents = {d.var: d.extent.xreplace(multiples) for d in function.dims}
    along, intervals = _intervals(value, {d.var: d.extent for d in function.dims})
    intervals = [(begin.xreplace(multiples), end.xreplace(multiples), leaf) for begin, end, leaf in intervals]
    place = sympy.expand(out.offset(at).xreplace(multiples))
    steps = {v: place.coeff(v) for v in extents}
    if along is None or sympy.expand(place - sum(v * s for v, s in steps.items())) != 0:
        return None
    if any(s.free_symbols & extents.keys() for s in steps.values()):
        return None
    positions = {b.name: k for k, b in enumerate(function.inputs)}
    found = []
    for begin, end, leaf in intervals:
        load = leaf.value if isinstance(leaf, Cast) else leaf
        if not isinstance(load, Load) or load.buffer not in positions or load.dtype is not out.dtype:
            return None
        if isinstance(leaf, Cast) and leaf.dtype is not out.dtype.compute:
            return None
        source = function.inputs[positions[load.buffer]]
        if source.dtype is not out.dtype or any(is_value(i) for i in load.indices):
            return None
        within = extents | {along: sympy.expand(end - begin)}
        moved = [i.xreplace(multiples).xreplace({along: along + begin}) for i in load.indices]  # type: ignore[union-attr]
        indices = [simplify(i, within, function.symbols) for i in moved]
        strides = _strides(tuple(n.xreplace(multiples) for n in source.shape), indices, within, steps)
        if strides is None:
            return None
        offset = sympy.expand(begin * steps[along]).xreplace(back)
        found.append(ConcatPart(positions[load.buffer], offset, tuple(s.xreplace(back) for s in strides)))
    return found


def _intervals(value: Expr, extents: Extents) -> tuple[sympy.Symbol | None, list[tuple[sympy.Expr, sympy.Expr, Expr]]]:
    """The dimension along which a value is one expression up to a place and another one behind it, and these."""
    along: sympy.Symbol | None = None
    begin: sympy.Expr = sympy.S.Zero
    found = []
    while isinstance(value, Select):
        match value.condition:
            case Call("lt", (IndexValue(place), limit)) if place in extents and (along is None or place == along):
                end = limit.index if isinstance(limit, IndexValue) else None
                end = sympy.Integer(int(limit.value)) if isinstance(limit, Const) else end
            case _:
                return None, []
        if end is None or end.free_symbols & extents.keys():
            return None, []
        along = place
        found.append((begin, end, value.if_true))
        begin, value = end, value.if_false
    if along is not None:
        found.append((begin, extents[along], value))
    return along, found


def _strides(
    shape: tuple[sympy.Expr, ...], indices: list[sympy.Expr], extents: Extents, steps: Mapping[sympy.Symbol, sympy.Expr]
) -> tuple[sympy.Expr, ...] | None:
    """The strides at which a tensor lies whose element at ``indices`` is ``steps`` times the loop variables further on;
    None where it is not all of the tensor, each element once."""
    strides: list[sympy.Expr] = []
    # What of each variable the dimensions are: a divisor and an extent each.
    digits: dict[sympy.Symbol, list[tuple[sympy.Expr, sympy.Expr]]] = {}
    for extent, index in zip(shape, indices, strict=True):
        if extent == 1:
            strides.append(sympy.S.One)
            continue
        if index.is_Add:
            ordered = axes_in_row(index, dict(extents))
            if ordered is None or sympy.expand(sympy.Mul(*(extents[v] for v in ordered)) - extent) != 0:
                return None
            for high, low in pairwise(ordered):
                if sympy.expand(steps[high] - steps[low] * extents[low]) != 0:
                    return None
            if any(v in digits for v in ordered):
                return None
            digits.update({v: [(sympy.S.One, extents[v])] for v in ordered})
            strides.append(steps[ordered[-1]])
            continue
        found = _digit(index)
        if found is None or found[0] not in extents:
            return None
        var, divisor = found
        digits.setdefault(var, []).append((divisor, extent))
        strides.append(sympy.expand(divisor * steps[var]))
    for var, extent in extents.items():
        whole: sympy.Expr = sympy.S.One
        for divisor, size in sorted(digits.get(var, []), key=lambda d: (not d[0].is_Integer, str(d[0]))):
            if sympy.expand(divisor - whole) != 0:
                return None
            whole = sympy.expand(whole * size)
        if sympy.expand(whole - extent) != 0:
            return None
    return tuple(strides)


def _digit(index: sympy.Expr) -> tuple[sympy.Symbol, sympy.Expr] | None:
    """The variable and the divisor of an index that is a variable, or a quotient or remainder of one."""
    match index:
        case sympy.Symbol():
            return index, sympy.S.One
        case FloorDiv() | ModularIndexing() if index.args[0].is_Symbol:
            return index.args[0], index.args[1]
        case Mod() | PythonMod() if index.args[0].is_Symbol:
            return index.args[0], sympy.S.One
    return None
