"""Rows that are summed where indices say, by sorted segments: on GPUs without atomic operations, in a fixed order.

The rows that go to one place lie together once the list of places is sorted. Each place sums its own, in float32, and
is written once, also where nothing goes. A long segment is summed in two steps: pieces of the sorted list that lie in
it whole, each by itself, and then the pieces and what is left at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from ....ir.errors import IRError
from ....ir.expr.dtypes import DType
from ....ir.expr.monoid import SUM, Monoid
from ....ir.expr.value import Expr, Index, IndexValue, Load, Select, call, cast, const, free_symbols, is_value, symbol
from ....ir.graph.graph import Library, Ref, TensorType
from ....ir.target import updates_in_order, usual_target
from ....scheduler.cost.segments import RowSums, atomic_nanoseconds, piece_of_list, segment_nanoseconds, sorts
from ....scheduler.decisions import Alternative, text_key
from ....scheduler.facts.views import map_value
from ..context import ImportContext, Tensor
from ..terms import all_of, axes, convert, index_value
from .search import count_before

_INT = DType.INT64
# The element of a row at a place of the sorted list, by the axis of each dimension that data do not decide.
Element: TypeAlias = Callable[[Expr, dict[int, sympy.Symbol]], Expr]
# Places that fit are sorted as 32 bits, in half the passes.
_MOST_NARROW = 2**31 - 2
# No list is longer whose rows are in memory.
_LONGEST = 2**36


@dataclass(frozen=True, slots=True)
class Listed:
    """Rows of a source that a list of places names: ``along`` are the source's axes of the list, ``dims`` the
    dimensions of the result that data decide, and ``own`` says which source axis each other dimension is."""

    along: tuple[int, ...]
    dims: tuple[int, ...]
    own: dict[int, int]


def listed(shape: Sequence[sympy.Expr], places: Sequence[Index], out: TensorType) -> Listed | None:
    """How a scatter lists whole rows; None where its points have places of their own."""
    names = {symbol(f"r{k}"): k for k in range(len(shape))}
    along: set[int] = set()
    dims, own = [], dict[int, int]()
    for d, place in enumerate(places):
        if is_value(place) and not isinstance(place, IndexValue):
            dims.append(d)
            along |= {names[s] for s in free_symbols(place) if s in names}
        else:
            at = place.index if isinstance(place, IndexValue) else place
            axis = names.get(at)
            if axis is None or axis in own.values() or shape[axis] != out.shape[d]:
                return None
            own[d] = axis
    if not dims or not along or along & set(own.values()) or len(along) + len(own) != len(shape):
        return None
    return Listed(tuple(sorted(along)), tuple(dims), own)


def is_cheaper(ctx: ImportContext, initial: Expr, shape: Sequence[sympy.Expr], rows: Listed, out: TensorType) -> bool:
    """Whether sums of rows cost less by sorted segments than by atomic operations."""
    hint = ctx.sizes.hint
    count, width = math.prod(hint(shape[a]) for a in rows.along), math.prod(hint(shape[a]) for a in rows.own.values())
    sums = RowSums(hint(out.numel), count, width, out.dtype, not _is_zero(initial))
    machine = usual_target(out.device).machine
    by_cost = sorts(machine, sums)
    if ctx.decider is None:
        return by_cost
    chosen = ctx.decider.decide(
        "row-sums", text_key((repr(sums), out.device)),
        (Alternative("segments", segment_nanoseconds(machine, sums)),
         Alternative("atomics", atomic_nanoseconds(machine, sums))),
        "segments" if by_cost else "atomics", at=ctx.node.name, nbytes=hint(out.nbytes),
        reason=f"{count} rows of {width} elements",
    )  # fmt: skip
    return chosen == "segments"


def may_sort(ctx: ImportContext, monoid: Monoid | None, out: TensorType) -> bool:
    """Whether sums of a type may be made by sorted segments at all."""
    if updates_in_order(out.device) or monoid is not SUM or not out.dtype.is_float or not out.shape:
        return False
    return not (ctx.numerics == "eager" and out.dtype.is_half)


def sum_by_segments(
    ctx: ImportContext, initial: Expr, shape: Sequence[sympy.Expr], places: Sequence[Index], value: Expr, rows: Listed,
    out: TensorType,
) -> Tensor:  # fmt: skip
    """The current node's result: ``initial`` and the sums of the rows of a source, over ``r0, r1, …``."""
    over = [shape[a] for a in rows.along]
    length = sympy.Mul(*over)
    sizes = [out.shape[d] for d in rows.dims]
    count = sympy.Mul(*sizes)
    keys, order = _sorted(ctx, places, rows, over, sizes, out.device)
    starts = _starts(ctx, keys, length, count, out.device)

    at = axes(len(out.shape))
    row: sympy.Expr = sympy.S.Zero
    for d, n in zip(rows.dims, sizes, strict=True):
        row = row * n + at[d]
    kind = out.dtype.compute

    def element(place: Expr, own: dict[int, sympy.Symbol]) -> Expr:
        """An element of the row at a place of the sorted list."""
        index = cast(Load(order.name, (place,), order.dtype), _INT)
        env: dict[sympy.Symbol, Index] = {symbol(f"r{a}"): own[d] for d, a in rows.own.items()}
        env |= {symbol(f"r{a}"): i for a, i in zip(rows.along, _unravelled(index, over), strict=True)}
        return convert(map_value(value, env), kind)

    own = {d: at[d] for d in rows.own}
    counted = _counted_in(length)
    begin, end = (cast(Load(starts, (i,), _INT), counted) for i in (row, row + 1))
    step = index_value(symbol("r0"), counted)
    size = piece_of_list(ctx.sizes.hint(length))
    if size is None:
        items = call("sub", end, begin)
        term = element(call("add", begin, step), own)
    else:
        pieces = _pieces(ctx, keys, length, count, size, rows, out, element)
        by = const(size, counted)
        first = call("truncdiv", call("add", begin, const(size - 1, counted)), by)
        whole = call("maximum", call("sub", call("truncdiv", end, by), first), const(0, counted))
        left_out = call("mul", whole, by)
        single = call("sub", call("sub", end, begin), left_out)
        items = call("add", single, whole)
        place = call("add", begin, step)
        behind = call("ge", place, call("mul", first, by))
        place = Select(behind, call("add", place, left_out), place)
        piece = call("add", first, call("sub", step, single))
        parts = ctx.at(pieces, (piece, *(at[d] for d in rows.own)), kind)
        term = Select(call("lt", step, single), element(place, own), parts)
    space = ctx.domain((*out.shape, length), [len(out.shape)])
    guarded = Select(call("lt", step, items), term, const(0, kind))
    (made,) = ctx.reduce(SUM, space, (guarded,), out.device)
    total = ctx.at(made, at)
    return ctx.compute(total if _is_zero(initial) else call("add", convert(initial, kind), total))


def _is_zero(value: Expr) -> bool:
    return value == const(0, value.dtype)


def _unravelled(place: Expr, shape: Sequence[sympy.Expr]) -> list[Expr]:
    """The indices of a row-major place."""
    indices: list[Expr] = []
    for k, extent in enumerate(reversed(shape)):
        size = index_value(extent)
        indices.append(place if k == len(shape) - 1 else call("remainder", place, size))
        place = call("truncdiv", place, size)
    return indices[::-1]


def _sorted(
    ctx: ImportContext, places: Sequence[Index], rows: Listed, over: Sequence[sympy.Expr], sizes: Sequence[sympy.Expr],
    device: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The places that the list names, in order, and which of the list each is; those out of range are the last."""
    count = sympy.Mul(*sizes)
    place: Expr = const(0, _INT)
    inside: list[Expr] = []
    for d, n in zip(rows.dims, sizes, strict=True):
        at = cast(places[d], _INT)  # type: ignore[arg-type]
        inside += [call("ge", at, const(0, _INT)), call("lt", at, index_value(n))]
        place = at if len(sizes) == 1 else call("add", call("mul", place, index_value(n)), at)
    place = Select(all_of(inside), place, index_value(count))
    (flat,) = axes(1)
    left, env = flat, dict[sympy.Symbol, Index]()
    for k, (a, n) in reversed(list(enumerate(zip(rows.along, over, strict=True)))):
        env[symbol(f"r{a}")] = left if k == 0 else Mod(left, n)
        left = FloorDiv(left, n)
    narrow = count.is_Integer and count <= _MOST_NARROW
    kind = ctx.contiguous((sympy.Mul(*over),), DType.INT32 if narrow else _INT, device)
    named = ctx.temporary(map_value(place, env), kind, "places")
    keys, order = ctx.fresh("sorted"), ctx.fresh("order")
    indices = ctx.contiguous(kind.shape, _INT, device)
    ctx.nodes.append(
        Library(
            (keys, order), (kind, indices), "aten::sort.stable", (Ref(named.name),),
            (("stable", True), ("dim", 0), ("descending", False)), "a sort", ctx.origins,
        )
    )  # fmt: skip
    return Tensor(keys, kind), Tensor(order, indices)


def _most(ctx: ImportContext, length: sympy.Expr) -> int:
    """How long a list may be."""
    try:
        most = ctx.sizes.table().bounds(length)[1]
    except IRError:
        most = None
    return _LONGEST if most is None else min(most, _LONGEST)


def _counted_in(length: sympy.Expr) -> DType:
    """The type in which places of the sorted list are computed."""
    return DType.INT32 if length.is_Integer and length <= _MOST_NARROW else _INT


def _starts(ctx: ImportContext, keys: Tensor, length: sympy.Expr, count: sympy.Expr, device: str) -> str:
    """Where in the sorted list the segment of each place begins, and behind it where the last one ends, by name."""
    kind = ctx.contiguous((count + 1,), _INT, device)
    (at,) = axes(1)
    sought = index_value(at)
    found = count_before(
        ctx, length, sought, lambda p: cast(ctx.at(keys, (p,)), _INT), right=False, out=kind, most=_most(ctx, length)
    )
    assert isinstance(found, Load)
    return found.buffer


def _pieces(
    ctx: ImportContext, keys: Tensor, length: sympy.Expr, count: sympy.Expr, size: int, rows: Listed, out: TensorType,
    element: Element,
) -> Tensor:  # fmt: skip
    """The sums of the pieces of the sorted list that belong to one place whole; of others nothing."""
    piece, *own = axes(1 + len(rows.own))
    extents = (FloorDiv(length, size), *(out.shape[d] for d in rows.own))
    first, last = (cast(ctx.at(keys, (piece * size + k,)), _INT) for k in (0, size - 1))
    whole = call("logical_and", call("eq", first, last), call("lt", last, index_value(count)))
    place = index_value(piece * size + symbol("r0"))
    term = element(place, dict(zip(rows.own, own, strict=True)))
    space = ctx.domain((*extents, sympy.Integer(size)), [len(extents)])
    (made,) = ctx.reduce(SUM, space, (Select(whole, term, const(0, term.dtype)),), out.device, "pieces")
    return made
