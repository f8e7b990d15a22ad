"""Reductions on a GPU in pieces, where programs read whole lines so, and enough of them are under way.

What a program reads of a row lies together, and a line of the caches is 128 bytes. With so many columns a program the
programs are few, whatever the rows. So each takes a piece of the rows, and a second kernel combines the states of the
pieces by the same monoid and does what else has no rows. No program waits for another, and sums have one order.

Rows whose parts lie apart in memory, as those of a channel of images do, are read a part a program: a loop over all of
them would find the place of each element by a quotient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Expr, Load, cast, rewrite
from ....ir.expr.value import loads as _loads
from ....ir.function.function import Dim, Output, Stage, TensorFunction
from ....ir.graph.graph import CallTensor
from ....ir.nest.loops import PARAM_ALIGN, Buffer, contiguous_strides
from ....ir.target import Target
from ...cost.columns import pieces_of_columns, pieces_of_parts
from ...functions.lower import collapse, lower_to_loops
from ...functions.split_kernel import Cut, Halves, Split, halves, numbered, split_axes, whole
from ...functions.visits import in_visits
from ...rules import GPU_COLUMN_REDUCTION, GPU_ROW_LOOPED, first_rule
from ...rules.analysis import analyse
from ...rules.gpu.common import narrowest_bytes


def in_column_pieces(
    function: TensorFunction, call: CallTensor, target: Target
) -> list[tuple[TensorFunction, CallTensor]] | None:
    """A function and its call as several, where it reduces columns of which too few occupy the target; None elsewhere.

    Elements that wait for a reduction are of another visit, and so of a function of their own.
    """
    if not _reduces_alone(function):
        return None
    function = collapse(function)
    visits = in_visits(function)
    first = function if visits is None else visits.first
    wanted = _wanted(first, target)
    cut = cut_columns(first, wanted) if wanted > 1 else None
    if cut is None:
        return None
    if visits is None:
        return list(zip((cut.first, cut.second), cut.calls(call, "pieces"), strict=True))
    head, again = visits.calls(call)
    rest = in_column_pieces(visits.rest, again, target) or [(visits.rest, again)]
    return [*zip((cut.first, cut.second), cut.calls(head, "pieces"), strict=True), *rest]


def cut_columns(function: TensorFunction, pieces: int) -> Halves | None:
    """A function that reduces its inner dimensions as two, the first of which does so in about ``pieces`` pieces.

    None where elements wait for a reduction, and where elements leave the kernel and no number of pieces near divides
    the rows: a piece has no tail then.
    """
    late = _late(function)
    cuts = _cuts(function.inner, pieces, function.symbols)
    if late is None or all(c is None for c in cuts):
        return None
    leave = any(_leaves(function, s) for s in function.stages if s.inner and s.monoid is None)
    if leave and any(c is not None and not c.is_exact for c in cuts):
        return None
    split = split_axes(function.inner, cuts, numbered("x"), numbered("y"))
    return _halves(_inlined(function) if split.inside else function, late, split)


def _reduces_alone(function: TensorFunction) -> bool:
    """Whether all that the function reduces are its inner dimensions, whole, to numbers."""
    reductions = [s for s in function.stages if s.monoid is not None]
    return bool(reductions and function.rows) and not (
        function.scatters
        or function.extra
        or any(s.scan or s.axes is not None or s.over is not None or s.role is not None for s in function.stages)
        or any(c.vector for s in reductions if s.monoid is not None for c in s.monoid.components)
    )


def _leaves(function: TensorFunction, stage: Stage) -> bool:
    return any(o.result in stage.results for o in function.outputs)


def _late(function: TensorFunction) -> tuple[Stage, ...] | None:
    """The reductions, and what the second half makes: what reads them, what leaves the kernel without elements, and
    what of the columns those read. None where elements wait for a reduction."""
    waiting: set[str] = set()
    for s in function.stages:
        waits = any(ld.buffer in waiting for v in s.values for ld in _loads(v))
        if waits and s.inner:
            return None
        if waits or s.monoid is not None:
            waiting |= {*s.results}
    of_elements = {r for s in function.stages if s.inner and s.monoid is None for r in s.results}
    wanted = set(waiting) | {o.result for o in function.outputs if o.result not in of_elements}
    chosen: list[Stage] = []
    for s in reversed(function.stages):
        if wanted.isdisjoint(s.results):
            continue
        chosen.append(s)
        if s.monoid is None:
            wanted |= {ld.buffer for v in s.values for ld in _loads(v) if ld.buffer in function.made}
    return None if wanted & of_elements else tuple(reversed(chosen))


def _wanted(function: TensorFunction, target: Target) -> int:
    """How many pieces the rows are cut into."""
    hint = function.symbols.hint
    buffers = {b.name: b for b in (*function.inputs, *(o.buffer for o in function.outputs))}
    nbytes = sum(hint(sympy.Mul(*b.shape)) * b.dtype.itemsize for b in buffers.values())
    states = sum(v.dtype.itemsize for s in function.stages if s.monoid is not None for v in s.values)
    results = [max(hint(d.extent), 1) for d in function.rows]
    rows = hint(sympy.Mul(*(d.extent for d in function.inner)))

    def pieces(itemsize: int) -> int:
        return pieces_of_columns(target.machine, results, rows, nbytes, states, itemsize)

    parts = hint(sympy.Mul(*(d.extent for d in function.inner[:-1])))
    apart = pieces_of_parts(target.machine, math.prod(results), parts, nbytes, states)
    if max(apart, pieces(1), pieces(8)) < 2:  # whatever its elements are
        return 1
    nest = lower_to_loops(function)
    rule = first_rule(nest, target)
    if rule is GPU_ROW_LOOPED:
        return apart
    return pieces(narrowest_bytes(analyse(nest))) if rule is GPU_COLUMN_REDUCTION else 1


def _cuts(over: Sequence[Dim], wanted: int, table: SymbolTable) -> list[Cut | None]:
    """Cuts of the outermost dimensions into about so many pieces, of one length where there is such a number near."""
    cuts: list[Cut | None] = []
    made = 1
    for dim in over:
        if 2 * made > wanted:
            cuts.append(None)
            continue
        length, parts = table.hint(dim.extent), -(-wanted // made)
        if length <= parts:
            cuts.append(whole(dim.extent))
        else:
            divisor = table.divisor(dim.extent)
            exact = next((p for p in _near(parts) if divisor % p == 0), None)
            count = sympy.Integer(parts if exact is None else exact)
            size = FloorDiv(dim.extent if exact is not None else dim.extent + count - 1, count)
            cuts.append(Cut(count, size, exact is not None))
        made *= max(table.hint(cuts[-1].parts), 1)  # type: ignore[union-attr]
    return cuts


def _near(number: int) -> Iterator[int]:
    """Numbers between half of one and twice it, the nearest first."""
    yield from sorted(range(number // 2 + 1, 2 * number), key=lambda p: max(p / number, number / p))


def _inlined(function: TensorFunction) -> TensorFunction:
    """With what is made of elements as part of the reductions that read it: behind a tail's condition nothing is
    loaded."""
    made: dict[str, Expr] = {}
    stages: list[Stage] = []

    def leaf(e: Expr) -> Expr | None:
        return cast(made[e.buffer], e.dtype) if isinstance(e, Load) and e.buffer in made else None

    for s in function.stages:
        values = tuple(rewrite(v, leaf, lambda i: i) for v in s.values)
        if s.inner and s.monoid is None:
            made.update(zip(s.results, values, strict=True))
        else:
            stages.append(replace(s, values=values))
    return replace(function, stages=tuple(stages))


def _halves(function: TensorFunction, late: tuple[Stage, ...], split: Split) -> Halves:
    rows = tuple(d.var for d in function.rows)
    points = {r for s in function.stages if s.inner and s.monoid is None for r in s.results}
    pieces, own = (tuple(d.var for d in dims) for dims in (split.pieces, split.own))

    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.buffer not in function.made:
            return None
        return Load(e.buffer, (*pieces, *rows, *own) if e.buffer in points else (*pieces, *rows), e.dtype)

    def of_pieces(stage: Stage) -> Stage:
        values = tuple(rewrite(v, leaf, lambda i: i.xreplace(split.place)) for v in stage.values)
        if stage.monoid is not None:
            values = split.values(stage.monoid, values)
        return replace(stage, values=values)

    last = {r for s in late for r in s.results}
    outputs = [o for o in function.outputs if o.result not in last]
    stages = _needed(function, {o.result for o in outputs})
    moved = [
        Output(replace(o.buffer, name=f"out{k}"), o.result, tuple(i.xreplace(split.place) for i in o.indices))
        for k, o in enumerate(outputs)
    ]
    dims = (*split.pieces, *function.rows)
    shape, where = tuple(d.extent for d in dims), tuple(d.var for d in dims)
    reductions = [s for s in late if s.monoid is not None]
    for s in reductions:
        for result, value in zip(s.results, s.values, strict=True):
            buffer = Buffer(f"out{len(moved)}", shape, contiguous_strides(shape), value.dtype, align=PARAM_ALIGN)
            moved.append(Output(buffer, result, where))
    first = replace(function, rows=dims, inner=split.own, outputs=tuple(moved), stages=tuple(map(of_pieces, stages)))
    return halves(function, first, late, split.pieces, function.rows, f"{function.name}_pieces")


def _needed(function: TensorFunction, wanted: set[str]) -> tuple[Stage, ...]:
    """The reductions, what they read, and what makes results that are ``wanted``."""
    kept: list[Stage] = []
    wanted = set(wanted)
    for s in reversed(function.stages):
        if s.monoid is not None or not wanted.isdisjoint(s.results):
            kept.append(s)
            wanted |= {ld.buffer for v in s.values for ld in _loads(v)}
    return tuple(reversed(kept))
