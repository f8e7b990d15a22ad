"""Accumulators of reductions: one for each lane, each interleaved copy and each target inside the loop that reduces.

They are stack slots that LLVM keeps in registers. A component that is the same in all lanes (Welford's count) is one
scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import State
from ....ir.expr.value import Expr, IndexValue, Load, Var, walk
from ....ir.nest.loops import AxisKind, Block, Bound, Loop, LoopKind, Update
from ..functions.functions import closed
from ..memory.index import scalar_index, split_linear
from ..text.builder import Val, llvm_type
from ..text.context import Context
from ..text.control import runtime_loop

_REDUCED = (AxisKind.REDUCTION, AxisKind.SCAN)


@dataclass(frozen=True, slots=True)
class Slot:
    """One component: ``pointer`` to an array of values of ``lanes`` lanes (0: one scalar for all lanes)."""

    pointer: str
    dtype: DType
    lanes: int


@dataclass(frozen=True, slots=True)
class Accumulator:
    """The state of one ``Update`` while its loops run.

    ``dims`` are the loops inside that select one of the slots' elements: loops over targets, and interleaved reduction
    loops. ``across`` tells that lanes run along the reduction and are combined at the end.
    """

    block: Block
    update: Update
    slots: tuple[Slot, ...]
    dims: tuple[Loop, ...]
    reduced: frozenset[sympy.Symbol]
    across: Loop | None
    vector: Loop | None
    # Part of a cascade: it joins others of its own width.
    nested: bool = False
    # What is combined at each step, and what multiplies the whole at the end.
    values: tuple[Expr, ...] = ()
    factor: Expr | None = None
    # Where an instruction adds integers: their sums, and what they are too much by, the same for all ``columns``.
    whole: tuple[Slot, ...] = ()
    columns: frozenset[sympy.Symbol] = frozenset()
    # The index of the first element, where elements come by rising index and the monoid can make use of that.
    first: IndexValue | None = None

    @property
    def runs_on(self) -> bool:
        """Whether it is the one running state of a scan, which copies and lanes hand on in order."""
        return self.block.is_scan

    @property
    def lanes(self) -> int:
        return int(self.vector.extent) if self.vector else 0

    @property
    def size(self) -> int:
        total = 1
        for d in self.dims:
            total *= int(d.extent)
        return total


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduction block, the loops around it, and the variables of those that carry its reduction axes."""

    block: Block
    path: tuple[Loop, ...]
    vars: frozenset[sympy.Symbol]

    @property
    def outermost(self) -> Loop | None:
        return next((lp for lp in self.path if lp.var in self.vars), None)


def reductions_of(paths: Mapping[str, tuple[Block, tuple[Loop, ...]]]) -> dict[str, Reduced]:
    """Every block with an ``Update`` whose places data do not decide, by name."""
    found = {}
    for name, (block, path) in paths.items():
        if block.is_reduction and not block.is_scatter:
            carried: set[sympy.Symbol] = set()
            for axis, binding in zip(block.axes, block.bindings, strict=True):
                if axis.kind is not AxisKind.SPATIAL:
                    carried |= binding.free_symbols
            found[name] = Reduced(block, path, frozenset(lp.var for lp in path if lp.var in carried))
    return found


def spatial_vars(block: Block) -> set[sympy.Symbol]:
    """The loop variables that the block's targets depend on."""
    # Along a scan that does not update (a state written out by stores) targets are as at any other axis.
    over = (AxisKind.REDUCTION, AxisKind.SCAN) if block.is_scan else (AxisKind.REDUCTION,)
    kinds = zip(block.axes, block.bindings, strict=True)
    return {s for axis, binding in kinds if axis.kind not in over for s in binding.free_symbols}


def make_slot(ctx: Context, size: int, dtype: DType, lanes: int) -> Slot:
    return Slot(ctx.b.alloca(f"[{size} x {llvm_type(dtype, lanes)}]"), dtype, lanes)


def varying(ctx: Context, reduced: Reduced, update: Update, var: sympy.Symbol | None) -> list[bool]:
    """Which components differ from lane to lane: those whose values do, and those that combine makes of them."""
    if var is None:
        return [False] * len(update.values)
    axes = {a.var for a, e in zip(reduced.block.axes, reduced.block.bindings, strict=True) if var in e.free_symbols}
    varies = [_mentions(v, axes) for v in update.values]
    if var in reduced.vars and any(_masks_lanes(b, var) for b in reduced.block.predicate if b not in ctx.assumed):
        return [True] * len(varies)
    sides = _operands(update)
    results = update.monoid.combine(*sides)
    for _ in varies:
        names = {v.name for side in sides for v, yes in zip(side, varies, strict=True) if yes}
        used = [any(isinstance(e, Var) and e.name in names for e in walk(r)) for r in results]
        varies = [x or y for x, y in zip(varies, used, strict=True)]
    return varies


def _masks_lanes(bound: Bound, var: sympy.Symbol) -> bool:
    return var in bound.lhs.free_symbols or var in bound.rhs.free_symbols


def _mentions(expr: Expr, axes: set[sympy.Symbol]) -> bool:
    for e in walk(expr):
        if isinstance(e, Load) and any(isinstance(i, sympy.Expr) and i.free_symbols & axes for i in e.indices):
            return True
        if isinstance(e, IndexValue) and e.index.free_symbols & axes:
            return True
    return False


def _operands(update: Update) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    kinds = [v.dtype for v in update.values]
    return tuple(Var(f"a{k}", d) for k, d in enumerate(kinds)), tuple(Var(f"b{k}", d) for k, d in enumerate(kinds))


def identity(ctx: Context, update: Update) -> list[Val]:
    constants = update.monoid.identity(tuple(v.dtype for v in update.values))
    return [ctx.b.const(c.value, c.dtype) for c in constants]


def clear(ctx: Context, acc: Accumulator) -> None:
    none = [ctx.b.const(0, s.dtype) for s in acc.whole]
    neutral = zip((*acc.slots, *acc.whole), (*identity(ctx, acc.update), *none), strict=True)
    for slot, start in neutral:
        value = ctx.b.splat(start, slot.lanes)
        if acc.size <= 16 or all(d.kind is LoopKind.UNROLLED for d in acc.dims):
            for k in range(acc.size):
                ctx.b.line(f"store {value}, ptr {element(ctx, slot, str(k))}")
        else:
            with runtime_loop(ctx, "0", str(acc.size)) as k_name:
                ctx.b.line(f"store {value}, ptr {element(ctx, slot, k_name)}")


def element(ctx: Context, slot: Slot, index: str) -> str:
    if index == "0":
        return slot.pointer
    return ctx.b.op(f"getelementptr inbounds {llvm_type(slot.dtype, slot.lanes)}, ptr {slot.pointer}, i64 {index}")


def read(ctx: Context, slot: Slot, index: str) -> Val:
    kind = llvm_type(slot.dtype, slot.lanes)
    return Val(ctx.b.effect(f"load {kind}, ptr {element(ctx, slot, index)}"), slot.dtype, slot.lanes)


def position(ctx: Context, acc: Accumulator) -> str:
    position: sympy.Expr = sympy.S.Zero
    for loop in acc.dims:
        position = position * loop.extent + loop.var
    return scalar_index(ctx, sympy.expand(position)).name


def combined(
    ctx: Context, statement: Update, x: list[Val], y: list[Val], rule: Callable[[State, State], State] | None = None
) -> list[Val]:
    """monoid.combine of two states, or another rule of the monoid."""
    a, b = _operands(statement)
    env = {v.name: val for v, val in (*zip(a, x, strict=True), *zip(b, y, strict=True))}
    return [closed(ctx.b, e, env) for e in (rule or statement.monoid.combine)(a, b)]


def first_index(ctx: Context, reduced: Reduced, update: Update, loops: Iterable[Loop]) -> IndexValue | None:
    """The index of the first element, where a state that holds an index sees them by rising index through ``loops``."""
    index = update.values[-1]
    if update.monoid.follow is None or not isinstance(index, IndexValue):
        return None
    over = {a.var: b for a, b in zip(reduced.block.axes, reduced.block.bindings, strict=True) if a.kind in _REDUCED}
    rest = sympy.expand(index.index.xreplace(over))
    reach: sympy.Expr = sympy.S.Zero
    for loop in reversed([lp for lp in loops if lp.var in rest.free_symbols]):
        parts = split_linear(rest, loop.var)
        if parts is None or parts[1].free_symbols & reduced.vars:
            return None
        rest, step = parts
        if ctx.nest.symbols.bounds(step - reach)[0] < 1:
            return None
        reach += step * (loop.extent - 1)
    return replace(index, index=index.index.xreplace(dict.fromkeys(over, sympy.S.Zero)))


def horizontal(ctx: Context, statement: Update, state: list[Val]) -> list[Val]:
    """All lanes combined into one, by halves."""
    lanes = state[0].lanes
    while lanes > 1:
        half = lanes // 2
        rest = [pick_lanes(ctx, v, lanes - 1, 1) for v in state] if lanes % 2 else None
        state = halved(ctx, statement, state, half)
        if rest is not None:
            state = _with_rest(ctx, statement, state, rest, half)
        lanes = half
    return [Val(ctx.b.op(f"extractelement {v}, i64 0"), v.dtype, 0) if v.lanes else v for v in state]


def _with_rest(ctx: Context, statement: Update, state: list[Val], rest: list[Val], half: int) -> list[Val]:
    """The odd lane goes into lane 0."""
    b = ctx.b
    neutral = identity(ctx, statement)
    padded = []
    for value, empty in zip(rest, neutral, strict=True):
        one = b.op(f"extractelement {value}, i64 0")
        fill = b.splat(empty, half)
        padded.append(Val(b.op(f"insertelement {fill}, {llvm_type(value.dtype, 0)} {one}, i64 0"), value.dtype, half))
    return [b.splat(v, half) for v in combined(ctx, statement, state, padded)]


def halved(ctx: Context, statement: Update, state: list[Val], half: int) -> list[Val]:
    low = [pick_lanes(ctx, v, 0, half) for v in state]
    high = [pick_lanes(ctx, v, half, half) for v in state]
    return [ctx.b.splat(v, half) for v in combined(ctx, statement, low, high)]


def pick_lanes(ctx: Context, v: Val, start: int, count: int) -> Val:
    picks = ", ".join(f"i32 {k}" for k in range(start, start + count))
    return Val(ctx.b.op(f"shufflevector {v}, {v.type} poison, <{count} x i32> <{picks}>"), v.dtype, count)
