"""Attention of few rows on a GPU: keys in pieces, a program for each; a second kernel combines their states.

A program goes over its keys one tile after the other, and heads and tiles of queries that are few, as in decoding,
leave most of a GPU idle. The second kernel combines what the pieces gave by the attention monoid, and does what follows
row by row. Source: Dao et al. 2023, "Flash-Decoding". On CPUs a schedule does the same inside one kernel.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.utils._sympy.functions import CeilDiv

from ....ir.expr.monoid import ATTENTION, SUM, lowest
from ....ir.expr.role import Role
from ....ir.expr.value import Expr, Load, Select, call, const, is_value, loads, rewrite
from ....ir.function.function import Dim, Output, Stage, TensorFunction
from ....ir.machine import Machine
from ....ir.nest.loops import PARAM_ALIGN, Buffer, contiguous_strides
from ...cost.programs import LEAST_KEYS, QUERIES, pieces_of_keys
from ...functions.split_kernel import Cut, Halves, Split, halves, numbered, split_axes
from ...primitives.analysis.empty import folded
from .two_stage import piece_sizes


def split_keys(function: TensorFunction, machine: Machine) -> Halves | None:
    """An attention as two functions; None where its rows occupy a GPU, or it is not of this form."""
    at = next((k for k, s in enumerate(function.stages) if s.monoid is ATTENTION), None)
    if at is None or len(function.inner) != 1:
        return None
    state, after = function.stages[at], function.stages[at + 1 :]
    (keys,) = function.inner
    own = state.axes or ()
    if function.symbols.bounds(keys.extent)[0] < 1 or any(set(s.axes or ()) != set(own) or s.monoid for s in after):
        return None
    cut = _cut(function, function.stages[: at + 1], keys, machine)
    if cut is None:
        return None
    kept, first = function.named(own), _first(function, at, keys, cut, _told(state, after))
    return halves(
        function, first, (state, *after), cut.pieces, kept, f"{function.name}_combined",
        lead=_behind_rows(function, own),
    )  # fmt: skip


def _behind_rows(function: TensorFunction, axes: tuple[sympy.Symbol, ...]) -> int:
    """Where the axis of the pieces stands among those of the state: rows, piece, features."""
    rows = {d.var for d in function.rows}
    return max((k for k, v in enumerate(axes) if v in rows), default=-1) + 1


def _cut(function: TensorFunction, stages: tuple[Stage, ...], keys: Dim, machine: Machine) -> Split | None:
    hint, table = function.symbols.hint, function.symbols
    count = hint(keys.extent)
    wanted = pieces_of_keys(machine, _programs(function, stages, keys), count)
    if wanted < 2:
        return None
    if keys.extent.is_Integer:
        parts, size = piece_sizes(keys.extent, wanted)
    else:
        length = sympy.Integer(-(-count // (wanted * LEAST_KEYS)) * LEAST_KEYS)
        parts, size = CeilDiv(keys.extent, length), length
    exact = parts.is_Integer and table.is_divisible(keys.extent, int(parts)) and parts * size == keys.extent
    cut = Cut(parts, size, bool(exact))
    return split_axes([keys], [cut], numbered("i", len(function.rows)), [keys.var])


def _programs(function: TensorFunction, stages: tuple[Stage, ...], keys: Dim) -> int:
    """How many programs the rows are: one for each tile of those that read the same keys."""
    extents = {d.var: max(function.symbols.hint(d.extent), 1) for d in function.rows}
    inputs = {b.name for b in function.inputs}
    moving = {
        s
        for stage in stages
        if stage.monoid is not None
        for v in stage.values
        for ld in loads(v)
        if ld.buffer in inputs and keys.var in _symbols(ld)
        for s in _symbols(ld)
    }
    shared = [extents[v] for v in extents if v not in moving]
    tiled = max(shared, default=1)
    rest = 1
    for n in extents.values():
        rest *= n
    return rest // tiled * -(-tiled // QUERIES)


def _symbols(load: Load) -> set[sympy.Symbol]:
    return {s for i in load.indices if not is_value(i) for s in i.free_symbols}


# --- the pieces -------------------------------------------------------------------------------------------------------


def _told(state: Stage, after: tuple[Stage, ...]) -> bool:
    """Whether rows without any score are told by their maximum: then a piece without any has a state of zeros."""
    top, *rest = state.results
    return not any(ld.buffer in rest for s in after for v in s.values for ld in loads(folded(v, top)))


def _first(function: TensorFunction, at: int, keys: Dim, cut: Split, told: bool) -> TensorFunction:
    """Scores and states of every piece; the state's axes get the piece behind the rows. Where rows of nothing are
    ``told``, a piece may leave keys out that a mask hides."""
    stages = tuple(_of_piece(function, s, keys.var, cut) for s in function.stages[: at + 1])
    state = stages[at]
    where = state.axes or ()
    extents = {d.var: d.extent for d in (*function.dims, *cut.pieces)}
    shape = tuple(extents[v] for v in where)
    highest = Load(state.results[0], where, state.values[0].dtype)

    def copied(result: str, v: Expr) -> Expr:
        element = Load(result, where, v.dtype)
        if not told or result == highest.buffer:
            return element
        return Select(call("eq", highest, lowest(highest.dtype)), const(0, v.dtype), element)

    # Copies of the states leave the kernel: the state itself is its schedule's to take apart.
    copies = tuple(
        Stage((f"{result}_piece",), (copied(result, v),), True, None, state.origins, where, role=Role.RESULT)
        for result, v in zip(state.results, state.values, strict=True)
    )
    outputs = tuple(
        Output(Buffer(f"out{k}", shape, contiguous_strides(shape), v.dtype, align=PARAM_ALIGN), c.results[0], where)
        for k, (c, v) in enumerate(zip(copies, state.values, strict=True))
    )
    return replace(
        function, rows=(*function.rows, *cut.pieces), inner=cut.own, outputs=outputs, stages=(*stages, *copies),
        name=f"{function.name}_pieces",
    )  # fmt: skip


def _of_piece(function: TensorFunction, stage: Stage, keys: sympy.Symbol, cut: Split) -> Stage:
    made = {r for s in function.stages for r in s.results}
    (piece,), position = cut.pieces, cut.place[keys]
    inside = cut.inside[0] if cut.inside else None

    def leaf(e: Expr) -> Expr | None:  # what it sees has its indices moved already
        if not isinstance(e, Load):
            return None
        if e.buffer in made:
            at = [x for i in e.indices for x in ((piece.var, keys) if i == position else (i,))]
            return Load(e.buffer, tuple(at), e.dtype)
        if inside is None or stage.monoid is not SUM or keys not in _symbols(e):
            return None
        return Select(inside, e, const(0, e.dtype))

    values = tuple(rewrite(v, leaf, lambda i: i.xreplace({keys: position})) for v in stage.values)
    if inside is not None and stage.monoid is None:
        values = tuple(Select(inside, v, const(0, v.dtype)) for v in values)
    if inside is not None and stage.monoid is ATTENTION:
        score, weight, value = values
        values = (Select(inside, score, lowest(score.dtype)), weight, Select(inside, value, const(0, value.dtype)))
    axes = stage.axes or ()
    if keys in axes:
        axes = tuple(x for v in axes for x in ((piece.var, v) if v == keys else (v,)))
    else:  # the state: rows, piece, features
        last = _behind_rows(function, axes)
        axes = (*axes[:last], piece.var, *axes[last:])
    return replace(stage, values=values, axes=axes)
