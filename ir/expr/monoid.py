"""Reductions as monoids: identity, lift, combine and project over tuples of values, each defined once.

Everything that reduces (one pass, split passes, lanes, tiles, two kernels, online recurrences) follows from
``combine``, so a new reduction is one entry of ``MONOIDS``. Sources: Welford 1962 and Chan et al. 1979 for mean and
variance; Milakov and Gimelshein 2018 for the online softmax statistics; Dao et al. 2022 for the attention state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import IRError
from .dtypes import DType
from .value import Const, Expr, IndexValue, Load, Select, Var, call, const, rewrite, walk

State: TypeAlias = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a state. A ``vector`` component has axes of its own that the others lack (attention's weighted
    values)."""

    name: str
    vector: bool = False


@dataclass(frozen=True, slots=True)
class Monoid:
    """An associative ``combine`` with an ``identity``, over tuples of values.

    ``identity(dtypes)`` gives the neutral state for the components' types; ``lift`` makes a state of one element;
    ``project`` makes the answers that users ask for of a final state. Monoids compare by name.
    """

    name: str
    components: tuple[Component, ...]
    identity: Callable[[tuple[DType, ...]], tuple[Const, ...]] = field(compare=False, repr=False)
    lift: Callable[..., State] = field(compare=False, repr=False)
    combine: Callable[[State, State], State] = field(compare=False, repr=False)
    project: Callable[[State], State] = field(compare=False, repr=False)
    # True where the result does not depend on the order of combination, rounding included.
    exact: bool = field(default=False, compare=False, repr=False)
    # ``combine`` for an element whose index is above every index in the state, where that is less work. An element
    # that is no better than the identity leaves the identity's index.
    follow: Callable[[State, State], State] | None = field(default=None, compare=False, repr=False)
    # ``combine`` of two states in the order of their elements, of which the second has some: what a scan asks for.
    after: Callable[[State, State], State] | None = field(default=None, compare=False, repr=False)
    # What ``associative`` made it of; empty for those of the table.
    definition: State = field(default=(), compare=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., Monoid], tuple[object, ...]]:
        return (associative, self.definition) if self.definition else (monoid, (self.name,))


def lowest(dtype: DType) -> Const:
    """The least value of a type: minus infinity, the least integer, or False."""
    if dtype is DType.BOOL:
        return const(False, dtype)
    if dtype.is_int:
        return const(-(1 << (dtype.bits - 1)) if dtype.is_signed else 0, dtype)
    return const(-math.inf, dtype)


def highest(dtype: DType) -> Const:
    """The greatest value of a type: infinity, the greatest integer, or True."""
    if dtype is DType.BOOL:
        return const(True, dtype)
    if dtype.is_int:
        return const((1 << (dtype.bits - (1 if dtype.is_signed else 0))) - 1, dtype)
    return const(math.inf, dtype)


def _self(*state: Expr) -> State:
    return state


def _simple(name: str, fn: str, identity: Callable[[DType], Const], exact: bool = False) -> Monoid:
    return Monoid(
        name,
        (Component("value"),),
        lambda dtypes: (identity(dtypes[0]),),
        _self,
        lambda a, b: (call(fn, a[0], b[0]),),
        lambda s: s,
        exact,
    )


def _argument(name: str, better: str, worst: Callable[[DType], Const], last: bool = False) -> Monoid:
    """Value and index of the best element; NaN is best of all, and of equals the lower index wins, or with ``last`` the
    higher one."""
    sooner = "gt" if last else "lt"

    def combine(a: State, b: State) -> State:
        tie = call("logical_and", call("eq", b[0], a[0]), call(sooner, b[1], a[1]))
        take = call("logical_or", call(better, b[0], a[0]), tie)
        if a[0].dtype.is_float:
            a_nan, b_nan = call("isnan", a[0]), call("isnan", b[0])
            b_wins = call("logical_or", call("logical_not", a_nan), call(sooner, b[1], a[1]))
            take = call(
                "logical_or",
                call("logical_and", take, call("logical_not", a_nan)),
                call("logical_and", b_nan, b_wins),
            )
        return (Select(take, b[0], a[0]), Select(take, b[1], a[1]))

    def follow(a: State, b: State) -> State:
        take = call(better, b[0], a[0])
        if a[0].dtype.is_float:  # unordered or better, unless the state is NaN already
            no_worse = call("le" if better == "gt" else "ge", b[0], a[0])
            take = call("logical_and", call("logical_not", no_worse), call("eq", a[0], a[0]))
        return (Select(take, b[0], a[0]), Select(take, b[1], a[1]))

    def after(a: State, b: State) -> State:
        take = call("ge" if better == "gt" else "le", b[0], a[0])
        if a[0].dtype.is_float:
            take = call("logical_or", take, call("isnan", b[0]))
        return (Select(take, b[0], a[0]), Select(take, b[1], a[1]))

    return Monoid(
        name,
        (Component("value"), Component("index")),
        lambda dtypes: (worst(dtypes[0]), (lowest if last else highest)(dtypes[1])),
        _self,
        combine,
        lambda s: s,
        exact=True,
        follow=None if last else follow,
        after=after if last else None,
    )


def _welford_combine(a: State, b: State) -> State:
    (mean_a, m2_a, n_a), (mean_b, m2_b, n_b) = a, b
    n = call("add", n_a, n_b)
    zero = const(0.0, n.dtype)
    share = Select(call("eq", n, zero), zero, call("div", n_b, n))
    delta = call("sub", mean_b, mean_a)
    mean = call("add", mean_a, call("mul", delta, share))
    spread = call("mul", call("mul", delta, delta), call("mul", n_a, share))
    return (mean, call("add", call("add", m2_a, m2_b), spread), n)


def _logsumexp_combine(a: State, b: State) -> State:
    """With one exponential: the state of the greater maximum keeps its weights, the other's are scaled down to it.

    Equal maxima, infinite ones included, need no scaling.
    """
    first = call("ge", a[0], b[0])
    top, low = call("maximum", a[0], b[0]), call("minimum", a[0], b[0])
    scale = Select(call("eq", a[0], b[0]), _one(top), call("exp", call("sub", low, top)))
    return (top, *(_weighted(first, x, y, scale) for x, y in zip(a[1:], b[1:], strict=True)))


def _weighted(first: Expr, x: Expr, y: Expr, scale: Expr) -> Expr:
    return call("add", Select(first, x, y), call("mul", Select(first, y, x), scale))


def _one(like: Expr) -> Const:
    return const(1.0, like.dtype)


def _zeros_after_lowest(dtypes: tuple[DType, ...]) -> tuple[Const, ...]:
    return (lowest(dtypes[0]), *(const(0, d) for d in dtypes[1:]))


SUM = _simple("sum", "add", lambda d: const(0, d))
PRODUCT = _simple("product", "mul", lambda d: const(1, d))
MAX = _simple("max", "maximum", lowest, exact=True)
MIN = _simple("min", "minimum", highest, exact=True)
ANY = _simple("any", "logical_or", lambda d: const(False, d), exact=True)
ALL = _simple("all", "logical_and", lambda d: const(True, d), exact=True)
XOR = _simple("xor", "bit_xor", lambda d: const(0, d), exact=True)
ARGMAX = _argument("argmax", "gt", lowest)
ARGMIN = _argument("argmin", "lt", highest)
# What running maxima and minima give: of equals the last.
LAST_ARGMAX = _argument("last_argmax", "gt", lowest, last=True)
LAST_ARGMIN = _argument("last_argmin", "lt", highest, last=True)
# State (mean, m2, count); count is kept in the same float type so that lanes combine without conversions.
WELFORD = Monoid(
    "welford",
    (Component("mean"), Component("m2"), Component("count")),
    lambda dtypes: tuple(const(0, d) for d in dtypes),
    lambda x: (x, const(0.0, x.dtype), _one(x)),
    _welford_combine,
    lambda s: (s[0], call("div", s[1], s[2])),
)
# State (sum, sum of squares): of distances from a value near the mean, both moments in one visit.
MOMENTS = Monoid(
    "moments",
    (Component("sum"), Component("squares")),
    lambda dtypes: tuple(const(0, d) for d in dtypes),
    lambda x: (x, call("mul", x, x)),
    lambda a, b: tuple(call("add", x, y) for x, y in zip(a, b, strict=True)),
    lambda s: s,
)
# State (max, sum of exp(x - max)).
LOGSUMEXP = Monoid(
    "logsumexp",
    (Component("max"), Component("sum")),
    _zeros_after_lowest,
    lambda x: (x, _one(x)),
    _logsumexp_combine,
    lambda s: (call("add", s[0], call("log", s[1])),),
)
# State (max, sum, weighted vector).
ATTENTION = Monoid(
    "attention",
    (Component("max"), Component("sum"), Component("vector", vector=True)),
    _zeros_after_lowest,
    lambda score, value: (score, _one(score), value),
    _logsumexp_combine,
    lambda s: (call("div", s[2], s[1]),),
)
# A sum of weights times vectors: like attention's state, but of weights that need no maximum.
WEIGHTED = Monoid(
    "weighted",
    (Component("vector", vector=True),),
    lambda dtypes: (const(0, dtypes[0]),),
    _self,
    lambda a, b: (call("add", a[0], b[0]),),
    lambda s: s,
)

MONOIDS: dict[str, Monoid] = {
    m.name: m
    for m in (
        SUM,
        PRODUCT,
        MAX,
        MIN,
        ANY,
        ALL,
        XOR,
        ARGMAX,
        ARGMIN,
        LAST_ARGMAX,
        LAST_ARGMIN,
        WELFORD,
        MOMENTS,
        LOGSUMEXP,
        ATTENTION,
        WEIGHTED,
    )
}


def associative(*definition: Expr) -> Monoid:
    """The monoid of an associative function of a user's: ``definition[k]`` is component k of the combination of two
    states, whose components are the Vars ``a0``, ``a1``, … and ``b0``, ``b1``, …, the earlier state first.

    Such a function may have no neutral element, so one is adjoined: a last component says whether a state has any
    element at all. The name follows from the definition. Raises IRError where other values are mentioned.
    """
    kinds = {f"{side}{k}": e.dtype for side in "ab" for k, e in enumerate(definition)}
    for e in (part for value in definition for part in walk(value)):
        if isinstance(e, (Load, IndexValue)) or (isinstance(e, Var) and kinds.get(e.name) is not e.dtype):
            raise IRError(f"a user's combination mentions {e}; it is a function of {', '.join(kinds)} alone")

    def after(a: State, b: State) -> State:
        given = {f"{side}{k}": e for side, state in (("a", a), ("b", b)) for k, e in enumerate(state[:-1])}
        results = (rewrite(e, lambda x: given[x.name] if isinstance(x, Var) else None) for e in definition)
        return (*(Select(a[-1], both, y) for y, both in zip(b[:-1], results, strict=True)), const(True, DType.BOOL))

    def combine(a: State, b: State) -> State:
        chosen = (Select(b[-1], both, x) for x, both in zip(a[:-1], after(a, b)[:-1], strict=True))
        return (*chosen, call("logical_or", a[-1], b[-1]))

    return Monoid(
        f"user_{hashlib.sha256(repr(definition).encode()).hexdigest()[:12]}",
        (*(Component(f"value{k}") for k in range(len(definition))), Component("present")),
        lambda dtypes: tuple(const(0, d) for d in dtypes),
        lambda *values: (*values, const(True, DType.BOOL)),
        combine,
        lambda s: s[:-1],
        after=after,
        definition=definition,
    )


def monoid(name: str) -> Monoid:
    """The monoid of that name. Raises IRError."""
    try:
        return MONOIDS[name]
    except KeyError:
        raise IRError(f"no monoid {name!r}; there are {', '.join(MONOIDS)}") from None
