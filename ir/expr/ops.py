"""The table of scalar functions that a value expression may call.

One row a function: the printer, the verifier, the oracle, the cost estimate and both emitters are keyed by these
names, and a test asserts that each of them covers the table. Semantics are torch's: comparisons give bool,
``maximum`` and ``minimum`` propagate NaN, ``floordiv`` and ``remainder`` round towards minus infinity, ``truncdiv``
and ``fmod`` towards zero, integers wrap.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Result(enum.Enum):
    """How the element type of a call follows from its arguments; the arguments of a call share one type."""

    SAME = "same"
    BOOL = "bool"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True)
class OpInfo:
    """``flops`` is the cost in float32 operations that the planner and the reports assume."""

    name: str
    arity: int
    result: Result
    flops: int


def _rows(names: str, arity: int, result: Result, flops: int) -> dict[str, OpInfo]:
    return {name: OpInfo(name, arity, result, flops) for name in names.split()}


OPS: dict[str, OpInfo] = {
    **_rows("add sub mul maximum minimum fmax fmin", 2, Result.SAME, 1),
    **_rows("div floordiv remainder truncdiv fmod", 2, Result.SAME, 4),
    **_rows("pow atan2 hypot nextafter copysign", 2, Result.SAME, 20),
    **_rows("fma", 3, Result.SAME, 1),
    **_rows("neg abs sign", 1, Result.SAME, 1),
    **_rows("floor ceil trunc round", 1, Result.SAME, 1),
    **_rows("sqrt rsqrt reciprocal", 1, Result.SAME, 4),
    **_rows("exp exp2 expm1 log log2 log10 log1p sigmoid tanh", 1, Result.SAME, 12),
    **_rows("sin cos tan asin acos atan sinh cosh asinh acosh atanh", 1, Result.SAME, 20),
    **_rows("erf erfc erfinv lgamma digamma", 1, Result.SAME, 20),
    # Of float32, with an error: see APPROXIMATIONS.
    **_rows("exp2_approx reciprocal_approx sqrt_approx tanh_approx", 1, Result.SAME, 1),
    **_rows("erfc_approx", 1, Result.SAME, 12),
    **_rows("div_approx", 2, Result.SAME, 4),
    # By iteration: ``ir/expr/iterations.py`` says what a step is.
    **_rows("gcd hermite_h hermite_he laguerre legendre", 2, Result.SAME, 200),
    **_rows("gamma_series gamma_fraction gamma_difference", 2, Result.SAME, 400),
    **_rows("eq ne lt le gt ge", 2, Result.BOOL, 1),
    **_rows("isnan isinf", 1, Result.BOOL, 1),
    **_rows("logical_and logical_or logical_xor", 2, Result.BOOL, 1),
    **_rows("logical_not", 1, Result.BOOL, 1),
    **_rows("bit_and bit_or bit_xor shl shr", 2, Result.SAME, 1),
    **_rows("bit_not", 1, Result.SAME, 1),
    # ``check_bounds(x, low, high, dim)`` is x; one below low, or not below high, is an error of the whole program, of
    # which its caller learns: an index into dimension dim that is out of range.
    **_rows("check_bounds", 4, Result.SAME, 1),
    # ``check_divisor(x)`` is x; a zero is such an error too: an integer is divided by it.
    **_rows("check_divisor", 1, Result.SAME, 1),
    # Reinterprets the bits as a type of the same width. As its own type a half value is rounded, whoever reads it:
    # conversions on either side of it do not cancel.
    **_rows("bitcast", 1, Result.EXPLICIT, 0),
    # A seed (int64) has a stream of words of 32 bits: word k is word k % 4 of Philox4x32-10 with the seed as key, low
    # half first, and k // 4 as counter, so that four neighbours take the work of one. ``rand(seed, k)`` is
    # (word k >> 8) * 2**-24 as float32. Of words 2k and 2k + 1, ``randn`` is Box-Muller's sqrt(-2 ln u) cos(2 pi v) as
    # float32 with u = ((first >> 8) + 1) * 2**-24, v = (second >> 8) * 2**-24; ``randbits`` has them as the low and the
    # high half of an int64.
    **_rows("rand", 2, Result.EXPLICIT, 40),
    **_rows("randn", 2, Result.EXPLICIT, 80),
    **_rows("randbits", 2, Result.EXPLICIT, 40),
}

# Random functions -> the neighbouring elements whose words one call of Philox makes.
DRAWN_TOGETHER = {"rand": 4, "randn": 2, "randbits": 2}


@dataclass(frozen=True, slots=True)
class Approximation:
    """A function that stands for an exact one, ``of``, whose meaning it has, where few digits are wanted.

    Of finite results it gives what differs by ``error``, relative, or by ``floor``, whichever is more. Arguments below
    2**-126 may count as zero, and those of ``reciprocal_approx`` beyond 2**126 as infinite. Infinities and NaN are
    those of the exact function. What a target has no shorter code for is computed exactly.
    """

    of: str
    error: float
    floor: float = 2.0**-126


# Errors of single instructions are those of PTX ISA 9.0 (ex2, rcp, sqrt, div, tanh) and of AMD's CDNA 3; tests measure
# the others.
APPROXIMATIONS: dict[str, Approximation] = {
    "exp2_approx": Approximation("exp2", 2.0**-22),
    "reciprocal_approx": Approximation("reciprocal", 2.0**-22),
    "div_approx": Approximation("div", 2.0**-22),
    "sqrt_approx": Approximation("sqrt", 2.0**-22, 2.0**-63),
    "tanh_approx": Approximation("tanh", 2.0**-10.9),
    "erfc_approx": Approximation("erfc", 2.0**-17, 2.0**-30),
}

# Those that are errors of the whole program where data are wrong.
CHECKS = ("check_bounds", "check_divisor")
