"""Regions: what part of an axis or of a buffer's dimension a block touches while the loops inside a given one run.

A loop variable is *outer* where its loop is fixed and *inner* where it runs. An index then moves over an interval that
starts at an expression in outer variables. Required regions may be too large; covered ones may be too small.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from ....ir.errors import IRError
from ....ir.expr.index import simplify
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Index, Load, is_value
from ....ir.nest.loops import Access, Block, Bound, LoopNest

Extents: TypeAlias = Mapping[sympy.Symbol, sympy.Expr]
ZERO, ONE = sympy.S.Zero, sympy.S.One


@dataclass(frozen=True, slots=True)
class Region:
    """``extent`` places from ``start``. ``is_whole``: all that there is. ``is_dense``: every place is touched, not only
    some."""

    start: sympy.Expr
    extent: sympy.Expr
    is_whole: bool = False
    is_dense: bool = True

    @property
    def is_point(self) -> bool:
        return self.extent == 1


def axis_regions(block: Block, outer: Collection[sympy.Symbol], inner: Extents) -> dict[sympy.Symbol, Region]:
    """The region of each axis of a block, given the loops outside (fixed) and inside (running) some place."""
    found = {}
    for a, b in zip(block.axes, block.bindings, strict=True):
        tail = Bound(b, a.extent)
        guards = [p for p in block.predicate if p != tail and any(v in inner for v in p.lhs.free_symbols)]
        found[a.var] = _axis_region(b, a.extent, outer, inner, guards)
    return found


def _axis_region(
    binding: sympy.Expr, extent: sympy.Expr, outer: Collection[sympy.Symbol], inner: Extents, guards: Sequence[Bound]
) -> Region:
    if binding.is_Symbol:
        return Region(binding, ONE) if binding in outer else Region(ZERO, extent, is_whole=True)
    if not any(v in outer for v in binding.free_symbols):
        return Region(ZERO, extent, is_whole=True)
    start: list[sympy.Expr] = []
    moving: list[tuple[sympy.Expr, sympy.Expr]] = []
    seen: set[sympy.Symbol] = set()
    is_dense = True
    for term in terms(binding):
        inside = [v for v in term.free_symbols if v in inner]
        if not inside:
            start.append(term)
            continue
        if any(v in outer for v in term.free_symbols):
            return Region(ZERO, extent, is_whole=True, is_dense=False)
        is_dense &= not any(v in seen for v in inside)
        seen.update(inside)
        step, count = _walk(term, inner)
        if step is None or count is None:
            return Region(ZERO, extent, is_whole=True, is_dense=False)
        moving.append((step, count))
    reach = sympy.expand(sympy.Add(ONE, *(s * (n - 1) for s, n in moving)))
    is_dense = is_dense and _is_dense(moving)
    walked = binding - sympy.Add(*start)
    for g in guards:
        if sympy.expand(g.lhs - walked) == 0:  # the tail of a loop that was split once more
            reach = g.rhs
        elif not seen.isdisjoint(g.lhs.free_symbols):  # some places are left out, we do not know which
            is_dense = False
    return Region(sympy.Add(*start), reach, is_dense=is_dense)


def _walk(term: sympy.Expr, inner: Extents) -> tuple[sympy.Expr | None, sympy.Expr | None]:
    """``(step, count)`` of a term over inner loops: it takes the values 0, step, …, (count - 1) * step."""
    varying = [f for f in sympy.Mul.make_args(term) if any(v in inner for v in f.free_symbols)]
    step = sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f not in varying))
    if len(varying) != 1 or step.could_extract_minus_sign():
        return None, None
    match varying[0]:
        case sympy.Symbol():
            return step, inner[varying[0]]
        case FloorDiv() if varying[0].args[0].is_Symbol and not varying[0].args[1].free_symbols & inner.keys():
            last = inner[varying[0].args[0]] - 1
            return step, simplify(FloorDiv(last, varying[0].args[1]), {}) + 1
        case ModularIndexing() | Mod() | PythonMod() if varying[0].args[0].is_Symbol:
            size = varying[0].args[-1]
            return (None, None) if size.free_symbols & inner.keys() else (step, size)
    return None, None


def _is_dense(moving: list[tuple[sympy.Expr, sympy.Expr]]) -> bool:
    """Whether sums of the terms take every value between their least and greatest."""
    reach: sympy.Expr = ONE
    left = list(moving)
    while left:
        found = next((m for m in left if m[0] == reach or _no_further(m[0], reach)), None)
        if found is None:
            return False
        left.remove(found)
        reach = sympy.expand(reach + found[0] * (found[1] - 1))
    return True


def _no_further(step: sympy.Expr, reach: sympy.Expr) -> bool:
    return bool(step.is_Integer and reach.is_Integer and step <= reach)


def index_region(index: Index, size: sympy.Expr, axes: Mapping[sympy.Symbol, Region]) -> Region:
    """The region of one dimension, of ``size``, that an access touches."""
    whole = Region(ZERO, size, is_whole=True, is_dense=False)
    if is_value(index):
        return whole
    if index.is_Symbol:  # type: ignore[union-attr]
        return axes.get(index, Region(index, ONE))  # type: ignore[arg-type]
    used = [v for v in index.free_symbols if v in axes]  # type: ignore[union-attr]
    if all(axes[v].is_point for v in used):
        return Region(index.xreplace({v: axes[v].start for v in used}), ONE)  # type: ignore[union-attr]
    start: list[sympy.Expr] = []
    moving: list[tuple[sympy.Expr, sympy.Expr]] = []
    for term in terms(index):  # type: ignore[arg-type]
        mine = [v for v in term.free_symbols if v in axes]
        if all(axes[v].is_point for v in mine):
            start.append(term.xreplace({v: axes[v].start for v in mine}))
            continue
        step = sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f != mine[0]))
        if len(mine) != 1 or mine[0] in step.free_symbols or step * mine[0] != term:
            return whole
        region = axes[mine[0]]
        if step.could_extract_minus_sign():  # backwards: the last place comes first
            start.append(step * (region.start + region.extent - 1))
            step = -step
        else:
            start.append(step * region.start)
        moving.append((step, region.extent))
    reach = sympy.expand(sympy.Add(ONE, *(s * (n - 1) for s, n in moving)))
    dense = _is_dense(moving) and all(axes[v].is_dense for v in used)
    return Region(sympy.expand(sympy.Add(*start)), reach, is_dense=dense)


def covers(
    nest: LoopNest,
    write: Access,
    made: Mapping[sympy.Symbol, Region],
    read: Load,
    wanted: Mapping[sympy.Symbol, Region],
) -> bool:
    """Whether one iteration writes all that it reads: ``made`` and ``wanted`` are the regions of the writer's and the
    reader's axes."""
    shape = nest.buffer(write.buffer).shape
    written: set[sympy.Symbol] = set()
    for index, other, size in zip(write.indices, read.indices, shape, strict=True):
        if is_value(index):
            return False
        inside = index.free_symbols & made.keys()  # type: ignore[union-attr]
        if all(made[v].is_whole and made[v].is_dense for v in inside):
            continue  # all that the block ever writes of this dimension
        mine, theirs = index_region(index, size, made), index_region(other, size, wanted)
        if not index.is_Symbol and not (mine.is_point and theirs.is_point):  # type: ignore[union-attr]
            return False
        if index in written or not mine.is_dense:
            return False
        written.update(inside)
        ahead = sympy.expand(theirs.start - mine.start)
        if not (ahead.is_Integer and ahead >= 0 and at_least(mine.extent, theirs.extent + ahead, nest.symbols)):
            return False
    return True


def same_place(nest: LoopNest, first: Access, a: Mapping[sympy.Symbol, Region], second: Access,
               b: Mapping[sympy.Symbol, Region], shared: Mapping[sympy.Symbol, sympy.Expr]) -> bool:  # fmt: skip
    """Whether two accesses touch the same elements, and others in every other iteration of the shared loops, whose
    extents ``shared`` gives. ``a`` and ``b`` are the regions of their blocks' axes; the second one writes."""
    shape = nest.buffer(first.buffer).shape
    pairs = [
        (index_region(i, size, a), index_region(j, size, b))
        for i, j, size in zip(first.indices, second.indices, shape, strict=True)
    ]
    moving = {v for v, r in b.items() if r.start.free_symbols & shared.keys()}
    alike = [x.start == y.start or sympy.expand(x.start - y.start) == 0 for x, y in pairs]
    if all(alike) and all(x.is_point and y.is_point for x, y in pairs) and set(second.indices) >= moving:
        # One element, that of one point of the block's axes, of which each iteration has its own.
        return set(shared) <= {v for x, _ in pairs for v in x.start.free_symbols}
    told: list[_Digits] = []
    for (x, y), is_alike in zip(pairs, alike, strict=True):
        # Where some dimensions tell iterations apart it does not matter how much of the others each touches.
        if is_alike:
            mine, theirs = (_told(region, shared, nest) for region in (x, y))
            told += mine if mine is not None and theirs is not None else []
    return all(_is_whole(v, [d for d in told if d.var == v], n, nest) for v, n in shared.items())


@dataclass(frozen=True, slots=True)
class _Digits:
    """Of a loop variable the quotient by ``low``, modulo ``high / low``: ``count`` values, each ``step`` elements
    apart. No ``high`` is the whole quotient."""

    var: sympy.Symbol
    low: sympy.Expr
    high: sympy.Expr | None
    count: sympy.Expr
    step: sympy.Expr


def _told(region: Region, shared: Mapping[sympy.Symbol, sympy.Expr], nest: LoopNest) -> list[_Digits] | None:
    """The digits of shared loops that tell where a region starts, if each of their values has a part of the dimension
    for itself; None where not."""
    found: list[_Digits] = []
    for term in terms(region.start):
        used = [v for v in term.free_symbols if v in shared]
        varying = [f for f in sympy.Mul.make_args(term) if f.free_symbols & set(used)]
        if not used:
            continue
        if len(used) > 1 or len(varying) > 1:
            return None
        (v,), step = used, sympy.Mul(*(f for f in sympy.Mul.make_args(term) if f is not varying[0]))
        match varying[0]:
            case sympy.Symbol():
                found.append(_Digits(v, ONE, None, shared[v], step))
            case FloorDiv(args=(inner, by)) if inner == v:
                found.append(_Digits(v, by, None, simplify(FloorDiv(shared[v] + by - 1, by), {}), step))
            case Mod(args=(inner, by)) | PythonMod(args=(inner, by)) if inner == v:
                found.append(_Digits(v, ONE, by, by, step))
            case ModularIndexing(args=(inner, by, of)) if inner == v:
                found.append(_Digits(v, by, sympy.expand(by * of), of, step))
            case _:
                return None
    return found if is_disjoint(nest, region.extent, [(d.step, d.count) for d in found]) else None


def _is_whole(var: sympy.Symbol, digits: list[_Digits], extent: sympy.Expr, nest: LoopNest) -> bool:
    """Whether digits of a loop variable tell its value, of ``extent`` there are."""
    reached: sympy.Expr = ONE
    while not at_least(reached, extent, nest.symbols):
        following = next((d for d in digits if d.low == reached), None)
        if following is None or following.high == reached:
            return False
        if following.high is None:
            return True
        reached = following.high
    return True


def is_disjoint(nest: LoopNest, extent: sympy.Expr, steps: list[tuple[sympy.Expr, sympy.Expr]]) -> bool:
    """Whether each iteration of loops with such steps, and that often, has ``extent`` places of its own."""
    reach, left = extent, [(step, n) for step, n in steps if n != 1]
    while left:
        for step, n in left:
            others = [s for s, _ in left if s != step]
            if at_least(step, reach, nest.symbols) and all(at_least(s, step, nest.symbols) for s in others):
                reach = sympy.expand(reach + step * (n - 1))
                left.remove((step, n))
                break
        else:
            return False
    return True


# --- proofs -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16384)
def terms(e: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """The summands of an expression, products of sums multiplied out."""
    return tuple(sympy.Add.make_args(sympy.expand(e)))


def at_least(a: sympy.Expr, b: sympy.Expr, table: SymbolTable) -> bool:
    """Whether ``a >= b`` is proved for all sizes."""
    difference = sympy.expand(a - b)
    for _ in range(4):
        lower = sympy.expand(sympy.Add(*(_lower(t) for t in sympy.Add.make_args(difference))))
        if lower == difference:
            break
        difference = lower
    return _lowest(difference, table) >= 0


def _lower(term: sympy.Expr) -> sympy.Expr:
    """A lower bound of a summand without a rounded quotient: ``c * (x // d) >= c * (x - d + 1) / d``, d dividing c."""
    for f in sympy.Mul.make_args(term):
        if isinstance(f, FloorDiv):
            factor = sympy.Mul(*(g for g in sympy.Mul.make_args(term) if g is not f))
            x, d = f.args
            if d.is_Integer and factor.is_Integer and factor % d == 0:
                q = factor / d
                return q * (x - d + 1) if q > 0 else q * x
    return term


def _lowest(e: sympy.Expr, table: SymbolTable) -> float:
    try:
        return table.bounds(e)[0]
    except IRError:
        return float("-inf")


def below(e: sympy.Expr, bound: sympy.Expr, extents: Extents, table: SymbolTable) -> bool:
    """Whether ``e < bound`` is proved while each loop variable runs over its extent."""
    if e.is_Symbol and extents.get(e) == bound:
        return True
    last = last_of(e, extents, table)
    return last is not None and at_least(bound, last + 1, table)


def last_of(e: sympy.Expr, extents: Extents, table: SymbolTable) -> sympy.Expr | None:
    """A value that ``e`` does not exceed while each variable runs over its extent; None where none is seen."""
    top = [_greatest(term, extents, table) for term in terms(e)]
    return None if any(t is None for t in top) else sympy.Add(*top)


def _greatest(e: sympy.Expr, extents: Extents, table: SymbolTable) -> sympy.Expr | None:
    """The value of a summand where every loop is in its last iteration, if that is its greatest."""
    free = [v for v in e.free_symbols if v in extents]
    if not free:
        return e
    factors = sympy.Mul.make_args(e)
    varying = [f for f in factors if any(v in extents for v in f.free_symbols)]
    rest = sympy.Mul(*(f for f in factors if f not in varying))
    if len(varying) != 1 or rest.could_extract_minus_sign():
        return None
    match varying[0]:
        case sympy.Symbol():
            return sympy.expand(rest * (extents[varying[0]] - 1))
        case FloorDiv():
            inside = [_greatest(t, extents, table) for t in terms(varying[0].args[0])]
            if any(i is None for i in inside):
                return None
            last = sympy.expand(sympy.Add(*inside))
            return sympy.expand(rest * simplify(FloorDiv(last, varying[0].args[1]), {}, table))
        case ModularIndexing() | Mod() | PythonMod():
            return sympy.expand(rest * (varying[0].args[-1] - 1))
    return None
