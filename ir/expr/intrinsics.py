"""Scalar functions of users: a name in value expressions, and what it means in terms of the functions that there are.

The formula is the meaning. The oracle, the emitters and the fallback have one way to follow it; code that a user gives
for a target goes over it there.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from keyword import iskeyword
from typing import Any

from ..errors import IRError
from ..registration import LOCK, Registration, RegistrationError
from .dtypes import DType
from .formula import Formula
from .ops import OPS, OpInfo, Result
from .value import Call, Cast, Expr, Select, Var, call, children, flops, walk

# Words of the text of value expressions.
_RESERVED = frozenset({"cast", "stored", "select", "index", "var", "load", "buffer", *(d.value for d in DType)})


@dataclass(frozen=True, slots=True)
class ScalarFunction:
    """``formula`` says what the function is; the others are code for those that read it, or None.

    Called with formulas and numbers, it is the call of the function.
    """

    name: str
    arity: int
    formula: Callable[..., Formula]
    triton: str | Callable[..., str] | None = None
    llvm: Callable[..., Any] | None = None
    numpy: Callable[..., Any] | None = None

    def __call__(self, *args: Formula | float) -> Formula:
        first = next((a for a in args if isinstance(a, Formula)), None)
        if first is None:
            raise IRError(f"{self.name} of numbers alone: one of its arguments must be a torch_mlc.Formula")
        return Formula(call(self.name, *(first.like(a).value for a in args)))


# By name. Each has a row in OPS as well.
INTRINSICS: dict[str, ScalarFunction] = {}


@dataclass(frozen=True, slots=True)
class Definition:
    """An expression of ``args``. What it uses more than once is named by ``lets``, each of what stands before it."""

    args: tuple[Var, ...]
    lets: tuple[tuple[Var, Expr], ...]
    result: Expr


@lru_cache(maxsize=256)
def definition(intrinsic: ScalarFunction, dtype: DType) -> Definition:
    """What a function of a user's is for arguments of ``dtype``. Raises IRError where the formula gives no value."""
    args = tuple(Var(f"a{k}", dtype) for k in range(intrinsic.arity))
    made = intrinsic.formula(*map(Formula, args))
    if not isinstance(made, Formula):
        raise IRError(
            f"the formula of {intrinsic.name} gives a {type(made).__name__}; it must give a torch_mlc.Formula"
        )
    if made.dtype not in (dtype, DType.BOOL):
        raise IRError(
            f"the formula of {intrinsic.name} gives {made.dtype.value} for {dtype.value}; it must give the type of its "
            "arguments, or bool"
        )
    return _with_lets(args, made.value)


def _with_lets(args: tuple[Var, ...], expr: Expr) -> Definition:
    uses = Counter(id(c) for e in walk(expr) for c in children(e))
    lets: list[tuple[Var, Expr]] = []
    known: dict[int, Expr] = {}

    def named(e: Expr) -> Expr:
        if (found := known.get(id(e))) is not None:
            return found
        match e:
            case Cast():
                made: Expr = Cast(named(e.value), e.dtype)
            case Call():
                made = Call(e.fn, tuple(map(named, e.args)), e.dtype)
            case Select():
                made = Select(named(e.condition), named(e.if_true), named(e.if_false))
            case _:
                return e
        if uses[id(e)] > 1:
            lets.append((Var(f"t{len(lets)}", e.dtype), made))
            made = lets[-1][0]
        known[id(e)] = made
        return made

    result = named(expr)
    return Definition(args, tuple(lets), result)


def register_intrinsic(
    name: str,
    formula: Callable[..., Formula] | None = None,
    *,
    triton: str | Callable[..., str] | None = None,
    llvm: Callable[..., Any] | None = None,
    numpy: Callable[..., Any] | None = None,
    flops: int | None = None,
) -> Any:
    """Give value expressions a scalar function more, of which there is one call in the IR and in its text.

    ``formula(*values)`` is what it means: it is given a ``torch_mlc.Formula`` for each argument, all of one type, and
    gives one of that type, or a condition. Half types are computed in float32 and rounded. Without a formula this is a
    decorator of it. The registration, called with formulas and numbers, is the call of the function; so is a method of
    a formula: ``x.name(y)``.

    Code that goes over the formula, each given the arguments in order:
    ``triton`` is the text of a Triton expression, with ``{0}``, ``{1}`` for the arguments, or a function of theirs;
    ``llvm(builder, *args)`` writes instructions with ``codegen.llvm.text.builder.Builder`` and gives the ``Val``;
    ``numpy`` is the function of NumPy scalars that the oracle, and so MLC_VERIFY, takes for the meaning (in float64 for
    floats). ``flops`` is what the planner assumes a call to cost in float32 operations; None counts the formula.
    Raises: RegistrationError for a name that is taken or is none, and for a formula that gives no value of any type.
    """
    if formula is None:
        return partial(register_intrinsic, name, triton=triton, llvm=llvm, numpy=numpy, flops=flops)
    if not name.isidentifier() or iskeyword(name) or name in _RESERVED or hasattr(Formula, name):
        raise RegistrationError(
            f"{name!r} cannot be the name of a function: it must be a Python name that means nothing"
        )
    intrinsic = ScalarFunction(name, _arity(name, formula), formula, triton, llvm, numpy)
    with LOCK:
        if name in OPS:
            whose = "a registered one" if name in INTRINSICS else "one of torch-mlc's"
            raise RegistrationError(f"there is a function {name!r} already, {whose}; give yours another name")
        OPS[name] = _row(intrinsic, flops)
        INTRINSICS[name] = intrinsic
        return Registration("intrinsic", name, intrinsic, partial(_take_back, name))


def _take_back(name: str) -> None:
    del OPS[name], INTRINSICS[name]


def _arity(name: str, formula: Callable[..., Formula]) -> int:
    try:
        given = inspect.signature(formula).parameters.values()
    except (TypeError, ValueError):
        raise RegistrationError(f"the formula of {name} is no Python function whose arguments can be counted") from None
    if not given or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given):
        raise RegistrationError(f"the formula of {name} must have positional arguments alone, and one at least")
    return len(given)


def _row(intrinsic: ScalarFunction, cost: int | None) -> OpInfo:
    """The row of the table, by the first type for which the formula gives a value."""
    faults = []
    for dtype in (DType.FLOAT32, DType.INT64, DType.BOOL):
        try:
            found = definition(intrinsic, dtype)
        except (IRError, AttributeError) as error:
            faults.append(str(error))
            continue
        result = Result.SAME if found.result.dtype is dtype else Result.BOOL
        count = sum(flops(e) for e in (*(e for _, e in found.lets), found.result))
        return OpInfo(intrinsic.name, intrinsic.arity, result, max(1, count) if cost is None else cost)
    raise RegistrationError(f"the formula of {intrinsic.name} gives no value: {faults[0]}")
