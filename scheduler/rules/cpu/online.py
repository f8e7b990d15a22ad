"""Log-sum-exps on CPUs: a tile of the row at a time, whose maximum is found before its exponentials are summed."""

from __future__ import annotations

from collections.abc import Collection

from ....ir.expr.monoid import LOGSUMEXP
from ....ir.nest.loops import Update
from ....ir.target import Target
from ...cost.cpu_kernels import online_tile
from ...error import ScheduleError
from ...schedule.schedule import Schedule


def is_online(schedule: Schedule, name: str) -> bool:
    return any(isinstance(s, Update) and s.monoid == LOGSUMEXP for s in schedule.block(name).body)


def keep_states(schedule: Schedule) -> None:
    """Let every log-sum-exp have its state in buffers of the nest; what it wrote before is written from there."""
    local = {b.name for b in schedule.nest.locals}
    for name in schedule.get_blocks():
        if is_online(schedule, name):
            for write in schedule.block(name).writes:
                if write.buffer not in local:
                    schedule.cache_write(name, write.buffer)


def in_tiles(schedule: Schedule, target: Target, depth: int, only: Collection[str] | None = None) -> None:
    """Write out the steps of every log-sum-exp whose reduction stands inside ``depth`` loops: one exponential an
    element, and the first-level cache between the two visits of a tile.

    A block of which the steps cannot be written out combines states element by element, as any reduction does.
    """
    for name in schedule.get_blocks():
        if (only is not None and name not in only) or not is_online(schedule, name):
            continue
        try:
            loops = schedule.get_loops(name)[depth:]
            along = loops[0] if len(loops) == 1 else schedule.fuse(*loops)
            tile, _ = schedule.split(along, [None, online_tile(target.machine)])
            schedule.decompose_online(name, tile)
        except ScheduleError:
            continue
