"""Products whose weight lies in registers' worth of bytes: sixteen columns (as many as a register has lanes) with four
neighbours along the sum of each, packed or not, as an instruction multiplies them.

Lanes are columns, so sums need no joining, the scales of a group of columns are one register, and what is read of a
weight is one stream. One row reads each byte once; a tile of rows has its sums in registers and meets each register of
the weight once it is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ....ir.expr.codes import dot_operands
from ....ir.expr.dots import DotInstruction, dots_of
from ....ir.expr.index import simplify
from ....ir.expr.monoid import SUM
from ....ir.expr.value import Expr, IndexValue, free_symbols, is_value, loads, symbol, walk
from ....ir.nest.hints import CASCADE, CHAIN
from ....ir.nest.loops import Block, LoopNest, Update
from ....ir.target import Target
from ...cost.cpu_kernels import DOT_RUN, dot_tile
from ...primitives.analysis.tree import linear_part
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Params, Rule, Value
from .common import merge_rows, parallel_roots
from .contraction import ProductLoops, take_out


@dataclass(frozen=True, slots=True)
class DotRoles:
    """What the axes of a product are: lanes run along ``column``, ``depth`` are the neighbours of a lane; ``rows`` are
    those of the other operand, and ``over`` the rest of the sum, of which ``parts`` are chosen between in a word."""

    instruction: DotInstruction
    column: sympy.Symbol
    rows: tuple[sympy.Symbol, ...]
    depth: sympy.Symbol
    over: tuple[sympy.Symbol, ...]
    parts: frozenset[sympy.Symbol]


def dot_roles(nest: LoopNest, target: Target) -> DotRoles | None:
    """The roles of a nest's axes for the first instruction of a target that its products fit; None where none does."""
    shape = analyse(nest)
    if not shape.reductions or any(len(b.body) != 1 for b in shape.reductions):
        return None
    inner = dict(shape.inner)
    if any(a.var in inner for b in shape.blocks if not b.is_reduction for a in b.axes):
        return None
    rows = [v for v, e in shape.rows if e != 1]
    for instruction in dots_of(features_of(target), target.vector_bytes):
        for depth in (v for v, e in shape.inner if e == instruction.depth):
            for column in rows:
                if all(_fits(nest, b, column, depth, instruction) for b in shape.reductions):
                    told = {s for b in shape.reductions for s in _told_apart(b)} & inner.keys()
                    return DotRoles(
                        instruction, column, tuple(v for v in rows if v != column), depth,
                        tuple(v for v in inner if v != depth), frozenset(told),
                    )  # fmt: skip
    return None


def features_of(target: Target) -> frozenset[str]:
    """LLVM's names of what a processor has."""
    return frozenset(f[1:] for f in target.features.split(",") if f.startswith("+"))


def _told_apart(block: Block) -> set[sympy.Symbol]:
    """The axes by whose value the terms are made in different ways."""
    values = (v for s in block.body if isinstance(s, Update) for v in s.values)
    return {f for v in values for e in walk(v) if isinstance(e, IndexValue) for f in e.index.free_symbols}


def _fits(nest: LoopNest, block: Block, column: sympy.Symbol, depth: sympy.Symbol, instruction: DotInstruction) -> bool:
    """Whether the weight of a sum lies as an instruction wants it."""
    (update,) = block.body
    axes = {a.var: a.extent for a in block.axes}
    if not isinstance(update, Update) or update.monoid is not SUM or column not in axes or depth not in axes:
        return False
    operands = dot_operands(update.values[0], {column}, {depth}, instruction)
    if isinstance(operands, str) or column in free_symbols(operands.right):
        return False
    return all(_lies(nest, ld_indices, strides, axes, column, depth, instruction) for ld_indices, strides in
               ((ld.indices, nest.buffer(ld.buffer).strides) for ld in loads(operands.left.value)))  # fmt: skip


def _lies(
    nest: LoopNest, indices: tuple[sympy.Expr | Expr, ...], strides: tuple[sympy.Expr, ...],
    axes: Mapping[sympy.Symbol, sympy.Expr], column: sympy.Symbol, depth: sympy.Symbol, instruction: DotInstruction,
) -> bool:  # fmt: skip
    if any(is_value(i) for i in indices):
        return False
    panel, lane = symbol("panel_"), symbol("lane_")
    panels = sympy.Integer(-(-int(axes[column]) // instruction.lanes)) if axes[column].is_Integer else axes[column]
    extents = {**axes, panel: panels, lane: sympy.Integer(instruction.lanes)}
    moved = {column: panel * instruction.lanes + lane}
    offset = sympy.Add(*(i * s for i, s in zip(indices, strides, strict=True)))
    offset = sympy.expand(simplify(sympy.expand(offset.xreplace(moved)), extents, nest.symbols))
    steps = [linear_part(offset, v) for v in (depth, lane)]
    return [s[0] if s else None for s in steps] == [1, instruction.depth]


# --- the rule ---------------------------------------------------------------------------------------------------------


def _matches(nest: LoopNest, target: Target) -> bool:
    return dot_roles(nest, target) is not None


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    roles = dot_roles(nest, target)
    assert roles is not None
    extents = dict(analyse(nest).rows)
    many = extents[roles.rows[-1]] if roles.rows else sympy.S.One
    panels = -(-nest.symbols.hint(extents[roles.column]) // roles.instruction.lanes)
    rows, vectors = dot_tile(target.machine, nest.symbols.hint(many), panels)
    return {
        "rows": tuple(dict.fromkeys((rows, 4, 2, 1))),
        "vectors": tuple(dict.fromkeys((vectors, 1, 2, 4))),
    }


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    roles = dot_roles(schedule.nest, target)
    assert roles is not None
    shared = 0
    for name in schedule.get_blocks():
        place = ProductLoops(schedule, name)
        is_sum = schedule.block(name).is_reduction
        column, vectors, lane = _columns(schedule, place.take(roles.column), int(params["vectors"]), roles.instruction)
        outer = [column, *(place.take(v) for v in roles.rows[:-1])]
        inner_rows: list[str] = []
        if roles.rows:
            row, *inner_rows = place.cut(roles.rows[-1], int(params["rows"]))
            outer.append(row)
        shared = len([lp for lp in outer if lp])
        terms = _terms(schedule, place, roles) if is_sum else []
        inside = [*terms, vectors, *inner_rows, *([place.take(roles.depth)] if is_sum else []), lane]
        inside = [lp for lp in inside if lp]
        loops = [lp for lp in (*outer, *inside) if lp]
        schedule.reorder(*loops)
        if is_sum:
            take_out(schedule, inside, place)
        for lp in (vectors, *inner_rows):
            if lp:
                schedule.unroll(lp)
        schedule.vectorize(lane)
        if is_sum:
            schedule.tensorize(name, roles.instruction.name)
    merge_rows(schedule, shared)
    parallel_roots(schedule, target)


def _columns(schedule: Schedule, loop: str, vectors: int, instruction: DotInstruction) -> tuple[str, str, str]:
    """The loop over panels, that over the registers of one ("" for one), and lanes."""
    if vectors == 1:
        panel, lane = schedule.split(loop, [None, instruction.lanes])
        return panel, "", lane
    return tuple(schedule.split(loop, [None, vectors, instruction.lanes]))  # type: ignore[return-value]


def _terms(schedule: Schedule, place: ProductLoops, roles: DotRoles) -> list[str]:
    """The loops of a sum but the innermost: groups, words, and the parts of a word, which are written out."""
    serial = [lp for v in roles.over if v not in roles.parts and (lp := place.take(v))]
    parts = [lp for v in roles.over if v in roles.parts and (lp := place.take(v))]
    for lp in parts:
        schedule.unroll(lp)
        schedule.annotate(lp, CHAIN, True)
    if len(serial) == 1 and not roles.instruction.is_whole:
        extent = schedule.extent(serial[0])
        if extent.is_Integer and extent > DOT_RUN and extent % DOT_RUN == 0:
            run, words = schedule.split(serial[0], [None, DOT_RUN])
            schedule.annotate(words, CASCADE, True)
            serial = [run, words]
    return [*serial, *parts]


CPU_DOT_PRODUCTS = Rule("cpu_dot_products", ("cpu",), _matches, _parameters, _apply)
