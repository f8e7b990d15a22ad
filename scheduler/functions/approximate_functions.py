"""Approximate functions where only half types are left of their results.

A value of float32 that reaches memory, or the next operation, rounded to a half type needs few of its digits. A GPU has
single instructions for powers of two, reciprocals and hyperbolic tangents that are exact to 22, or 11, bits. A CPU
takes one polynomial where an exact function takes two and chooses.
``ir.expr.ops.APPROXIMATIONS`` promises their errors; docs/numbers.md says what that makes of results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import is_, or_

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import MAX, MIN, SUM
from ...ir.expr.ops import APPROXIMATIONS
from ...ir.expr.value import (
    Call,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Select,
    call,
    children,
    const,
    is_value,
    with_children,
)
from ...ir.function.function import Stage, TensorFunction
from ..numerics import FUNCTION, keeps

_LOG2_E = math.log2(math.e)
# Functions whose relative error is, but for cancellation, about that of their arguments.
_KEEPS = frozenset((
    "add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "fmax", "fmin", "fma", "sqrt", "rsqrt",
    "reciprocal",
))  # fmt: skip
_SUMS = frozenset(("add", "sub", "fma"))
# Of an approximate tangent, beside two that rounding to no more than these leaves nothing of.
_TANH_DIGITS = math.floor(-math.log2(APPROXIMATIONS["tanh_approx"].error)) - 2
# Bits of a significand, the hidden one included.
DIGITS = {DType.BFLOAT16: 8, DType.FLOAT16: 11}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is left of a value: digits of the finest type that it is rounded to, 24 where it is not; and whether it is
    added to something on the way, which may leave its error and take the value itself."""

    digits: int
    added: bool = False

    def __or__(self, other: _Wanted) -> _Wanted:
        return _Wanted(max(self.digits, other.digits), self.added or other.added)

    @property
    def exact(self) -> bool:
        return self.digits > DIGITS[DType.FLOAT16]


_EXACT, _NOTHING = _Wanted(24), _Wanted(0)


def approximate_functions(function: TensorFunction) -> TensorFunction:
    """The function with approximate exponentials, sigmoids, tangents, error functions and quotients, where all that
    reads them rounds to half types.

    Rewrites::

        t0 = compute(points, mul(x, add(erf(mul(x, 0.7)), 1.0)))      # stored as bfloat16
        ->  t0 = compute(points, mul(x, erfc_approx(neg(mul(x, 0.7)))))

    Parts of attention are left to the steps of the online softmax. What is the same for a whole row stays exact: it
    costs little, and all elements of the row would have its error. Stages that keep eager's functions are left alone.
    """
    if any(s.role is not None and s.role.is_of_attention for s in function.stages):
        return function
    wanted: dict[str, _Wanted] = {}
    for output in function.outputs:
        _want(wanted, output.result, _of_type(output.buffer.dtype))
    elements = {d.var for d in (*function.inner, *function.extra)}
    stages: list[Stage] = []
    for stage in reversed(function.stages):
        values = []
        for value in stage.values:
            needs = _needs(value, _of_stage(stage, wanted))
            for e in needs.order:
                if isinstance(e, Load):
                    _want(wanted, e.buffer, needs.of(e))
            values.append(value if keeps(stage, FUNCTION) else _approximated(value, needs, elements))
        same = all(map(is_, values, stage.values))
        stages.append(stage if same else replace(stage, values=tuple(values)))
    if all(map(is_, stages[::-1], function.stages)):
        return function
    return replace(function, stages=tuple(stages[::-1]))


# --- what is wanted ---------------------------------------------------------------------------------------------------


def _of_type(dtype: DType) -> _Wanted:
    return _Wanted(DIGITS[dtype]) if dtype in DIGITS else _EXACT


def _want(wanted: dict[str, _Wanted], name: str, more: _Wanted) -> None:
    wanted[name] = wanted.get(name, _NOTHING) | more


def _of_stage(stage: Stage, wanted: Mapping[str, _Wanted]) -> _Wanted:
    """What readers want of the values of a stage."""
    wants = reduce(or_, (wanted.get(r, _NOTHING) for r in stage.results), _NOTHING)
    if stage.monoid is None:
        return wants
    return replace(wants, added=True) if stage.monoid in (SUM, MAX, MIN) else _EXACT


@dataclass(frozen=True, slots=True)
class _Needs:
    """Of an expression's parts, each behind all that it is part of, what is wanted."""

    order: tuple[Expr, ...]
    known: Mapping[int, _Wanted]

    def of(self, e: Expr) -> _Wanted:
        return self.known[id(e)]


def _needs(value: Expr, wants: _Wanted) -> _Needs:
    order = _outermost_first(value)
    known = {id(value): wants}
    for e in order:
        for inside, more in _given(e, known[id(e)]):
            known[id(inside)] = known.get(id(inside), _NOTHING) | more
    return _Needs(order, known)


def _given(e: Expr, wants: _Wanted) -> Iterable[tuple[Expr, _Wanted]]:
    """What an expression wants of those directly inside it."""
    match e:
        case Cast(value, dtype):
            return ((value, wants if dtype is DType.FLOAT32 else _of_type(dtype)),)
        case Select(condition, if_true, if_false):
            return ((condition, _EXACT), (if_true, wants), (if_false, wants))
        case Call(fn, args) if fn in _KEEPS:
            inner = replace(wants, added=True) if fn in _SUMS else wants
            return tuple((a, inner) for a in args)
        case _:
            return tuple((i, _EXACT) for i in children(e))


def _outermost_first(value: Expr) -> tuple[Expr, ...]:
    order: list[Expr] = []
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(value, False)]
    while stack:
        e, done = stack.pop()
        if done:
            order.append(e)
        elif id(e) not in seen:
            seen.add(id(e))
            stack.append((e, True))
            stack.extend((i, False) for i in children(e))
    return tuple(order[::-1])


# --- approximations ---------------------------------------------------------------------------------------------------


def _approximated(value: Expr, needs: _Needs, elements: set[sympy.Symbol]) -> Expr:
    """An expression with approximations in the place of what needs to be no more than that."""
    made: dict[int, Expr] = {}
    varies: dict[int, bool] = {}
    for e in needs.order[::-1]:
        inside = children(e)
        varies[id(e)] = not elements or any(varies[id(i)] for i in inside) or _is_at(e, elements)
        new = e
        if any(made[id(i)] is not i for i in inside):
            new = with_children(e, tuple(made[id(i)] for i in inside))
        wants = needs.of(e)
        if isinstance(new, Call) and e.dtype is DType.FLOAT32 and varies[id(e)] and not wants.exact:
            new = _approximation(new, wants, varies[id(inside[-1])]) or new
        made[id(e)] = new
    return made[id(value)]


def _is_at(e: Expr, elements: set[sympy.Symbol]) -> bool:
    """Whether an expression itself, whatever it is made of, is another one at each element of a row."""
    indices = e.indices if isinstance(e, Load) else (e.index,) if isinstance(e, IndexValue) else ()
    return any(not is_value(i) and elements & i.free_symbols for i in indices)


def _approximation(e: Call, wants: _Wanted, last_varies: bool) -> Expr | None:
    """What stands for a call, None where nothing does; ``last_varies`` within a row if its last argument does."""
    match e:
        case Call("exp", (x,)):
            return call("exp2_approx", _times(x, _LOG2_E))
        case Call("exp2", (x,)):
            return call("exp2_approx", x)
        case Call("sigmoid", (x,)):
            return _sigmoid(x, 1.0)
        case Call("add", (Call("erf", (z,)), Const(1.0)) | (Const(1.0), Call("erf", (z,)))):
            return call("erfc_approx", call("neg", z))
        case Call("sub", (Const(1.0), Call("erf", (z,)))):
            return call("erfc_approx", z)
        case Call("add", (Call("tanh", (u,)), Const(1.0)) | (Const(1.0), Call("tanh", (u,)))):
            return call("mul", _sigmoid(u, 2.0), _number(2.0))
        case Call("tanh", (u,)) if not wants.added and APPROXIMATIONS["tanh_approx"].error <= 2.0 ** -(
            wants.digits + 2
        ):
            return call("tanh_approx", u)
        case Call("reciprocal", (x,)):
            return call("reciprocal_approx", x)
        case Call("div", (a, Const() as b)):
            return _times(a, 1.0 / float(b.value)) if _inverts(b) else None
        case Call("div", (a, b)):
            return call("div_approx", a, b) if last_varies else call("mul", a, call("reciprocal", b))
    return None


def _sigmoid(x: Expr, factor: float) -> Expr:
    """The sigmoid of a multiple of a value; its denominator is 1 or more."""
    return call("reciprocal_approx", call("add", call("exp2_approx", _times(x, -factor * _LOG2_E)), _number(1.0)))


def _times(x: Expr, factor: float) -> Expr:
    match x:
        case Call("mul", (a, Const() as c)) | Call("mul", (Const() as c, a)):
            return call("mul", a, _number(factor * float(c.value)))
    return call("mul", x, _number(factor))


def _number(value: float) -> Expr:
    return const(value, DType.FLOAT32)


def _inverts(b: Const) -> bool:
    """Whether a reciprocal of a constant is as exact as others: it is a normal number."""
    return 2.0**-126 <= abs(float(b.value)) <= 2.0**126
