"""Tiles of an online softmax that hold minus infinity alone, or tiles of a sum that hold zeros, by comparing positions.

``facts`` are expressions g in axes such that a value is minus infinity (or a condition holds, or fails) wherever g < 0:
one of them is enough. The greatest g of a tile, by the signs of its coefficients, then tells the tiles that are empty.
A fact is only used where it is exact: no assumption is made about scores that a mask is *added* to, since infinity or
NaN there would have shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, call, const, is_value, loads, rewrite
from ....ir.nest.loops import Block, Bound, LoopNest, Node, Store, Update, blocks, map_nodes
from ....ir.oracle.ops import function
from ...error import ScheduleError
from ...facts.views import map_value
from .dependence import accesses
from .tree import blocks_under, find_block, find_loop, linear_part

Facts = list[sympy.Expr]
# Facts of zeros, each with what the value is there instead where that is no number: expressions that are zero or NaN.
Zeros = dict[sympy.Expr, frozenset[Expr]]


@dataclass(frozen=True, slots=True)
class Guards:
    """Bounds, in the loops of the tile and around it, that hold for every tile that is not empty."""

    bounds: tuple[Bound, ...]

    def assured(self, block: Block) -> Block:
        """The block of the tiles, without the choices that the bounds decide for every element."""
        binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
        room = [sympy.expand(b.rhs - b.lhs - 1) for b in self.bounds]

        def leaf(e: Expr) -> Expr | None:
            if isinstance(e, Select) and isinstance(e.condition, Call):
                # A comparison fails where one of these is negative, and nowhere else where there is but one.
                facts = _compared(e.condition, negated=True)
                if len(facts) == 1 and sympy.expand(facts[0].xreplace(binding)) in room:
                    return e.if_true
            return None

        updates = [s for s in block.body if isinstance(s, Update)]
        body = tuple(replace(s, values=tuple(rewrite(v, leaf) for v in s.values)) for s in updates)
        return replace(block, body=body) if self.bounds and len(body) == len(block.body) else block

    def applied(self, nest: LoopNest, loop: str, guarded: Collection[str]) -> LoopNest:
        """The bounds given to the blocks in ``loop`` too whose results only blocks with them read."""
        if not self.bounds:
            return nest
        inside = [b.name for b in blocks_under(find_loop(nest, loop, "skip")[0])]
        local = {b.name for b in nest.locals}
        done = set(guarded) | {b.name for b, _ in blocks(nest) if set(self.bounds) <= set(b.predicate)}
        before = set(done)
        grown = True
        while grown:
            grown = False
            for b, _ in blocks(nest):
                if b.name in done or b.name not in inside or not accesses(b).written <= local:
                    continue
                readers = [r.name for r, _ in blocks(nest) if r is not b and accesses(r).read & accesses(b).written]
                if all(r in done for r in readers):
                    done.add(b.name)
                    grown = True
        new = done - before

        def visit(n: Node) -> Node | None:
            if isinstance(n, Block) and n.name in new:
                return replace(n, predicate=(*self.bounds, *n.predicate))
            return None

        return replace(nest, body=map_nodes(nest.body, visit))


def occupied(
    nest: LoopNest,
    block: Block,
    facts: Iterable[sympy.Expr],
    outer: Mapping[sympy.Symbol, sympy.Expr],
) -> Guards:
    """What holds of the loops ``outer`` (variables and extents) in tiles in which no fact holds of every element."""
    around = find_block(nest, block.name, "skip")[1]
    inner = {lp.var: lp.extent for lp in around if lp.var not in outer}
    binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    found: dict[Bound, None] = {}
    for g in facts:
        greatest = _greatest(sympy.expand(g.xreplace(binding)), inner)
        if greatest is None or not greatest.free_symbols & outer.keys():
            continue
        moving = [t for t in sympy.Add.make_args(greatest) if t.free_symbols & outer.keys()]
        fixed = sympy.expand(greatest - sympy.Add(*moving))
        found[Bound(sympy.expand(-sympy.Add(*moving)), fixed + 1)] = None
    return Guards(tuple(found))


def _greatest(g: sympy.Expr, inner: Mapping[sympy.Symbol, sympy.Expr]) -> sympy.Expr | None:
    for var, extent in inner.items():
        parts = linear_part(g, var)
        if parts is None or not parts[0].is_Integer:
            return None
        g = parts[1] + (parts[0] * (extent - 1) if parts[0] > 0 else 0)
    return sympy.expand(g)


def inlined(nest: LoopNest, value: Expr, stop: Collection[str] = ()) -> Expr:
    """A value with the point-wise LOCAL buffers that it loads replaced by what they hold."""
    local = {b.name for b in nest.locals} - set(stop)
    stores: dict[str, Store] = {}
    for b, _ in blocks(nest):
        for s in b.body:
            if isinstance(s, Store) and s.buffer in local:
                if s.buffer in stores or any(is_value(i) or not i.is_Symbol for i in s.indices):  # type: ignore[union-attr]
                    local.discard(s.buffer)
                stores[s.buffer] = s
            elif isinstance(s, Update):
                local -= {t.buffer for t in s.targets}

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in local and e.buffer in stores:
            s = stores[e.buffer]
            if any(ld.buffer == e.buffer for ld in loads(s.value)):
                return None
            return rewrite(map_value(s.value, dict(zip(s.indices, e.indices, strict=True))), leaf)  # type: ignore[arg-type]
        return None

    return rewrite(value, leaf)


# --- facts ------------------------------------------------------------------------------------------------------------

ALWAYS = sympy.S.NegativeOne


def minus_infinity(e: Expr) -> Facts:
    """Where the value is minus infinity."""
    match e:
        case Const():
            return [ALWAYS] if isinstance(e.value, float) and e.value == -math.inf else []
        case Select(condition, a, b):
            return _either(holds(condition), minus_infinity(a), fails(condition), minus_infinity(b))
        case Cast(value, dtype) if dtype.is_float and value.dtype.is_float:
            return minus_infinity(value)
        case Call("add", (x, y), _):
            return minus_infinity(x) if _is_finite(y) else minus_infinity(y) if _is_finite(x) else []
        case Call("sub", (x, y), _) if _is_finite(y):
            return minus_infinity(x)
        case Call("mul", (x, Const(factor, _)), _) | Call("mul", (Const(factor, _), x), _):
            return minus_infinity(x) if 0 < factor < math.inf else []
    return []


def zero(e: Expr) -> Zeros:
    """Where the value is zero, if all that it is made of is finite but for scores of minus infinity and what is
    subtracted from those."""
    match e:
        case Const():
            return {ALWAYS: frozenset()} if e.value == 0 else {}
        case Select(condition, a, b):
            return _zero_choice(condition, zero(a), zero(b))
        case Cast(value, dtype) if dtype.is_float and value.dtype.is_float:
            return zero(value)
        case Call("mul", (x, y), _):
            first, second = zero(x), zero(y)
            both = {g: first[g] | second[g] for g in first if g in second}
            return {**first, **second, **both}
        case Call("div" | "neg", (x, *_), _):
            return zero(x)
        case Call("add" | "sub", (x, y), _):
            first, second = zero(x), zero(y)
            others = second.get(ALWAYS)
            found = {g: at | second[g] for g, at in first.items() if g in second}
            return found if others is None else {**{g: at | others for g, at in first.items()}, **found}
        case Call("exp" | "exp2", (x,), _):
            facts, at = _sinks(x)
            # The exponential of minus infinity, whatever was subtracted, unless that was no number or infinite too.
            undefined = Select(call("eq", at, at), const(0.0, at.dtype), const(math.nan, at.dtype))
            rest = frozenset[Expr]() if isinstance(at, Const) else frozenset({undefined})
            return dict.fromkeys(facts, rest)
        case Call("sigmoid", (x,), _):
            return dict.fromkeys(minus_infinity(x), frozenset())
        case Call("maximum", (x, y), _) if ALWAYS in zero(y):
            floor = zero(y)[ALWAYS]
            below = {**dict.fromkeys(minus_infinity(x), frozenset[Expr]()), **zero(x)}
            return {g: at | floor for g, at in below.items()}
    return {}


def _sinks(e: Expr) -> tuple[Facts, Expr]:
    """Where the value is minus infinity or NaN, and what it is there."""
    facts = minus_infinity(e)
    if facts:
        return facts, const(-math.inf, e.dtype)
    match e:
        case Call("sub", (x, y), _):
            facts, at = _sinks(x)
            return facts, call("sub", at, y)
        case Call("mul", (x, Const(factor, _) as by), _) | Call("mul", (Const(factor, _) as by, x), _):
            if 0 < factor < math.inf:
                facts, at = _sinks(x)
                return facts, call("mul", at, by)
    return [], e


def _zero_choice(condition: Expr, a: Zeros, b: Zeros) -> Zeros:
    """``a`` holds where the condition does, ``b`` where it fails: what holds of the choice."""
    found = {g: at | b[g] for g, at in a.items() if g in b}
    for always, facts, other in ((a.get(ALWAYS), holds(condition), b), (b.get(ALWAYS), fails(condition), a)):
        if always is not None:
            found = {**{g: at | always for g, at in other.items()}, **found, **dict.fromkeys(facts, always)}
    return found


def _either(yes: Facts, a: Facts, no: Facts, b: Facts) -> Facts:
    """``a`` holds where the condition does, ``b`` where it fails: what holds of the choice."""
    found = [g for g in a if g in b]
    if ALWAYS in a:
        found += [*yes, *b]
    if ALWAYS in b:
        found += [*no, *a]
    return list(dict.fromkeys(found))


def _is_finite(e: Expr) -> bool:
    match e:
        case Const():
            return math.isfinite(e.value)
        case IndexValue():
            return True
        case Cast(value, dtype):
            return dtype is not DType.FLOAT16 and _is_finite(value)
    return False


def holds(c: Expr) -> Facts:
    """Where a condition holds."""
    match c:
        case Const(True, _):
            return [ALWAYS]
        case Call("logical_not", (x,), _):
            return fails(x)
        case Call("logical_or" | "bit_or", (x, y), _) if x.dtype is DType.BOOL:
            return list(dict.fromkeys((*holds(x), *holds(y))))
        case Call("logical_and" | "bit_and", (x, y), _) if x.dtype is DType.BOOL:
            return [g for g in holds(x) if g in holds(y) or ALWAYS in holds(y)]
        case Select(condition, a, b):
            return _either(holds(condition), holds(a), fails(condition), holds(b))
    return _compared(c, negated=False)


def fails(c: Expr) -> Facts:
    """Where a condition fails."""
    match c:
        case Const(False, _):
            return [ALWAYS]
        case Call("logical_not", (x,), _):
            return holds(x)
        case Call("logical_and" | "bit_and", (x, y), _) if x.dtype is DType.BOOL:
            return list(dict.fromkeys((*fails(x), *fails(y))))
        case Call("logical_or" | "bit_or", (x, y), _) if x.dtype is DType.BOOL:
            return [g for g in fails(x) if g in fails(y) or ALWAYS in fails(y)]
        case Select(condition, a, b):
            return _either(holds(condition), fails(a), fails(condition), fails(b))
    return _compared(c, negated=True)


COMPARISONS = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _compared(c: Expr, negated: bool) -> Facts:
    if isinstance(c, Call) and c.fn in ("eq", "ne") and (chosen := _choice_of_constants(c)) is not None:
        return fails(chosen) if negated else holds(chosen)
    if not isinstance(c, Call) or c.fn not in COMPARISONS:
        return []
    x, y = (_position(a) for a in c.args)
    if x is None or y is None:
        return []
    match COMPARISONS[c.fn] if negated else c.fn:
        case "lt":
            return [sympy.expand(x - y)]
        case "le":
            return [sympy.expand(x - y - 1)]
        case "gt":
            return [sympy.expand(y - x)]
        case "ge":
            return [sympy.expand(y - x - 1)]
        case "ne":
            return [sympy.expand(x - y), sympy.expand(y - x)]
    return []


def _choice_of_constants(c: Call) -> Expr | None:
    """The comparison of a number with one of two numbers, as the condition that chooses."""
    for chosen, other in (c.args, c.args[::-1]):
        match chosen, other:
            case Select(condition, Const(a, _), Const(b, _)), Const(number, _):
                yes, no = ((x == number) == (c.fn == "eq") for x in (a, b))
                return Select(condition, const(yes, DType.BOOL), const(no, DType.BOOL))
    return None


def _position(e: Expr) -> sympy.Expr | None:
    """An integer value as an index expression."""
    match e:
        case IndexValue():
            return e.index
        case Const(value, dtype) if dtype.is_int:
            return sympy.Integer(int(value))
        case Cast(value, dtype) if value.dtype.is_int and dtype in (DType.INT64, DType.INT32):
            return _position(value)
        case Call("add" | "sub" | "mul" as fn, (a, b), _):
            x, y = _position(a), _position(b)
            if x is None or y is None:
                return None
            return x + y if fn == "add" else x - y if fn == "sub" else x * y
        case Call("neg", (a,), _):
            x = _position(a)
            return None if x is None else -x
    return None


# --- rows of nothing --------------------------------------------------------------------------------------------------


def unread_where_empty(nest: LoopNest, block: Block, asked: str) -> None:
    """Refuse unless the results of a row whose maximum is minus infinity do not depend on its sum and vector.

    Such rows meet other elements, or none, where tiles are left out. Raises ScheduleError.
    """
    (update,) = block.body
    assert isinstance(update, Update)
    _unread(nest, block, update, asked)


def _unread(nest: LoopNest, block: Block, update: Update, asked: str) -> None:
    top, *rest = (t.buffer for t in update.targets)
    stop = {top, *rest}
    others = [(b, s) for b, _ in blocks(nest) if b is not block for s in b.body]
    inner = {
        s.buffer for _, s in others
        if isinstance(s, Store) and s.buffer not in nest.outputs and any(ld.buffer in stop for ld in loads(s.value))
    }  # fmt: skip
    for b, s in others:
        if isinstance(s, Store) and s.buffer in inner:
            continue  # seen where it is read
        if isinstance(s, Update) and s.monoid is update.monoid and _buffers(s) == [top, *rest]:
            # States of pieces that are combined: one of minus infinity weighs nothing beside any other.
            _unread(nest, b, s, asked)
            continue
        for v in s.values if isinstance(s, Update) else (s.value,):
            seen = folded(inlined(nest, v, stop), top)
            if any(ld.buffer in rest or ld.buffer in inner for ld in loads(seen)):
                raise ScheduleError(
                    asked, f"{b.name} does not tell rows without any score by their maximum", nest, b.name,
                    "select on the maximum being minus infinity, or do not skip",
                )  # fmt: skip


def _buffers(update: Update) -> list[str]:
    return [v.buffer if isinstance(v, Load) else "" for v in update.values]


def folded(value: Expr, lowest: str) -> Expr:
    """A value where the buffer ``lowest`` holds minus infinity, its constants folded."""

    def leaf(e: Expr) -> Expr | None:
        match e:
            case Load() if e.buffer == lowest:
                return const(-math.inf, e.dtype)
            case Select(Const(yes, _), a, b):
                return a if yes else b
            case Cast(Const(x, _), dtype) if dtype.is_float:
                return const(x, dtype)
            case Call("logical_or", (Const(True, _) as yes, _), _) | Call("logical_or", (_, Const(True, _) as yes), _):
                return yes
            case Call("logical_and", (Const(False, _) as no, _), _) | Call(
                "logical_and", (_, Const(False, _) as no), _
            ):
                return no
            case Call(fn, args, dtype) if all(isinstance(a, Const) and not a.dtype.is_half for a in args):
                given = [a.dtype.numpy.type(a.value) for a in args if isinstance(a, Const)]
                with np.errstate(all="ignore"):
                    return const(function(fn, args[0].dtype, dtype)(*given).item(), dtype)
        return None

    return rewrite(value, leaf)
