"""Sums of products on CPUs: blocks of results in registers, so that what is read of a weight is converted once for all
the rows that it meets, and each vector of a row serves several columns.

Where the weight lies along the sum ([n, k]), lanes are partial sums; where it lies along its columns ([k, n]), lanes
are columns, and a panel of sums stays in the first-level cache while rows of the weight stream by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from ....ir.expr.value import IndexValue, flops, is_value, walk
from ....ir.nest.hints import CASCADE, CHAIN, FACTOR
from ....ir.nest.loops import AxisKind, Block, LoopNest, Store, Update
from ....ir.target import Target
from ...cost.cpu_kernels import (
    DEAR_RESULT,
    PANEL_ROWS,
    PANEL_TILE,
    dear_columns,
    panel_vectors,
    product_tile,
    sums_in_registers,
)
from ...schedule.schedule import Schedule
from ..analysis import NestShape, Reach, analyse
from ..registry import Params, Rule, Value
from .common import choose_width, is_long, merge_rows, parallel_roots, run_length

# Packed elements of one word: as many loops at most are written out.
MOST_PACKED = 8


@dataclass(frozen=True, slots=True)
class DimensionRoles:
    """What the dimensions of a product are: ``batch`` of all operands, ``columns`` of the weight, ``rows`` of the other
    operand; ``packed`` those over the parts of one word; ``lane`` the one along which the ``weight`` lies."""

    batch: tuple[sympy.Symbol, ...]
    columns: tuple[sympy.Symbol, ...]
    rows: tuple[sympy.Symbol, ...]
    packed: tuple[sympy.Symbol, ...]
    over: tuple[sympy.Symbol, ...]
    lane: sympy.Symbol
    weight: Reach

    @property
    def is_across(self) -> bool:
        """Whether lanes run along the sum."""
        return self.lane in self.over


def product_roles(nest: LoopNest) -> DimensionRoles | None:
    """What the dimensions of a nest of products are; None where it is none."""
    shape = analyse(nest)
    if not shape.reductions or not all(map(_is_product, shape.reductions)):
        return None
    inner = {v for v, _ in shape.inner}
    if any(a.var in inner for b in shape.blocks if not b.is_reduction for a in b.axes):
        return None
    reads = [a for a in shape.accesses if not a.is_write and not a.is_gather and _moves(a, inner)]
    long = [v for v, e in shape.rows if e != 1]
    weight = max(reads, key=lambda a: (_has_lanes(shape, a, reads, inner), _elements(shape, a)), default=None)
    if weight is None:
        return None
    columns = tuple(v for v in long if _moves(weight, [v]) and any(not _moves(a, [v]) for a in reads))
    rows = tuple(v for v in long if not _moves(weight, [v]))
    batch = tuple(v for v, _ in shape.rows if v not in columns and v not in rows)
    unit = [v for v, e in (*shape.inner, *shape.rows) if e != 1 and weight.step(v) == 1]
    lane = next((v for v in unit if v in inner or v in columns), None)
    if lane is None or not columns:
        return None
    extents = dict(shape.inner)
    told = {s for b in shape.reductions for s in _told_apart(b)}
    packed = tuple(
        v
        for v in extents
        if v != lane and extents[v].is_Integer and extents[v] <= MOST_PACKED
        and (v in told or not _moves(weight, [v]))
    )  # fmt: skip
    others = [a for a in reads if not any(_moves(a, [v]) for v in columns)]
    for v in packed:
        # The parts of a word beside each other, as their partners are: lanes that shift one word by different counts.
        if extents[v] == MOST_PACKED and all(a.step(v) == 1 for a in others) and not _moves(weight, [v]):
            lane, packed = v, tuple(p for p in packed if p != v)
    return DimensionRoles(batch, columns, rows, packed, tuple(extents), lane, weight)


def _is_product(block: Block) -> bool:
    has_operands = block.role is not None and block.role.has_operands
    return has_operands and all(isinstance(s, Update) and s.values[0].dtype.is_float for s in block.body)


def _told_apart(block: Block) -> Iterable[sympy.Symbol]:
    """The axes by whose value the terms are made in different ways."""
    for s in block.body:
        for v in s.values if isinstance(s, Update) else ():
            yield from (f for e in walk(v) if isinstance(e, IndexValue) for f in e.index.free_symbols)


def _moves(access: Reach, along: Iterable[sympy.Symbol]) -> bool:
    return any(access.step(v) != 0 for v in along)


def _has_lanes(shape: NestShape, weight: Reach, reads: list[Reach], inner: set[sympy.Symbol]) -> bool:
    """Whether an operand lies along lanes that are neighbours in all others that have them, as those along a sum may
    not be."""
    unit = [v for v, e in (*shape.inner, *shape.rows) if e != 1 and weight.step(v) == 1]
    if any(v in inner for v in unit):
        return all(_is_near(a.step(v)) for v in unit if v in inner for a in reads)
    return bool(unit)


def _is_near(step: sympy.Expr | None) -> bool:
    """Whether neighbours lie beside each other, or as far apart as the parts of a word are many."""
    return step is not None and bool(step.is_Integer) and 0 <= int(step) <= MOST_PACKED


def _elements(shape: NestShape, access: Reach) -> int:
    extents = dict((*shape.rows, *shape.inner))
    count = 1
    for v, e in extents.items():
        count *= shape.nest.symbols.hint(e) if access.step(v) != 0 else 1
    return count


# --- the rule ---------------------------------------------------------------------------------------------------------


def _matches(nest: LoopNest, target: Target) -> bool:
    return product_roles(nest) is not None


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    roles = product_roles(nest)
    assert roles is not None
    extents = dict(analyse(nest).rows)
    sums, (most, beside) = sums_in_registers(target.machine), product_tile(target.machine)
    many = extents[roles.rows[-1]] if roles.rows else sympy.S.One
    if roles.packed:
        # To unpack the parts of a word is dear, so all rows share it that have their sums in registers. More columns
        # would take the registers of parts; with 16 of them only those of few rows do not.
        rows = _together(nest, many, sums)
        columns = min(4, max(1, sums // rows)) if roles.is_across else 1
    else:
        # Other rows are loaded anew for each tile of columns, and the weight for each tile of rows, from a cache.
        rows = min(most if roles.is_across else PANEL_TILE, nest.symbols.hint(many))
        columns = min(4 if rows == 1 else beside, sums // rows) if roles.is_across else 1
        if roles.is_across and rows > 1 and _is_dear(nest):
            columns = dear_columns(target.machine)
            rows = min(rows, sums // columns)
    wide = 2 if rows * columns * 2 <= sums else 1
    return {
        "rows": tuple(dict.fromkeys((rows, 4, 2, 1))),
        "columns": tuple(dict.fromkeys((columns, 4, 2, 1))),
        "wide": (wide, 3 - wide),
    }


def _is_dear(nest: LoopNest) -> bool:
    """Whether what is made of results takes about as long as some terms of them do, so that it is done in lanes."""
    made = (s.value for b in analyse(nest).blocks if not b.is_reduction for s in b.body if isinstance(s, Store))
    return any(flops(v) >= DEAR_RESULT for v in made)


def _together(nest: LoopNest, extent: sympy.Expr, sums: int) -> int:
    """How many rows share a conversion: all of a few, else four, or another number near it that leaves no tail."""
    if not extent.is_Integer:
        return min(4, max(1, nest.symbols.hint(extent)))
    count = int(extent)
    if count <= 6:
        return count
    return next((r for r in (4, 5, 6, 3, 7) if count % r == 0), count if count <= sums else 4)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    roles = product_roles(schedule.nest)
    assert roles is not None
    rows, columns, wide = int(params["rows"]), int(params["columns"]), int(params["wide"])
    shared = 0
    dear = columns == dear_columns(target.machine) and _is_dear(schedule.nest)
    for name in schedule.get_blocks():
        place = ProductLoops(schedule, name)
        outer = [place.take(v) for v in (*roles.batch, *roles.columns[:-1])]
        if roles.is_across:
            column, *inner_columns = place.cut(roles.columns[-1], columns)
        else:
            column, *inner_columns = place.panel(
                roles.columns, roles.lane, target, panel_vectors(target.machine) // rows
            )
        outer += [column, *(place.take(v) for v in roles.rows[:-1])]
        inner_rows: list[str] = []
        if roles.rows:
            row, *inner_rows = place.cut(roles.rows[-1], rows)
            outer.append(row)
        shared = len([lp for lp in outer if lp])
        if schedule.block(name).is_reduction:
            inside = _terms(schedule, place, roles, target, (rows * columns, wide), inner_columns, inner_rows)
        else:
            inside = [*inner_rows, *inner_columns]
        # Lanes last: they must stay innermost.
        loops = [lp for lp in (*outer, *inside) if lp]
        if len(loops) > 1:
            schedule.reorder(*loops)
        if schedule.block(name).is_reduction:
            take_out(schedule, [lp for lp in inside if lp], place)
        # Few columns are lanes where a function is called of each result; else they are written out.
        in_lanes = roles.is_across and not schedule.block(name).is_reduction and dear and bool(inner_columns)
        for lp in (*inner_rows, *(inner_columns if roles.is_across and not in_lanes else ())):
            schedule.unroll(lp)
        if schedule.block(name).is_reduction or not roles.is_across or in_lanes:
            schedule.vectorize(loops[-1])
    merge_rows(schedule, shared)
    parallel_roots(schedule, target)


def _terms(
    schedule: Schedule,
    place: ProductLoops,
    roles: DimensionRoles,
    target: Target,
    sums: tuple[int, int],
    columns: list[str],
    rows: list[str],
) -> list[str]:
    """The loops of a sum inside its block of results, in order."""
    results, wide = sums
    packed = [place.take(v) for v in roles.packed]
    for lp in packed:
        schedule.unroll(lp)
        schedule.annotate(lp, CHAIN, results * wide > 4 or not roles.is_across)
    left = [v for v in roles.over if v not in roles.packed]
    if roles.is_across:
        serial = [place.take(v) for v in left if v != roles.lane]
        run, lane = place.lanes(roles.lane, target, wide)
        return [*serial, *run, *packed, *columns, *rows, lane]
    *serial, last = [place.take(v) for v in left] or [""]
    together: list[str] = []
    if last:
        last, *together = place.divided(last, PANEL_ROWS)
        for lp in together:
            schedule.unroll(lp)
            schedule.annotate(lp, CHAIN, True)
    *vectors, lane = columns
    return [*serial, last, *vectors, *together, *packed, *rows, lane]


def take_out(schedule: Schedule, inside: list[str], place: ProductLoops) -> None:
    """Factors that all terms of a sum have in common multiply it once; groups are summed by themselves for that."""
    summed = place.reducing(inside)
    schedule.annotate(summed[0], FACTOR, True)
    for lp in summed[1:]:
        if CASCADE.of(schedule.loop(lp)):
            return
    if len(summed) > 2 and place.scales(summed[0]):
        schedule.annotate(summed[1], CASCADE, True)
        schedule.annotate(summed[1], FACTOR, True)


@dataclass(slots=True)
class ProductLoops:
    """The loops of one block by the axes that they run over."""

    schedule: Schedule
    block: str

    @property
    def size(self) -> int:
        """Bytes of a lane: an index that tells parts of a word apart is none."""
        return max(
            s.values[0].dtype.compute.itemsize
            for b in map(self.schedule.block, self.schedule.get_blocks())
            for s in b.body
            if isinstance(s, Update)
        )

    def take(self, var: sympy.Symbol) -> str:
        """The loop over an axis that no step has split yet; "" where the block has none."""
        block = self.schedule.block(self.block)
        for axis, binding in zip(block.axes, block.bindings, strict=True):
            if axis.var == var and binding.is_Symbol:
                return str(binding.name)
        return ""

    def reducing(self, loops: list[str]) -> list[str]:
        """Those loops that the sum runs over."""
        block = self.schedule.block(self.block)
        over = {
            s.name
            for axis, e in zip(block.axes, block.bindings, strict=True)
            if axis.kind is AxisKind.REDUCTION
            for s in e.free_symbols
        }
        return [lp for lp in loops if lp in over]

    def scales(self, loop: str) -> bool:
        """Whether something that is read depends on this loop of the sum, and on no other one."""
        block = self.schedule.block(self.block)
        bindings = {a.var: e for a, e in zip(block.axes, block.bindings, strict=True) if a.kind is AxisKind.REDUCTION}
        own = {v for v, e in bindings.items() if any(s.name == loop for s in e.free_symbols)}
        for access in block.reads:
            used = {s for i in access.indices if not is_value(i) for s in i.free_symbols} & bindings.keys()
            if used and used <= own:
                return True
        return False

    def cut(self, var: sympy.Symbol, size: int) -> list[str]:
        """The loop over an axis in pieces of ``size``: the loop over pieces, and the one inside a piece."""
        return self.divided(self.take(var), size)

    def divided(self, loop: str, size: int) -> list[str]:
        extent = self.schedule.extent(loop)
        size = min(size, int(extent)) if extent.is_Integer else size
        return list(self.schedule.split(loop, [None, size])) if size > 1 else [loop]

    def panel(
        self, columns: tuple[sympy.Symbol, ...], lane: sympy.Symbol, target: Target, vectors: int
    ) -> tuple[str, ...]:
        """Columns as panels of vectors of lanes. ``lane`` is the last of them."""
        loop = self.take(columns[-1])
        extent = self.schedule.extent(loop)
        width = choose_width(target, self.schedule.nest, extent, 2, self.size)
        hint = self.schedule.nest.symbols.hint(extent)
        # A panel for each core at least.
        count = max(1, min(vectors, hint // (width * target.cores)))
        return self.schedule.split(loop, [None, count, width])

    def lanes(self, var: sympy.Symbol, target: Target, wide: int) -> tuple[list[str], str]:
        """The serial loops over an axis, and the lanes of its vectors."""
        schedule, loop = self.schedule, self.take(var)
        extent = schedule.extent(loop)
        width = choose_width(target, schedule.nest, extent, wide, self.size)
        if extent == width:
            return [], loop
        if is_long(schedule, loop, width):
            *serial, lane = schedule.split(loop, [None, run_length(schedule, loop, width), width])
            schedule.annotate(serial[-1], CASCADE, True)
        else:
            *serial, lane = schedule.split(loop, [None, width])
        return serial, lane


CPU_CONTRACTION = Rule("cpu_contraction", ("cpu",), _matches, _parameters, _apply)
