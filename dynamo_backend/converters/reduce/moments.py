"""Mean and sum of squared distances from it, as exact as sums in double precision.

Squares lose digits with the square of how far they are taken from the mean, and a mean in single precision may be far
from the mean where elements hardly differ. So both moments are taken about a first mean, from which the distances of
what is near are exact, and corrected by what the distances add up to. Source: Chan, Golub and LeVeque 1983, the
corrected two-pass algorithm. Many elements are taken in pieces that stay in a cache between their two visits; the
pieces' moments are combined in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import MOMENTS, SUM, WELFORD
from ....ir.expr.value import Const, Expr, Select, call, const, loads, substitute_index, symbol
from ....ir.nest.loops import contiguous_strides
from ....scheduler.cost.programs import few_rows
from ....scheduler.cost.rows import comes_back
from ..context import ImportContext, ReductionSpace, Tensor
from ..terms import axes, convert, index_value

# Up to so many elements are visited twice as a whole, more of them in pieces.
WHOLE = 1 << 16
# Where a GPU finds them again, so many: its programs have sums of 2048 lanes and more, of no more terms than those of a
# CPU's vectors have in a whole.
LONGEST = 1 << 20
# What a sum of squares of equal elements is known to, as a part of it.
ROUNDING = 2.0**-17
# A mean of one piece in so many is near enough to take squares about.
PART = 32
# Elements of a piece where they lie side by side, half as many on GPUs, and where they are rows of many columns.
PIECE, PIECE_OF_ROWS = 8192, 512


def count_value(ctx: ImportContext, count: sympy.Expr, dtype: DType) -> Expr:
    """A number of elements as a float."""
    return Const(float(count), dtype) if count.is_Integer else convert(index_value(count), dtype)


def divide_by_count(ctx: ImportContext, total: Tensor, count: sympy.Expr) -> Expr:
    """``total / count``, over the axes of ``total``."""
    value = ctx.at(total, axes(total.rank))
    return call("div", value, count_value(ctx, count, value.dtype))


def moments(ctx: ImportContext, x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor, ReductionSpace]:
    """Mean and sum of squared distances from it over ``dims``, in the compute type, over the kept dims."""
    domain = ctx.domain(x.shape, dims)
    return *moments_over(ctx, domain, ctx.load(x, domain.indices), x.device, x.type.strides), domain


def moments_over(
    ctx: ImportContext, domain: ReductionSpace, value: Expr, device: str, strides: Sequence[sympy.Expr] | None = None
) -> tuple[Tensor, Tensor]:
    """The same of ``value`` over ``domain``, whose indices have these ``strides`` in memory, or lie as they come."""
    if ctx.sizes.hint(domain.count) > WHOLE:
        extents = dict(zip((*domain.kept_axes, *domain.axes), (*domain.kept, *domain.reduce_shape), strict=True))
        if strides is None:
            strides = contiguous_strides(tuple(extents.get(i, sympy.S.One) for i in domain.indices))
        steps = {axis: ctx.sizes.hint(n) for axis, n in zip(domain.indices, strides, strict=True)}
        if not _is_near(ctx, domain, value, device, steps):
            return _in_pieces(ctx, domain, value, device, steps)
    count, at = count_value(ctx, domain.count, value.dtype), domain.kept_axes
    guess = _mean(ctx, domain, value, count, device)
    first = ctx.at(guess, at)
    left, about = _about(ctx, domain, value, first, device)
    # Distances from an infinity are NaN, and the mean is what the sum says.
    mean = Select(call("eq", left, left), call("add", first, call("div", left, count)), first)
    squares = _corrected(about, left, count)
    return ctx.temporary(mean, guess.type, "mean"), ctx.temporary(squares, guess.type, "squares")


def _is_near(
    ctx: ImportContext, domain: ReductionSpace, value: Expr, device: str, steps: Mapping[sympy.Expr, int]
) -> bool:
    """Whether a GPU finds rows again in its cache when it visits them again: then they are visited as a whole.

    A program has a row to itself, and adds up thousands of sums side by side: each has few of the terms."""
    machine, hint = ctx.target_of(device).machine, ctx.sizes.hint
    count, step = hint(domain.count), 1
    for axis, extent in sorted(zip(domain.axes, domain.reduce_shape, strict=True), key=lambda a: steps[a[0]]):
        if steps[axis] != step:  # parts of a row lie apart
            return False
        step *= hint(extent)
    rows = math.prod(map(hint, domain.kept))
    if count > LONGEST or rows <= few_rows(machine):
        return False
    return comes_back(machine, count * sum({ld.buffer: ld.dtype.itemsize for ld in loads(value)}.values()))


def _mean(ctx: ImportContext, domain: ReductionSpace, value: Expr, count: Expr, device: str) -> Tensor:
    (total,) = ctx.reduce(SUM, domain, (value,), device)
    return ctx.temporary(call("div", ctx.at(total, domain.kept_axes), count), total.type, "guess")


def _about(ctx: ImportContext, domain: ReductionSpace, value: Expr, guess: Expr, device: str) -> tuple[Expr, Expr]:
    """The sum of the distances from ``guess``, and that of their squares."""
    rest, squares = ctx.reduce(MOMENTS, domain, MOMENTS.lift(call("sub", value, guess)), device)
    return ctx.at(rest, domain.kept_axes), ctx.at(squares, domain.kept_axes)


def _corrected(about: Expr, rest: Expr, count: Expr) -> Expr:
    """Squares about the mean, of those about a guess; none where they are no more than what rounding leaves of equal
    elements."""
    squares = call("sub", about, call("mul", rest, call("div", rest, count)))
    noise = call("mul", about, const(ROUNDING, about.dtype))
    return Select(call("le", squares, noise), const(0, about.dtype), squares)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The space of a reduction in pieces.

    Its results have the axes ``lead`` more, one for each of ``parts``, and its old axes are at ``moved``. What the
    pieces leave is ``tail``, None where that is nothing, with the old axes at ``tail_at``.
    """

    pieces: ReductionSpace
    moved: dict[sympy.Symbol, sympy.Expr]
    lead: tuple[sympy.Symbol, ...]
    parts: tuple[sympy.Expr, ...]
    tail: ReductionSpace | None
    tail_at: dict[sympy.Symbol, sympy.Expr]


def _cut(ctx: ImportContext, domain: ReductionSpace, steps: Mapping[sympy.Expr, int], device: str) -> _Chunks:
    """Pieces of the innermost axes, of one length, their axes in the order of memory, where strides are ``steps``."""
    shape, k = domain.reduce_shape, len(domain.axes) - 1
    beside = PIECE // 2 if device.startswith("cuda") else PIECE
    size = beside if min(steps[a] for a in domain.axes) == 1 else PIECE_OF_ROWS
    while k > 0 and 2 * ctx.sizes.hint(shape[k]) <= size:
        size //= max(ctx.sizes.hint(shape[k]), 1)
        k -= 1
    whole = shape[k]
    if whole.is_Integer:  # a length near that one that leaves nothing
        size = next((n for n in range(min(size, int(whole)), size // 2, -1) if int(whole) % n == 0), size)
    parts = (*shape[:k], FloorDiv(whole, sympy.Integer(size)))
    inner = _reduced(len(shape) - k)
    outer = [*zip(domain.axes, parts, strict=False), *zip(domain.kept_axes, domain.kept, strict=True)]
    outer.sort(key=lambda a: -steps[a[0]] * (size if a[0] == domain.axes[k] else 1))
    at: dict[sympy.Symbol, sympy.Symbol] = {axis: symbol(f"i{n}") for n, (axis, _) in enumerate(outer)}
    moved = at | {domain.axes[k]: at[domain.axes[k]] * size + inner[0]} | dict(zip(domain.axes[k + 1 :], inner[1:]))
    extents = (sympy.Integer(size), *shape[k + 1 :])
    pieces = _moved(domain, moved, tuple(n for _, n in outer), inner, extents)
    left = whole - parts[k] * size
    tail_at = {domain.axes[k]: parts[k] * size + domain.axes[k]}
    tail = _moved(domain, tail_at, domain.kept, domain.axes, (*shape[:k], left, *shape[k + 1 :])) if left != 0 else None
    return _Chunks(pieces, moved, tuple(at[a] for a in domain.axes[: k + 1]), parts, tail, tail_at)


def _in_pieces(
    ctx: ImportContext, domain: ReductionSpace, value: Expr, device: str, steps: Mapping[sympy.Expr, int]
) -> tuple[Tensor, Tensor]:
    cut, kept = _cut(ctx, domain, steps, device), domain.kept_axes
    over = _reduced(len(cut.lead))
    # Where the pieces of a result are: their own axes are reduced, the others those of the result.
    back: dict[sympy.Symbol, sympy.Expr] = dict(zip(cut.lead, over, strict=True))
    back |= {cut.moved[axis]: axis for axis in kept}
    elements = substitute_index(value, cut.moved)
    sample = None if device.startswith("cuda") else _sampled(ctx, cut, elements, back, device)
    guess = None if sample is None else ctx.at(sample, tuple(cut.moved[axis] for axis in kept))
    state = _state(ctx, cut.pieces, elements, device, guess)
    at = tuple(back[axis] for axis in cut.pieces.kept_axes)
    values = tuple(ctx.at(part, at) if isinstance(part, Tensor) else part for part in state)
    parts = ReductionSpace(at, domain.kept, over, cut.parts)
    whole = tuple(ctx.at(part, kept) for part in ctx.reduce(WELFORD, parts, values, device))
    if cut.tail is not None:
        tail = _state(ctx, cut.tail, substitute_index(value, cut.tail_at), device)
        whole = WELFORD.combine(whole, tuple(ctx.at(t, kept) if isinstance(t, Tensor) else t for t in tail))
    like = ctx.contiguous(domain.kept, value.dtype, device)
    mean, squares = (
        ctx.temporary(convert(part, value.dtype), like, name)
        for part, name in zip(whole[:2], ("mean", "squares"), strict=True)
    )
    return mean, squares


def _moved(
    domain: ReductionSpace,
    moved: Mapping[sympy.Symbol, sympy.Expr],
    kept: tuple[sympy.Expr, ...],
    inner: tuple[sympy.Symbol, ...],
    extents: tuple[sympy.Expr, ...],
) -> ReductionSpace:
    return ReductionSpace(tuple(sympy.sympify(i).xreplace(moved) for i in domain.indices), kept, inner, extents)


def _sampled(
    ctx: ImportContext, cut: _Chunks, value: Expr, back: Mapping[sympy.Symbol, sympy.Expr], device: str
) -> Tensor:
    """A mean of the elements of some pieces, over the axes of the results; ``back`` says where those and pieces are.

    The squared distance of a part's mean from that of the whole is at most the variance times how many such parts there
    are. So squares about it lose no more than a few bits, whatever the elements are, and one visit suffices.
    """
    pieces, lead = cut.pieces, len(cut.lead)
    inner = _reduced(lead + len(pieces.axes))
    hints = [ctx.sizes.hint(n) for n in cut.parts]
    k = hints.index(max(hints))
    step = max(min(hints[k], PART), 1)
    moved = dict(back) | dict(zip(pieces.axes, inner[lead:], strict=True))
    moved[cut.lead[k]] = inner[k] * step
    extents = [*cut.parts, *pieces.reduce_shape]
    extents[k] = FloorDiv(extents[k] + step - 1, sympy.Integer(step))
    results = {back[axis]: n for axis, n in zip(pieces.kept_axes, pieces.kept, strict=True) if axis not in cut.lead}
    domain = _moved(pieces, moved, tuple(results[axis] for axis in axes(len(results))), inner, tuple(extents))
    # In double precision, since roundings of a long sum of numbers that hardly differ go one way.
    wide = convert(substitute_index(value, moved), DType.FLOAT64)
    mean = _mean(ctx, domain, wide, count_value(ctx, sympy.Max(domain.count, 1), wide.dtype), device)
    return ctx.temporary(convert(ctx.at(mean, domain.kept_axes), value.dtype), mean.type, "sampled", value.dtype)


def _state(
    ctx: ImportContext, domain: ReductionSpace, value: Expr, device: str, guess: Expr | None = None
) -> tuple[Tensor, Tensor, Expr]:
    """Mean, squares and number of the elements of ``domain``, in double precision, about a ``guess`` or their own first
    mean."""
    wide, at = DType.FLOAT64, domain.kept_axes
    count = count_value(ctx, domain.count, wide)
    some = count if domain.count.is_positive else call("maximum", count, const(1, wide))
    if guess is None:
        guess = ctx.at(_mean(ctx, domain, value, convert(some, value.dtype), device), at)
    rest, about = (convert(part, wide) for part in _about(ctx, domain, value, guess, device))
    like = ctx.contiguous(domain.kept, wide, device)
    mean = ctx.temporary(call("add", convert(guess, wide), call("div", rest, some)), like, "mean_of_piece")
    squares = ctx.temporary(_corrected(about, rest, some), like, "squares_of_piece")
    return mean, squares, count


def _reduced(count: int) -> tuple[sympy.Symbol, ...]:
    return tuple(symbol(f"r{k}") for k in range(count))
