"""What makes a nest a stencil: sums or maxima over the few taps of windows that slide along axes of the results."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...ir.expr import Load, index_exprs, is_value, walk
from ...ir.loops import AxisKind, Block, LoopNest, Update, blocks
from ...ir.monoid import MAX, SUM
from .analysis import analyse

# Taps that are written out at most.
MOST_TAPS = 128


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
    found = [b for b, _ in blocks(nest) if b.is_reduction]
    if len(found) != 1 or any(b.is_scan for b in found):
        return None
    (block,) = found
    taps = {a.var: a.extent for a in block.axes_of(AxisKind.REDUCTION)}
    rows = {a.var: a.extent for a in block.axes_of(AxisKind.SPATIAL)}
    if not taps or not all(e.is_Integer for e in taps.values()) or not _is_sum(block):
        return None
    shape = analyse(nest)
    if any(a.var in taps for b in shape.blocks if b is not block for a in b.axes):
        return None
    count = 1
    for e in taps.values():
        count *= int(e)
    if count > MOST_TAPS:
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
            return Stencil(block.name, ld.buffer, along, others, order, tuple(s for _, _, s in pairs), count)
    return None


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
