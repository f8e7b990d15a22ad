"""What makes a nest a stencil: sums or maxima over the few taps of windows that slide along axes of the results."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import sympy
from torch.utils._sympy.functions import FloorDiv

from ...ir.expr.monoid import MAX, SUM
from ...ir.expr.value import Load, index_exprs, is_value, walk
from ...ir.nest.loops import AxisKind, Block, LoopNest, Update, blocks
from ..cost.convolution import MOST_SUMS, MOST_TAPS
from .analysis import analyse


@dataclass(frozen=True, slots=True)
class Stencil:
    """A nest with one block ``name`` that combines ``count`` taps: the windows over ``buffer`` slide along the axes
    ``along``, by ``steps``, each with the axis of ``taps`` in its place; ``others`` are the other axes of the results.
    """

    name: str
    buffer: str
    along: tuple[sympy.Symbol, ...]
    others: tuple[sympy.Symbol, ...]
    taps: tuple[sympy.Symbol, ...]
    steps: tuple[int, ...]
    count: int

    @property
    def overlap(self) -> float:
        """How many windows cover a place."""
        found = float(self.count)
        for step in self.steps:
            found /= step
        return found


def stencil(nest: LoopNest) -> Stencil | None:
    """The nest as a stencil, or None."""
    window = _window(nest)
    if window is None:
        return None
    block, rows, taps = window
    shape = analyse(nest)
    if any(a.var in taps for b in shape.blocks if b is not block for a in b.axes):
        return None
    params = {p.name for p in nest.params} - set(nest.outputs)
    for ld in _loads(block):
        if ld.buffer not in params or any(is_value(i) for i in ld.indices):
            continue
        pairs = _pairs(ld, rows, taps)
        if pairs and {t for _, t, _ in pairs} == set(taps):
            along = tuple(v for v, _, _ in pairs)
            others = tuple(v for v in rows if v not in along and rows[v] != 1)
            order = tuple(t for _, t, _ in pairs)
            return Stencil(
                block.name,
                ld.buffer,
                along,
                others,
                order,
                tuple(s for _, _, s in pairs),
                prod(map(int, taps.values())),
            )
    return None


def _window(nest: LoopNest) -> tuple[Block, dict[sympy.Symbol, sympy.Expr], dict[sympy.Symbol, sympy.Expr]] | None:
    """The one reduction of a nest where it combines few elements of fixed number, its axes, and those of the taps."""
    found = [b for b, _ in blocks(nest) if b.is_reduction]
    if len(found) != 1 or any(b.is_scan for b in found):
        return None
    (block,) = found
    taps = {a.var: a.extent for a in block.axes_of(AxisKind.REDUCTION)}
    rows = {a.var: a.extent for a in block.axes_of(AxisKind.SPATIAL)}
    if not taps or not all(e.is_Integer for e in taps.values()) or not _is_sum(block):
        return None
    return (block, rows, taps) if prod(map(int, taps.values())) <= MOST_TAPS else None


@dataclass(frozen=True, slots=True)
class Slide:
    """A nest whose one reduction ``name`` combines the few ``taps`` of windows that slide along axes of its results.

    ``windows`` are, for each dimension of what is read that has a window, the axis along which it slides, the tap, and
    how many places two neighbours are apart (less than one where neighbours read the same). Other taps move no window.
    """

    name: str
    rows: tuple[sympy.Symbol, ...]
    taps: tuple[sympy.Symbol, ...]
    windows: tuple[tuple[sympy.Symbol, sympy.Symbol, sympy.Rational], ...]


def slide(nest: LoopNest) -> Slide | None:
    """The nest as sums or maxima over windows that overlap or have several dimensions, transposed ones included; None
    where it is not, or has stages of other axes."""
    window = _window(nest)
    if window is None:
        return None
    block, rows, taps = window
    if any({a.var for a in b.axes} != rows.keys() for b, _ in blocks(nest) if b is not block):
        return None
    params = {p.name for p in nest.params} - set(nest.outputs)
    for ld in _loads(block):
        windows = _windows(ld, rows, taps) if ld.buffer in params else []
        several = len(windows) > 1 or any(step < taps[tap] for _, tap, step in windows)
        if several:
            return Slide(block.name, tuple(rows), tuple(taps), tuple(windows))
    return None


@dataclass(frozen=True, slots=True)
class Filters:
    """A nest that sums over all windows for each tap: reduction ``name``, whose results have the axes ``rows`` and, a
    sum for each, ``taps``; ``windows`` as those of ``Slide``, which slide along axes of the sum."""

    name: str
    rows: tuple[sympy.Symbol, ...]
    taps: tuple[sympy.Symbol, ...]
    over: tuple[sympy.Symbol, ...]
    windows: tuple[tuple[sympy.Symbol, sympy.Symbol, sympy.Rational], ...]


def filters(nest: LoopNest) -> Filters | None:
    """The nest as sums over windows for each of their few taps, and what is made of each sum; None where it is not."""
    found = [b for b, _ in blocks(nest) if b.is_reduction]
    if len(found) != 1 or found[0].is_scan or not _is_sum(found[0]):
        return None
    (block,) = found
    over = {a.var: a.extent for a in block.axes_of(AxisKind.REDUCTION)}
    rows = {a.var: a.extent for a in block.axes_of(AxisKind.SPATIAL)}
    if any({a.var for a in b.axes} != rows.keys() for b, _ in blocks(nest) if b is not block):
        return None
    few = {v: e for v, e in rows.items() if e.is_Integer and 1 < e <= MOST_TAPS}
    for ld in _loads(block):
        windows = _covered(ld, over, few) if ld.buffer not in nest.outputs else []
        taps = tuple(t for _, t, _ in windows)
        if windows and sympy.Mul(*(few[t] for t in taps)) <= MOST_SUMS:
            kept = tuple(v for v in rows if v not in taps)
            return Filters(block.name, kept, taps, tuple(over), tuple(windows))
    return None


def _covered(
    load: Load, over: dict[sympy.Symbol, sympy.Expr], few: dict[sympy.Symbol, sympy.Expr]
) -> list[tuple[sympy.Symbol, sympy.Symbol, sympy.Rational]]:
    """The windows of an access that moves with a sum by whole numbers: taps that move it less far than the sum does.
    What moves it further tells which piece of the sum it is."""
    found = []
    for i in index_exprs(load):
        expanded = sympy.expand(i)
        for var in (v for v in over if expanded.coeff(v).is_Integer and expanded.coeff(v) > 0):
            step = expanded.coeff(var)
            reaches = {t: expanded.coeff(t) for t in few if expanded.coeff(t).is_Integer and expanded.coeff(t) != 0}
            mine = [t for t, reach in reaches.items() if not (step * over[var] - abs(reach)).is_nonpositive]
            if len(mine) == 1:
                found.append((var, mine[0], step))
    return found


def _windows(
    load: Load, rows: dict[sympy.Symbol, sympy.Expr], taps: dict[sympy.Symbol, sympy.Expr]
) -> list[tuple[sympy.Symbol, sympy.Symbol, sympy.Rational]]:
    """The windows of an access; none where an index moves otherwise with a tap."""
    found = []
    for i in index_exprs(load):
        mine, moving = ([v for v in axes if v in i.free_symbols] for axes in (taps, rows))
        if not mine or not moving:
            continue
        expanded = sympy.expand(i)
        if len(mine) != 1 or len(moving) != 1 or not expanded.coeff(mine[0]).is_Integer:
            return []
        rest = expanded - expanded.coeff(mine[0]) * mine[0]
        step = _step(rest, moving[0])
        if mine[0] in rest.free_symbols or step is None:
            return []
        found.append((moving[0], mine[0], step))
    return found


def _step(place: sympy.Expr, var: sympy.Symbol) -> sympy.Rational | None:
    """How far a place moves with an axis: by whole numbers, or by one after several steps."""
    quotients = [q for q in place.atoms(FloorDiv) if var in q.free_symbols]
    if not quotients:
        step = place.coeff(var)
        return step if step.is_Integer and step > 0 and var not in (place - step * var).free_symbols else None
    (quotient, *others) = quotients
    base, by = quotient.args
    if others or place.coeff(quotient) != 1 or var in (place - quotient).free_symbols or not by.is_Integer:
        return None
    return sympy.Rational(1, int(by)) if sympy.expand(base).coeff(var) == 1 else None


def _is_sum(block: Block) -> bool:
    found = [s for s in block.body if isinstance(s, Update) and s.monoid in (SUM, MAX)]
    return len(found) == len(block.body) == 1 and found[0].values[0].dtype.is_float


def _loads(block: Block) -> list[Load]:
    return [e for s in block.body if isinstance(s, Update) for v in s.values for e in walk(v) if isinstance(e, Load)]


def _pairs(
    load: Load, rows: dict[sympy.Symbol, sympy.Expr], taps: dict[sympy.Symbol, sympy.Expr]
) -> list[tuple[sympy.Symbol, sympy.Symbol, int]]:
    """The windows of an access: the axis along which it slides, the tap, and the step."""
    found = []
    for i in index_exprs(load):
        mine = [t for t in taps if t in i.free_symbols]
        if not mine:
            continue
        slide = [v for v in rows if v in i.free_symbols]
        if len(mine) != 1 or len(slide) != 1:
            return []
        expanded = sympy.expand(i)
        step, reach = expanded.coeff(slide[0]), expanded.coeff(mine[0])
        if not (step.is_Integer and reach.is_Integer and step > 0 and reach != 0):
            return []
        if (expanded - step * slide[0] - reach * mine[0]).free_symbols & {slide[0], mine[0]}:
            return []
        found.append((slide[0], mine[0], int(step)))
    return found
