"""The parts of a nest that is a stencil: of sums or maxima over taps, which windows slide along which axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import sympy

from ...ir.expr.value import Load, is_value, walk
from ...ir.expr.windows import MOST_TAPS, Window, windows_along_sum, windows_of
from ...ir.nest.loops import AxisKind, Block, LoopNest, Update, blocks
from ..cost.convolution import MOST_SUMS


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
    if any(a.var in taps for b, _ in blocks(nest) if b is not block for a in b.axes):
        return None
    params = {p.name for p in nest.params} - set(nest.outputs)
    for ld in _loads(block):
        if ld.buffer not in params or any(is_value(i) for i in ld.indices):
            continue
        windows = windows_of(ld, rows, taps)
        if windows and {w.tap for w in windows} == set(taps) and all(w.step.is_Integer for w in windows):
            along, order, steps = zip(*((w.along, w.tap, w.step) for w in windows), strict=True)
            others = tuple(v for v in rows if v not in along and rows[v] != 1)
            count = prod(map(int, taps.values()))
            return Stencil(block.name, ld.buffer, along, others, order, tuple(map(int, steps)), count)
    return None


def _window(nest: LoopNest) -> tuple[Block, dict[sympy.Symbol, sympy.Expr], dict[sympy.Symbol, sympy.Expr]] | None:
    """The one reduction of a nest where it combines taps of windows, its axes, and those of the taps."""
    found = [b for b, _ in blocks(nest) if b.is_reduction]
    if len(found) != 1 or found[0].role is None or not found[0].role.has_windows or not _is_float(found[0]):
        return None
    (block,) = found
    taps = {a.var: a.extent for a in block.axes_of(AxisKind.REDUCTION)}
    rows = {a.var: a.extent for a in block.axes_of(AxisKind.SPATIAL)}
    return block, rows, taps


@dataclass(frozen=True, slots=True)
class Slide:
    """A nest whose one reduction ``name`` combines the few ``taps`` of windows that slide along axes of its results.

    ``windows`` are those of the dimensions of what is read. Other taps move no window.
    """

    name: str
    rows: tuple[sympy.Symbol, ...]
    taps: tuple[sympy.Symbol, ...]
    windows: tuple[Window, ...]


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
        windows = windows_of(ld, rows, taps) if ld.buffer in params else []
        several = len(windows) > 1 or any(w.step < taps[w.tap] for w in windows)
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
    windows: tuple[Window, ...]


def filters(nest: LoopNest) -> Filters | None:
    """The nest as sums over windows for each of their few taps, and what is made of each sum; None where it is not."""
    found = [b for b, _ in blocks(nest) if b.is_reduction]
    if len(found) != 1 or found[0].role is None or not found[0].role.has_taps or not _is_float(found[0]):
        return None
    (block,) = found
    over = {a.var: a.extent for a in block.axes_of(AxisKind.REDUCTION)}
    rows = {a.var: a.extent for a in block.axes_of(AxisKind.SPATIAL)}
    if any({a.var for a in b.axes} != rows.keys() for b, _ in blocks(nest) if b is not block):
        return None
    few = {v: e for v, e in rows.items() if e.is_Integer and 1 < e <= MOST_TAPS}
    for ld in _loads(block):
        windows = windows_along_sum(ld, over, few) if ld.buffer not in nest.outputs else []
        taps = tuple(w.tap for w in windows)
        if windows and sympy.Mul(*(few[t] for t in taps)) <= MOST_SUMS:
            kept = tuple(v for v in rows if v not in taps)
            return Filters(block.name, kept, taps, tuple(over), tuple(windows))
    return None


def _is_float(block: Block) -> bool:
    (update,) = block.body
    return isinstance(update, Update) and update.values[0].dtype.is_float


def _loads(block: Block) -> list[Load]:
    return [e for s in block.body if isinstance(s, Update) for v in s.values for e in walk(v) if isinstance(e, Load)]
