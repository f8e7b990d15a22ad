"""Reductions: accumulators over loops, and the reduction of a tile along its axes by the monoid's own ``combine``.

An accumulator over a loop is a full tile, one state a lane, reduced once after the loop. Lanes that hold no element
hold the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import LOGSUMEXP, MAX, SUM, Monoid, State
from ...ir.expr.value import Const, Expr, Load, Select, Var, call, const
from ...ir.nest.hints import NARROW_ROWS, NUM_WARPS
from ...ir.nest.loops import Access, AxisKind, Buffer, Scope, Update
from ..kernel import ALIGNMENT, EmitError
from .products.dot import dot
from .program import BlockInfo
from .types import literal, type_text, typed_literal
from .values import Values
from .writer import SCALAR, Dims, SourceWriter, Value

Rule: TypeAlias = Callable[[State, State], State]
# Threads of a warp of the GPUs that keep rows as they were loaded.
_WARP = 32
_SMALL_INT = (DType.INT8, DType.INT16, DType.UINT8, DType.UINT16)


@dataclass(frozen=True, slots=True)
class ReductionState:
    """The state of one update while its loop runs: a name a component."""

    update: Update
    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    # What the targets held before the loop, where the update goes on from it.
    before: tuple[Value, ...] = ()
    # Neighbours of a tile that have one state.
    near: int = 1


class Reductions:
    """Emits the updates of blocks."""

    def __init__(self, values: Values, writer: SourceWriter) -> None:
        self.values = values
        self.out = writer
        self.open: dict[tuple[str, tuple[sympy.Expr, ...]], tuple[ReductionState, ...]] = {}

    def begin(self, info: BlockInfo) -> None:
        """Before the outermost loop that carries the block's reduction: accumulators at the identity."""
        found = []
        for update in _updates(info):
            dtypes, near = _states(update), self._near(info, update)
            names = tuple(self.out.fresh("acc") for _ in dtypes)
            for name, start, dtype in zip(names, update.monoid.identity(dtypes), dtypes, strict=True):
                shape = self._shape(info, near) if info.tile else "[]"
                self.out.line(f"{name} = tl.full({shape}, {literal(start.value)}, {type_text(dtype)})")
            found.append(ReductionState(update, names, dtypes, self._held(info, update), near))
        self.open[info.place] = tuple(found)

    def _near(self, info: BlockInfo, update: Update) -> int:
        """How many neighbours of a row have one state. Where registers hold the row, and a thread has of a part what it
        loads at once, it sums that up, and holds one number; of larger parts the compiler takes more registers."""
        program = self.values.program
        if update.monoid != SUM or program.rank != 1 or not info.tile or info.tile != info.reduced_tile:
            return 1
        if not NARROW_ROWS.of(program.nest):
            return 1
        (size,) = {program.tile[s][1] for s in info.tile}
        near = ALIGNMENT // DType.BFLOAT16.itemsize
        return near if size == near * _WARP * NUM_WARPS.of(program.nest) else 1

    def _shape(self, info: BlockInfo, near: int) -> str:
        """The shape of a state of each ``near`` elements of a tile."""
        if near == 1:
            return self.values.shape(info.tile)
        (size,) = {self.values.program.tile[s][1] for s in info.tile}
        return f"[{size // near}]"

    def step(self, info: BlockInfo, update: Update) -> None:
        """One element a lane: into the accumulator of an open loop, or reduced at once."""
        if info.operands:
            self._product(info, update)
            return
        states = tuple(self.state(v) for v in update.values)
        accumulators = [a for a in self.open.get(info.place, ()) if a.update is update]
        if accumulators:
            self._accumulate(accumulators[0], states)
        elif info.reduced_tile:
            results = self._reduced(info, update, self._masked(info, update, states))
            self._finish(info, update, results, self._held(info, update))
            self.values.enter(info)
        elif info.block.axes_of(AxisKind.REDUCTION):  # over a single element, or none
            if info.elements:
                states = self._masked(info, update, states)
            self._finish(info, update, states, self._held(info, update))
            self.values.enter(info)
        else:
            raise EmitError(
                f"block {info.block.name} updates {update.targets[0].buffer} without a "
                "loop over a reduction axis; "
                "keep at least one loop of the reduction, or store the value"
            )

    def end(self, info: BlockInfo) -> None:
        """After the loop: reduce the accumulators' tiles and write the results."""
        for acc in self.open.pop(info.place):
            states = tuple(Value(n, info.tile, d) for n, d in zip(acc.names, acc.dtypes, strict=True))
            results = self._tile_reduce(acc.update.monoid, states, info) if info.reduced_tile else states
            results = tuple(map(self._one_copy, results))
            self._finish(info, acc.update, results, acc.before)

    def _held(self, info: BlockInfo, update: Update) -> tuple[Value, ...]:
        """What the targets hold now, for an update that goes on from there."""
        if update.begins:
            return ()
        self.values.enter(info, ended=True)
        held = []
        for target, dtype in zip(update.targets, _states(update), strict=True):
            buffer = self.values.program.buffers[target.buffer]
            value = self._stored(info, buffer, target)
            text = (
                value.text if buffer.dtype is dtype else self.values.program.types.cast(value.text, buffer.dtype, dtype)
            )
            held.append(Value(text, value.dims, dtype))
        return tuple(held)

    def _stored(self, info: BlockInfo, buffer: Buffer, target: Access) -> Value:
        """A target as the program itself has stored it; other programs' stores it could not see."""
        if buffer.scope is not Scope.GLOBAL:
            return self.values.value(Load(buffer.name, target.indices, buffer.dtype))
        _, dims, linear, parts = self.values.address(buffer, target.indices, {}, ())
        bounds = self.values.bounds_of_results(dims, info.reduced_serial | info.reduced_tile)
        found = self.out.known(("load", buffer.name, linear, parts, tuple(c.text for c in bounds), ()))
        if found is None:
            raise EmitError(
                f"block {info.block.name} goes on from {buffer.name}, of which this program has not stored the same "
                "elements just before; keep the value in a LOCAL buffer (cache_write)"
            )
        return found  # type: ignore[return-value]

    def _product(self, info: BlockInfo, update: Update) -> None:
        """A tile of a matrix product: onto the accumulator of an open loop, or the whole of it."""
        known = next((a for a in self.open.get(info.place, ()) if a.update is update), None)
        result = dot(self.values, self.out, info, update, known.names[0] if known else None)
        self.values.enter(info, ended=True)
        if known is None:
            self._finish(info, update, (self._one_copy(result),))

    def _one_copy(self, value: Value) -> Value:
        """The first column of a product with a vector; the others are the same, or nothing."""
        copies = self.values.program.copies
        if copies is None or copies not in value.dims:
            return value
        text = f"tl.sum(tl.where({copies.name} == 0, {value.text}, 0), 1, keep_dims=True)"
        return Value(self.out.assign("v", text), value.dims - {copies}, value.dtype)

    # --- one element --------------------------------------------------------------------------------------------------

    def state(self, expr: Expr) -> Value:
        value = self.values.value(expr)
        if value.dtype.is_half:
            return Value(f"{value.typed}.to(tl.float32)", value.dims, DType.FLOAT32)
        return value

    def _accumulate(self, acc: ReductionState, new: tuple[Value, ...]) -> None:
        info = self.values.info
        assert info is not None
        monoid, bounds = acc.update.monoid, self.values.reduction_bounds()
        mask = self.values.all_of(bounds)
        old = tuple(Value(n, info.tile, d) for n, d in zip(acc.names, acc.dtypes, strict=True))
        if mask is not None and len(new) == 1 and not (monoid == SUM and self.values.is_zero_outside(new[0], bounds)):
            (start,) = monoid.identity(acc.dtypes)
            new = (self._where(mask, new[0], start),)
        if acc.near > 1:
            ((state,), (element,)) = acc.names, new
            text = self.values.broadcast(element, info.tile).text
            groups = self._shape(info, acc.near).replace("]", f", {acc.near}]")
            self.out.forget_value(state)
            self.out.line(f"{state} = {state} + tl.sum(tl.reshape({text}, {groups}), 1)")
            return
        results = self.combined(monoid, old, new)
        for name, result in zip(acc.names, results, strict=True):
            text = self.values.broadcast(result, info.tile).text
            self.out.forget_value(name)
            if mask is not None and len(new) > 1:
                text = f"tl.where({mask.text}, {text}, {name})"
            self.out.line(f"{name} = {text}")

    def combined(
        self, monoid: Monoid, old: tuple[Value, ...], new: tuple[Value, ...], rule: Rule | None = None
    ) -> tuple[Value, ...]:
        """The combination of two states, or another rule of the monoid."""
        a = tuple(Var(f"a{k}", v.dtype) for k, v in enumerate(old))
        b = tuple(Var(f"b{k}", v.dtype) for k, v in enumerate(new))
        env = {var.name: value for var, value in zip((*a, *b), (*old, *new), strict=True)}
        return tuple(self.values.value(e, env) for e in (rule or monoid.combine)(a, b))

    def _where(self, mask: Value, value: Value, otherwise: Const) -> Value:
        other = literal(otherwise.value)
        if value.dtype is not DType.FLOAT32:
            other = typed_literal(other, value.dtype)
        text = f"tl.where({mask.text}, {value.typed}, {other})"
        return Value(self.out.assign("v", text), mask.dims | value.dims, value.dtype)

    def _masked(self, info: BlockInfo, update: Update, states: tuple[Value, ...]) -> tuple[Value, ...]:
        """Full tiles of states, the identity in lanes without an element."""
        mask = self.values.all_of(self.values.reduction_bounds())
        start = update.monoid.identity(tuple(s.dtype for s in states))
        if mask is not None:
            states = tuple(
                self._where(mask, s, i) if s.typed != i.value else s for s, i in zip(states, start, strict=True)
            )
        # What is the same along a tile axis is reduced once for it, not once a lane.
        dims = info.reduced_tile.union(*(s.dims for s in states)) if update.begins else info.tile
        return tuple(self.values.broadcast(s, dims) for s in states)

    # --- tiles --------------------------------------------------------------------------------------------------------

    def _reduced(self, info: BlockInfo, update: Update, states: tuple[Value, ...]) -> tuple[Value, ...]:
        if (
            update.monoid.name == "welford"
            and _is_literal(update.values[1], 0.0)
            and _is_literal(update.values[2], 1.0)
        ):
            return self._welford(info, states)
        return self._tile_reduce(update.monoid, states, info)

    def _welford(self, info: BlockInfo, states: tuple[Value, ...]) -> tuple[Value, ...]:
        """Mean, then squares about it: a tile is in registers, so the second visit is free and more accurate."""
        x, _, count = states
        total = self._simple("tl.sum", x, info)
        n = self._simple("tl.sum", count, info)
        safe = f"tl.maximum({n.text}, 1.0)"
        mean = Value(self.out.assign("mean", f"{total.text} / {safe}"), total.dims, x.dtype)
        centred = self.out.assign("v", f"{x.text} - {mean.text}")
        mask = self.values.all_of(self.values.reduction_bounds())
        if mask is not None:
            centred = self.out.assign("v", f"tl.where({mask.text}, {centred}, 0.0)")
        m2 = self._simple("tl.sum", Value(f"({centred} * {centred})", x.dims, x.dtype), info)
        return (mean, m2, n)

    def _tile_reduce(self, monoid: Monoid, states: tuple[Value, ...], info: BlockInfo) -> tuple[Value, ...]:
        """The states combined along the block's reduced tile axes."""
        dtype = states[0].dtype
        if monoid.name == "sum":
            return (self._simple("tl.sum", states[0], info),)
        if monoid.name in ("max", "min") and not dtype.is_float and dtype is not DType.BOOL:
            return (self._simple(f"tl.{monoid.name}", states[0], info),)
        if monoid.name in ("any", "all") or (dtype is DType.BOOL and monoid.name in ("max", "min")):
            fn = "tl.max" if monoid.name in ("any", "max") else "tl.min"
            wide = Value(f"{states[0].text}.to(tl.int32)", states[0].dims, DType.INT32)
            found = self._simple(fn, wide, info)
            return (Value(self.out.assign("v", f"{found.text} != 0"), found.dims, DType.BOOL),)
        if monoid == LOGSUMEXP:
            (top,) = self._by_combine(MAX, states[:1], info)
            return top, self._rescaled(states, top, info)
        return self._by_combine(monoid, states, info)

    def _rescaled(self, states: tuple[Value, ...], top: Value, info: BlockInfo) -> Value:
        """The sum of a tile's log-sum-exps: one exponential an element, since their maximum is known."""
        own, weight = (Var(f"a{k}", v.dtype) for k, v in enumerate(states))
        most = Var("b0", top.dtype)
        scale = Select(call("eq", own, most), const(1.0, own.dtype), call("exp", call("sub", own, most)))
        env = {"a0": states[0], "a1": states[1], "b0": top}
        return self._simple("tl.sum", self.values.value(call("mul", weight, scale), env), info)

    def _simple(self, fn: str, value: Value, info: BlockInfo) -> Value:
        text = value.text
        kept = value.dims - info.reduced_tile
        for arguments in self._axes(info, kept):
            text = f"{fn}({text}{arguments})"
        if value.dtype in _SMALL_INT:
            text = f"{text}.to({type_text(value.dtype)})"
        return Value(self.out.assign("v", text), kept, value.dtype)

    def _by_combine(self, monoid: Monoid, states: tuple[Value, ...], info: BlockInfo) -> tuple[Value, ...]:
        fn = self.combine_function(monoid, tuple(s.dtype for s in states))
        kept = states[0].dims - info.reduced_tile
        names = tuple(self.out.fresh("r") for _ in states)
        current = tuple(s.text for s in states)
        for arguments in self._axes(info, kept):
            operand = current[0] if len(current) == 1 else f"({', '.join(current)})"
            axis, comma, keep = arguments.removeprefix(", ").partition(", ")
            self.out.line(f"{', '.join(names)} = tl.reduce({operand}, {axis}, {fn}{comma}{keep})")
            current = names
        return tuple(Value(n, kept, s.dtype) for n, s in zip(names, states, strict=True))

    def _axes(self, info: BlockInfo, kept: Dims) -> list[str]:
        """Arguments of the reductions to call, one after the other, axis by axis."""
        if not kept:  # no axis is left: every dimension goes, those of extent 1 too, the last first
            return [f", {d}" for d in reversed(range(self.values.program.rank))]
        dims = sorted((self.values.program.tile[s][0] for s in info.reduced_tile), reverse=True)
        return [f", {d}, keep_dims=True" for d in dims]

    def combine_function(self, monoid: Monoid, dtypes: tuple[DType, ...], rule: Rule | None = None) -> str:
        """The name of a device function that combines two states, generated once a kernel."""
        name = f"{'combine' if rule is None else 'after'}_{monoid.name}_{'_'.join(d.value for d in dtypes)}"
        if name not in self.out.helpers:
            self.out.helpers[name] = self._combine_source(name, monoid, dtypes, rule or monoid.combine)
        return name

    def _combine_source(self, name: str, monoid: Monoid, dtypes: tuple[DType, ...], rule: Rule) -> str:
        writer = SourceWriter()
        inner = Values(self.values.program, writer)
        a = tuple(Var(f"a{k}", d) for k, d in enumerate(dtypes))
        b = tuple(Var(f"b{k}", d) for k, d in enumerate(dtypes))
        env = {v.name: Value(v.name, SCALAR, v.dtype) for v in (*a, *b)}
        results = [inner.value(e, env) for e in rule(a, b)]
        arguments = ", ".join(v.name for v in (*a, *b))
        body = "\n".join([*writer.lines, f"    return {', '.join(r.typed for r in results)}"])
        head = f'\n@triton.jit\ndef {name}({arguments}):\n    """{monoid.name}: the combination of two states."""'
        return f"{head}\n{body}\n"

    # --- results ------------------------------------------------------------------------------------------------------

    def _finish(
        self, info: BlockInfo, update: Update, results: tuple[Value, ...], held: tuple[Value, ...] = ()
    ) -> None:
        start = update.monoid.identity(tuple(r.dtype for r in results))
        if any(h.text != literal(s.value) for h, s in zip(held, start, strict=False)):
            results = self.combined(update.monoid, held, results)
        ended: frozenset[sympy.Symbol] = info.reduced_serial | info.reduced_tile
        for target, result in zip(update.targets, results, strict=True):
            buffer = self.values.program.buffers[target.buffer]
            if result.dtype is not buffer.dtype:
                text = self.out.assign("v", self.values.program.types.cast(result.text, result.dtype, buffer.dtype))
                result = Value(text, result.dims, buffer.dtype)
            self.values.store(buffer, target.indices, result, ended)


def _updates(info: BlockInfo) -> list[Update]:
    return [s for s in info.block.body if isinstance(s, Update)]


def _states(update: Update) -> tuple[DType, ...]:
    return tuple(v.dtype.compute for v in update.values)


def _is_literal(expr: Expr, value: float) -> bool:
    return isinstance(expr, Const) and expr.value == value
