"""Products of a library with what stands around them, for blocks of rows: the library multiplies a block into scratch,
and the other stages go over it while it is in a cache. Each thread of a team takes blocks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import sympy

from ....ir.expr.role import Role
from ....ir.nest.loops import Block, DimKind, LoopNest, blocks
from ....ir.target import Target
from ...cost.products.contraction_cpu import BLOCK_ROWS, rows_of_block
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..registry import Params, Rule, Value
from .common import merge_inner, merge_paths, merge_rows, unroll_values, vectorize_innermost


def _matches(nest: LoopNest, target: Target) -> bool:
    return target.gemm and any(_is_library(b) for b, _ in blocks(nest))


def _is_library(block: Block) -> bool:
    return block.role is Role.LIBRARY_PRODUCT


def _row(block: Block) -> tuple[sympy.Symbol, sympy.Expr] | None:
    """The row axis of a block, and its extent."""
    return next(((a.var, a.extent) for a in block.axes if a.dim is DimKind.ROW), None)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    first = next(b for b, _ in blocks(nest) if _is_library(b))
    row = _row(first)
    hint = nest.symbols.hint
    width = sum(hint(sympy.Mul(*b.shape[1:])) * b.dtype.itemsize for b in nest.locals if len(b.shape) > 1)
    size = rows_of_block(hint(row[1]) if row is not None else 1, width, target.machine)
    return {"rows": tuple(dict.fromkeys((size, *BLOCK_ROWS))), **unroll_values(nest, target)}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    paths = []
    for name in schedule.get_blocks():
        block = schedule.block(name)
        row = _row(block)
        loops = schedule.get_loops(block.name)
        over = [lp for a, lp in zip(block.axes, map(str, block.bindings), strict=True) if row and a.var == row[0]]
        if len(over) != 1 or over[0] not in loops:
            raise ScheduleError("cpu_row_blocks", f"{name} has no loop over rows", schedule.nest, name)
        outer, inner = schedule.split(over[0], [None, int(params["rows"])])
        schedule.reorder(outer, inner, *(lp for lp in loops if lp != over[0]))
        paths.append([outer])
    merge_paths(schedule, paths)
    schedule.parallel(paths[0][0])
    for is_library, group in groupby(schedule.get_blocks(), lambda n: _is_library(schedule.block(n))):
        names = list(group)
        if is_library:
            for name in names:
                schedule.tensorize(name, "gemm")
            continue
        merge_rows(schedule, 2, names)
        merge_inner(schedule, 2, names)
        for name in names:
            vectorize_innermost(schedule, target, int(params["unroll"]), skip=2, only=name)


CPU_ROW_BLOCKS = Rule("cpu_row_blocks", ("cpu",), _matches, _parameters, _apply)
