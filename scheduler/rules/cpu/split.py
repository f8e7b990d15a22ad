"""Reductions to few results over many elements on CPUs: pieces in parallel, then their combination."""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Capability, Params, Rule, Value
from .common import best_vector, cut_rows, inline_cheap, parallel_roots, unroll_values, vectorize_innermost
from .online import in_tiles

INLINE = 16
PIECE = 16384
MAX_PARTIALS = 1024


def _matches(nest: LoopNest, target: Target) -> bool:
    shape = analyse(nest)
    if not shape.has_reduction or target.cores == 1 or shape.row_count >= 4 * target.cores:
        return False
    return shape.inner_count >= 1 << 14 and best_vector(shape) not in {v for v, _ in shape.rows}


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    # Short pieces keep sums as accurate as a pairwise summation: rounding grows with the longest chain of additions.
    accurate = min(MAX_PARTIALS, -(-analyse(nest).inner_count // PIECE))
    default = max(4 * target.cores, accurate)
    return {**unroll_values(nest, target), "partials": tuple(dict.fromkeys((default, 4 * target.cores, target.cores)))}


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    shape = analyse(schedule.nest)
    rows = len(shape.rows)
    # An intermediate of all elements would go through memory: computing it again is cheaper.
    inline_cheap(schedule, limit=INLINE)
    cut = [cut_rows(schedule, block.name, rows, int(params["partials"])) for block in shape.reductions]
    in_tiles(schedule, target, rows + 1, [name for name in cut if name is not None])
    for name in schedule.get_blocks():
        # The combination of the pieces is short: lanes would only add a tail.
        if len(schedule.get_loops(name)) > rows and f"{name}_rf" not in schedule.get_blocks():
            vectorize_innermost(schedule, target, int(params["unroll"]), skip=rows, only=name)
    parallel_roots(schedule, target)


CPU_SPLIT_REDUCTION = Rule(
    "cpu_split_reduction", ("cpu",), _matches, _parameters, _apply, can=frozenset({Capability.SPLIT_SUMS})
)
