"""Traces that are carried to nests with other names, and with other sizes."""

from __future__ import annotations

import random
import re

import pytest

from torch_mlc.ir.nest.loops import Loop, LoopNest, blocks, walk_nodes
from torch_mlc.ir.nest.positions import named_by_position
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.carry import carried
from torch_mlc.scheduler.schedule.schedule import replay
from torch_mlc.scheduler.tuning.space import Space

from .typical_nests import NAMES, TEXTS, lower, nest

CPU = Target("cpu", "znver3", 2)
SM90 = Target("cuda", "sm_90", 132, warp=32, shared_bytes=227 << 10)


def scrambled(given: LoopNest) -> LoopNest:
    """The same nest with other names for all but its sizes; old names stand for other things in part."""
    names = [b.name for b in (*given.params, *given.locals)]
    loops = [n.var.name for n, _ in walk_nodes(given.body) if isinstance(n, Loop)]
    axes = {a.var.name for b, _ in blocks(given) for a in b.axes}
    inside = [b.name for b, _ in blocks(given)]
    table = {n: f"z{k}" for k, n in enumerate((*names, *loops))}
    table |= {n: f"q{k}" for k, n in enumerate(sorted(axes, reverse=True))}
    table |= {n: inside[-1 - k] for k, n in enumerate(inside)}
    found = parse(re.sub(r"\b(" + "|".join(map(re.escape, table)) + r")\b", lambda m: table[m[0]], show(given)))
    assert isinstance(found, LoopNest) and structural_key(found) == structural_key(given)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", [CPU, SM90], ids=["cpu", "gpu"])
def test_a_trace_serves_an_equal_nest_with_other_names(name: str, target: Target) -> None:
    own, other = nest(name), scrambled(nest(name))
    space, rng = Space(own, target), random.Random(name)
    with pytest.raises(ScheduleError):
        replay(default_schedule(own, target).trace, other)
    drafts = [space.default(), *(space.mutated(space.random(rng), rng) for _ in range(25))]
    schedules = [s for d in drafts if (s := space.replayed(d)) is not None]
    assert len(schedules) > 5
    for schedule in schedules:
        there = carried(schedule.trace, own, other)
        # Hints name buffers, which keys of structure count.
        assert structural_key(named_by_position(there.nest)) == structural_key(named_by_position(schedule.nest))
        assert replay(there.trace, other).nest == there.nest
    by_position = named_by_position(other)
    assert carried(carried(schedules[-1].trace, own, by_position).trace, by_position, own).nest == schedules[-1].nest


def test_a_trace_serves_other_sizes_where_its_steps_are_legal() -> None:
    own = nest("softmax")
    larger = lower(TEXTS["softmax"].replace("11", "64").replace("150", "1024"))
    schedule = default_schedule(own, CPU)
    there = carried(schedule.trace, own, larger)
    assert there.trace.steps == schedule.trace.steps and there.nest.params == larger.params


def test_a_nest_that_is_built_otherwise_is_refused() -> None:
    with pytest.raises(ScheduleError, match="built otherwise"):
        carried(default_schedule(nest("softmax"), CPU).trace, nest("softmax"), nest("gelu"))
    with pytest.raises(ScheduleError):
        carried(default_schedule(nest("gelu"), CPU).trace, nest("softmax"), scrambled(nest("softmax")))
