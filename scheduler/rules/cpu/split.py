"""Reductions to few results over many elements on CPUs: pieces in parallel, then their combination."""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.nest.loops import LoopKind, LoopNest
from ....ir.target import Target
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..registry import Capability, Params, Rule, Value
from .common import best_vector, cut_rows, inline_cheap, merge_rows, parallel_roots, unroll_values, vectorize_innermost
from .online import in_tiles, is_online

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
    partials = int(params["partials"])
    found = [cut_rows(schedule, block.name, rows, partials) for block in shape.reductions]
    cut = [name for name in found if name is not None]
    _share_passes(schedule, rows, cut, partials)
    in_tiles(schedule, target, rows + 1, cut)
    # A loop that several share is as wide as the reduction among them wants.
    for name in sorted(schedule.get_blocks(), key=lambda name: name not in cut):
        # The combination of the pieces is short: lanes would only add a tail.
        if len(schedule.get_loops(name)) > rows and f"{name}_rf" not in schedule.get_blocks():
            vectorize_innermost(schedule, target, int(params["unroll"]), skip=rows, only=name)
    parallel_roots(schedule, target)


def _share_passes(schedule: Schedule, rows: int, cut: list[str], partials: int) -> None:
    """Let reductions over the same elements, and what is written for each element beside them, share one pass.

    A second pass would read the same memory again: a loss and what is saved for its gradient would take twice the time.
    """
    sums = [name for name in cut if not is_online(schedule, name)]
    beside = [b for b in schedule.get_blocks() if not schedule.block(b).is_reduction]
    trial = schedule.copy()
    _merge_pieces(trial, rows, sums, beside, partials)
    roots = {trial.get_loops(name)[0] for name in sums}
    _merge_pieces(schedule, rows, sums, [b for b in beside if roots & {*trial.get_loops(b)[:1]}], partials)


def _merge_pieces(schedule: Schedule, rows: int, sums: list[str], beside: list[str], partials: int) -> None:
    """Cut ``beside`` into as many pieces as ``sums`` have been, and merge the loops of both as far as that is right."""
    merged = list(sums)
    for name in beside:
        loops = schedule.get_loops(name)
        if len(loops) <= rows or schedule.loop(loops[rows]).kind is not LoopKind.SERIAL:
            continue
        try:
            piece, _ = schedule.split(loops[rows], [partials, None])
            if rows:
                schedule.reorder(piece, *loops[:rows])
        except ScheduleError:
            continue
        merged.append(name)
    merge_rows(schedule, max((len(schedule.get_loops(name)) for name in merged), default=0), merged)


CPU_SPLIT_REDUCTION = Rule(
    "cpu_split_reduction", ("cpu",), _matches, _parameters, _apply, can=frozenset({Capability.SPLIT_SUMS})
)
