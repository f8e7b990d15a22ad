"""annotate and set_scope: what is said to the emitter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest, Scope
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Prove = Callable[..., Schedule]


def test_nest_loop_and_block(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.annotate("", "num_warps", 4)
        s.annotate("b0_i0", "eviction", "first")
        s.annotate("b0", "fast", True)
        s.annotate("", "num_warps", 8)

    s = proved(nests["plane"], build)
    assert s.nest.annotations == (("num_warps", 8),)
    assert s.loop("b0_i0").annotations == (("eviction", "first"),)
    assert s.block("b0").annotations == (("fast", True),)


def test_annotations_survive_what_comes_after(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.annotate("b0", "note", 1)
        s.annotate("b0_i0", "note", 2)
        s.split("b0_i0", [None, 4])
        s.compute_at("b0", "b1_i0")

    s = proved(nests["chain"], build)
    assert s.block("b0").annotations == (("note", 1),)


def test_a_place_that_is_not_there(nests: Mapping[str, LoopNest]) -> None:
    with pytest.raises(ScheduleError, match="there is no loop or block b5"):
        Schedule(nests["plane"]).annotate("b5", "note", 1)


def test_scope(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["chain"], lambda s: s.set_scope("t0", "global"))
    assert s.nest.buffer("t0").scope is Scope.GLOBAL


@pytest.mark.parametrize(
    ("buffer", "scope", "reason"),
    [("t0", "register", "there is no scope 'register'"), ("in0", "local", "in0 is no buffer of the nest's own")],
)
def test_refused_scopes(nests: Mapping[str, LoopNest], buffer: str, scope: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule(nests["chain"]).set_scope(buffer, scope)
