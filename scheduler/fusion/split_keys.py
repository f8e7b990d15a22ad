"""Attention of few rows on a GPU: keys in pieces, a program for each; a second kernel combines their states.

A program goes over its keys one tile after the other, and heads and tiles of queries that are few, as in decoding,
leave most of a GPU idle. The second kernel combines what the pieces gave by the attention monoid, and does what follows
row by row. Source: Dao et al. 2023, "Flash-Decoding". On CPUs a schedule does the same inside one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import CeilDiv

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import ATTENTION, SUM, lowest
from ...ir.expr.value import Expr, IndexValue, Load, Select, call, const, is_value, loads, rename_loads, rewrite, symbol
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor, TensorType
from ...ir.nest.loops import Buffer, contiguous_strides
from .two_stage import PARAM_ALIGN, PROGRAMS, piece_sizes

# Programs that occupy a GPU without pieces; the least keys of a piece, of which pieces are multiples where keys vary in
# number; queries of a tile.
ENOUGH, LEAST_KEYS, QUERIES = 132, 256, 64


@dataclass(frozen=True, slots=True)
class SplitKeys:
    """``first`` reads the inputs and gives the three states of every piece; ``second`` reads these first.

    Then it reads inputs of the whole, of which ``taken`` are the places.
    """

    first: TensorFunction
    second: TensorFunction
    taken: tuple[int, ...]

    def calls(self, whole: CallTensor, symbols: tuple[sympy.Symbol, ...]) -> tuple[CallTensor, CallTensor]:
        """A call of the whole as calls of the two."""
        sizes = dict(zip(symbols, whole.sizes, strict=True))
        device = whole.types[0].device
        made = [o.buffer for o in self.first.outputs]
        names = tuple(f"{whole.names[0]}_keys{k}" for k in range(len(made)))
        types = tuple(TensorType(_at(sizes, b.shape), _at(sizes, b.strides), b.dtype, device) for b in made)
        first = replace(whole, names=names, types=types, function=self.first.name)
        args = (*names, *(whole.args[k] for k in self.taken))
        return first, replace(whole, args=args, function=self.second.name)


def _at(sizes: Mapping[sympy.Symbol, sympy.Expr], exprs: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    return tuple(e.xreplace(sizes) for e in exprs)


def split_keys(function: TensorFunction) -> SplitKeys | None:
    """An attention as two functions; None where its rows occupy a GPU, or it is not of this form."""
    at = next((k for k, s in enumerate(function.stages) if s.monoid is ATTENTION), None)
    if at is None or len(function.inner) != 1:
        return None
    state, after = function.stages[at], function.stages[at + 1 :]
    (keys,) = function.inner
    own = state.axes or ()
    if function.symbols.bounds(keys.extent)[0] < 1 or any(set(s.axes or ()) != set(own) or s.monoid for s in after):
        return None
    cut = _cut(function, function.stages[: at + 1], keys)
    if cut is None:
        return None
    first = _first(function, at, cut)
    second, taken = _second(function, at, cut, tuple(o.buffer for o in first.outputs))
    return SplitKeys(first, second, taken)


@dataclass(frozen=True, slots=True)
class _KeyCut:
    """Keys as ``piece * size + own``; ``inside`` where the last piece has a tail."""

    piece: Dim
    own: Dim
    inside: Expr | None

    @property
    def position(self) -> sympy.Expr:
        return self.piece.var * self.own.extent + self.own.var


def _cut(function: TensorFunction, stages: tuple[Stage, ...], keys: Dim) -> _KeyCut | None:
    hint, table = function.symbols.hint, function.symbols
    programs, count = _programs(function, stages, keys), hint(keys.extent)
    wanted = min(-(-PROGRAMS // programs), count // LEAST_KEYS)
    if programs >= ENOUGH or wanted < 2:
        return None
    if keys.extent.is_Integer:
        parts, size = piece_sizes(keys.extent, wanted)
    else:
        length = sympy.Integer(-(-count // (wanted * LEAST_KEYS)) * LEAST_KEYS)
        parts, size = CeilDiv(keys.extent, length), length
    piece = Dim(symbol(f"i{len(function.rows)}"), parts)
    position = piece.var * size + keys.var
    exact = parts.is_Integer and table.is_divisible(keys.extent, int(parts)) and parts * size == keys.extent
    inside = call("lt", IndexValue(position, DType.INT64), IndexValue(keys.extent, DType.INT64))
    return _KeyCut(piece, Dim(keys.var, size), None if exact else inside)


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


def _first(function: TensorFunction, at: int, cut: _KeyCut) -> TensorFunction:
    """Scores and states of every piece; the state's axes get the piece behind the rows."""
    stages = tuple(_of_piece(function, s, cut) for s in function.stages[: at + 1])
    state = stages[at]
    where = state.axes or ()
    extents = {d.var: d.extent for d in (*function.dims, cut.piece)}
    shape = tuple(extents[v] for v in where)
    # Copies of the states leave the kernel: the state itself is its schedule's to take apart.
    copies = tuple(
        Stage((f"{result}_piece",), (Load(result, where, v.dtype),), False, None, state.origins, where)
        for result, v in zip(state.results, state.values, strict=True)
    )
    outputs = tuple(
        Output(Buffer(f"out{k}", shape, contiguous_strides(shape), v.dtype, align=PARAM_ALIGN), c.results[0], where)
        for k, (c, v) in enumerate(zip(copies, state.values, strict=True))
    )
    return replace(
        function, rows=(*function.rows, cut.piece), inner=(cut.own,), outputs=outputs, stages=(*stages, *copies),
        name=f"{function.name}_pieces",
    )  # fmt: skip


def _of_piece(function: TensorFunction, stage: Stage, cut: _KeyCut) -> Stage:
    made = {r for s in function.stages for r in s.results}
    keys, position = cut.own.var, cut.position

    def leaf(e: Expr) -> Expr | None:  # what it sees has its indices moved already
        if not isinstance(e, Load):
            return None
        if e.buffer in made:
            at = [x for i in e.indices for x in ((cut.piece.var, keys) if i == position else (i,))]
            return Load(e.buffer, tuple(at), e.dtype)
        if cut.inside is None or stage.monoid is not SUM or keys not in _symbols(e):
            return None
        return Select(cut.inside, e, const(0, e.dtype))

    values = tuple(rewrite(v, leaf, lambda i: i.xreplace({keys: position})) for v in stage.values)
    if cut.inside is not None and stage.monoid is None:
        values = tuple(Select(cut.inside, v, const(0, v.dtype)) for v in values)
    if cut.inside is not None and stage.monoid is ATTENTION:
        score, weight, value = values
        inside = cut.inside
        values = (Select(inside, score, lowest(score.dtype)), weight, Select(inside, value, const(0, value.dtype)))
    axes = stage.axes or ()
    if keys in axes:
        axes = tuple(x for v in axes for x in ((cut.piece.var, v) if v == keys else (v,)))
    else:  # the state: rows, piece, features
        rows = {d.var for d in function.rows}
        last = max((k for k, v in enumerate(axes) if v in rows), default=-1) + 1
        axes = (*axes[:last], cut.piece.var, *axes[last:])
    return replace(stage, values=values, axes=axes)


# --- their combination ------------------------------------------------------------------------------------------------


def _second(
    function: TensorFunction, at: int, cut: _KeyCut, states: tuple[Buffer, ...]
) -> tuple[TensorFunction, tuple[int, ...]]:
    state, after = function.stages[at], function.stages[at + 1 :]
    extents = {d.var: d.extent for d in function.dims}
    order = state.axes or ()
    rows = tuple(Dim(symbol(f"i{k}"), extents[v]) for k, v in enumerate(order))
    inner = Dim(symbol("r0"), cut.piece.extent)
    moved: dict[sympy.Symbol, sympy.Expr] = {v: d.var for v, d in zip(order, rows, strict=True)}
    row_vars = {d.var for d in function.rows}
    last = max((k for k, v in enumerate(order) if v in row_vars), default=-1) + 1
    where = (*(d.var for d in rows[:last]), inner.var, *(d.var for d in rows[last:]))
    given = tuple(replace(b, name=f"in{k}") for k, b in enumerate(states))
    read = {ld.buffer for s in after for v in s.values for ld in loads(v)}
    taken = tuple(k for k, b in enumerate(function.inputs) if b.name in read)
    names = {function.inputs[k].name: f"in{len(given) + j}" for j, k in enumerate(taken)}
    combined = Stage(state.results, tuple(Load(b.name, where, b.dtype) for b in given), True, ATTENTION, state.origins)
    axes_of = {r: tuple(s.axes or ()) for s in function.stages[at:] for r in s.results}
    here = tuple(d.var for d in rows)

    def leaf(e: Expr) -> Expr | None:
        return Load(e.buffer, here, e.dtype) if isinstance(e, Load) and e.buffer in axes_of else None

    follow = tuple(
        replace(
            s,
            values=tuple(rename_loads(rewrite(v, leaf, lambda i: i.xreplace(moved)), names) for v in s.values),
            axes=None,
            inner=False,
        )
        for s in after
    )
    outputs = tuple(replace(o, indices=tuple(i.xreplace(moved) for i in o.indices)) for o in function.outputs)
    inputs = (*given, *(replace(function.inputs[k], name=names[function.inputs[k].name]) for k in taken))
    second = TensorFunction(
        f"{function.name}_combined", rows, (inner,), inputs, outputs, (combined, *follow), function.symbols
    )
    return second, taken
