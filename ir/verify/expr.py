"""Rules that every value expression keeps, in nests and in graphs alike."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import sympy

from ..errors import IRError
from ..expr.dtypes import DType
from ..expr.ops import OPS, Result
from ..expr.symbols import Interval, interval
from ..expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, children, is_value, symbol


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken rule: the object that breaks it, what is wrong, and how to mend it."""

    culprit: object
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class AccessShape:
    """What an access must agree with."""

    dtype: DType
    extents: tuple[sympy.Expr, ...]


Shapes = Mapping[str, AccessShape]
_CHOICES: dict[DType, type | tuple[type, ...]] = {
    d: bool if d is DType.BOOL else int if d.is_int else (float, complex) if d.is_complex else float for d in DType
}


def parts(expr: Expr, guarded: bool = False) -> Iterator[tuple[Expr, bool]]:
    """Every distinct sub-expression once, and whether a ``Select`` decides that it is evaluated."""
    seen: set[int] = set()
    stack = [(expr, guarded)]
    while stack:
        e, under = stack.pop()
        if id(e) in seen:
            continue
        seen.add(id(e))
        yield e, under
        if isinstance(e, Select):
            stack += [(e.if_false, True), (e.if_true, True), (e.condition, under)]
        else:
            stack += [(c, under) for c in reversed(children(e))]


def expression(
    expr: Expr,
    shapes: Shapes,
    bound: Container[sympy.Symbol],
    ranges: Mapping[sympy.Symbol, Interval],
    in_graph: bool = False,
) -> Iterator[Fault]:
    """Faults of one value expression. ``bound`` are the symbols in force, ``ranges`` what is known of them. Values that
    are ``in_graph`` are in no kernel yet, and may be rounded when they are stored."""
    for e, guarded in parts(expr):
        match e:
            case Load():
                yield from access(e, e.buffer, e.indices, shapes, bound, {} if guarded else ranges)
                if e.buffer in shapes and shapes[e.buffer].dtype is not e.dtype:
                    yield Fault(e, f"{e.buffer} holds {shapes[e.buffer].dtype.value}, loaded as {e.dtype.value}")
            case Const():
                if not isinstance(e.value, _CHOICES[e.dtype]) or (isinstance(e.value, bool) != (e.dtype is DType.BOOL)):
                    kind = type(e.value).__name__
                    yield Fault(e, f"a {kind} is no literal of {e.dtype.value}", "use const(value, dtype)")
            case Var():
                yield Fault(e, f"nothing binds the value {e.name}", "a Var stands only inside a monoid's combine")
            case IndexValue():
                yield from index_symbols(e, e.index, bound)
                if not e.dtype.is_int:
                    yield Fault(e, f"an index is an integer, not {e.dtype.value}", "cast it")
            case Call():
                yield from _call(e)
            case Select():
                if e.condition.dtype is not DType.BOOL:
                    yield Fault(e.condition, f"a condition is bool, not {e.condition.dtype.value}")
                if e.if_true.dtype is not e.if_false.dtype:
                    sides = f"{e.if_true.dtype.value} and {e.if_false.dtype.value}"
                    yield Fault(e, f"the branches are {sides}", "cast one of them")
            case Cast():
                if e.when_stored and not in_graph:
                    yield Fault(e, "a kernel rounds, or it does not", "write cast(), or leave it out")
                elif e.when_stored and not e.dtype.may_stay_wide:
                    yield Fault(e, f"no kernel keeps wider what is {e.dtype.value}", "write cast()")


def _call(e: Call) -> Iterator[Fault]:
    info = OPS.get(e.fn)
    if info is None:
        yield Fault(e, f"no function {e.fn!r}", "the table is torch_mlc.ir.expr.ops.OPS")
        return
    if len(e.args) != info.arity:
        yield Fault(e, f"{e.fn} takes {info.arity} arguments, here {len(e.args)}")
        return
    if info.result is Result.EXPLICIT:
        return
    if any(a.dtype is not e.args[0].dtype for a in e.args):
        yield Fault(e, f"{e.fn} of mixed types {', '.join(a.dtype.value for a in e.args)}", "cast the arguments first")
    wanted = DType.BOOL if info.result is Result.BOOL else e.args[0].dtype
    if e.dtype is not wanted:
        yield Fault(e, f"{e.fn} gives {wanted.value}, said to be {e.dtype.value}")


def index_symbols(culprit: object, index: sympy.Expr, bound: Container[sympy.Symbol]) -> Iterator[Fault]:
    """Every symbol of an index is in force, and is the one symbol of its name."""
    for s in sorted(index.free_symbols, key=str):
        if s not in bound:
            hint = "loop variables reach a body only through the bindings of its axes"
            if symbol(s.name) != s and symbol(s.name) in bound:
                hint = f"make it with ir.expr.value.symbol({s.name!r}), which fixes its assumptions"
            yield Fault(culprit, f"nothing binds the symbol {s}", hint)


def access(
    culprit: object,
    buffer: str,
    indices: tuple[Index, ...],
    shapes: Shapes,
    bound: Container[sympy.Symbol],
    ranges: Mapping[sympy.Symbol, Interval],
) -> Iterator[Fault]:
    """A known buffer, its rank, integer indices, and none of them surely out of range (``ranges`` empty: not asked)."""
    if buffer not in shapes:
        yield Fault(culprit, f"nothing above defines {buffer!r}")
        return
    extents = shapes[buffer].extents
    if len(indices) != len(extents):
        yield Fault(culprit, f"{buffer} has {len(extents)} dimensions, indexed by {len(indices)}")
        return
    for k, (i, extent) in enumerate(zip(indices, extents, strict=True)):
        if is_value(i):
            if not i.dtype.is_int:
                yield Fault(i, f"a gather's index is an integer, not {i.dtype.value}")
            continue
        yield from index_symbols(culprit, i, bound)
        reached = exact_range(i, ranges)
        if reached and extent.is_Integer and not (reached[0] >= 0 and reached[1] < extent):
            says = f"index {i} of dimension {k} runs over {reached[0]}..{reached[1]}, and {buffer} has {extent} there"
            yield Fault(culprit, says, "guard the load by a Select, or the block by a predicate")


def exact_range(expr: sympy.Expr, ranges: Mapping[sympy.Symbol, Interval]) -> tuple[int, int] | None:
    """Least and greatest value, both taken on: of linear expressions over variables of constant range. Else None."""
    if not ranges:
        return None
    for term in sympy.Add.make_args(expr):
        factor, rest = term.as_coeff_Mul()
        if rest is sympy.S.One:
            continue
        if not (rest.is_Symbol and factor.is_Integer) or ranges.get(rest, (0, None))[1] is None:
            return None
    try:
        low, high = interval(expr, ranges)
    except IRError:
        return None
    return None if high is None else (low, high)
