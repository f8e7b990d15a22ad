"""The parts of a nest that is a contraction: blocks that sum products of two operands over shared axes, and the axes.

An axis of the left factor alone is a row, one of the right alone a column, one of both a batch; the summed axes are
those of the reduction. Everything else in the nest runs on the tile of results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.product import BYTES, HALVES, bare, factors, multiplied, operands
from ...ir.expr.value import Call, Const, Expr, IndexValue, Load, Select, free_symbols, is_value, loads, walk
from ...ir.nest.loops import AxisKind, Block, Buffer, LoopNest, Scope, Update, blocks
from .analysis import SameNest

Axes = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
# Parts of a word that are written out.
MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class DotOperand:
    """One factor of a product: its expression without the conversion that widens it, and the type that is multiplied.

    ``is_plain`` where the tile is memory as it is, which the tensor cores may read where the copy puts it.
    """

    factors: tuple[Expr, ...]
    dtype: DType
    is_plain: bool


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """A block that sums products; ``dtype`` is that of the sum."""

    name: str
    left: DotOperand
    right: DotOperand
    dtype: DType


@dataclass(frozen=True, slots=True)
class TileBlock:
    """A block that reduces over tiles of the results along ``axes``, the rows or the columns.

    It has axes of its own for those: ``whole`` for all but the last, and for that the tile (``piece``) and the place in
    it (``own``), of ``size`` results.
    """

    axes: Axes
    whole: tuple[sympy.Symbol, ...]
    piece: sympy.Symbol
    own: sympy.Symbol
    size: int

    def loops(self, loops: Mapping[sympy.Symbol, str]) -> tuple[dict[sympy.Symbol, str], tuple[str, str]]:
        """The loops in place of all axes but the last, and the two in place of that; ``loops`` are by axis."""
        names = (v for v, _ in self.axes[:-1])
        whole = {v: loops[own] for v, own in zip(names, self.whole, strict=True)}
        return whole, (loops[self.piece], loops[self.own])


@dataclass(frozen=True, slots=True)
class ContractionNest:
    """A nest whose heart is one product, or several over the same axes.

    The axes are those of the function, with their extents; ``before`` and ``after`` are the other blocks.
    """

    products: tuple[BlockProduct, ...]
    batch: Axes
    rows: Axes
    columns: Axes
    summed: Axes
    before: tuple[str, ...]
    after: tuple[str, ...]
    # Whether a later block reduces over the columns, so that one program must hold a whole row.
    needs_row: bool
    # Later blocks that reduce over tiles of the results.
    tiles: Mapping[str, TileBlock] = field(default_factory=dict)

    def tile_of(self, axes: Axes) -> int | None:
        """The extent of the tiles over which later blocks reduce along ``axes``; None where they do not."""
        return next((t.size for t in self.tiles.values() if t.axes == axes), None)

    def dtype(self) -> DType:
        """The type that is multiplied: a half type, or bytes that add up to integers, where all are of it, else
        float32."""
        kinds = {multiplied(p.left.dtype, p.right.dtype, p.dtype) for p in self.products}
        return kinds.pop() if len(kinds) == 1 else DType.FLOAT32


def extent(axes: Axes) -> sympy.Expr:
    """Iterations of all the axes."""
    return sympy.Mul(*(e for _, e in axes))


@lru_cache(maxsize=32)
def _cached(same: SameNest, vectors: bool) -> ContractionNest | None:
    return _find(same.nest, vectors)


def find_contraction(nest: LoopNest, vectors: bool = False) -> ContractionNest | None:
    """The contraction that a nest as lowering leaves it is; None where it is none. With ``vectors`` the product of a
    vector with a matrix is one too, and has no rows."""
    return _cached(SameNest(nest), vectors)


def _find(nest: LoopNest, vectors: bool) -> ContractionNest | None:
    found = [b for b, _ in blocks(nest)]
    products: list[BlockProduct] = []
    axes: tuple[Axes, Axes, Axes, Axes] | None = None
    first = last = -1
    for k, block in enumerate(found):
        made = _product(nest, block, vectors)
        if made is None:
            continue
        product, own = made
        if axes is not None and own != axes:
            return None
        axes, last = own, k
        first = k if first < 0 else first
        products.append(product)
    if axes is None:
        return None
    inside = {p.name for p in products}
    used = {ld.buffer for b in found if b.name in inside for ld in b.reads}
    between = [b for b in found[first:last] if b.name not in inside]
    # What stands between products may as well come after them, unless one of them reads it.
    if any(b.is_reduction or any(w.buffer in used for w in b.writes) for b in between):
        return None
    batch, rows, columns, summed = axes
    known = {v for v, _ in (*batch, *rows, *columns)}
    column_vars = {v for v, _ in columns}
    before, after = found[:first], [*between, *found[last + 1 :]]
    local = {b.name for b in nest.locals}
    if any(b.is_reduction or any(w.buffer not in local for w in b.writes) for b in before):
        return None
    needs_row = False
    tiles: dict[str, TileBlock] = {}
    for b in after:
        if not {a.var for a in b.axes} <= known:
            cut = _tile(nest, b, rows, columns)
            if cut is None or any((cut.axes, cut.size) != (t.axes, t.size) for t in tiles.values()):
                return None
            tiles[b.name] = cut
            continue
        reduced = {a.var for a in b.axes if a.kind is not AxisKind.SPATIAL}
        if not reduced <= column_vars or (reduced and reduced != column_vars):
            return None
        needs_row |= bool(reduced)
    return ContractionNest(
        tuple(products), batch, rows, columns, summed,
        tuple(b.name for b in before), tuple(b.name for b in after), needs_row, tiles,
    )  # fmt: skip


def _tile(nest: LoopNest, block: Block, rows: Axes, columns: Axes) -> TileBlock | None:
    """A block that is no part of the loops over results as one that reduces over tiles of them; None where it does
    not."""
    own = {a.var for a in block.axes}
    written = {w.buffer: w.indices for b, _ in blocks(nest) if b is not block for w in b.writes}
    found: dict[object, object] = {}
    for ld in block.reads:
        if nest.buffer(ld.buffer).scope is not Scope.GLOBAL:
            if ld.buffer not in written:  # it goes on from what it has made itself
                return None
            for axis, index in zip(written[ld.buffer], ld.indices, strict=True):
                if found.setdefault(axis, index) != index:
                    return None
    moved = {axis: index for axis, index in found.items() if axis != index}
    axes = next((side for side in (rows, columns) if side and {v for v, _ in side} == moved.keys()), None)
    reduced = [a for a in block.axes if a.kind is AxisKind.REDUCTION]
    if axes is None or len(reduced) != 1 or not reduced[0].extent.is_Integer:
        return None
    *whole, last = (moved[v] for v, _ in axes)
    if not isinstance(last, sympy.Expr):
        return None
    piece = sympy.expand((last - reduced[0].var) / reduced[0].extent)
    if not all(e in own for e in (*whole, piece)):
        return None
    return TileBlock(axes, tuple(whole), piece, reduced[0].var, int(reduced[0].extent))  # type: ignore[arg-type]


def _product(nest: LoopNest, block: Block, vectors: bool) -> tuple[BlockProduct, tuple[Axes, Axes, Axes, Axes]] | None:
    """A block that sums products, with its batch, row, column and summed axes; None where no operand has axes that
    another one lacks, and that one others, or where tiles of their types are not multiplied."""
    if block.role is None or not block.role.has_operands:
        return None
    (update,) = block.body
    assert isinstance(update, Update)
    (value,) = update.values
    dtype, parts = value.dtype, factors(value)
    summed = {a.var for a in block.axes if a.kind is AxisKind.REDUCTION}
    kept = {a.var for a in block.axes} - summed
    split = _own_axes([free_symbols(f) & kept for f in operands(value, summed)], vectors)
    if split is None:
        return None
    rows, columns = split
    reached = [free_symbols(f) & kept for f in parts]
    left = [f for f, own in zip(parts, reached, strict=True) if not own & columns]
    right = [f for f, own in zip(parts, reached, strict=True) if own & columns]
    if any(own & rows and own & columns for own in reached):
        return None
    # Rows stand before columns in the order of the axes, so that the roles of sibling products agree.
    place = {a.var: k for k, a in enumerate(block.axes)}
    if rows and min(place[v] for v in rows) > min(place[v] for v in columns):
        rows, columns, left, right = columns, rows, right, left
    a, b = _operand(nest, block, left), _operand(nest, block, right)
    product = BlockProduct(block.name, a, b, dtype)
    if dtype is DType.INT32 and {a.dtype, b.dtype} != {DType.INT8}:
        return None
    if dtype not in (DType.FLOAT32, DType.INT32):
        return None
    sizes = {x.var: x.extent for x in block.axes}

    def named(chosen: set[sympy.Symbol]) -> Axes:
        return tuple((v, e) for v, e in sizes.items() if v in chosen)

    batch = sizes.keys() - rows - columns - summed
    return product, (named(set(batch)), named(rows), named(columns), named(summed))


def _own_axes(
    reached: Sequence[set[sympy.Symbol]], vectors: bool
) -> tuple[set[sympy.Symbol], set[sympy.Symbol]] | None:
    """The axes of the rows and of the columns: those that the first operand which is of rows has alone, and those that
    the other has alone. Of a vector there are no rows."""
    pairs = [(left - right, right - left) for left in reached for right in reached]
    found = next(((rows, columns) for rows, columns in pairs if rows and columns), None)
    if found is None and vectors:
        found = next(((rows, columns) for rows, columns in pairs if columns), None)
    return found


def _operand(nest: LoopNest, block: Block, parts: Sequence[Expr]) -> DotOperand:
    if len(parts) != 1:
        return DotOperand(tuple(parts), parts[0].dtype, False)
    factor = loaded = bare(parts[0])
    while isinstance(loaded, Select) and isinstance(loaded.if_false, Const) and loaded.if_false.value == 0:
        loaded = loaded.if_true  # a copy may put zeros
    summed = {a.var: a.extent for a in block.axes if a.kind is AxisKind.REDUCTION}

    def is_copied(e: Expr) -> bool:
        # Rows that data name are copied as others are, where they are known before the sum begins.
        return (
            isinstance(e, Load)
            and nest.buffer(e.buffer).scope is Scope.GLOBAL
            and not any(
                is_value(i) and free_symbols(i) & summed.keys()
                for i in e.indices  # type: ignore[arg-type]
            )
        )

    return DotOperand((factor,), factor.dtype, all(map(is_copied, _joined(loaded, summed))))


def _joined(value: Expr, axes: Mapping[sympy.Symbol, sympy.Expr]) -> list[Expr]:
    """The elements among which the position along one of the ``axes`` alone chooses, where that has few iterations; the
    value itself where it chooses nothing."""
    match value:
        case Select(Call("lt", (IndexValue(index), Const()), _), a, b) if _is_few(axes.get(index)):
            return [*_joined(a, axes), *_joined(b, axes)]
    return [value]


def _is_few(extent: sympy.Expr | None) -> bool:
    return extent is not None and extent.is_Integer and 1 < extent <= MOST_PARTS


def joined_axis(c: ContractionNest) -> tuple[sympy.Symbol, int] | None:
    """The summed axis with a tensor of its own at each iteration, of which an operand is joined, and its extent; None
    where there is none, or where elements are made in any other way."""
    summed, parts = dict(c.summed), part_axes(c)
    sides = [side for p in c.products for side in (p.left, p.right)]
    choices = [e for side in sides for e in side.factors if isinstance(e, Select)]
    asked = {e.condition.args[0].index for e in choices if len(_joined(e, summed)) > 1}  # type: ignore[union-attr]
    if not all(side.is_plain for side in sides) or len(parts) != 1 or asked != {parts[0][0]}:
        return None
    return parts[0][0], int(parts[0][1])


def part_axes(c: ContractionNest) -> Axes:
    """The summed axes of few iterations whose positions values ask about: which part of a word an element is."""
    asked: set[sympy.Symbol] = set()
    for p in c.products:
        for factor in (*p.left.factors, *p.right.factors):
            for e in walk(factor):
                if isinstance(e, IndexValue):
                    asked |= e.index.free_symbols
    found = tuple((v, e) for v, e in c.summed if v in asked and e.is_Integer and 1 < e <= MOST_PARTS)
    return found if len(found) < len(c.summed) else ()


def reads_packed(nest: LoopNest, c: ContractionNest) -> bool:
    """Whether an operand becomes a half type of bytes that are words (``reads_words``), of words with several parts, or
    of eight bits with an exponent, which lie side by side along a summed axis."""
    if c.dtype() not in HALVES:
        return False
    if reads_words(nest, c):
        return True
    found = [ld for p in c.products for f in (*p.left.factors, *p.right.factors) for ld in loads(f)]
    along = {v for v, _ in c.summed}
    if part_axes(c) and any(ld.dtype is DType.INT32 and _reaches(ld, along) for ld in found):
        return True
    return any(
        ld.dtype.is_float and ld.dtype.bits == 8 and any(_in_words(nest.buffer(ld.buffer), ld, v, 1) for v in along)
        for ld in found
    )


def _reaches(load: Load, axes: set[sympy.Symbol]) -> bool:
    return any(not is_value(i) and i.free_symbols & axes for i in load.indices)


def reads_words(nest: LoopNest, c: ContractionNest) -> bool:
    """Whether bytes of an operand that become a half type lie side by side along the innermost summed axis that is no
    part of them, and begin at even places in all other axes."""
    parts = {v for v, _ in part_axes(c)}
    along = [v for v, _ in c.summed if v not in parts]
    if c.dtype() not in HALVES or not along:
        return False
    bytes_ = [
        ld for p in c.products for f in (*p.left.factors, *p.right.factors) for ld in loads(f) if ld.dtype in BYTES
    ]
    return bool(bytes_) and all(_in_words(nest.buffer(ld.buffer), ld, along[-1]) for ld in bytes_)


def _in_words(buffer: Buffer, load: Load, along: sympy.Symbol, size: int = 2) -> bool:
    if buffer.scope is not Scope.GLOBAL or any(is_value(i) for i in load.indices):
        return False
    place = sympy.expand(sympy.Add(*(i * s for i, s in zip(load.indices, buffer.strides, strict=True))))  # type: ignore[operator]
    others = [t.as_coeff_Mul()[0] for t in sympy.Add.make_args(place - along)]
    return place.coeff(along) == 1 and all(k.is_Integer and k % size == 0 for k in others)


@dataclass(frozen=True, slots=True)
class StepRun:
    """A program's run of steps over tiles: ``step`` is the summed axis of which positions say where it begins and ends,
    ``tile`` the axis of results, if there is one, that goes on where that ends, as a digit above it."""

    step: sympy.Symbol
    tile: sympy.Symbol | None


def run_of(nest: LoopNest, c: ContractionNest) -> StepRun | None:
    """The run of steps that a program of a contraction does, where all but those are zero and every product writes
    results of its own; None where positions say nothing of the kind."""
    summed = dict(c.summed)
    batch = [v for v, _ in c.batch]
    own = tuple(v for v, _ in (*c.batch, *c.rows, *c.columns))
    steps: set[sympy.Symbol] = set()
    tiles: set[sympy.Symbol] = set()
    for b, _ in blocks(nest):
        if b.name not in {p.name for p in c.products}:
            continue
        (target,) = b.writes
        if target.buffer not in nest.outputs or target.indices != own:
            return None
        for room in _choices(b):
            moving = room.free_symbols & summed.keys()
            if len(moving) != 1 or not room.free_symbols & set(batch) or room.free_symbols & set(own) - set(batch):
                continue
            steps |= moving
            (step,) = moving
            above = sympy.expand(room.coeff(step) * summed[step])
            tiles |= {v for v in batch[1:] if above != 0 and room.coeff(v) == above}
    if len(steps) != 1 or len(tiles) > 1 or len(summed) < 2:
        return None
    return StepRun(steps.pop(), tiles.pop() if tiles else None)


def _choices(block: Block) -> Iterator[sympy.Expr]:
    """Of every comparison of positions where it fails of which a value is zero: how far it is from failing."""
    for e in (e for s in block.body if isinstance(s, Update) for v in s.values for e in walk(v)):
        match e:
            case Select(Call("lt", (IndexValue(index=low), IndexValue(index=high)), _), _, Const(0, _)):
                yield sympy.expand(high - low)


def bytes_per_step(nest: LoopNest, c: ContractionNest, tile: Mapping[sympy.Symbol, int]) -> int:
    """Bytes of the tiles that one step over the summed axes copies, each load once, and one of those that are joined;
    ``tile`` has the elements of a tile along each axis."""
    total = 0
    seen: set[Load] = set()
    summed = dict(c.summed)
    for p in c.products:
        for part in (*p.left.factors, *p.right.factors):
            for ld in loads(_joined(part, summed)[0]):
                if ld in seen or nest.buffer(ld.buffer).scope is not Scope.GLOBAL:
                    continue
                seen.add(ld)
                own = {s for i in ld.indices if not is_value(i) for s in i.free_symbols} & tile.keys()
                if own & summed.keys() and own - summed.keys():
                    elements = 1
                    for v in own:
                        elements *= tile[v]
                    total += elements * ld.dtype.itemsize
    return total
