"""What each scalar function of ``ops`` means, one NumPy scalar at a time.

float32 functions other than the arithmetic that IEEE 754 rounds correctly are computed in float64 and rounded once,
so that the oracle is a better answer than any kernel's. Half types are computed in float32 and rounded after every
call; a program that wants fewer roundings says so with casts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from ..errors import DivisionByZeroError, IRError, OutOfRangeError
from ..expr.dtypes import DType
from ..expr.intrinsics import INTRINSICS, ScalarFunction, definition
from ..expr.iterations import ITERATIONS, iteration
from ..expr.ops import APPROXIMATIONS, OPS, Result
from ..expr.value import Call, Cast, Const, Expr, Select, Var

# A NumPy scalar of an element type; ``Any`` because NumPy's own annotations say no more.
Scalar: TypeAlias = Any
Function: TypeAlias = Callable[..., Scalar]
Maker: TypeAlias = Callable[[DType], Function]


def function(fn: str, dtype: DType, result: DType) -> Function:
    """The function ``fn`` on arguments of ``dtype``. Raises IRError where that type has no such function."""
    if fn == "bitcast":
        return _bitcast(dtype, result)
    if fn in _RANDOM:
        return _RANDOM[fn]
    if fn in APPROXIMATIONS:
        return function(APPROXIMATIONS[fn].of, dtype, result)
    if dtype.is_half:
        inner, round_to = function(fn, DType.FLOAT32, DType.FLOAT32), partial(_narrowed, dtype=dtype)
        if OPS[fn].result is Result.BOOL:
            return lambda *args: inner(*map(np.float32, args))
        return lambda *args: round_to(inner(*map(np.float32, args)))
    if fn in ITERATIONS:
        return _iterated(fn, dtype)
    if fn in INTRINSICS:
        return _defined(INTRINSICS[fn], dtype)
    if fn in _UNARY_FLOAT:
        if not (dtype.is_float or dtype.is_complex):
            raise IRError(f"{fn} of {dtype.value}: cast to a float type first")
        return _in_double(_UNARY_FLOAT[fn], dtype)
    if fn not in _MAKERS:
        raise IRError(f"the oracle does not know {fn!r}")
    return _MAKERS[fn](dtype)


def converter(source: DType, target: DType) -> Function:
    """``Cast``: float to int truncates, to bool is ``!= 0``, to half types rounds to nearest even by way of float32."""
    if target is DType.BOOL:
        return lambda x: np.bool_(x != 0)
    into = target.numpy
    if source.is_complex and not target.is_complex:
        return lambda x: x.real.astype(into)
    if target.is_half and source is not DType.FLOAT32:
        return lambda x: _narrowed(x.astype(np.float32), target)
    if source.is_half and target is not DType.FLOAT32:
        return lambda x: x.astype(np.float32).astype(into)
    return lambda x: _narrowed(x, target)


def _narrowed(x: Any, dtype: DType) -> Any:
    """Numbers in a type that may be narrower; what lies beyond its largest as torch has it."""
    if dtype.limit is not None:
        x = np.clip(x, -dtype.limit, dtype.limit)
    return x.astype(dtype.numpy)


def scalar(value: bool | int | float, dtype: DType) -> Scalar:
    """A literal as a NumPy scalar."""
    if dtype.is_half:
        return _narrowed(np.float32(value), dtype)
    return dtype.numpy.type(value)


def _bitcast(dtype: DType, result: DType) -> Function:
    if dtype.itemsize != result.itemsize:
        raise IRError(f"bitcast of {dtype.value} to {result.value}: the widths differ")
    into = result.numpy
    return lambda x: np.asarray(x).reshape(1).view(into)[0]


def _in_double(fn: Function, dtype: DType) -> Function:
    if dtype is DType.FLOAT32:
        return lambda x: np.float32(fn(np.float64(x)))
    into = dtype.numpy.type
    return lambda x: into(fn(x))


def _iterated(fn: str, dtype: DType) -> Function:
    """A function that its steps define, of one element."""
    loop = iteration(fn, dtype)
    args, names = [v.name for v in loop.args], [v.name for v in loop.state]
    start, step = [_evaluator(e) for e in loop.start], [_evaluator(e) for e in loop.step]
    goes_on, result = _evaluator(loop.condition), _evaluator(loop.result)

    def run(*values: Scalar) -> Scalar:
        env = dict(zip(args, values, strict=True))
        env.update(zip(names, [e(env) for e in start], strict=True))
        while goes_on(env):
            env.update(zip(names, [e(env) for e in step], strict=True))
        return result(env)

    return run


def _defined(intrinsic: ScalarFunction, dtype: DType) -> Function:
    """A function of a user's: what is said for NumPy, of floats in float64, or else its formula."""
    if (given := intrinsic.numpy) is not None:
        into = np.bool_ if OPS[intrinsic.name].result is Result.BOOL else dtype.numpy.type
        wide = np.float64 if dtype.is_float else dtype.numpy.type
        return lambda *values: into(given(*map(wide, values)))
    meaning = definition(intrinsic, dtype)
    args = [v.name for v in meaning.args]
    lets, result = [(v.name, _evaluator(e)) for v, e in meaning.lets], _evaluator(meaning.result)

    def run(*values: Scalar) -> Scalar:
        env = dict(zip(args, values, strict=True))
        for name, value in lets:
            env[name] = value(env)
        return result(env)

    return run


def _evaluator(expr: Expr) -> Callable[[Mapping[str, Scalar]], Scalar]:
    """An expression of named values alone as a function of these."""
    match expr:
        case Var(name):
            return lambda env: env[name]
        case Const():
            constant = scalar(expr.value, expr.dtype)
            return lambda env: constant
        case Cast(value, dtype):
            convert, inner = converter(value.dtype, dtype), _evaluator(value)
            return lambda env: convert(inner(env))
        case Call(fn, args, dtype):
            call, parts = function(fn, args[0].dtype, dtype), [_evaluator(a) for a in args]
            return lambda env: call(*[p(env) for p in parts])
        case Select():
            condition, if_true, if_false = map(_evaluator, (expr.condition, expr.if_true, expr.if_false))
            return lambda env: if_true(env) if condition(env) else if_false(env)
    raise IRError(f"an iteration holds a {type(expr).__name__}")


def _same(fn: Function) -> Maker:
    return lambda dtype: fn


def _by_kind(of_float: Function, of_int: Function) -> Maker:
    """One function for floats and one for integers, the latter wrapped to the type."""

    def make(dtype: DType) -> Function:
        if dtype.is_float or dtype.is_complex:
            return of_float
        return lambda *args: wrap(of_int(*map(int, args)), dtype)

    return make


def wrap(value: int, dtype: DType) -> Scalar:
    """An unbounded integer modulo the width of the type."""
    value &= (1 << dtype.bits) - 1
    if dtype.is_signed and value >> (dtype.bits - 1):
        value -= 1 << dtype.bits
    return dtype.numpy.type(value)


def _binary_double(fn: Function) -> Maker:
    def make(dtype: DType) -> Function:
        if dtype is DType.FLOAT32:
            return lambda a, b: np.float32(fn(np.float64(a), np.float64(b)))
        return fn

    return make


def _maximum(a: Scalar, b: Scalar) -> Scalar:
    return a if a >= b or a != a else b


def _minimum(a: Scalar, b: Scalar) -> Scalar:
    return a if a <= b or a != a else b


def _fmax(a: Scalar, b: Scalar) -> Scalar:
    return a if a >= b or b != b else b


def _fmin(a: Scalar, b: Scalar) -> Scalar:
    return a if a <= b or b != b else b


def _divide(dtype: DType) -> Function:
    if not (dtype.is_float or dtype.is_complex):
        raise IRError(f"div of {dtype.value}: cast to a float type, or use floordiv or truncdiv")
    return lambda a, b: a / b


def _remainder(a: Scalar, b: Scalar) -> Scalar:
    r = np.fmod(a, b)
    return r + b if r != 0 and (b < 0) != (r < 0) else r


def _floordiv(a: Scalar, b: Scalar) -> Scalar:
    if b == 0:
        return a / b
    r = np.fmod(a, b)
    q = (a - r) / b
    if r != 0 and (b < 0) != (r < 0):
        q = q - type(a)(1)
    if q == 0:
        return np.copysign(type(a)(0), a / b)
    floor = np.floor(q)
    return floor + type(a)(1) if q - floor > 0.5 else floor


def _int_truncdiv(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _int_pow(a: int, b: int) -> int:
    if b < 0:  # torch: 1 and -1 stay what they are, the rest goes to zero
        return a if a == 1 or (a == -1 and b % 2) else 1 if a == -1 else 0
    return pow(a, b, 1 << 64)


def _power(dtype: DType) -> Function:
    if dtype.is_int:
        return lambda a, b: wrap(_int_pow(int(a), int(b)), dtype)
    return (
        np.power if dtype.is_complex else _binary_double(lambda a, b: np.float64(_float_pow(float(a), float(b))))(dtype)
    )


def _float_pow(a: float, b: float) -> float:
    """C's pow. NumPy's takes the square root for an exponent of a half, which differs at minus infinity."""
    sign = a if b % 2 == 1 else 1.0
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.copysign(math.inf, sign)
    except ValueError:  # a negative base of a fractional exponent, or zero of a negative one
        return math.nan if a != 0 else math.copysign(math.inf, sign)


def _fma(dtype: DType) -> Function:
    if dtype is DType.FLOAT64:
        return lambda a, b, c: _exact_fma(a, b, c)
    if dtype is DType.FLOAT32:
        return lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    return lambda a, b, c: a * b + c


def _exact_fma(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        return a * b + c
    total = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    try:
        return np.float64(float(total)) if total else a * b + c
    except OverflowError:
        return np.float64(math.copysign(math.inf, total))


def _sign(a: Scalar) -> Scalar:
    return type(a)(a > 0) - type(a)(a < 0)


def _rounding(fn: Function) -> Maker:
    return lambda dtype: fn if dtype.is_float else lambda x: x


def _shift_left(dtype: DType) -> Function:
    return lambda a, b: wrap(int(a) << int(b), dtype) if 0 <= b < dtype.bits else wrap(0, dtype)


def _shift_right(dtype: DType) -> Function:
    def shift(a: Scalar, b: Scalar) -> Scalar:
        by = int(b) if 0 <= b < dtype.bits else dtype.bits - dtype.is_signed
        return wrap(int(a) >> by, dtype)

    return shift


def _logical(fn: Callable[[bool, bool], bool]) -> Maker:
    return _same(lambda a, b: np.bool_(fn(bool(a), bool(b))))


def _check_bounds(index: Scalar, low: Scalar, high: Scalar, dim: Scalar) -> Scalar:
    if not low <= index < high:
        raise OutOfRangeError(f"index {index} is out of bounds for dimension {dim} with size {high}")
    return index


def _check_divisor(x: Scalar) -> Scalar:
    if x == 0:
        raise DivisionByZeroError("ZeroDivisionError: an integer is divided by zero")
    return x


def _by_torch(name: str) -> Function:
    """Functions that neither NumPy nor ``math`` has, on one float64."""
    fn = getattr(torch, name)
    return lambda x: fn(torch.tensor(float(x), dtype=torch.float64)).item()


def _sigmoid(x: Scalar) -> Scalar:
    return 1 / (1 + np.exp(-x)) if x.real >= 0 else np.exp(x) / (1 + np.exp(x))


_NUMPY_NAMES = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "tanh": "tanh", "sin": "sin", "cos": "cos", "tan": "tan", "sinh": "sinh", "cosh": "cosh",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
}  # fmt: skip

_UNARY_FLOAT: dict[str, Function] = {
    **{name: getattr(np, theirs) for name, theirs in _NUMPY_NAMES.items()},
    **{name: _by_torch(name) for name in ("erf", "erfc", "erfinv", "lgamma", "digamma")},
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": _sigmoid,
}

_MAKERS: dict[str, Maker] = {
    "add": _same(lambda a, b: a + b),
    "sub": _same(lambda a, b: a - b),
    "mul": _same(lambda a, b: a * b),
    "maximum": _same(_maximum),
    "minimum": _same(_minimum),
    "fmax": _same(_fmax),
    "fmin": _same(_fmin),
    "div": _divide,
    "floordiv": _by_kind(_floordiv, lambda a, b: a // b if b else 0),
    "remainder": _by_kind(_remainder, lambda a, b: a % b if b else 0),
    "truncdiv": _by_kind(lambda a, b: np.trunc(a / b), _int_truncdiv),
    "fmod": _by_kind(np.fmod, lambda a, b: a - b * _int_truncdiv(a, b)),
    "pow": _power,
    "atan2": _binary_double(np.arctan2),
    "hypot": _binary_double(np.hypot),
    "nextafter": _same(np.nextafter),
    "copysign": _same(np.copysign),
    "fma": _fma,
    "neg": _same(lambda a: -a),
    "abs": _same(abs),
    "sign": _same(_sign),
    "floor": _rounding(np.floor),
    "ceil": _rounding(np.ceil),
    "trunc": _rounding(np.trunc),
    "round": _rounding(np.rint),
    "eq": _same(lambda a, b: a == b),
    "ne": _same(lambda a, b: a != b),
    "lt": _same(lambda a, b: a < b),
    "le": _same(lambda a, b: a <= b),
    "gt": _same(lambda a, b: a > b),
    "ge": _same(lambda a, b: a >= b),
    "isnan": _same(lambda a: np.bool_(a != a)),
    "isinf": lambda dtype: (lambda a: np.bool_(np.isinf(a))) if not dtype.is_int else lambda a: np.False_,
    "logical_and": _logical(lambda a, b: a and b),
    "logical_or": _logical(lambda a, b: a or b),
    "logical_xor": _logical(lambda a, b: a != b),
    "logical_not": _same(lambda a: np.bool_(not a)),
    "bit_and": _same(lambda a, b: a & b),
    "bit_or": _same(lambda a, b: a | b),
    "bit_xor": _same(lambda a, b: a ^ b),
    "bit_not": _same(lambda a: ~a),
    "shl": _shift_left,
    "shr": _shift_right,
    "check_bounds": _same(_check_bounds),
    "check_divisor": _same(_check_divisor),
}


# --- random numbers ---------------------------------------------------------------------------------------------------


def philox(seed: int, offset: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 of key ``seed`` and counter ``(offset, 0)``, both 64 bits, low word first (Salmon et al. 2011)."""
    mask = 0xFFFFFFFF
    k0, k1 = seed & mask, seed >> 32 & mask
    c0, c1, c2, c3 = offset & mask, offset >> 32 & mask, 0, 0
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & mask, low >> 32 ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def random_word(seed: int, place: int) -> int:
    """A word of the stream of a seed."""
    return philox(seed, place >> 2)[place & 3]


def _word_pair(seed: Scalar, offset: Scalar) -> tuple[int, int]:
    return random_word(int(seed), 2 * int(offset)), random_word(int(seed), 2 * int(offset) + 1)


def _rand(seed: Scalar, offset: Scalar) -> Scalar:
    return np.float32((random_word(int(seed), int(offset)) >> 8) * 2.0**-24)


def _randn(seed: Scalar, offset: Scalar) -> Scalar:
    w0, w1 = _word_pair(seed, offset)
    u1, u2 = ((w0 >> 8) + 1) * 2.0**-24, (w1 >> 8) * 2.0**-24
    return np.float32(math.sqrt(-2.0 * math.log(u1)) * math.cos(2.0 * math.pi * u2))


def _randbits(seed: Scalar, offset: Scalar) -> Scalar:
    w0, w1 = _word_pair(seed, offset)
    return wrap(w1 << 32 | w0, DType.INT64)


_RANDOM: dict[str, Function] = {"rand": _rand, "randn": _randn, "randbits": _randbits}
FUNCTIONS = frozenset({*_UNARY_FLOAT, *_MAKERS, *_RANDOM, *ITERATIONS, *APPROXIMATIONS, "bitcast"})
