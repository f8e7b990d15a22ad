"""Reductions over rows beside others, on a GPU: each program keeps what a piece of the rows gives.

A second kernel combines the pieces. Beside reductions along rows a piece is what lasts a program; beside products it is
a tile of their results.

Programs do not combine results. The second kernel combines the raw states of the first by the same monoid, and does
what else has no rows. On CPUs a schedule does the same inside one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Expr, Index, IndexValue, Load, Select, call, rename_loads, substitute_index, symbol
from ...ir.expr.value import loads as _loads
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.nest.loops import Buffer, contiguous_strides
from ..functions.lower import collapse
from .cross import HALF_ROW
from .tiles import tile_extent

# Programs of the first kernel: two for each multiprocessor, so that one reads while the other reduces, as long as rows
# leave room for two. Each has so many rows at least, or what it writes of its own is no small part of what it reads.
PROGRAMS, LEAST_ROWS = 264, 16
PARAM_ALIGN = 16


@dataclass(frozen=True, slots=True)
class TwoStages:
    """``first`` reads the inputs of the whole and gives the other results and, last, the states of the pieces.

    Those are ``partial`` in number. ``second`` reads them first and then inputs of the whole, of which ``taken`` are
    the places.
    """

    first: TensorFunction
    second: TensorFunction
    partial: int
    taken: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _RowCut:
    """The rows in pieces: each row dimension in terms of ``pieces`` and ``own``; ``inside`` where there is a tail.

    ``kept`` are the dimensions of what the reductions give.
    """

    pieces: tuple[Dim, ...]
    own: tuple[Dim, ...]
    rows: dict[sympy.Symbol, sympy.Expr]
    inside: Expr | None
    kept: tuple[Dim, ...]


def in_two_stages(function: TensorFunction) -> TwoStages | None:
    """The function as two, where it reduces over its rows; None where it does not."""
    if function.scatters or not any(s.axes is not None and s.monoid is not None for s in function.stages):
        return None
    function = collapse(function)
    over = next(function.over_of(s) for s in function.stages if s.axes is not None and s.monoid is not None)
    cut = _cut(function) if over == function.rows else _tiles(function, over)
    across = [s for s in function.stages if s.axes is not None]
    last = {r for s in across for r in s.results}
    stages = tuple(
        _partial(function, s, cut) if s.axes is not None else s
        for s in function.stages
        if s.axes is None or s.monoid is not None
    )
    if _is_long(function):
        stages = _early(stages)
    outputs = [o for o in function.outputs if o.result not in last]
    kept = len(outputs)
    outputs = [replace(o, buffer=replace(o.buffer, name=f"out{k}")) for k, o in enumerate(outputs)]
    dims = (*cut.pieces, *cut.kept)
    shape, where = tuple(d.extent for d in dims), tuple(d.var for d in dims)
    for s in across:
        for result, value in zip(s.results, s.values, strict=True) if s.monoid is not None else ():
            buffer = Buffer(f"out{len(outputs)}", shape, contiguous_strides(shape), value.dtype, align=PARAM_ALIGN)
            outputs.append(Output(buffer, result, where))
    second, taken = _second(function, across, tuple(o.buffer for o in outputs[kept:]), cut)
    first = replace(function, outputs=tuple(outputs), stages=stages, extra=(*cut.pieces, *cut.own))
    return TwoStages(first, second, len(outputs) - kept, taken)


def _is_long(function: TensorFunction) -> bool:
    """Whether a row leaves no room for that of another program."""
    return function.symbols.hint(sympy.Mul(*(d.extent for d in function.inner))) > HALF_ROW


def _early(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """What waits for no result of a row comes first, the reductions over rows too: then less of the row has to stay."""
    late: set[str] = set()
    first: list[Stage] = []
    last: list[Stage] = []
    for stage in stages:
        waits = any(ld.buffer in late for v in stage.values for ld in _loads(v))
        (last if waits else first).append(stage)
        if waits or (stage.monoid is not None and stage.axes is None):
            late.update(stage.results)
    return (*first, *last)


def _cut(function: TensorFunction) -> _RowCut:
    """Whole row dimensions are pieces while there are too few; the one that makes them enough is cut; the others are
    each piece's own."""
    table = function.symbols
    count = max(table.hint(sympy.Mul(*(d.extent for d in function.rows))), 1)
    room = 1 if _is_long(function) else 2
    wanted = max(min(PROGRAMS * room // 2, count // LEAST_ROWS), 2)
    pieces: list[sympy.Expr] = []
    own: list[sympy.Expr] = []
    place: list[tuple[int | None, int | None]] = []
    size: sympy.Expr = sympy.S.One
    tail = None
    for dim in function.rows:
        made = max(table.hint(sympy.Mul(*pieces)), 1)
        if pieces and 2 * made >= wanted:
            place.append((None, len(own)))
            own.append(dim.extent)
            continue
        parts, length = piece_sizes(dim.extent, -(-wanted // made))
        if made * table.hint(dim.extent) <= wanted or length == 1:  # pieces of one are the dimension as it is
            place.append((len(pieces), None))
            pieces.append(dim.extent)
        else:
            if table.divisor(dim.extent) % int(parts) if parts.is_Integer else True:
                tail = dim
            size = length
            place.append((len(pieces), len(own)))
            pieces.append(parts)
            own.append(size)
    outer = [Dim(symbol(f"x{k}"), e) for k, e in enumerate(pieces)]
    inside = [Dim(symbol(f"x{len(pieces) + k}"), e) for k, e in enumerate(own)]
    rows: dict[sympy.Symbol, sympy.Expr] = {}
    guard: Expr | None = None
    for dim, (p, q) in zip(function.rows, place, strict=True):
        index: sympy.Expr = sympy.S.Zero if q is None else inside[q].var
        if p is not None:
            index = outer[p].var * (size if q is not None else 1) + index
        rows[dim.var] = index
        if dim is tail:
            guard = call("lt", IndexValue(index, DType.INT64), IndexValue(dim.extent, DType.INT64))
    return _RowCut(tuple(outer), tuple(inside), rows, guard, function.inner)


def _tiles(function: TensorFunction, over: tuple[Dim, ...]) -> _RowCut:
    """The last of the dimensions reduced over in tiles; the others are pieces whole."""
    *whole, last = over
    size = tile_extent(function, over)
    exact = function.symbols.is_divisible(last.extent, size)
    parts = FloorDiv(last.extent if exact else last.extent + size - 1, sympy.Integer(size))
    extents = (*(d.extent for d in whole), parts)
    pieces = tuple(Dim(symbol(f"x{k}"), e) for k, e in enumerate(extents))
    own = Dim(symbol(f"x{len(pieces)}"), sympy.Integer(size))
    place = pieces[-1].var * size + own.var
    rows = {d.var: p.var for d, p in zip(whole, pieces, strict=False)} | {last.var: place}
    guard: Expr | None = None
    if not exact:
        guard = call("lt", IndexValue(place, DType.INT64), IndexValue(last.extent, DType.INT64))
    return _RowCut(pieces, (own,), rows, guard, tuple(d for d in function.rows if d not in over))


def piece_sizes(extent: sympy.Expr, wanted: int) -> tuple[sympy.Expr, sympy.Expr]:
    """About ``wanted`` pieces of a dimension, and the length of a piece: without a tail if there is such a number
    near."""
    if extent.is_Integer:
        near = sorted(range(wanted // 2 + 1, wanted + wanted // 4 + 1), key=lambda p: max(p / wanted, wanted / p))
        parts = next((p for p in near if int(extent) % p == 0), wanted)
        size = -(-int(extent) // parts)
        return sympy.Integer(-(-int(extent) // size)), sympy.Integer(size)
    return sympy.Integer(wanted), FloorDiv(extent + wanted - 1, sympy.Integer(wanted))


def _partial(function: TensorFunction, stage: Stage, cut: _RowCut) -> Stage:
    """A reduction over all rows as one over those of each piece."""
    assert stage.monoid is not None
    values = tuple(substitute_index(v, cut.rows) for v in stage.values)
    if cut.inside is not None:
        identity = stage.monoid.identity(tuple(v.dtype for v in values))
        values = tuple(Select(cut.inside, v, e) for v, e in zip(values, identity, strict=True))
    axes = (*(d.var for d in cut.pieces), *(d.var for d in cut.kept))
    return replace(stage, values=values, axes=axes, over=tuple(d.var for d in cut.own))


def _second(
    function: TensorFunction, across: list[Stage], partial: tuple[Buffer, ...], cut: _RowCut
) -> tuple[TensorFunction, tuple[int, ...]]:
    """The pieces combined, and what is made of that; the dimensions of the results are its rows."""
    rows = tuple(Dim(symbol(f"i{k}"), d.extent) for k, d in enumerate(cut.kept))
    inner = tuple(Dim(symbol(f"r{k}"), d.extent) for k, d in enumerate(cut.pieces))
    moved: dict[sympy.Symbol, sympy.Expr] = {d.var: r.var for d, r in zip(cut.kept, rows, strict=True)}
    at: tuple[Index, ...] = tuple(d.var for d in (*inner, *rows))
    states = [replace(b, name=f"in{k}") for k, b in enumerate(partial)]
    read = {ld.buffer for s in across if s.monoid is None for v in s.values for ld in _loads(v)}
    taken = tuple(k for k, b in enumerate(function.inputs) if b.name in read)
    names = {function.inputs[k].name: f"in{len(states) + j}" for j, k in enumerate(taken)}
    waiting = iter(states)
    stages = []
    for s in across:
        if s.monoid is None:
            values = tuple(rename_loads(substitute_index(v, moved), names) for v in s.values)
            stages.append(replace(s, values=values, inner=False, axes=None))
        else:
            values = tuple(Load(b.name, at, b.dtype) for _, b in zip(s.results, waiting, strict=False))
            stages.append(replace(s, values=values, axes=None, over=None))
    results = {r for s in across for r in s.results}
    outputs = [o for o in function.outputs if o.result in results]
    outputs = [
        Output(replace(o.buffer, name=f"out{k}"), o.result, tuple(i.xreplace(moved) for i in o.indices))
        for k, o in enumerate(outputs)
    ]
    inputs = (*states, *(replace(function.inputs[k], name=names[function.inputs[k].name]) for k in taken))
    second = TensorFunction(
        f"{function.name}_pieces", rows, inner, inputs, tuple(outputs), tuple(stages), function.symbols
    )
    return second, taken
