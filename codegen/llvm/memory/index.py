"""Index expressions as int64 instructions, split into a scalar part and what varies from lane to lane."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from ....ir.expr.dtypes import DType
from ....ir.expr.index import expanded, simplify
from ...kernel import EmitError
from ..text.builder import Val
from ..text.context import Context

I64, I32 = DType.INT64, DType.INT32


def in_loops(ctx: Context, expr: sympy.Expr) -> sympy.Expr:
    """An expression over the block's axes as one over loop variables and sizes."""
    if expr.is_Integer:
        return expr
    if ctx.axes:
        expr = expr.xreplace(ctx.axes)
    return _expanded(expr)


@lru_cache(maxsize=16384)
def _expanded(expr: sympy.Expr) -> sympy.Expr:
    return expanded(expr)


@lru_cache(maxsize=16384)
def _symbols(expr: sympy.Expr) -> frozenset[sympy.Symbol]:
    return frozenset(expr.free_symbols)


@lru_cache(maxsize=16384)
def _is_polynomial(expr: sympy.Expr) -> bool:
    return all(e.is_Integer or e.is_Symbol or e.is_Add or e.is_Mul or e.is_Pow for e in sympy.preorder_traversal(expr))


@lru_cache(maxsize=16384)
def split_linear(expr: sympy.Expr, var: sympy.Symbol) -> tuple[sympy.Expr, sympy.Expr] | None:
    """``(rest, step)`` with expr == rest + step * var and neither mentioning var; None where it is not linear."""
    if var not in expr.free_symbols:
        return expr, sympy.S.Zero
    rest, step = [], []
    for term in sympy.Add.make_args(expr):
        if var not in term.free_symbols:
            rest.append(term)
            continue
        factor, others = [], 0
        for f in sympy.Mul.make_args(term):
            if f == var:
                others += 1
            elif var in f.free_symbols:
                return None
            else:
                factor.append(f)
        if others != 1:
            return None
        step.append(sympy.Mul(*factor))
    return sympy.Add(*rest), sympy.Add(*step)


def scalar_index(ctx: Context, expr: sympy.Expr) -> Val:
    """An int64 of an expression over loop variables and sizes that is the same in all lanes."""
    if not expr.args or not _is_polynomial(expr):  # quotients depend on what is known of the ranges, too
        return _emit(ctx, expr, 0)
    used = _symbols(expr)
    if ctx.vector is not None and ctx.vector[0] in used:
        return _emit(ctx, expr, 0)
    # The symbols in their order, which is that of the terms, and what each of them is here.
    key = (expr, tuple([(s, v.name) for s, v in ctx.indices.items() if s in used]))
    made = ctx.b.recall(key)
    if made is None:
        made = _emit(ctx, expr, 0)
        ctx.b.remember(key, made)
    return made


def lane_index(ctx: Context, expr: sympy.Expr, dtype: DType = I64) -> Val:
    """The expression as ``dtype``: a scalar where it is the same in all lanes, else one value a lane."""
    if ctx.vector is None or ctx.vector[0] not in expr.free_symbols:
        return ctx.b.convert("trunc", _emit(ctx, expr, 0), dtype) if dtype is I32 else _emit(ctx, expr, 0)
    var, lanes = ctx.vector
    parts = split_linear(expr, var)
    if parts is None:
        simpler = simplify(expr, ctx.extents, ctx.nest.symbols)
        if simpler != expr:
            return lane_index(ctx, _expanded(simpler), dtype)
        return _emit_lanes(ctx, expr, dtype)
    base = lane_index(ctx, parts[0], dtype)
    step = lane_index(ctx, parts[1], dtype)
    ramp = iota(lanes, dtype)
    scaled = ramp if step.name == "1" else ctx.b.binary("mul", ramp, step)
    return scaled if base.name == "0" else ctx.b.binary("add", scaled, base)


def iota(lanes: int, dtype: DType = I64) -> Val:
    """0, 1, 2, … as a literal."""
    element = f"i{dtype.bits}"
    return Val(f"<{', '.join(f'{element} {k}' for k in range(lanes))}>", dtype, lanes)


def _emit_lanes(ctx: Context, expr: sympy.Expr, dtype: DType) -> Val:
    """Per-lane arithmetic in 32 bits where the range of every part allows it, for vectors divide badly in 64."""
    if dtype is I64 and _fits_int32(ctx, expr):
        return ctx.b.convert("sext", _emit(ctx, expr, ctx.lanes, I32), I64)
    return _emit(ctx, expr, ctx.lanes, dtype)


def _fits_int32(ctx: Context, expr: sympy.Expr) -> bool:
    for part in sympy.preorder_traversal(expr):
        if part.is_Integer:
            if abs(int(part)) >= 1 << 31:
                return False
            continue
        low, high = ctx.nest.symbols.bounds(part, ctx.extents)
        if high is None or high >= 1 << 31 or low < -(1 << 31):
            return False
    return True


def _emit(ctx: Context, expr: sympy.Expr, lanes: int, dtype: DType = I64) -> Val:
    b = ctx.b
    if expr.is_Integer:
        return b.const(int(expr), dtype)
    if expr.is_Symbol:
        if ctx.vector is not None and expr == ctx.vector[0]:
            return iota(lanes, dtype)
        return _narrow(ctx, _symbol(ctx, expr), dtype)
    if lanes and ctx.vector is not None and ctx.vector[0] not in expr.free_symbols:
        return _narrow(ctx, _emit(ctx, expr, 0), dtype)
    match expr:
        case sympy.Add():
            return _fold(ctx, "add", _ordered(ctx, expr.args), lanes, dtype)
        case sympy.Mul():
            return _fold(ctx, "mul", _ordered(ctx, expr.args), lanes, dtype)
        case sympy.Pow() if expr.args[1].is_Integer and int(expr.args[1]) > 0:
            base = _emit(ctx, expr.args[0], lanes, dtype)
            result = base
            for _ in range(int(expr.args[1]) - 1):
                result = b.binary("mul", result, base)
            return result
        case FloorDiv() | CleanDiv():
            return _divide(ctx, "div", expr.args[0], expr.args[1], lanes, dtype)
        case Mod() | PythonMod():
            return _divide(ctx, "rem", expr.args[0], expr.args[1], lanes, dtype)
        case ModularIndexing():
            base, by, modulus = expr.args
            inner = base if by == 1 else FloorDiv(base, by)
            return _divide(ctx, "rem", inner, modulus, lanes, dtype)
        case CeilDiv():
            return _divide(ctx, "div", expr.args[0] + expr.args[1] - 1, expr.args[1], lanes, dtype)
    if expr.func.__name__ in ("Max", "Min"):
        name = "smax" if expr.func.__name__ == "Max" else "smin"
        result, *others = (_emit(ctx, a, lanes, dtype) for a in expr.args)
        for other in others:
            result = b.intrinsic(name, result, other)
        return result
    raise EmitError(f"{ctx.nest.name}: no code for the index expression {expr} ({type(expr).__name__})")


def _symbol(ctx: Context, var: sympy.Symbol) -> Val:
    try:
        return ctx.indices[var]
    except KeyError:
        where = f"block {ctx.block.name}" if ctx.block else "the loops"
        raise EmitError(
            f"{ctx.nest.name}, {where}: {var} is neither a loop variable around nor a size; "
            "bind it, or add it to symbols"
        ) from None


def _narrow(ctx: Context, v: Val, dtype: DType) -> Val:
    if dtype is v.dtype:
        return v
    return Val(v.name, dtype, 0) if v.is_literal else ctx.b.convert("trunc", v, dtype)


def _ordered(ctx: Context, terms: Iterable[sympy.Expr]) -> list[sympy.Expr]:
    """Terms of outer loops first: their partial sums are invariant in the inner ones, where LLVM then hoists them."""
    order = {var: k for k, var in enumerate(ctx.indices)}
    if ctx.vector is not None:
        order[ctx.vector[0]] = len(order)

    # Stable: sympy's own order of terms, which is the same in every process, stands among those of one loop.
    return sorted(terms, key=lambda term: max((order.get(s, 0) for s in _symbols(term)), default=-1))


def _fold(ctx: Context, op: str, terms: list[sympy.Expr], lanes: int, dtype: DType) -> Val:
    # Constants last: an address keeps them as its displacement.
    terms = [t for t in terms if not t.is_Integer] + [t for t in terms if t.is_Integer]
    result, *others = (_emit(ctx, t, lanes, dtype) for t in terms)
    for other in others:
        result = _folded(op, result, other) or ctx.b.binary(f"{op} nsw" if dtype is I64 else op, result, other)
    return result


def _folded(op: str, x: Val, y: Val) -> Val | None:
    """A sum or product that needs no instruction. Loops that are written out have numbers for variables, and the slots
    of accumulators become registers only where their places are numbers."""
    neutral = "0" if op == "add" else "1"
    for value, other in ((x, y), (y, x)):
        if value.lanes or not value.is_literal:
            continue
        if value.name == neutral:
            return other
        if op == "mul" and value.name == "0" and not other.lanes:
            return value
        if not other.lanes and other.is_literal:
            a, b = int(value.name), int(other.name)
            return Val(str(a + b if op == "add" else a * b), x.dtype)
    return None


def _divide(ctx: Context, what: str, base: sympy.Expr, by: sympy.Expr, lanes: int, dtype: DType) -> Val:
    """Floor division or remainder. Indices are rarely negative.

    Then the unsigned instruction is the same and cheaper.
    """
    b = ctx.b
    low, _ = ctx.nest.symbols.bounds(base, ctx.extents)
    positive, _ = ctx.nest.symbols.bounds(by, ctx.extents)
    x, y = _emit(ctx, base, lanes, dtype), _emit(ctx, by, lanes, dtype)
    if positive <= 0:
        y = b.intrinsic("smax", y, b.const(1, dtype))
    if low >= 0:
        return b.binary(f"u{what}", x, y)
    zero = b.const(0, dtype)
    rest = b.binary("srem", x, y)
    negative = b.binary("icmp slt", rest, zero, DType.BOOL)
    if what == "rem":
        return b.select(negative, b.binary("add", rest, y), rest)
    quotient = b.binary("sdiv", x, y)
    return b.select(negative, b.binary("sub", quotient, b.const(1, dtype)), quotient)
