"""Lowering: a fused tensor function as a loop nest, one loop tree a stage, with no decision about order or place yet.

Dimensions that every access crosses as one are collapsed, so that a contiguous point-wise kernel has a single loop
whatever the rank of its tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

import sympy

from ...ir.expr.origin import Origin
from ...ir.expr.role import Role
from ...ir.expr.value import Expr, Index, IndexValue, Load, cast, index_exprs, is_value, rewrite, symbol, walk
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.nest.hints import IN_PLACE, TABLE
from ...ir.nest.loops import (
    Access,
    AxisKind,
    Block,
    Buffer,
    LoopNest,
    Scope,
    Statement,
    Store,
    Update,
    contiguous_strides,
)
from ...ir.passes import Level, Pass, Plain, run_passes
from ...ir.target import Target
from ...ir.text.printer import show
from ...ir.verify.verify import verify
from .approximate_functions import approximate_functions
from .context import APPROXIMATIONS_PAY, NO_SCATTER, FunctionContext
from .join_divided import join_divided
from .lower_scatter import in_loops, lower_scatter
from .name_sums import name_sums
from .split_windows import split_windows

# What stores of the results of a stage of attention beside it are.
_LATE = {
    Role.SCORE: Role.WEIGHT,
    Role.ROW_TOTAL: Role.ROW_TOTAL,
    **dict.fromkeys((Role.STATE, Role.WEIGHTED_SUM, Role.WEIGHT_TOTAL), Role.RESULT),
}


def lower_to_loops(function: TensorFunction, target: Target | None = None) -> LoopNest:
    """The loop nest of a function, after the ``FUNCTION_PASSES`` for a target with fast numerics; of all targets where
    none is given."""
    return lower_stages(run_passes(FUNCTION_PASSES, function, FunctionContext(function, target, fast=True)))


def lower_stages(function: TensorFunction) -> LoopNest:
    """The loop nest of a function: parameters are inputs, then outputs; results that stay inside are LOCAL buffers.

    Stages stand in order at the root, each with loops over the rows and, where it needs them, the inner dimensions.
    """
    if function.scatters:
        return lower_scatter(function)
    inputs = {b.name for b in function.inputs}
    # What goes over an input is written when everything has been read.
    last = [o for o in function.outputs if o.buffer.name in inputs]
    made = function.made
    readers = {ld.buffer for s in function.stages for v in s.values for ld in _result_loads(made, v)}
    readers |= {o.result for o in last}
    locals_: list[Buffer] = []
    blocks: list[Block] = []
    for stage in function.stages:
        name = f"b{len(blocks)}"
        outputs = {r: [o for o in function.outputs if o.result == r and o not in last] for r in stage.results}
        block, buffers = _block(function, stage, name, outputs, readers)
        locals_ += buffers
        late = _late_stores(function, stage, outputs, readers)
        if stage.monoid is None and blocks and not blocks[-1].is_reduction and blocks[-1].axes == block.axes:
            # Neighbours of one domain are one block: what one makes the next has at hand.
            blocks[-1] = replace(blocks[-1], body=(*blocks[-1].body, *block.body))
        else:
            blocks.append(block)
        if late:
            blocks.append(_row_block(function, stage, f"b{len(blocks)}", late))
    if last:
        where = tuple(d.var for d in function.rows)
        kinds = {b.name: b.dtype for b in locals_}
        stores = [
            Store(o.buffer.name, o.indices, cast(Load(o.result, where, kinds[o.result]), o.buffer.dtype)) for o in last
        ]
        if len(blocks) == 1 and not blocks[0].is_reduction and not function.inner:
            blocks = [replace(blocks[0], body=(*blocks[0].body, *stores))]
        else:
            axes = tuple(map(function.axis, function.rows))
            name = f"b{len(blocks)}"
            blocks.append(
                Block(name, axes, tuple(symbol(f"{name}_{d.var.name}") for d in function.rows), tuple(stores))
            )
    return LoopNest(
        function.name,
        function.params,
        tuple(o.buffer.name for o in function.outputs),
        tuple(in_loops(b) for b in blocks),
        tuple(locals_),
        function.symbols,
        (
            *(((TABLE.name, True),) if function.table else ()),
            *(((IN_PLACE.name, ",".join(o.buffer.name for o in last)),) if last else ()),
        ),
    )


def _result_loads(made: Collection[str], value: Expr) -> list[Load]:
    return [e for e in walk(value) if isinstance(e, Load) and e.buffer in made]


def _block(
    function: TensorFunction, stage: Stage, name: str, outputs: dict[str, list[Output]], readers: set[str]
) -> tuple[Block, list[Buffer]]:
    kept, over = function.axes_of(stage), function.over_of(stage)
    dims = _in_order(function, (*kept, *over))
    if stage.scan:
        return _scan_block(function, stage, name, outputs, readers)
    axes = tuple(function.axis(d, AxisKind.REDUCTION if d in over else AxisKind.SPATIAL) for d in dims)
    where = tuple(d.var for d in kept)
    shape = tuple(d.extent for d in kept)
    buffers: list[Buffer] = []

    def local(result: str, value: Expr) -> None:
        buffers.append(Buffer(result, shape, contiguous_strides(shape), value.dtype, Scope.LOCAL))

    body: list[Statement] = []
    if stage.monoid is not None:
        targets = []
        for r, v in zip(stage.results, stage.values, strict=True):
            direct = _direct(outputs[r], r, v, readers)
            if direct is not None:
                targets.append(Access(direct.buffer.name, direct.indices))
            else:
                local(r, v)
                targets.append(Access(r, where))
        body.append(Update(stage.monoid, tuple(targets), stage.values))
    else:
        (r,), (v,) = stage.results, stage.values
        if r in readers:
            local(r, v)
            body.append(Store(r, where, v))
        body += [Store(o.buffer.name, o.indices, cast(v, o.buffer.dtype)) for o in outputs[r]]
    bindings = tuple(symbol(f"{name}_{d.var.name}") for d in dims)
    return Block(name, axes, bindings, tuple(body), role=stage.role), buffers


def _scan_block(
    function: TensorFunction, stage: Stage, name: str, outputs: dict[str, list[Output]], readers: set[str]
) -> tuple[Block, list[Buffer]]:
    """The state of a row, updated at each point, and the stores of what it is up to there."""
    assert stage.monoid is not None
    dims, rows = (*function.rows, *function.inner), tuple(d.var for d in function.rows)
    axes = tuple(function.axis(d, AxisKind.SCAN if d in function.inner else AxisKind.SPATIAL) for d in dims)
    where, buffers, body = tuple(d.var for d in dims), [], []
    states = []
    for r, v in zip(stage.results, stage.values, strict=True):
        shape = tuple(d.extent for d in function.rows)
        states.append(Buffer(f"{r}_state", shape, contiguous_strides(shape), v.dtype, Scope.LOCAL))
        so_far = Load(states[-1].name, rows, v.dtype)
        if r in readers:
            shape = tuple(d.extent for d in dims)
            buffers.append(Buffer(r, shape, contiguous_strides(shape), v.dtype, Scope.LOCAL))
            body.append(Store(r, where, so_far))
        body += [Store(o.buffer.name, o.indices, cast(so_far, o.buffer.dtype)) for o in outputs[r]]
    update = Update(stage.monoid, tuple(Access(s.name, rows) for s in states), stage.values)
    bindings = tuple(symbol(f"{name}_{d.var.name}") for d in dims)
    return Block(name, axes, bindings, (update, *body)), [*states, *buffers]


def _in_order(function: TensorFunction, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Dimensions in the order of the function's loops; those of a stage's own stand last."""
    return tuple(d for d in function.dims if d in dims)


def _direct(outputs: list[Output], result: str, value: Expr, readers: set[str]) -> Output | None:
    """The output that a reduction may accumulate into: its only reader, of the same type."""
    if len(outputs) == 1 and result not in readers and outputs[0].buffer.dtype is value.dtype:
        return outputs[0]
    return None


def _late_stores(
    function: TensorFunction, stage: Stage, outputs: dict[str, list[Output]], readers: set[str]
) -> list[Statement]:
    """The stores of a reduction's results that it cannot accumulate in place, because they are also read here."""
    if stage.monoid is None or stage.scan:
        return []
    where = tuple(d.var for d in function.axes_of(stage))
    return [
        Store(o.buffer.name, o.indices, cast(Load(r, where, v.dtype), o.buffer.dtype))
        for r, v in zip(stage.results, stage.values, strict=True)
        if _direct(outputs[r], r, v, readers) is None
        for o in outputs[r]
    ]


def _row_block(function: TensorFunction, stage: Stage, name: str, body: list[Statement]) -> Block:
    dims = _in_order(function, function.axes_of(stage))
    axes = tuple(map(function.axis, dims))
    role = _LATE.get(stage.role) if stage.role is not None else None
    return Block(name, axes, tuple(symbol(f"{name}_{d.var.name}") for d in dims), tuple(body), role=role)


# --- stages -----------------------------------------------------------------------------------------------------------


def substitute_single_uses(function: TensorFunction) -> TensorFunction:
    """Stages whose result one load of the same level reads, and nothing else, become part of their reader."""
    kept_out = {o.result for o in function.outputs}
    made_at = {r: set(function.axes_of(s)) for s in function.stages for r in s.results}
    uses: dict[str, int] = {}
    for s in function.stages:
        visited = {*function.axes_of(s), *function.over_of(s)}
        for v in s.values:
            for ld in _result_loads(made_at, v):
                same = made_at[ld.buffer] == visited
                uses[ld.buffer] = uses.get(ld.buffer, 0) + (1 if same else 2)
    inlined: dict[str, Expr] = {}

    def leaf(e: Expr) -> Expr | None:
        return cast(inlined[e.buffer], e.dtype) if isinstance(e, Load) and e.buffer in inlined else None

    stages = []
    for s in function.stages:
        values = tuple(rewrite(v, leaf) for v in s.values)
        name = s.results[0]
        if s.monoid is None and name not in kept_out and uses.get(name, 0) <= 1:
            inlined[name] = values[0]
            continue
        stages.append(replace(s, values=values))
    if not inlined:
        return function
    return replace(function, stages=tuple(_merged_origins(function, stages)))


def rows_late(function: TensorFunction) -> TensorFunction:
    """Stages that run once a row come no earlier than somebody needs them: between two that run over the elements of
    the row, they would keep those from sharing a visit."""
    made = function.made
    waiting: list[Stage] = []
    order: list[Stage] = []
    for stage in function.stages:
        if stage.monoid is None and not stage.inner and stage.axes is None:
            waiting.append(stage)
            continue
        needed: set[str] = set()
        ready: list[Stage] = []
        for s in (stage, *reversed(waiting)):
            if s is stage or needed & set(s.results):
                needed |= {ld.buffer for v in s.values for ld in _result_loads(made, v)}
                ready.insert(0, s)
        waiting = [w for w in waiting if w not in ready]
        order += ready
    order += waiting
    is_same = all(a is b for a, b in zip(order, function.stages, strict=True))
    return function if is_same else replace(function, stages=tuple(order))


def _merged_origins(function: TensorFunction, stages: list[Stage]) -> list[Stage]:
    """A stage speaks for the stages that went into it: those since the one before it."""
    kept = {s.results for s in stages}
    pending: list[Origin] = []
    result = []
    by_results = {s.results: s for s in stages}
    for s in function.stages:
        pending += s.origins
        if s.results in kept:
            result.append(replace(by_results[s.results], origins=tuple(dict.fromkeys(pending))))
            pending = []
    return result


# --- collapsing -------------------------------------------------------------------------------------------------------


def collapse(function: TensorFunction) -> TensorFunction:
    """Merge neighbouring dimensions that every access crosses as one."""
    rows, inner = list(function.rows), list(function.inner)
    changed = True
    while changed:
        changed = False
        for dims in (rows, inner):
            for k in range(len(dims) - 1):
                merged = merge_pair(function, dims[k], dims[k + 1])
                if merged is not None:
                    function = merged
                    dims[k : k + 2] = [Dim(dims[k + 1].var, dims[k].extent * dims[k + 1].extent)]
                    changed = True
                    break
    if (*rows, *inner) != (*function.rows, *function.inner):
        function = replace(function, rows=tuple(rows), inner=tuple(inner))
    return renumber(function)


def _accesses(function: TensorFunction) -> dict[str, dict[tuple[Index, ...], None]]:
    """The indices at which each buffer is accessed, each once."""
    found: dict[str, dict[tuple[Index, ...], None]] = {}
    for e in function.loads:
        found.setdefault(e.buffer, {})[e.indices] = None
    for o in function.outputs:
        found.setdefault(o.buffer.name, {})[o.indices] = None
    return found


def merge_pair(function: TensorFunction, high: Dim, low: Dim) -> TensorFunction | None:
    """The function with two neighbouring dimensions as one, if each access moves with ``high*low.extent + low``
    alone."""
    for s in function.stages:
        if any(((high.var in own) != (low.var in own)) for own in (s.axes, s.over) if own is not None):
            return None
    buffers = {b.name: b for b in function.inputs} | {o.buffer.name: o.buffer for o in function.outputs}
    reshaped: dict[str, tuple[int, Buffer]] = {}
    for name, sites in _accesses(function).items():
        buffer = buffers.get(name)
        if buffer is None:
            if any(is_value(i) or not i.is_Symbol for site in sites for i in site):
                return None
            continue  # results are indexed by dimensions and follow them
        at: int | None = None
        for indices in sites:
            found = _mergeable_site(buffer, indices, high, low)
            if found is None or (at is not None and found not in (at, -1) and at != -1):
                return None
            at = found if at in (None, -1) else at
        if at is not None and at >= 0:
            reshaped[name] = (at, _joined(buffer, at))
            if any(_mergeable_site(buffer, i, high, low) != at for i in sites):
                return None
    for s in function.stages:
        for v in s.values:
            if any(isinstance(e, IndexValue) and not _moves_as_one(e.index, high, low) for e in walk(v)):
                return None
    return _rewritten(function, reshaped, high, low)


def _moves_as_one(index: sympy.Expr, high: Dim, low: Dim) -> bool:
    free = index.free_symbols
    return (high.var not in free and low.var not in free) or _is_one_position(index, high, low)


@lru_cache(maxsize=4096)
def _is_one_position(index: sympy.Expr, high: Dim, low: Dim) -> bool:
    whole = sympy.Dummy(integer=True, nonnegative=True)
    moved = sympy.expand(index.xreplace({low.var: whole - high.var * low.extent}))
    return high.var not in moved.free_symbols


def _mergeable_site(buffer: Buffer, indices: tuple[Index, ...], high: Dim, low: Dim) -> int | None:
    """-1 where the access needs no change of the buffer's shape; k where dimensions k and k+1 of it must become one;
    else None."""
    for i in indices:
        if is_value(i):
            inner = [e for e in index_exprs(i)]
            if not all(_moves_as_one(e, high, low) for e in inner):
                return None
    exprs = [sympy.S.Zero if is_value(i) else i for i in indices]
    if all(_moves_as_one(i, high, low) for i in exprs):
        return -1
    for k in range(len(exprs) - 1):
        if exprs[k] == high.var and exprs[k + 1] == low.var:
            others = [e for j, e in enumerate(exprs) if j not in (k, k + 1)]
            if any({high.var, low.var} & e.free_symbols for e in others):
                return None
            if (
                buffer.shape[k + 1] == low.extent
                and sympy.expand(buffer.strides[k] - buffer.strides[k + 1] * buffer.shape[k + 1]) == 0
            ):
                return k
    return None


def _joined(buffer: Buffer, k: int) -> Buffer:
    shape = (*buffer.shape[:k], buffer.shape[k] * buffer.shape[k + 1], *buffer.shape[k + 2 :])
    return replace(buffer, shape=shape, strides=(*buffer.strides[:k], *buffer.strides[k + 1 :]))


def _rewritten(
    function: TensorFunction, reshaped: dict[str, tuple[int, Buffer]], high: Dim, low: Dim
) -> TensorFunction:
    """``low`` becomes the merged dimension; ``high`` disappears from every index."""
    merged = {low.var: sympy.expand(low.var - high.var * low.extent)}
    made = function.made

    def index(i: sympy.Expr) -> sympy.Expr:
        free = i.free_symbols
        return sympy.expand(i.xreplace(merged)) if high.var in free or low.var in free else i

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load):
            if e.buffer in reshaped:
                return Load(e.buffer, _drop(e.indices, reshaped[e.buffer][0], low), e.dtype)
            if e.buffer in made:
                kept = tuple(low.var if i == merged[low.var] else i for i in e.indices if i != high.var)
                return Load(e.buffer, kept, e.dtype)
        return None

    def indices(name: str, given: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
        moved = tuple(index(i) for i in given)
        return _drop(moved, reshaped[name][0], low) if name in reshaped else moved  # type: ignore[return-value]

    stages = tuple(
        replace(
            s,
            values=tuple(rewrite(v, leaf, index) for v in s.values),
            axes=_without(s.axes, high),
            over=_without(s.over, high),
        )
        for s in function.stages
    )
    outputs = tuple(
        replace(
            o,
            buffer=reshaped[o.buffer.name][1] if o.buffer.name in reshaped else o.buffer,
            indices=indices(o.buffer.name, o.indices),
        )
        for o in function.outputs
    )
    inputs = tuple(reshaped[b.name][1] if b.name in reshaped else b for b in function.inputs)
    return replace(function, stages=stages, outputs=outputs, inputs=inputs)


def _without(symbols: tuple[sympy.Symbol, ...] | None, dim: Dim) -> tuple[sympy.Symbol, ...] | None:
    return None if symbols is None else tuple(s for s in symbols if s != dim.var)


def _drop(indices: tuple[Index, ...], k: int, low: Dim) -> tuple[Index, ...]:
    return (*indices[:k], low.var, *indices[k + 2 :])


def renumber(function: TensorFunction) -> TensorFunction:
    """The function with its dimensions named i0, i1, …, r0, r1, … and x0, x1, … again."""
    env: dict[sympy.Symbol, sympy.Symbol] = {}
    for prefix, dims in (("i", function.rows), ("r", function.inner), ("x", function.extra)):
        env.update({d.var: symbol(f"{prefix}{k}") for k, d in enumerate(dims)})
    if all(a == b for a, b in env.items()):
        return function

    def index(i: sympy.Expr) -> sympy.Expr:
        return i.xreplace(env) if i.free_symbols else i

    def renamed(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(Dim(env[d.var], d.extent) for d in dims)

    return replace(
        function,
        rows=renamed(function.rows),
        inner=renamed(function.inner),
        extra=renamed(function.extra),
        stages=tuple(
            replace(
                s,
                values=tuple(rewrite(v, lambda _: None, index) for v in s.values),
                axes=None if s.axes is None else tuple(env[a] for a in s.axes),
                over=None if s.over is None else tuple(env[a] for a in s.over),
            )
            for s in function.stages
        ),
        outputs=tuple(replace(o, indices=tuple(index(i) for i in o.indices)) for o in function.outputs),
    )


FUNCTION: Level[TensorFunction] = Level(
    "function", show, lambda f: len(f.stages), verify, lambda function: function.name
)  # fmt: skip
# Over each function by itself, in the order in which they run.
FUNCTION_PASSES: tuple[Pass[TensorFunction, FunctionContext], ...] = (
    Pass("substitute_single_uses", FUNCTION, Plain(substitute_single_uses), needs=(NO_SCATTER,)),
    Pass("join_divided", FUNCTION, Plain(join_divided), needs=(NO_SCATTER,)),
    Pass("collapse", FUNCTION, Plain(collapse), needs=(NO_SCATTER,)),
    Pass("rows_late", FUNCTION, Plain(rows_late), needs=(NO_SCATTER,)),
    Pass("split_windows", FUNCTION, Plain(split_windows), needs=(NO_SCATTER,)),
    Pass("name_sums", FUNCTION, Plain(name_sums), needs=(NO_SCATTER,)),
    Pass("approximate_functions", FUNCTION, Plain(approximate_functions), needs=(NO_SCATTER, APPROXIMATIONS_PAY)),
)
