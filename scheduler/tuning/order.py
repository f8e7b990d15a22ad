"""In which order a schedule combines what it reduces: equal values for schedules whose results have the same bits.

Two schedules of a nest combine alike where their ``combining`` is equal. What it holds follows the emitters. On CPUs
(``codegen/llvm/reductions``) loops that run one after the other are one order, however they are split; lanes along a
reduction, copies of an unrolled loop that keep partial states, cascades, and pieces of ``rfactor`` each change it. On
GPUs a tile's own reduction follows from its shape and the warps over which it is laid.

A product is rounded together with the sum that follows where both stand in one loop, so what a block computes, and
which blocks stand in one loop, counts as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeAlias

import sympy

from ...ir.expr.value import Call, Expr, IndexValue, Load, walk
from ...ir.nest.hints import CASCADE, CHAIN, HINTS, Annotations, Changes
from ...ir.nest.loops import BLOCK_KINDS, AxisKind, Block, Loop, LoopKind, LoopNest, Scope, Update, blocks, walk_nodes

Combining: TypeAlias = tuple[Hashable, ...]
# Bytes of accumulators past which the emitter updates targets in memory (``codegen.llvm.reductions``).
LARGEST_ACCUMULATORS = 1 << 15


def combining(nest: LoopNest) -> Combining:
    """The order in which a scheduled nest combines, comparable with that of other schedules of the same nest."""
    found = list(blocks(nest))
    inside = {id(b): (outer[-1].body if outer else nest.body) for b, outer in found}
    local = {b.name for b in nest.locals if b.scope is not Scope.GLOBAL}
    is_grid = any(lp.kind in BLOCK_KINDS for _, path in found for lp in path)
    parts: list[Hashable] = []
    for block, path in found:
        beside = (n for n in inside[id(block)] if isinstance(n, Block) and n is not block)
        neighbours = tuple(sorted(n.name for n in beside if _touches(n, block, local)))
        own: tuple[Hashable, ...] = (block.name, block.body, block.axes, neighbours, _hints(block.annotations))
        if is_grid:
            own = (*own, _tile_order(block, path) if rounds(block) else ())
        else:
            own = (*own, _order(block, path) if rounds(block) else (), _sharing(block, path))
        parts.append(own)
    nest_hints = _hints(nest.annotations) if any(rounds(b) for b, _ in found) else ()
    return (*sorted(parts, key=lambda p: p[0]), nest_hints)  # type: ignore[index]


def _touches(one: Block, other: Block, local: set[str]) -> bool:
    """Whether one of two blocks passes something on to the other."""
    mine, theirs = ({w.buffer for w in b.writes} & local for b in (one, other))
    return any(r.buffer in theirs for r in one.reads) or any(r.buffer in mine for r in other.reads)


def rounds(block: Block) -> bool:
    """Whether a block combines so that the order shows in the last bits."""
    updates = [s for s in block.body if isinstance(s, Update)]
    return any(not s.monoid.exact and any(not v.dtype.is_int for v in s.values) for s in updates)


def _hints(annotations: Annotations) -> Annotations:
    """Those that change an order, a rounding or a meaning."""
    return tuple(sorted((k, v) for k, v in annotations if HINTS[k.partition(":")[0]].changes is not Changes.SPEED))


# --- CPUs -------------------------------------------------------------------------------------------------------------


def _order(block: Block, path: tuple[Loop, ...]) -> Hashable:
    over = (AxisKind.REDUCTION, AxisKind.SCAN, AxisKind.SCATTER)
    bound = [(a, e) for a, e in zip(block.axes, block.bindings, strict=True) if a.kind in over]
    carried = {s for _, e in bound for s in e.free_symbols}
    loops = [lp for lp in path if lp.var in carried]
    spatial = {s for a, e in zip(block.axes, block.bindings, strict=True) if a.kind not in over for s in e.free_symbols}
    if not loops:
        return ()
    across = [lp for lp in loops if lp.kind is LoopKind.VECTORIZED]
    mixed = any(lp.var in spatial for lp in loops)
    if across or mixed or block.is_scan or block.is_scatter:
        # Lanes along a reduction: tails, and what shares the lanes, decide how many there are at the end.
        return ("whole", _shape(path[path.index(loops[0]) :]), block.bindings, block.predicate)
    kept = _accumulates(block, path, loops[0], spatial, carried)
    dims = _selecting(path, loops[0], spatial, carried)
    steps: list[Hashable] = []
    ordered: list[Loop] = []
    for lp in loops:
        copies = kept and lp.kind is LoopKind.UNROLLED and not CHAIN.of(lp)
        # A loop between it and the accumulators outside would select among those: then there is no cascade.
        is_inner = not set(dims) - set(path[path.index(lp) :])
        cascade = kept and lp is not loops[0] and CASCADE.of(lp) and is_inner
        if copies or cascade:
            steps.append(_sequence(bound, ordered, final=False))
            ordered = []
            steps.append(("cascade",) if cascade else ())
        if copies:
            steps.append(("copies", lp.extent, _coefficients(bound, lp)))
        else:
            ordered.append(lp)
    steps.append(_sequence(bound, ordered, final=len(steps) == 0))
    return (kept if len(steps) > 1 else None, *steps, tuple(_factors(loops)))


def _sequence(bound: Sequence[tuple[object, sympy.Expr]], loops: list[Loop], final: bool) -> Hashable:
    """Loops one after the other, as the elements that they visit in turn."""
    merged: list[tuple[tuple[sympy.Expr | None, ...], sympy.Expr]] = []
    for lp in loops:
        steps = _coefficients(bound, lp)
        if merged:
            before, extent = merged[-1]
            if None not in steps and all(b == s * lp.extent for b, s in zip(before, steps, strict=True)):
                merged[-1] = (steps, extent * lp.extent)
                continue
        merged.append((steps, lp.extent))
    # The outermost loop along an axis covers it, whatever its extent.
    seen: set[int] = set()
    result: list[Hashable] = []
    for steps, extent in merged:
        axes = {k for k, s in enumerate(steps) if s != 0}
        result.append((steps, None if final and not axes & seen else extent))
        seen |= axes
    return tuple(result)


def _coefficients(bound: Sequence[tuple[object, sympy.Expr]], loop: Loop) -> tuple[sympy.Expr | None, ...]:
    return tuple(_linear(e, loop.var) for _, e in bound)


def _linear(expr: sympy.Expr, var: sympy.Symbol) -> sympy.Expr | None:
    """The coefficient of a variable in an index; the expression itself stands for what is not linear."""
    step = sympy.expand(expr.subs(var, var + 1) - expr) if var in expr.free_symbols else sympy.S.Zero
    return None if var in step.free_symbols else step


def _factors(loops: list[Loop]) -> Iterator[Hashable]:
    for lp in loops:
        rest = tuple(h for h in _hints(lp.annotations) if h[0] not in (CASCADE.name, CHAIN.name))
        if rest:
            yield rest


def _selecting(
    path: tuple[Loop, ...], first: Loop, spatial: set[sympy.Symbol], carried: set[sympy.Symbol]
) -> list[Loop]:
    """The loops that select one of a block's accumulators: those over targets, and those whose copies keep their own.

    Lanes do not: each has its element of a vector."""
    vector = _lanes(path)
    return [
        lp
        for lp in path[path.index(first) :]
        if lp is not vector
        and (lp.var in spatial or (lp.var in carried and lp.kind is LoopKind.UNROLLED and not CHAIN.of(lp)))
    ]


def _lanes(path: tuple[Loop, ...]) -> Loop | None:
    return next((lp for lp in path if lp.kind is LoopKind.VECTORIZED), None)


def _accumulates(
    block: Block, path: tuple[Loop, ...], first: Loop, spatial: set[sympy.Symbol], carried: set[sympy.Symbol]
) -> bool:
    """Whether the emitter keeps accumulators (``reductions.begin``), or updates the targets in memory."""
    vector = _lanes(path)
    size = int(vector.extent) if vector is not None and vector.extent.is_Integer else 1
    for lp in _selecting(path, first, spatial, carried):
        if not lp.extent.is_Integer:
            return False
        size *= int(lp.extent)
    numbers = max(len(s.values) for s in block.body if isinstance(s, Update))
    return size * 8 * numbers <= LARGEST_ACCUMULATORS


def _shape(loops: tuple[Loop, ...]) -> Hashable:
    """Loops and all that stands in the outermost of them."""
    if not loops:
        return ()
    return tuple(
        n.name if isinstance(n, Block) else (n.extent, n.kind, _hints(n.annotations), len(n.body))
        for n, _ in walk_nodes((loops[0],))
    )


def _sharing(block: Block, path: tuple[Loop, ...]) -> Hashable:
    """The loops of a block in which a product could be made once for several sums, and would be rounded by itself."""
    axes = {a.var for a in block.axes if a.extent != 1}
    for s in block.body:
        values = s.values if isinstance(s, Update) else (s.value,)
        for v in values:
            for e in walk(v):
                if isinstance(e, Call) and e.fn == "mul" and e.dtype.is_float and not axes <= _symbols_of(e):
                    return tuple((lp.extent, lp.kind, len(lp.body)) for lp in path)
    return ()


def _symbols_of(value: Expr) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for e in walk(value):
        indices = e.indices if isinstance(e, Load) else (e.index,) if isinstance(e, IndexValue) else ()
        for i in indices:
            found |= set(i.free_symbols) if isinstance(i, sympy.Expr) else set()
    return found


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _tile_order(block: Block, path: tuple[Loop, ...]) -> Hashable:
    """The tile of a program and the loops around it that reduce, with what is in them."""
    over = (AxisKind.REDUCTION, AxisKind.SCAN, AxisKind.SCATTER)
    carried = {s for a, e in zip(block.axes, block.bindings, strict=True) if a.kind in over for s in e.free_symbols}
    kept = tuple(lp for lp in path if lp.kind is LoopKind.THREAD_X or lp.var in carried)
    return (
        tuple((lp.var.name, lp.extent, lp.kind, _hints(lp.annotations)) for lp in kept),
        tuple(e for a, e in zip(block.axes, block.bindings, strict=True) if a.kind in over), block.predicate,
    )  # fmt: skip
