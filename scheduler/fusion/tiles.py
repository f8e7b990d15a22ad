"""Reductions over the rows or the columns of a product's results, on GPUs, in the kernel that makes those: each program
combines its own tile while that is in registers, and a second kernel (``fusion/pieces/two_stage.py``) combines what the
tiles gave.

The gradient of a bias is of this kind, beside what an activation sends back; so is the log-sum-exp of a row of logits.
As with other reductions over the rows of a kernel, nothing in it may read what they give but what has no more elements.
"""

from __future__ import annotations

import sympy

from ...ir.expr.monoid import SUM
from ...ir.expr.value import Call, flops, free_symbols
from ...ir.function.function import Dim, TensorFunction
from ..cost.products.gpu_tiles import COMBINED_ROWS, FEWER_COLUMNS, HEAVY_EPILOGUE
from ..facts.contraction import COLUMNS
from ..facts.fusion_nodes import FusionNode
from ..rules import Capability, can
from .group import Group


def complete_reduction(group: Group, m: FusionNode, covered: set[int], used: set[int]) -> str | None:
    """Let a reduction over ``covered`` dimensions of a product's results into the product's group, or say why not;
    ``used`` are all dimensions that it has."""
    domain = group.domain
    partly = f"{m.name} covers only a part of the loops"
    ways = sides(group) if can(group.target, Capability.TILE_REDUCTIONS) else []
    if not covered or covered not in ways or used != set(domain.rows()) or used != set().union(*ways):
        return partly
    if not m.settles or m.monoid is None or any(c.vector for c in m.monoid.components):
        return f"{m.name} reduces over a part of the results of a product, and its results are needed for each of those"
    if group.cross and reduced(group) != covered:
        return f"{m.name} reduces over other dimensions than what stands beside the product already"
    least = min(group.table.hint(domain.extents[d]) for way in ways for d in (max(way, key=domain.rows().index),))
    if least < COLUMNS:
        return f"{m.name} reduces over results of which {least} are no tile"
    group.cross.update(m.names)
    return None


def sides(group: Group) -> list[set[int]]:
    """The dimensions of a product's rows and those of its columns; nothing where a group has no product of half types
    on tensor cores, or several that do not agree."""
    found: list[list[set[int]]] = []
    for m in group.nodes:
        if m.monoid is None or m.name in group.cross:
            continue
        value = m.values[0]
        if m.monoid is not SUM or not isinstance(value, Call) or value.fn != "mul":
            return []
        if not all(ld.dtype.is_half and group.target.multiplies(ld.dtype) for ld in m.loads):
            return []
        left, right = ({d for v in free_symbols(a) & set(m.axes) for d in _digits(group, m, v)} for a in value.args)
        found.append([left - right, right - left])
    if not found or not all(found[0]) or any(f != found[0] for f in found):
        return []
    return found[0]


def tile_extent(function: TensorFunction, over: tuple[Dim, ...]) -> int:
    """The extent of the tiles of a product's results, over whose dimensions ``over`` a function reduces."""
    if function.rows[0] in over:
        return COMBINED_ROWS
    after = [s for s in function.stages if (s.monoid is None) == (s.axes is None)]
    light = sum(flops(v) for s in after for v in s.values) < HEAVY_EPILOGUE and all(len(s.results) == 1 for s in after)
    return COLUMNS if light else FEWER_COLUMNS


def reduced(group: Group) -> set[int]:
    """The dimensions over which the reductions beside a product run; empty where they run over all rows of a group."""
    for m in group.nodes:
        if m.name in group.cross and m.monoid is not None:
            over = {d for a in m.reduce_axes for d in _digits(group, m, a)}
            return over if over < set(group.domain.rows()) else set()
    return set()


def kept(group: Group) -> list[int]:
    """The dimensions of what reductions over rows give."""
    over = reduced(group)
    return [d for d in group.domain.rows() if d not in over] if over else list(group.domain.inner_order())


def _digits(group: Group, m: FusionNode, axis: sympy.Symbol) -> tuple[int, ...]:
    return group.bindings[m.name][axis]
