"""Value expressions: what one element of a result is.

Two kinds of expression never mix by accident. Shapes, extents and indices are sympy expressions over non-negative
integer symbols; values are the frozen dataclasses below. ``IndexValue`` carries an index into a value, and an index
of a ``Load`` may itself be an integer-valued expression (a gather).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import is_not
from typing import Any, TypeAlias, TypeGuard

import sympy

from ..errors import IRError
from .dtypes import DType
from .ops import CHECKS, OPS, Result


@cache
def symbol(name: str) -> sympy.Symbol:
    """The one symbol of that name: every size, loop variable and axis is a non-negative integer."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


@dataclass(frozen=True, slots=True)
class Load:
    """The element of ``buffer`` at ``indices`` (one per dimension). Out of range is an error unless guarded by a
    ``Select``."""

    buffer: str
    indices: tuple[Index, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Const:
    """A literal. NaN equals NaN here, so that equal programs compare equal."""

    value: bool | int | float
    dtype: DType

    def _key(self) -> tuple[str, DType]:
        return (repr(self.value), self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Var:
    """A named value bound by whoever reads the expression (operands of ``Monoid.combine``)."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class IndexValue:
    """An index expression as a value of an integer type."""

    index: sympy.Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Cast:
    """Conversion with torch's rules: float to int truncates, to bool is ``!= 0``, to a half type rounds to nearest
    even.

    In a graph a conversion to a half type may be ``when_stored``: it rounds where the value is written to memory, and a
    kernel that goes on with it keeps float32. The pass ``widen`` says which are; in functions and nests none is.
    """

    value: Expr
    dtype: DType
    when_stored: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the table in ``ops``; the arguments share one type (but for ``bitcast`` and the random
    functions)."""

    fn: str
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Select:
    """``if_true`` where ``condition`` holds, else ``if_false``; a branch is evaluated only where it is taken."""

    condition: Expr
    if_true: Expr
    if_false: Expr

    @property
    def dtype(self) -> DType:
        return self.if_true.dtype


Expr: TypeAlias = Load | Const | Var | IndexValue | Cast | Call | Select
# A sympy expression or a value (a gather). sympy has no types, and a union with an untyped member cannot be narrowed.
Index: TypeAlias = Any
EXPR_TYPES = (Load, Const, Var, IndexValue, Cast, Call, Select)
_EXPR_TYPES = frozenset(EXPR_TYPES)


def is_value(index: Index) -> TypeGuard[Expr]:
    """True for an index that is computed from data (a gather)."""
    return type(index) in _EXPR_TYPES


# --- construction -----------------------------------------------------------------------------------------------------


def call(fn: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """A checked ``Call``: known function, right arity, arguments of one type. Raises IRError."""
    info = OPS.get(fn)
    if info is None:
        raise IRError(f"call of unknown function {fn!r}; the table is torch_mlc.ir.expr.ops.OPS")
    if len(args) != info.arity:
        raise IRError(f"{fn} takes {info.arity} arguments, got {len(args)}")
    match info.result:
        case Result.EXPLICIT:
            if dtype is None:
                raise IRError(f"{fn} needs an explicit result type")
            return Call(fn, args, dtype)
        case result:
            if any(a.dtype is not args[0].dtype for a in args):
                raise IRError(f"{fn} of mixed types {', '.join(a.dtype.value for a in args)}; cast the arguments first")
            return Call(fn, args, DType.BOOL if result is Result.BOOL else args[0].dtype)


def cast(value: Expr, dtype: DType, when_stored: bool = False) -> Expr:
    """``value`` as ``dtype``; nothing where it already is. Literals are folded, or rounded to what half types hold."""
    when_stored = when_stored and dtype.may_stay_wide
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and not dtype.is_carried:
        number = value.dtype.rounded(value.value) if value.dtype.is_float else value.value
        if not dtype.is_half:
            return const(number, dtype)
        held = const(dtype.rounded(number), value.dtype) if value.dtype.is_float else value
        return Cast(held, dtype, when_stored)
    if isinstance(value, IndexValue) and dtype in (DType.INT64, DType.INT32):
        return IndexValue(value.index, dtype)
    return Cast(value, dtype, when_stored)


def const(value: bool | int | float, dtype: DType) -> Const:
    """A literal in the Python type that belongs to ``dtype``; integers wrap as a cast would."""
    if dtype is DType.BOOL:
        return Const(bool(value), dtype)
    if dtype.is_int:
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            raise IRError(f"{value} is no {dtype.value}")
        wrapped = int(value) & ((1 << dtype.bits) - 1)
        if dtype.is_signed and wrapped >> (dtype.bits - 1):
            wrapped -= 1 << dtype.bits
        return Const(wrapped, dtype)
    return Const(float(value), dtype)


# --- traversal --------------------------------------------------------------------------------------------------------


def children(expr: Expr) -> tuple[Expr, ...]:
    """The value expressions directly inside, gathers' indices included."""
    match expr:
        case Call():
            return expr.args
        case Load():
            return tuple([i for i in expr.indices if type(i) in _EXPR_TYPES])
        case Select():
            return (expr.condition, expr.if_true, expr.if_false)
        case Cast():
            return (expr.value,)
        case _:
            return ()


def with_children(expr: Expr, inside: tuple[Expr, ...]) -> Expr:
    """The same expression of others, given as ``children`` gives them."""
    match expr:
        case Load():
            given = iter(inside)
            return Load(expr.buffer, tuple([next(given) if is_value(i) else i for i in expr.indices]), expr.dtype)
        case Cast():
            return Cast(inside[0], expr.dtype, expr.when_stored)
        case Call():
            return Call(expr.fn, inside, expr.dtype)
        case Select():
            return Select(*inside)
        case _:
            return expr


def is_checked(expr: Expr) -> bool:
    """Whether an expression is made of something that is an error of the whole program where data are wrong."""
    return any(isinstance(e, Call) and e.fn in CHECKS for e in walk(expr))


def walk(expr: Expr) -> Iterator[Expr]:
    """Every sub-expression, outermost first; what an expression shares comes once, or there would be no end of it."""
    stack, seen = [expr], set()
    while stack:
        e = stack.pop()
        if id(e) in seen:
            continue
        seen.add(id(e))
        yield e
        kind = type(e)
        if kind is not Const and kind is not IndexValue and (inside := children(e)):
            stack.extend(inside[::-1])


def loads(expr: Expr) -> Iterator[Load]:
    """Every load of the expression, those inside the indices of others included."""
    return (e for e in walk(expr) if isinstance(e, Load))


def conjuncts(condition: Expr) -> Iterator[Expr]:
    """The conditions that all hold where ``condition`` does."""
    if isinstance(condition, Call) and condition.fn == "logical_and":
        for part in condition.args:
            yield from conjuncts(part)
    else:
        yield condition


def index_exprs(expr: Expr) -> Iterator[sympy.Expr]:
    """Every sympy expression inside."""
    for e in walk(expr):
        if isinstance(e, Load):
            yield from (i for i in e.indices if not is_value(i))
        elif isinstance(e, IndexValue):
            yield e.index


def free_symbols(expr: Expr) -> set[sympy.Symbol]:
    """Every sympy symbol that the expression mentions."""
    return {s for i in index_exprs(expr) for s in i.free_symbols}


def rewrite(
    expr: Expr,
    leaf: Callable[[Expr], Expr | None],
    index: Callable[[sympy.Expr], sympy.Expr] | None = None,
) -> Expr:
    """Rebuild bottom up. ``index`` maps each sympy expression; ``leaf`` sees each rebuilt node and may replace it.

    What an expression shares is rebuilt once, and shared by the result. Returns the same object where nothing changed.
    """
    shared: dict[int, Expr] = {}

    def go(e: Expr) -> Expr:
        new: Expr = e
        match e:
            case Load():
                indices = [go(i) if is_value(i) else (index(i) if index else i) for i in e.indices]
                if any(map(is_not, indices, e.indices)):
                    new = Load(e.buffer, tuple(indices), e.dtype)
            case IndexValue():
                if index is not None and (i := index(e.index)) is not e.index:
                    new = IndexValue(i, e.dtype)
            case Cast():
                if (v := go(e.value)) is not e.value:
                    new = Cast(v, e.dtype, e.when_stored)
            case Call():
                if (known := shared.get(id(e))) is not None:
                    return known
                args = [go(a) for a in e.args]
                if any(map(is_not, args, e.args)):
                    new = Call(e.fn, tuple(args), e.dtype)
            case Select():
                if (known := shared.get(id(e))) is not None:
                    return known
                c, t, f = go(e.condition), go(e.if_true), go(e.if_false)
                if c is not e.condition or t is not e.if_true or f is not e.if_false:
                    new = Select(c, t, f)
        result = leaf(new) or new
        if isinstance(e, (Call, Select)):
            shared[id(e)] = result
        return result

    return go(expr)


def always_rounded(value: Expr) -> Expr:
    """A value in which every conversion is made, wherever it is used."""
    return rewrite(value, lambda e: Cast(e.value, e.dtype) if isinstance(e, Cast) and e.when_stored else None)


def substitute_index(expr: Expr, mapping: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
    """Replace index symbols everywhere inside."""
    if not mapping:
        return expr
    return rewrite(expr, lambda _: None, lambda i: i.xreplace(mapping))


def rename_loads(expr: Expr, names: Mapping[str, str]) -> Expr:
    """Point loads at other buffers."""

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in names:
            return Load(names[e.buffer], e.indices, e.dtype)
        return None

    return rewrite(expr, leaf)


def flops(expr: Expr) -> int:
    """Estimated float32 operations to compute the expression once, and what it shares as often as it stands there."""
    return _summed(expr, lambda e: OPS[e.fn].flops if isinstance(e, Call) else int(isinstance(e, Select)), {})


def length(expr: Expr) -> int:
    """How many sub-expressions there are, written out: what is shared counts as often as it stands there."""
    return _summed(expr, lambda _: 1, {})


def times(expr: Expr, buffer: str) -> int:
    """How often a buffer is read, written out: what is shared counts as often as it stands there."""
    return _summed(expr, lambda e: int(isinstance(e, Load) and e.buffer == buffer), {})


def _summed(expr: Expr, own: Callable[[Expr], int], known: dict[int, int]) -> int:
    found = known.get(id(expr))
    if found is None:
        found = known[id(expr)] = own(expr) + sum([_summed(e, own, known) for e in children(expr)])
    return found
