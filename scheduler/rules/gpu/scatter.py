"""Scatters on GPUs: all that is scattered at once, combined in memory by atomic operations. Several of the same points
are one loop."""

from __future__ import annotations

from collections.abc import Mapping

from ....ir.nest.loops import LoopNest, blocks
from ....ir.target import Target
from ...schedule.schedule import Schedule
from ..registry import Params, Rule, Value
from .common import GPUS
from .pointwise import GPU_POINTWISE


def _matches(nest: LoopNest, target: Target) -> bool:
    found = [b for b, _ in blocks(nest)]
    return bool(found) and all(b.is_scatter for b in found)


def _parameters(nest: LoopNest, target: Target) -> Mapping[str, tuple[Value, ...]]:
    return GPU_POINTWISE.parameters(nest, target)


def _apply(schedule: Schedule, target: Target, params: Params) -> None:
    for name in schedule.get_blocks():
        schedule.atomic(name)
    GPU_POINTWISE.apply(schedule, target, params)


GPU_SCATTER = Rule("gpu_scatter", GPUS, _matches, _parameters, _apply)
