"""One handler for each function of ``ir.expr.ops.OPS``: values in, value out, with torch's semantics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from ....ir.expr.dtypes import DType
from ....ir.expr.intrinsics import INTRINSICS, ScalarFunction, definition
from ....ir.expr.iterations import ITERATIONS, iteration
from ....ir.expr.ops import APPROXIMATIONS
from ....ir.expr.value import Call, Cast, Const, Expr, Select, Var
from ...kernel import EmitError
from ..text.builder import Builder, Val
from ..text.types import cast, from_memory, memory_type, round_half, to_memory
from . import elementary, rng, special
from .iterations import defined, iterate
from .library import LIBRARY, library_call

Args: TypeAlias = tuple[Val, ...]
Handler: TypeAlias = Callable[[Builder, Args, DType], Val]
BOOL = DType.BOOL


def apply(b: Builder, fn: str, args: Args, dtype: DType) -> Val:
    """The value of ``fn(*args)``. Half types are computed in float32 and rounded."""
    args = b.same(*args)
    handler = HANDLERS.get(fn) or _intrinsic(INTRINSICS[fn])
    if args[0].dtype.is_half and fn != "bitcast":
        wide = tuple(Val(a.name, DType.FLOAT32, a.lanes) for a in args)
        if dtype is BOOL:
            return handler(b, wide, dtype)
        return round_half(b, handler(b, wide, DType.FLOAT32), dtype)
    return handler(b, args, dtype)


def closed(b: Builder, expr: Expr, env: Mapping[str, Val]) -> Val:
    """An expression over named values alone (a monoid's ``combine``, a step), with what is neutral left out.

    ``x + 0`` and ``x * 1`` are x here: lifted states are full of such constants. The sign of a zero may differ.
    """
    match expr:
        case Var():
            return env[expr.name]
        case Const():
            return b.const(expr.value, expr.dtype)
        case Cast():
            return cast(b, closed(b, expr.value, env), expr.dtype)
        case Select():
            condition = closed(b, expr.condition, env)
            if condition.name in ("true", "false"):
                return closed(b, expr.if_true if condition.name == "true" else expr.if_false, env)
            return b.select(condition, closed(b, expr.if_true, env), closed(b, expr.if_false, env))
        case Call():
            return _folded(b, expr, tuple(closed(b, a, env) for a in expr.args))
    raise EmitError(f"an expression of named values alone holds a {type(expr).__name__}")


def _folded(b: Builder, expr: Call, args: Args) -> Val:
    if len(args) == 2:
        x, y = args
        zero, one = b.const(0, x.dtype).name, b.const(1, x.dtype).name
        if expr.fn == "add" and zero in (x.name, y.name):
            return y if x.name == zero else x
        if expr.fn == "sub" and y.name == zero:
            return x
        if expr.fn == "mul" and one in (x.name, y.name):
            return y if x.name == one else x
        if expr.fn == "eq" and x.is_literal and x == y and "7FF" not in x.name:
            return b.const(True, BOOL)
    return apply(b, expr.fn, args, expr.dtype)


def _add(b: Builder, args: Args, dtype: DType) -> Val:
    x, y = args
    if not dtype.is_float:
        return b.binary("add", x, y)
    # A product and the sum that follows may become one fused multiply-add; nothing else is reassociated. Two products
    # may be each other's negative: a fused one would leave the other's rounding error where eager has zero.
    both = x.name in b.products and y.name in b.products
    return b.binary("fadd" if both else "fadd contract", x, y)


def _sub(b: Builder, args: Args, dtype: DType) -> Val:
    x, y = args
    # Never fused: a product less what it equals is zero, whose root is no NaN.
    return b.binary("fsub" if dtype.is_float else "sub", x, y)


def _mul(b: Builder, args: Args, dtype: DType) -> Val:
    x, y = args
    product = b.binary("fmul contract" if dtype.is_float else "mul", x, y)
    b.products.add(product.name)
    return product


def _extreme(greater: bool, skip_nan: bool) -> Handler:
    """maximum and minimum give NaN if an argument is NaN; fmax and fmin the other argument."""

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        x, y = args
        if not dtype.is_float:
            sign = "s" if dtype.is_signed else "u"
            if dtype is BOOL:
                return b.binary("or" if greater else "and", x, y)
            return b.intrinsic(f"{sign}{'max' if greater else 'min'}", x, y)
        if skip_nan:
            order = f"fcmp {'ogt' if greater else 'olt'}"
            # One maxps gives y where either is NaN; what remains is the NaN of y.
            best = b.select(b.binary(order, x, y, BOOL), x, y)
            return b.select(b.binary("fcmp uno", y, y, BOOL), x, best)
        # One maxps gives its second operand where either is NaN; what remains is the NaN of the first, so that is y: in
        # a reduction the element, and no state that the next one waits for, and often a literal. Which zero it is does
        # not matter, as little as it does to eager.
        return b.intrinsic("maximum" if greater else "minimum", y, x, flags="nsz ")

    return handler


def _divide(b: Builder, args: Args, dtype: DType) -> Val:
    if not dtype.is_float:
        raise EmitError(f"div of {dtype.value}: cast to a float type, or use floordiv or truncdiv")
    return b.binary("fdiv", args[0], args[1])


def _int_division(b: Builder, x: Val, y: Val, dtype: DType) -> tuple[Val, Val, Val]:
    """``(quotient, remainder, ok)`` towards zero that never trap; where ``ok`` does not hold the divisor was zero."""
    zero, one = b.const(0, dtype), b.const(1, dtype)
    ok = b.binary("icmp ne", y, zero, BOOL)
    safe = b.select(ok, y, one)
    if not dtype.is_signed:
        return b.binary("udiv", x, safe), b.binary("urem", x, safe), ok
    # The least integer divided by -1 traps: the quotient is the negation, which wraps.
    minus = b.binary("icmp eq", y, b.const(-1, dtype), BOOL)
    safe = b.select(minus, one, safe)
    quotient = b.binary("sdiv", x, safe)
    remainder = b.binary("srem", x, safe)
    return b.select(minus, b.binary("sub", zero, x), quotient), b.select(minus, zero, remainder), ok


def _floordiv(b: Builder, args: Args, dtype: DType) -> Val:
    x, y = args
    if dtype.is_float:
        return _float_floordiv(b, x, y)
    quotient, rest, ok = _int_division(b, x, y, dtype)
    zero = b.const(0, dtype)
    if dtype.is_signed:
        uneven = b.binary("icmp ne", rest, zero, BOOL)
        opposite = b.binary("icmp slt", b.binary("xor", rest, y), zero, BOOL)
        quotient = b.select(b.binary("and", uneven, opposite), b.binary("sub", quotient, b.const(1, dtype)), quotient)
    return b.select(ok, quotient, zero)


def _float_floordiv(b: Builder, x: Val, y: Val) -> Val:
    """As torch's div_floor_floating: by the exact remainder, so that no quotient is rounded up to the next integer."""
    dtype = x.dtype
    zero, one = b.const(0.0, dtype), b.const(1.0, dtype)
    rest = library_call(b, "fmod", x, y)
    quotient = b.binary("fdiv", b.binary("fsub", x, rest), y)
    adjusted = b.select(_opposite(b, rest, y), b.binary("fsub", quotient, one), quotient)
    floor = b.intrinsic("floor", adjusted)
    close = b.binary("fcmp ogt", b.binary("fsub", adjusted, floor), b.const(0.5, dtype), BOOL)
    floor = b.select(close, b.binary("fadd", floor, one), floor)
    plain = b.binary("fdiv", x, y)
    signed_zero = b.intrinsic("copysign", b.splat(zero, x.lanes), plain)
    result = b.select(b.binary("fcmp oeq", adjusted, zero, BOOL), signed_zero, floor)
    # Sleef has no remainder where the quotient is infinite.
    infinite = b.const(math.inf, dtype)
    endless = b.binary("fcmp oeq", b.intrinsic("fabs", plain), infinite, BOOL)
    finite = b.binary("fcmp olt", b.intrinsic("fabs", x), infinite, BOOL)
    undivided = b.binary("or", b.binary("fcmp oeq", y, zero, BOOL), b.binary("and", endless, finite))
    return b.select(undivided, plain, result)


def _opposite(b: Builder, rest: Val, y: Val) -> Val:
    """The remainder is not zero and its sign is not the divisor's."""
    zero = b.const(0.0, rest.dtype)
    uneven = b.binary("fcmp une", rest, zero, BOOL)
    negative_y = b.binary("fcmp olt", y, zero, BOOL)
    negative_rest = b.binary("fcmp olt", rest, zero, BOOL)
    return b.binary("and", uneven, b.binary("xor", negative_y, negative_rest))


def _remainder(b: Builder, args: Args, dtype: DType) -> Val:
    x, y = args
    if dtype.is_float:
        rest = library_call(b, "fmod", x, y)
        return b.select(_opposite(b, rest, y), b.binary("fadd", rest, y), rest)
    _, rest, ok = _int_division(b, x, y, dtype)
    zero = b.const(0, dtype)
    if dtype.is_signed:
        uneven = b.binary("icmp ne", rest, zero, BOOL)
        opposite = b.binary("icmp slt", b.binary("xor", rest, y), zero, BOOL)
        rest = b.select(b.binary("and", uneven, opposite), b.binary("add", rest, y), rest)
    return b.select(ok, rest, zero)


def _truncdiv(b: Builder, args: Args, dtype: DType) -> Val:
    if dtype.is_float:
        return b.intrinsic("trunc", b.binary("fdiv", args[0], args[1]))
    quotient, _, ok = _int_division(b, args[0], args[1], dtype)
    return b.select(ok, quotient, b.const(0, dtype))


def _fmod(b: Builder, args: Args, dtype: DType) -> Val:
    if dtype.is_float:
        return library_call(b, "fmod", *args)
    _, rest, ok = _int_division(b, args[0], args[1], dtype)
    return b.select(ok, rest, args[0])


def _pow(b: Builder, args: Args, dtype: DType) -> Val:
    return library_call(b, "pow", *args) if dtype.is_float else special.int_pow(b, *args)


def _neg(b: Builder, args: Args, dtype: DType) -> Val:
    (x,) = args
    if not dtype.is_float:
        return b.binary("sub", b.const(0, dtype), x)
    negative = elementary.b_neg(b, x)
    if x.name in b.products:
        b.products.add(negative.name)
    return negative


def _abs(b: Builder, args: Args, dtype: DType) -> Val:
    (x,) = args
    if dtype.is_float:
        return b.intrinsic("fabs", x)
    if not dtype.is_signed:
        return x
    zero = b.const(0, dtype)
    return b.select(b.binary("icmp slt", x, zero, BOOL), b.binary("sub", zero, x), x)


def _sign(b: Builder, args: Args, dtype: DType) -> Val:
    (x,) = args
    zero, one = b.const(0, dtype), b.const(1, dtype)
    if dtype.is_float:
        above, below = b.binary("fcmp ogt", x, zero, BOOL), b.binary("fcmp olt", x, zero, BOOL)
        return b.select(above, one, b.select(below, b.const(-1.0, dtype), b.splat(zero, x.lanes)))
    if not dtype.is_signed:
        return cast(b, b.binary("icmp ne", x, zero, BOOL), dtype)
    above, below = b.binary("icmp sgt", x, zero, BOOL), b.binary("icmp slt", x, zero, BOOL)
    return b.binary("sub", cast(b, above, dtype), cast(b, below, dtype))


def _rounding(name: str) -> Handler:
    return lambda b, args, dtype: b.intrinsic(name, args[0]) if dtype.is_float else args[0]


def _sqrt(b: Builder, args: Args, dtype: DType) -> Val:
    return b.intrinsic("sqrt", args[0])


def _rsqrt(b: Builder, args: Args, dtype: DType) -> Val:
    return b.binary("fdiv", b.const(1.0, dtype), b.intrinsic("sqrt", args[0]))


def _reciprocal(b: Builder, args: Args, dtype: DType) -> Val:
    return b.binary("fdiv", b.const(1.0, dtype), args[0])


def _elementary(fn: str) -> Handler:
    """Inline for float32, Sleef or the C library for float64."""

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        inline = elementary.INLINE.get(fn)
        if inline is not None and dtype is DType.FLOAT32:
            return inline(b, args[0])
        if fn in LIBRARY:
            return library_call(b, fn, *args)
        return special.COMPOSED[fn](b, args[0])

    return handler


def _inverse_hyperbolic(fn: str) -> Handler:
    """Far out by the logarithm: Sleef squares its argument, which then is infinite."""

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        (x,) = args
        if not b.sleef:
            return library_call(b, fn, x)
        size = b.intrinsic("fabs", x) if fn == "asinh" else x
        far = b.binary("fcmp ogt", size, b.const(2.0**60 if dtype is DType.FLOAT32 else 2.0**500, dtype), BOOL)
        near = library_call(b, fn, b.select(far, b.const(1.0, dtype), x))
        log = b.binary("fadd", _elementary("log")(b, (size,), dtype), b.const(math.log(2), dtype))
        return b.select(far, b.intrinsic("copysign", log, x), near)

    return handler


def _hyperbolic(fn: str) -> Handler:
    """Far out by the square of an exponential's root: Sleef's are infinite where that exponential is, which half of it
    is not. Its own error is that of two roundings more.
    """

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        (x,) = args
        if not b.sleef:
            return library_call(b, fn, x)
        size = b.intrinsic("fabs", x)
        far = b.binary("fcmp ogt", size, b.const(88.0 if dtype is DType.FLOAT32 else 709.0, dtype), BOOL)
        near = library_call(b, fn, b.select(far, b.const(1.0, dtype), x))
        half = b.const(0.5, dtype)
        root = _elementary("exp")(b, (b.binary("fmul", size, half),), dtype)
        grown = b.binary("fmul", b.binary("fmul", root, half), root)
        return b.select(far, b.intrinsic("copysign", grown, x) if fn == "sinh" else grown, near)

    return handler


def _compare(code: str) -> Handler:
    floats = {"ne": "une"}.get(code, f"o{code}")

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        source = args[0].dtype
        if source.is_float:
            return b.binary(f"fcmp {floats}", args[0], args[1], BOOL)
        sign = "" if code in ("eq", "ne") else "s" if source.is_signed else "u"
        return b.binary(f"icmp {sign}{code}", args[0], args[1], BOOL)

    return handler


def _isnan(b: Builder, args: Args, dtype: DType) -> Val:
    (x,) = args
    return b.binary("fcmp uno", x, x, BOOL) if x.dtype.is_float else b.const(False, BOOL, x.lanes)


def _isinf(b: Builder, args: Args, dtype: DType) -> Val:
    (x,) = args
    if not x.dtype.is_float:
        return b.const(False, BOOL, x.lanes)
    return b.binary("fcmp oeq", b.intrinsic("fabs", x), b.const(math.inf, x.dtype), BOOL)


def _logical(instruction: str) -> Handler:
    return lambda b, args, dtype: b.binary(instruction, cast(b, args[0], BOOL), cast(b, args[1], BOOL))


def _logical_not(b: Builder, args: Args, dtype: DType) -> Val:
    return b.binary("xor", cast(b, args[0], BOOL), b.const(True, BOOL))


def _bits(instruction: str) -> Handler:
    return lambda b, args, dtype: b.binary(instruction, args[0], args[1])


def _bit_not(b: Builder, args: Args, dtype: DType) -> Val:
    return b.binary("xor", args[0], b.const(True if dtype is BOOL else -1, dtype))


def _shl(b: Builder, args: Args, dtype: DType) -> Val:
    x, by = args
    ok = b.binary("icmp ult", by, b.const(dtype.bits, dtype), BOOL)
    safe = b.select(ok, by, b.const(0, dtype))
    return b.select(ok, b.binary("shl", x, safe), b.const(0, dtype))


def _shr(b: Builder, args: Args, dtype: DType) -> Val:
    x, by = args
    ok = b.binary("icmp ult", by, b.const(dtype.bits, dtype), BOOL)
    if dtype.is_signed:
        return b.binary("ashr", x, b.select(ok, by, b.const(dtype.bits - 1, dtype)))
    return b.select(ok, b.binary("lshr", x, b.select(ok, by, b.const(0, dtype))), b.const(0, dtype))


def _bitcast(b: Builder, args: Args, dtype: DType) -> Val:
    (x,) = args
    text = to_memory(b, x)
    source, result = memory_type(x.dtype, x.lanes), memory_type(dtype, x.lanes)
    if source != result:
        text = b.op(f"bitcast {source} {text} to {result}")
    return from_memory(b, text, dtype, x.lanes)


def _fma(b: Builder, args: Args, dtype: DType) -> Val:
    return b.intrinsic("fma", *args) if dtype.is_float else b.binary("add", b.binary("mul", args[0], args[1]), args[2])


def _copysign(b: Builder, args: Args, dtype: DType) -> Val:
    return b.intrinsic("copysign", *args)


def _library(fn: str) -> Handler:
    return lambda b, args, dtype: library_call(b, fn, *args)


_ELEMENTARY = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sigmoid",
    "tanh",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atanh",
    "erf",
    "erfc",
    "erfinv",
    "lgamma",
    "digamma",
]


def _approximate(fn: str) -> Handler:
    """A function with an error: its own code for float32 where that is shorter, else the exact one."""
    exact, shorter = HANDLERS[APPROXIMATIONS[fn].of], elementary.APPROXIMATE.get(fn)

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        return shorter(b, *args) if shorter is not None and dtype is DType.FLOAT32 else exact(b, args, dtype)

    return handler


def _iterated(fn: str) -> Handler:
    return lambda b, args, dtype: iterate(b, iteration(fn, dtype), args, partial(closed, b))


def _intrinsic(intrinsic: ScalarFunction) -> Handler:
    """A function of a user's: by the instructions that it writes, or by its formula."""

    def handler(b: Builder, args: Args, dtype: DType) -> Val:
        if intrinsic.llvm is None:
            return defined(b, definition(intrinsic, args[0].dtype), args, partial(closed, b))
        made = intrinsic.llvm(b, *args)
        if not isinstance(made, Val) or made.dtype is not dtype:
            what = f"a {made.dtype.value}" if isinstance(made, Val) else f"a {type(made).__name__}"
            raise EmitError(f"the LLVM code of {intrinsic.name} gives {what}; it must give a Val of {dtype.value}")
        return made

    return handler


def _check(b: Builder, args: Args, dtype: DType) -> Val:
    raise EmitError("a check has an effect: values.py emits it where an expression is evaluated")


HANDLERS: dict[str, Handler] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "maximum": _extreme(greater=True, skip_nan=False),
    "minimum": _extreme(greater=False, skip_nan=False),
    "fmax": _extreme(greater=True, skip_nan=True),
    "fmin": _extreme(greater=False, skip_nan=True),
    "div": _divide,
    "floordiv": _floordiv,
    "remainder": _remainder,
    "truncdiv": _truncdiv,
    "fmod": _fmod,
    "pow": _pow,
    "atan2": _library("atan2"),
    "hypot": _library("hypot"),
    "nextafter": _library("nextafter"),
    "copysign": _copysign,
    "fma": _fma,
    "neg": _neg,
    "abs": _abs,
    "sign": _sign,
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding("trunc"),
    "round": _rounding("roundeven"),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    **{fn: _elementary(fn) for fn in _ELEMENTARY},
    **{fn: _hyperbolic(fn) for fn in ("sinh", "cosh")},
    **{fn: _inverse_hyperbolic(fn) for fn in ("asinh", "acosh")},
    **{fn: _compare(fn) for fn in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{fn: _iterated(fn) for fn in ITERATIONS},
    "isnan": _isnan,
    "isinf": _isinf,
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical_not,
    "bit_and": _bits("and"),
    "bit_or": _bits("or"),
    "bit_xor": _bits("xor"),
    "bit_not": _bit_not,
    "shl": _shl,
    "shr": _shr,
    "check_bounds": _check,
    "check_divisor": _check,
    "bitcast": _bitcast,
    "rand": lambda b, args, dtype: rng.rand(b, *args),
    "randn": lambda b, args, dtype: rng.randn(b, *args),
    "randbits": lambda b, args, dtype: rng.randbits(b, *args),
}
HANDLERS.update({fn: _approximate(fn) for fn in APPROXIMATIONS})
