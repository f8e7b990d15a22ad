"""Products of many rows on CPUs, where lanes are columns: a tile of results stays in registers for the whole sum.

Each term of a tile takes a few vectors of the weight's row and an element of each of the other operand's rows, which a
multiplication reads from memory for all its lanes. A panel of the weight, as wide as a tile, is copied for all tiles of
rows that meet it: it then lies in one piece, whatever its rows are apart, and what is computed of its elements,
conversions among it, is computed once. A panel is read from the second-level cache as fast as it is multiplied. One
that does not stay there is copied and met by all rows in blocks of terms, between which sums wait in memory, where
these are few. Source: Goto and van de Geijn 2008.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from ....ir.nest.hints import CASCADE
from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...cost.cpu_kernels import (
    TILE_LEAST,
    TILE_PANELS,
    TILE_ROWS,
    TILE_TERMS,
    in_blocks,
    packs_panels,
    register_tiles,
    tile_sides,
)
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Params, Rule, Value
from .common import merge_rows, parallel_roots
from .contraction import DimensionRoles, ProductLoops, product_roles, take_out


def _matches(nest: LoopNest, target: Target) -> bool:
    roles = product_roles(nest)
    if roles is None or roles.is_across or roles.packed or not roles.rows:
        return False
    hint = nest.symbols.hint
    rows, known = hint(_extents(nest, roles.rows)[-1]), 1
    for extent in reversed(
        _known(nest, roles.rows)
    ):  # a tile goes on in the dimensions outside, as far as these are known
        if extent is None:
            break
        known *= extent
    return max(rows, known) >= TILE_ROWS and hint(_extents(nest, roles.columns)[-1]) >= target.lanes(8)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    roles = product_roles(nest)
    assert roles is not None
    hint, size = nest.symbols.hint, _size(nest)
    columns = hint(_extents(nest, roles.columns)[-1])
    rows, width = _known(nest, roles.rows), target.lanes(size)
    spread = _spread(nest, roles, width)
    across = hint(_extents(nest, [spread])[0]) if spread else -(-columns // width)
    tiles = register_tiles(target.machine, rows, across)
    (sides, vectors), many = tiles[0], hint(sympy.Mul(*_extents(nest, roles.rows)))
    panels = across // vectors if spread else columns // (vectors * width)
    pack = packs_panels(many, panels, target.machine)
    terms = hint(sympy.Mul(*(e for v, e in analyse(nest).inner if v in roles.over)))
    whole = all(extent is not None and extent % side == 0 for extent, side in zip(rows, sides, strict=True))
    panel = vectors * width * size
    blocks = whole and terms > TILE_TERMS and in_blocks(target.machine, many * panel, terms * panel)
    return {
        "rows": tuple(dict.fromkeys(math.prod(s) for s, _ in tiles)),
        "vectors": tuple(dict.fromkeys(v for _, v in tiles)),
        "pack": (pack, not pack),
        "blocks": (blocks, not blocks) if terms > TILE_TERMS else (False,),
    }


def _extents(nest: LoopNest, over: Sequence[sympy.Symbol]) -> list[sympy.Expr]:
    extents = dict(analyse(nest).rows)
    return [extents[v] for v in over]


def _known(nest: LoopNest, over: Sequence[sympy.Symbol]) -> list[int | None]:
    return [int(e) if e.is_Integer else None for e in _extents(nest, over)]


def _spread(nest: LoopNest, roles: DimensionRoles, lanes: int) -> sympy.Symbol | None:
    """The dimension of the columns along which a panel has its vectors, where the last has no more than one, as an
    image of few elements has: the one before, where it is known."""
    if len(roles.columns) < 2:
        return None
    before, last = _known(nest, roles.columns)[-2:]
    return roles.columns[-2] if last is not None and last <= lanes and before is not None else None


def _size(nest: LoopNest) -> int:
    """Bytes of what is summed."""
    return max(u.values[0].dtype.compute.itemsize for b in analyse(nest).reductions for u in b.body)  # type: ignore[union-attr]


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    roles = product_roles(schedule.nest)
    assert roles is not None
    nest = schedule.nest  # as lowering left it
    lanes, shared = target.lanes(_size(nest)), 0
    sides = tile_sides(_known(nest, roles.rows), int(params["rows"]))
    spread = _spread(nest, roles, lanes)
    panels: list[tuple[str, str]] = []
    for name in schedule.get_blocks():
        place = ProductLoops(schedule, name)
        outer = [place.take(v) for v in (*roles.batch, *roles.columns[:-1])]
        if spread is None:
            column, vectors, lane = _columns(schedule, place.take(roles.columns[-1]), int(params["vectors"]), lanes)
        else:
            outer[-1], *inner = place.divided(outer[-1], int(params["vectors"]))
            vectors = inner[0] if inner else ""
            column, _, lane = _columns(schedule, place.take(roles.columns[-1]), 1, lanes)
        outer.append(column)
        tiles: list[str] = []
        rows: list[str] = []
        for v, side in zip(roles.rows, sides, strict=True):
            tile, *within = place.cut(v, side)
            tiles.append(tile)
            rows += within
        inside = [*rows, vectors, lane]
        turned = bool(rows) and not schedule.block(name).is_reduction and _leaves_in_rows(nest, roles, name)
        if turned:
            inside = [vectors, *rows[:-1], lane, rows[-1]]
        blocks: list[str] = []
        terms: list[str] = []
        if schedule.block(name).is_reduction:
            terms = _terms(schedule, [lp for v in roles.over if (lp := place.take(v))], bool(params["blocks"]))
            if params["blocks"]:
                *blocks, last = terms
                terms = [last]
            panels.append((name, blocks[-1] if blocks else column))
        loops = [lp for lp in (*outer, *blocks, *tiles, *terms, *inside) if lp]
        shared = len([lp for lp in (*outer, *(() if params["blocks"] else tiles)) if lp])
        if len(loops) > 1:
            schedule.reorder(*loops)
        if terms:
            take_out(schedule, [lp for lp in (*blocks, *terms, *inside) if lp], place)
        for lp in (*rows[:-1], lane) if turned else (*rows, vectors):
            if lp:
                schedule.unroll(lp)
        schedule.vectorize(rows[-1] if turned else lane)
    if params["pack"]:
        for name, loop in panels:
            _pack(schedule, roles, name, loop)
    merge_rows(schedule, shared)
    parallel_roots(schedule, target)


def _leaves_in_rows(nest: LoopNest, roles: DimensionRoles, name: str) -> bool:
    """Whether what a stage makes of results lies along their rows, across the lanes: tiles are turned in registers."""
    written = [a for a in analyse(nest).accesses if a.is_write and a.block == name]
    return any(a.step(roles.rows[-1]) == 1 and a.step(roles.columns[-1]) != 1 for a in written)


def _terms(schedule: Schedule, loops: list[str], blocks: bool) -> list[str]:
    """The loops of a sum; of many terms, and in ``blocks``, the last one is summed by itself, so that errors stay
    small."""
    if not loops:
        return loops
    extents, hint = [schedule.extent(lp) for lp in loops], schedule.nest.symbols.hint
    last = extents[-1]
    if not (last.is_Integer and last <= TILE_TERMS):
        run, short = schedule.split(loops[-1], [None, TILE_TERMS])
        schedule.annotate(short, CASCADE, True)
        return [*loops[:-1], run, short]
    if blocks or (hint(sympy.Mul(*extents)) > TILE_TERMS and last >= TILE_LEAST):
        schedule.annotate(loops[-1], CASCADE, True)
    return loops


def _columns(schedule: Schedule, loop: str, vectors: int, lanes: int) -> tuple[str, str, str]:
    """The loop over panels, the vectors of a panel ("" for one), and their lanes."""
    extent = schedule.extent(loop)
    if vectors == 1 or (extent.is_Integer and extent <= lanes):
        panel, lane = schedule.split(loop, [None, min(lanes, int(extent)) if extent.is_Integer else lanes])
        return panel, "", lane
    return tuple(schedule.split(loop, [None, vectors, lanes]))  # type: ignore[return-value]


def _pack(schedule: Schedule, roles: DimensionRoles, name: str, at: str) -> None:
    """Let a sum read its weight through a copy of the panel, or of the part of it that one iteration of a loop needs,
    where it can be copied."""
    block, weight = schedule.block(name), roles.weight
    moved = [a.var for a in block.axes if weight.step(a.var) != 0]
    order = [v for v in (*roles.batch, *roles.columns[:-1], *roles.over, roles.columns[-1]) if v in moved]
    try:
        made = schedule.pack(name, weight.buffer.name, [v.name for v in order])
    except ScheduleError:
        return  # it is read in several ways, or where a condition holds
    schedule.compute_at(made, at)
    loop = schedule.get_loops(made)[-1]
    extent = schedule.extent(loop)
    if extent.is_Integer and extent <= TILE_PANELS:
        schedule.vectorize(loop)


CPU_PRODUCT_TILES = Rule("cpu_product_tiles", ("cpu",), _matches, _parameters, _apply)
