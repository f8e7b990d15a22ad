"""Finding attention: a product whose left or right operand is, element by element, a softmax over the contracted axis
of a function of another product.

Nothing here knows how a model writes it. Loads are followed through views and element-wise nodes; that the maximum and
the sum are those of the very same values over the very same axis is proved from the index expressions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from ....ir.errors import MlcError
from ....ir.expr.product import product_of as product_of_factors
from ....ir.expr.value import Call, Const, Expr, Index, Load, Select, call, cast, const, free_symbols, is_value, rewrite
from ....ir.expr.value import loads as loads_of
from ....ir.graph.graph import Compute, Reduction, TensorType
from ...facts.definitions import Definitions
from ..products.operands import Product, made_of, mentions, operand, product_of, scaled
from ..products.read_through import ReadThrough

# The names that found functions read scores, and the largest score of a row, by.
SCORES, HIGHEST = "scores", "highest"
# A function of scores beyond so many nodes is not attention any more.
MAX_NODES = 1500


class NoAttention(MlcError):
    """A softmax feeds a product, but the two cannot become one function; the text says why."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of one attention: a batch (None for two matrices), rows of scores, columns, features and the axis that
    scores are summed over."""

    batch: sympy.Symbol | None
    row: sympy.Symbol
    column: sympy.Symbol
    feature: sympy.Symbol
    inner: sympy.Symbol


@dataclass(frozen=True, slots=True)
class Attention:
    """``out[b, m, d] = sum over n of softmax over n of score(scores[b, m, n]) * weight[b, m, n] * value[b, n, d]``.

    ``scores[b, m, n]`` is the sum over e of ``query * key``; ``score`` reads it as ``SCORES``. ``weight``, which is of
    no scores, is what a dropout multiplies probabilities by, or None. ``transposed`` where
    the product's result is ``[b, d, m]``. ``zero_for_nan`` where rows of NaN count as zeros, ``zero_for_empty`` where
    those do whose every score is minus infinity. ``statistics`` are the maxima and sums of the softmax in the graph
    ("max" or "sum" by the name of the reduction), all of one shape and read at ``rows``.

    Where the model says so, exponentials are of scores less ``shift`` and not less the largest, and ``extra`` is
    added to their sum: a sink, which takes weight and has no value. Both are of a row, and may read ``HIGHEST``.
    """

    product: Product
    first: Product
    axes: Axes
    extents: dict[sympy.Symbol, sympy.Expr]
    query: Expr
    key: Expr
    value: Expr
    score: Expr
    weight: Expr | None
    transposed: bool
    zero_for_nan: bool
    zero_for_empty: bool
    rows: tuple[Index, ...]
    statistics: Mapping[str, str]
    shift: Expr | None = None
    extra: Expr | None = None


@dataclass(frozen=True, slots=True)
class _Softmax:
    """``total`` is the sum of its exponentials, as it is read; ``factors`` multiply it. Exponentials are of scores less
    ``shift``, or less the largest where that is None, and ``extra`` is added to their sum."""

    score: Expr
    total: Load
    shift: Expr | None = None
    extra: Expr | None = None
    factors: tuple[Expr, ...] = ()
    zero_for_nan: bool = False
    zero_for_empty: bool = False


def match_attention(found: Definitions, product: Product, types: dict[str, TensorType]) -> Attention | None:
    """The attention that a product closes, or None. Raises NoAttention where it is one that cannot be rewritten."""
    if product.added is not None or not product.type.dtype.is_float:
        return None
    for transposed in (False, True):
        attention = _match(found, product, types, transposed)
        if attention is not None:
            return attention
    return None


def _match(found: Definitions, product: Product, types: dict[str, TensorType], transposed: bool) -> Attention | None:
    names = ("att_row", "att_column", "att_feature", "att_inner")
    row, column, feature, inner = (sympy.Symbol(n, integer=True, nonnegative=True) for n in names)
    batch = sympy.Symbol("att_batch", integer=True, nonnegative=True) if product.rank == 3 else None
    *_, m, d = reversed(product.type.shape[-2:]) if transposed else product.type.shape[-2:]
    n = types[product.left].shape[-1]
    extents = {row: m, column: n, feature: d}
    if batch is not None:
        extents[batch] = product.type.shape[0]
    found = found.within(extents)
    lead = () if batch is None else (batch,)
    weights, values = (product.right, product.left) if transposed else (product.left, product.right)
    kind = product.type.dtype
    softmax = _softmax(found, Load(weights, (*lead, *((column, row) if transposed else (row, column))), kind), column)
    if softmax is None:
        return None
    at = (*lead, *((feature, column) if transposed else (column, feature)))
    value = operand(found, Load(values, at, kind))
    axes = Axes(batch, row, column, feature, inner)
    refusal = NoAttention("its scores are not one product of matrices")
    for first in _products(found, softmax.score, column):
        extents[inner] = types[first.left].shape[-1]
        try:
            scores = _Scores(found, first, axes)
            score = scores.expand(cast(softmax.score, kind.compute))
            query, key = scores.operands()
            weight = _Scores(found, first, axes).apart(softmax.factors)
            of_rows = (None if e is None else _OfRows(found, first, axes, softmax.score).number(e)
                       for e in (softmax.shift, softmax.extra))  # fmt: skip
            shift, extra = of_rows
        except NoAttention as error:
            refusal = error
            continue
        return Attention(
            product, first, axes, extents, query, key, value, score, weight, transposed, softmax.zero_for_nan,
            softmax.zero_for_empty, softmax.total.indices, _statistics(found, softmax, column), shift, extra,
        )  # fmt: skip
    raise refusal


# --- the softmax ------------------------------------------------------------------------------------------------------


def _softmax(found: Definitions, e: Expr, column: sympy.Symbol) -> _Softmax | None:
    """What a value is the softmax over ``column`` of."""
    e = found.peel(e)
    match e:
        case Call("div", (top, bottom), _):
            if isinstance(bottom, Const) and (softmax := _softmax(found, top, column)) is not None:
                return replace(softmax, factors=(*softmax.factors, call("reciprocal", bottom)))
            return _normalized(found, top, bottom, column)
        case Call("mul", (a, b), _):
            for top, other in ((a, b), (b, a)):
                inverse = found.peel(other)
                if isinstance(inverse, Call) and inverse.fn == "reciprocal":
                    return _normalized(found, top, inverse.args[0], column)
            for probability, factor in ((a, b), (b, a)):
                softmax = None if isinstance(probability, Const) else _softmax(found, probability, column)
                if softmax is not None:
                    return replace(softmax, factors=(*softmax.factors, factor))
        case Select(condition, if_true, if_false):
            return _selected(found, found.peel(condition), if_true, if_false, column)
    return None


def _selected(
    found: Definitions, condition: Expr, if_true: Expr, if_false: Expr, column: sympy.Symbol
) -> _Softmax | None:
    """A softmax that zeros stand in for in some rows."""
    if isinstance(condition, Call):
        return _without_nan(found, condition, if_true, if_false, column)
    softmax = _softmax(found, if_false, column)
    masked = _over(found, condition, ("all",), column)
    if softmax is None or masked is None or not _is(found, if_true, 0.0):
        return None
    match found.peel(masked[0]):
        case Call("eq", (score, limit), _) if _is(found, limit, -float("inf")) and found.same(score, softmax.score):
            return replace(softmax, zero_for_empty=True)
    return None


def _is(found: Definitions, e: Expr, value: float) -> bool:
    e = found.peel(e)
    return isinstance(e, Const) and e.value == value


def _without_nan(
    found: Definitions, condition: Call, if_true: Expr, if_false: Expr, column: sympy.Symbol
) -> _Softmax | None:
    """A softmax whose NaN are replaced by zeros: they come by whole rows. Its values are never infinite."""
    softmax = _softmax(found, if_false, column)
    if softmax is None:
        return None
    tested = _softmax(found, condition.args[0], column)
    if tested is None or not found.same(tested.score, softmax.score):
        return None
    if softmax.factors or tested.factors:  # which may be NaN or infinite, element by element
        return None
    match condition:
        case Call("isnan", _, _) if _is(found, if_true, 0.0):
            return replace(softmax, zero_for_nan=True)
        case Call("eq", (_, limit), _) if any(_is(found, limit, x) for x in (float("inf"), -float("inf"))):
            return softmax
    return None


def _normalized(found: Definitions, top: Expr, bottom: Expr, column: sympy.Symbol) -> _Softmax | None:
    """``exp(s - max s) / sum exp(s - max s)``, both over ``column``; or with another number of the row in place of
    the largest, and with one more in the sum."""
    exp = found.peel(top)
    if not (isinstance(exp, Call) and exp.fn == "exp"):
        return None
    sums = [(whole, extra) for total, extra in _summands(found, bottom)
            if (whole := _over(found, total, ("sum",), column)) is not None and found.same(whole[0], exp)]  # fmt: skip
    if not sums:
        return None
    whole, extra = sums[0]
    shifted = found.peel(exp.args[0])
    if not (isinstance(shifted, Call) and shifted.fn == "sub"):
        return None
    score, shift = shifted.args
    if any(e is not None and column in free_symbols(e) for e in (shift, extra)):
        return None
    is_highest = _is_highest(found, shift, score, column)
    return _Softmax(score, whole[1], None if is_highest else shift, extra)


def _summands(found: Definitions, e: Expr) -> list[tuple[Expr, Expr | None]]:
    """A sum, and what is added to it, if anything."""
    inner = found.peel(e)
    if isinstance(inner, Call) and inner.fn == "add":
        a, b = inner.args
        return [(a, b), (b, a)]
    return [(e, None)]


def _is_highest(found: Definitions, e: Expr, score: Expr, column: sympy.Symbol) -> bool:
    """Whether a value is the largest score of its row."""
    whole = _over(found, e, ("max", "argmax"), column)
    return whole is not None and found.same(whole[0], score)


def _over(found: Definitions, e: Expr, monoids: tuple[str, ...], column: sympy.Symbol) -> tuple[Expr, Load] | None:
    """What a value is the reduction over all of ``column`` of, at the position of ``column``; and the load of it."""
    state = found.state(e)
    if state is None:
        return None
    node, component, load = state
    if node.monoid.name not in monoids or component != 0 or len(node.reduce_axes) != 1:
        return None
    if node.reduce_shape[0] != found.extents[column] or any(mentions(i, column) for i in load.indices):
        return None
    return found.moved(node.values[0], (*node.axes, *node.reduce_axes), (*load.indices, column)), load


def _statistics(found: Definitions, softmax: _Softmax, column: sympy.Symbol) -> dict[str, str]:
    """The maxima and sums of a softmax, however often the graph has them."""
    shape = found.makers[softmax.total.buffer].types[0]
    result: dict[str, str] = {}
    for node in found.graph.nodes:
        if not isinstance(node, Reduction) or len(node.names) != 1 or shape is None:
            continue
        if node.types[0].shape != shape.shape or any(is_value(i) for i in softmax.total.indices):
            continue
        load = Load(node.names[0], softmax.total.indices, node.types[0].dtype)
        if _is_highest(found, load, softmax.score, column):
            result[node.names[0]] = "max"
        elif (whole := _over(found, load, ("sum",), column)) is not None and _is_exp(found, whole[0], softmax, column):
            result[node.names[0]] = "sum"
    return result


def _is_exp(found: Definitions, e: Expr, softmax: _Softmax, column: sympy.Symbol) -> bool:
    """Whether a value is ``exp(s - max s)`` of a softmax's scores, or what that has for it."""
    match found.peel(e):
        case Call("exp", (difference,), _):
            match found.peel(difference):
                case Call("sub", (score, shift), _) if found.same(score, softmax.score):
                    if softmax.shift is not None:
                        return found.same(shift, softmax.shift)
                    return _is_highest(found, shift, softmax.score, column)
    return False


# --- the scores -------------------------------------------------------------------------------------------------------


def _products(found: Definitions, score: Expr, column: sympy.Symbol) -> Iterator[Product]:
    """Products that a score is made of, each once, those at whose result the score looks most plainly first."""
    seen: set[str] = set()
    stack: list[Expr] = [score]
    while stack:
        for load in loads_of(stack.pop()):
            base = found.base(load)
            if base.buffer in seen:
                continue
            seen.add(base.buffer)
            made = found.makers.get(base.buffer)
            product = product_of(made)
            if product is not None and product.type.dtype.is_float:
                yield product
            elif isinstance(made, Compute):
                stack.append(found.moved(made.value, made.axes, base.indices))


class _Scores(ReadThrough):
    """A score as a function of one product's result, of other tensors and of positions."""

    def __init__(self, found: Definitions, first: Product, axes: Axes) -> None:
        super().__init__(found, MAX_NODES)
        self.first = first
        self.axes = axes
        self.made_of = made_of(found, first.name)
        self.kind = first.type.dtype
        self.indices: tuple[Any, ...] | None = None
        self.scale: float = 1.0

    def expand(self, score: Expr) -> Expr:
        """The score, with the product's result read as ``SCORES``. Raises NoAttention."""
        result = self.expanded(score)
        if self.indices is None:
            raise NoAttention("its scores do not depend on a product of matrices")
        scale = self._hoisted()
        if scale == 1.0:
            return result

        def leaf(e: Expr) -> Expr | None:
            return call("mul", e, const(scale, e.dtype)) if isinstance(e, Load) and e.buffer == SCORES else None

        return rewrite(result, leaf)

    def apart(self, parts: Sequence[Expr]) -> Expr | None:
        """The product of factors, in which no score is; None of none. Raises NoAttention."""
        if not parts:
            return None
        result = product_of_factors([cast(self.expanded(f), self.kind.compute) for f in parts])
        if self.indices is not None:
            raise NoAttention("what multiplies its probabilities depends on its scores")
        return result

    def ends(self, load: Load) -> bool:
        return load.buffer == SCORES

    def too_long(self) -> Exception:
        return NoAttention(f"its function of the scores has more than {MAX_NODES} operations")

    def resolved(self, load: Load) -> Expr:
        if load.buffer == self.first.name:
            return self._result(load)
        if load.buffer in self.made_of:
            made = self.found.makers.get(load.buffer)
            if isinstance(made, Compute):
                return self.expanded(self.found.moved(made.value, made.axes, load.indices))
            raise NoAttention(f"its scores depend on other scores, through {load.buffer}")
        return self.settled(load)

    def _result(self, e: Load) -> Expr:
        if any(is_value(i) for i in e.indices):
            raise NoAttention("its scores are gathered by data")
        if self.indices not in (None, e.indices):
            raise NoAttention("scores of several positions make one score")
        self.indices = e.indices
        a = self.axes
        at = (a.row, a.column) if a.batch is None else (a.batch, a.row, a.column)
        compute = self.kind.compute
        value: Expr = Load(SCORES, at, compute)
        if self.first.alpha != 1.0:
            value = call("mul", value, const(self.first.alpha, compute))
        if self.first.added is not None and self.first.beta != 0.0:
            added = self._added(self.first.added, e.indices)
            if self.first.beta != 1.0:
                added = call("mul", added, const(self.first.beta, compute))
            value = call("add", value, added)
        return cast(value, self.kind, when_stored=not self.first.node.rounded)

    def _added(self, name: str, indices: tuple[Any, ...]) -> Expr:
        """What a product adds, which is broadcast to its shape."""
        shape = self.found.graph.types()[name].shape
        at = indices[len(indices) - len(shape) :]
        at = tuple(sympy.S.Zero if n == 1 else i for i, n in zip(at, shape, strict=True))
        return cast(self.load(Load(name, at, self.kind)), self.kind.compute)

    # --- operands -----------------------------------------------------------------------------------------------------

    def _sides(self) -> tuple[Load, Load]:
        """The loads of queries and keys that make a score. Raises NoAttention."""
        assert self.indices is not None
        a, (*lead, i, j) = self.axes, self.indices
        left, right = (Load(n, (), self.kind) for n in (self.first.left, self.first.right))
        rows = Load(left.buffer, (*lead, i, a.inner), self.kind)
        columns = Load(right.buffer, (*lead, a.inner, j), self.kind)
        if any(mentions(x, a.row, a.column) for x in lead):
            raise NoAttention("each score is of other matrices")
        if not mentions(i, a.column) and not mentions(j, a.row):
            return rows, columns
        if not mentions(i, a.row) and not mentions(j, a.column):
            return columns, rows
        raise NoAttention("rows and columns of the scores are mixed")

    def _hoisted(self) -> float:
        query, key = (scaled(self.found, ld)[1] for ld in self._sides())
        return query * key

    def operands(self) -> tuple[Expr, Expr]:
        """Query and key at a score, in the compute type, without the constants that were taken out of them."""
        query, key = (scaled(self.found, ld)[0] for ld in self._sides())
        return query, key


class _OfRows(_Scores):
    """Numbers of a row, as functions of the largest of its scores and of what is no score."""

    def __init__(self, found: Definitions, first: Product, axes: Axes, score: Expr) -> None:
        super().__init__(found, first, axes)
        self.score = score

    def number(self, e: Expr) -> Expr:
        """Raises NoAttention."""
        result = cast(self.expanded(e), self.kind.compute)
        if self.indices is not None:
            raise NoAttention("its sum has more of its scores than their exponentials")
        return result

    def ends(self, load: Load) -> bool:
        return load.buffer in (SCORES, HIGHEST)

    def load(self, e: Load) -> Expr:
        if _is_highest(self.found, e, self.score, self.axes.column):
            return Load(HIGHEST, (), self.kind.compute)
        return super().load(e)


__all__ = ["HIGHEST", "SCORES", "Attention", "Axes", "NoAttention", "match_attention"]
