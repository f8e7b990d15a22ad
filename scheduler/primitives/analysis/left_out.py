"""What iterations of a sum would add that are left out because it is zero: NaN, where it is no number there.

An exponential of minus infinity less something is zero, unless that something is NaN or infinite. Where it belongs to
what the sum goes over (a row's largest score, for a sum over rows), a sum over that alone tells all that was left out.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, IndexValue, Load, Select, call, const, free_symbols, is_value, loads, symbol
from ....ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    Loop,
    LoopNest,
    Node,
    Scope,
    Update,
    blocks,
    contiguous_strides,
)
from .tree import fresh, linear_part


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A loop that sums what was left out, the buffer in which it is, and the axes at which it is read with the loops
    that they follow."""

    node: Node
    buffer: Buffer
    axes: tuple[tuple[Axis, sympy.Expr], ...]

    @property
    def load(self) -> Load:
        return Load(self.buffer.name, tuple(a.var for a, _ in self.axes), self.buffer.dtype)


def is_told_alone(
    nest: LoopNest, block: Block, values: Collection[Expr], outer: Sequence[Loop], inner: Sequence[Loop]
) -> bool:
    """Whether values are known before the last loop of ``outer`` for all its iterations: they are of parameters, at
    plain indices, and what is summed is one axis of which an iteration of the loop has a piece. They belong to what is
    summed or to what it is summed for, and are not as many as both."""
    if not values:
        return True
    if _step(block, outer[-1], inner) is None:
        return False
    given = {p.name for p in nest.params} - set(nest.outputs)
    known = {a.var for a in block.axes} | set(nest.symbols.symbols)
    reads = [ld for v in values for ld in loads(v)]
    plain = all(ld.buffer in given and not any(is_value(i) for i in ld.indices) for ld in reads)
    (over,) = block.axes_of(AxisKind.REDUCTION)
    within = {lp.var for lp in inner}
    several = {a.var for a, e in zip(block.axes, block.bindings, strict=True) if e.free_symbols & within} - {over.var}
    used = {s for v in values for s in free_symbols(v)}
    return plain and used <= known and not (over.var in used and used & several)


def left_out(
    nest: LoopNest, block: Block, bounds: Mapping[Bound, Collection[Expr]], outer: Sequence[Loop], inner: Sequence[Loop]
) -> LeftOut | None:
    """The sum of what each bound leaves out of ``block``'s sum over the last loop of ``outer``; None where that is
    zero. The values of all bounds are told alone."""
    found = {b: rest for b, rest in bounds.items() if rest}
    if not found:
        return None
    step = _step(block, outer[-1], inner)
    (over,) = block.axes_of(AxisKind.REDUCTION)
    assert step is not None
    taken = {a.var.name for b, _ in blocks(nest) for a in b.axes} | {b.name for b in (*nest.params, *nest.locals)}
    name = _other(f"{block.name}_left_out", taken)
    used = {s for rest in found.values() for v in rest for s in free_symbols(v)}
    pairs = zip(block.axes, block.bindings, strict=True)
    axes = [(a, e) for a, e in pairs if a.var in used and a is not over]
    # Along the summed axis, or a place for each iteration where values do not move along it.
    summed = over if over.var in used else replace(over, var=symbol(_other("tile", taken)), extent=outer[-1].extent)
    places = {outer[-1].var: FloorDiv(over.var, step) if summed is over else summed.var}
    speaks = {s for b in found for s in (b.lhs - b.rhs).free_symbols}
    for lp in outer[:-1]:
        if lp.var in speaks:
            places[lp.var] = symbol(_other(f"{name}_place", taken))
            axes.append((Axis(places[lp.var], lp.extent), lp.var))
    terms: list[Expr] = [
        Select(call("le", _at(b.rhs, places), _at(b.lhs, places)), undefined, const(0.0, undefined.dtype))
        for b, rest in found.items()
        for undefined in sorted(rest, key=str)
    ]
    value: Expr = functools.reduce(lambda x, y: call("add", x, y), terms)
    shape = tuple(a.extent for a, _ in axes)
    buffer = Buffer(_other(f"{name}_sum", taken), shape, contiguous_strides(shape), value.dtype, Scope.LOCAL)
    update = Update(SUM, (Access(buffer.name, tuple(a.var for a, _ in axes)),), (value,))
    names = set[str]()
    copies: dict[sympy.Symbol, sympy.Expr] = {}
    for lp in (*inner, replace(outer[-1], var=summed.var)):
        if lp.var == summed.var or any(lp.var in e.free_symbols for _, e in axes):
            copies[lp.var] = symbol(fresh(nest, f"{name}_{lp.var}", names))
            names.add(copies[lp.var].name)
    fixed = {lp.var for lp in outer[:-1]} | copies.keys() | set(nest.symbols.symbols)
    predicate = tuple(
        Bound(b.lhs.xreplace(copies), b.rhs.xreplace(copies))
        for b in block.predicate
        if (b.lhs - b.rhs).free_symbols <= fixed
    )
    bindings = (*(e.xreplace(copies) for _, e in axes), copies[summed.var])
    node: Node = Block(name, (*(a for a, _ in axes), summed), bindings, (update,), predicate)
    node = Loop(copies[summed.var], summed.extent, (node,))  # type: ignore[arg-type]
    for lp in reversed(inner):
        if lp.var in copies:
            node = replace(lp, var=copies[lp.var], body=(node,))
    return LeftOut(node, buffer, tuple(axes))


def _at(index: sympy.Expr, places: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    return IndexValue(index.xreplace(places), DType.INT64)


def _step(block: Block, loop: Loop, inner: Sequence[Loop]) -> int | None:
    """How many elements of the one summed axis an iteration of the loop has, one after the other."""
    over = [e for a, e in zip(block.axes, block.bindings, strict=True) if a.kind is AxisKind.REDUCTION]
    parts = linear_part(over[0], loop.var) if len(over) == 1 else None
    if parts is None or not parts[0].is_Integer or parts[0] <= 0:
        return None
    step, rest = parts
    extents = {lp.var: lp.extent for lp in inner}
    for var in sorted(rest.free_symbols, key=str):
        part = linear_part(rest, var)
        if part is None or var not in extents or not part[0].is_Integer or part[0] <= 0:
            return None
        rest = part[1] + part[0] * (extents[var] - 1)
    return int(step) if rest.is_Integer and 0 <= rest < step else None


def _other(base: str, taken: set[str]) -> str:
    name = base
    while name in taken:
        name += "_"
    taken.add(name)
    return name
