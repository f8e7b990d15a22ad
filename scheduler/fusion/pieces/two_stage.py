"""Reductions over rows beside others, on a GPU: each program keeps what a piece of the rows gives.

A second kernel combines the pieces. Beside reductions along rows a piece is what lasts a program; beside products it is
a tile of their results.

Programs do not combine results. The second kernel combines the raw states of the first by the same monoid, and does
what else has no rows. On CPUs a schedule does the same inside one kernel.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.value import loads as _loads
from ....ir.function.function import Dim, Output, Stage, TensorFunction
from ....ir.machine import Machine
from ....ir.nest.loops import PARAM_ALIGN, Buffer, contiguous_strides
from ...cost.programs import pieces_of_rows
from ...cost.rows import long_row
from ...functions.lower import collapse
from ...functions.split_kernel import Cut, Halves, Split, halves, numbered, split_axes, whole
from ..tiles import tile_extent


def in_two_stages(function: TensorFunction, machine: Machine) -> Halves | None:
    """The function as two, where it reduces over its rows; None where it does not."""
    if function.scatters or not any(s.axes is not None and s.monoid is not None for s in function.stages):
        return None
    function = collapse(function)
    over = next(function.over_of(s) for s in function.stages if s.axes is not None and s.monoid is not None)
    split = _rows(function, machine) if over == function.rows else _tiles(function, over)
    results = function.inner if over == function.rows else tuple(d for d in function.rows if d not in over)
    across = [s for s in function.stages if s.axes is not None]
    last = {r for s in across for r in s.results}
    stages = tuple(
        _partial(s, split, results) if s.axes is not None else s
        for s in function.stages
        if s.axes is None or s.monoid is not None
    )
    if _is_long(function, machine):
        stages = _early(stages)
    outputs = [o for o in function.outputs if o.result not in last]
    outputs = [replace(o, buffer=replace(o.buffer, name=f"out{k}")) for k, o in enumerate(outputs)]
    dims = (*split.pieces, *results)
    shape, where = tuple(d.extent for d in dims), tuple(d.var for d in dims)
    for s in across:
        for result, value in zip(s.results, s.values, strict=True) if s.monoid is not None else ():
            buffer = Buffer(f"out{len(outputs)}", shape, contiguous_strides(shape), value.dtype, align=PARAM_ALIGN)
            outputs.append(Output(buffer, result, where))
    first = replace(function, outputs=tuple(outputs), stages=stages, extra=(*split.pieces, *split.own))
    return halves(function, first, across, split.pieces, results, f"{function.name}_pieces")


def _is_long(function: TensorFunction, machine: Machine) -> bool:
    """Whether a row leaves no room for that of another program."""
    return function.symbols.hint(sympy.Mul(*(d.extent for d in function.inner))) > long_row(machine)


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


def _rows(function: TensorFunction, machine: Machine) -> Split:
    """Whole row dimensions are pieces while there are too few; the one that makes them enough is cut; the others are
    each piece's own."""
    table = function.symbols
    count = max(table.hint(sympy.Mul(*(d.extent for d in function.rows))), 1)
    wanted = pieces_of_rows(machine, count, alone=_is_long(function, machine))
    cuts: list[Cut | None] = []
    for dim in function.rows:
        made = max(table.hint(sympy.Mul(*(c.parts for c in cuts if c is not None))), 1)
        if cuts and 2 * made >= wanted:
            cuts.append(None)
            continue
        parts, length = piece_sizes(dim.extent, -(-wanted // made))
        if made * table.hint(dim.extent) <= wanted or length == 1:  # pieces of one are the dimension as it is
            cuts.append(whole(dim.extent))
        else:
            exact = bool(parts.is_Integer) and table.divisor(dim.extent) % int(parts) == 0
            cuts.append(Cut(parts, length, exact))
    return _split(function.rows, cuts)


def _tiles(function: TensorFunction, over: tuple[Dim, ...]) -> Split:
    """The last of the dimensions reduced over in tiles; the others are pieces whole."""
    *others, last = over
    size = tile_extent(function, over)
    exact = function.symbols.is_divisible(last.extent, size)
    parts = FloorDiv(last.extent if exact else last.extent + size - 1, sympy.Integer(size))
    return _split(over, [*(whole(d.extent) for d in others), Cut(parts, sympy.Integer(size), exact)])


def _split(over: tuple[Dim, ...], cuts: list[Cut | None]) -> Split:
    return split_axes(over, cuts, numbered("x"), numbered("x", sum(c is not None for c in cuts)))


def piece_sizes(extent: sympy.Expr, wanted: int) -> tuple[sympy.Expr, sympy.Expr]:
    """About ``wanted`` pieces of a dimension, and the length of a piece: without a tail if there is such a number
    near."""
    if extent.is_Integer:
        near = sorted(range(wanted // 2 + 1, wanted + wanted // 4 + 1), key=lambda p: max(p / wanted, wanted / p))
        parts = next((p for p in near if int(extent) % p == 0), wanted)
        size = -(-int(extent) // parts)
        return sympy.Integer(-(-int(extent) // size)), sympy.Integer(size)
    return sympy.Integer(wanted), FloorDiv(extent + wanted - 1, sympy.Integer(wanted))


def _partial(stage: Stage, split: Split, kept: tuple[Dim, ...]) -> Stage:
    """A reduction over all rows as one over those of each piece."""
    assert stage.monoid is not None
    axes = tuple(d.var for d in (*split.pieces, *kept))
    values = split.values(stage.monoid, stage.values)
    return replace(stage, values=values, axes=axes, over=tuple(d.var for d in split.own))
