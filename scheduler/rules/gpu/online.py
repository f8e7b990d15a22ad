"""Log-sum-exps of long rows on GPUs: a state for each lane of a tile, into which many neighbours go at a time.

A lane takes the maximum of what it has of a tile first, brings its state there once, and then adds exponentials up. The
states of all lanes come together behind the loop over tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from ....ir.expr.monoid import LOGSUMEXP
from ....ir.nest.hints import NUM_WARPS
from ....ir.nest.loops import Block, LoopNest, Update, blocks
from ....ir.target import Target
from ...cost.gpu_kernels import ONLINE_EACH, ONLINE_LEAST, ONLINE_LOADS, ONLINE_TILE
from ...error import ScheduleError
from ...schedule.schedule import Schedule
from ..analysis import analyse
from ..cpu.online import keep_states
from ..registry import Params, Rule, Value
from .common import GPUS, clamp_power, fused, has_scan, neighbours, tile, typical, warps_for
from .row import inline_elements, keep_near, row_inputs, row_programs, stay_in_cache, whole_warps


@dataclass(frozen=True, slots=True)
class LaneTile:
    """A tile of a row: ``lanes`` with ``near`` neighbours each, ``parts`` times."""

    parts: int
    lanes: int
    near: int


def _matches(nest: LoopNest, target: Target) -> bool:
    return any(_is_online(b) for b, _ in blocks(nest)) and not has_scan(nest)


def _is_online(block: Block) -> bool:
    return any(isinstance(s, Update) and s.monoid == LOGSUMEXP for s in block.body)


def _near(nest: LoopNest) -> int:
    shape = analyse(nest)
    return neighbours(shape, [v for v, _ in shape.inner])


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    near = _near(nest)
    row = sympy.Mul(*(e for _, e in analyse(nest).inner))
    size = clamp_power(typical(nest, row), ONLINE_LEAST, ONLINE_TILE)
    warps = warps_for(target, size, ONLINE_EACH, 1, 8)
    if stay_in_cache(nest, target):
        warps = whole_warps(target)
        size = warps * target.warp * ONLINE_EACH
    # Each load of a lane has an address in registers. Many of them keep other programs out, and with them their bytes.
    parts = min(max(size // (warps * target.warp * near), 1), ONLINE_LOADS)
    return {
        "parts": tuple(dict.fromkeys((parts, max(parts // 2, 1), parts * 2))),
        "warps": tuple(dict.fromkeys((warps, min(warps * 2, whole_warps(target)), max(warps // 2, 1)))),
    }


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    """One visit a stage, as ``gpu_row_looped`` has it, of which those that may share one do."""
    nest, warps = schedule.nest, int(params["warps"])
    inline_elements(schedule)
    keep_states(schedule)
    depth = row_programs(schedule, analyse(nest), 1)
    by_lanes(schedule, depth, LaneTile(int(params["parts"]), warps * target.warp, _near(nest)))
    if stay_in_cache(nest, target):
        keep_near(schedule, row_inputs(analyse(nest)), depth)
    schedule.annotate("", NUM_WARPS, warps)


def by_lanes(schedule: Schedule, depth: int, shape: LaneTile) -> None:
    """Cut the loops of all stages inside ``depth`` loops into tiles, the steps of log-sum-exps written out by lanes;
    stages that may run in one visit share it."""
    steps: list[str] = []
    for name in schedule.get_blocks():
        along = fused(schedule, schedule.get_loops(name)[depth:])
        if along is None:
            continue
        step, *_, lane, _ = schedule.split(along, [None, shape.parts, shape.lanes, shape.near])
        steps.append(step)
        if not _is_online(schedule.block(name)):
            _elements(schedule, name)
            continue
        partial = schedule.rfactor(lane)
        # Where little is left of an exponential, its error does not show in the sum: powers of two are as exact.
        written = schedule.decompose_online(partial, step, exponential="exp2", finite=True)
        begin, most, factor, added, *into = written
        for visit in (most, added):
            _elements(schedule, visit)
        for state in (begin, factor, *into, name):
            _lanes(schedule, state, shape)
    _merge(schedule, steps)


def _elements(schedule: Schedule, block: str) -> None:
    for loop in schedule.get_loops(block)[-3:]:
        tile(schedule, loop)


def _lanes(schedule: Schedule, block: str, shape: LaneTile) -> None:
    """The loop of a block over lanes, in the dimension of the tile that lanes have beside elements."""
    for loop in schedule.split(schedule.get_loops(block)[-1], [1, shape.lanes]):
        tile(schedule, loop)


def _merge(schedule: Schedule, steps: Sequence[str]) -> None:
    """Neighbouring loops over tiles as one, where they may be."""
    first, *others = steps
    for step in others:
        try:
            schedule.merge(first, step)
        except ScheduleError:
            first = step


GPU_ROW_ONLINE = Rule("gpu_row_online", GPUS, _matches, _parameters, _apply)
