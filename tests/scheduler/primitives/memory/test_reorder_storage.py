"""reorder_storage: the order of a buffer's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Prove = Callable[..., Schedule]


def test_columns_first(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["layer_norm"], lambda s: s.reorder_storage("t2", [1, 0]))
    buffer = s.nest.buffer("t2")
    assert [str(e) for e in buffer.shape] == ["s1", "s0"] and [str(e) for e in buffer.strides] == ["s0", "1"]
    (write,) = s.block("b2").writes
    assert [str(i) for i in write.indices] == ["r0", "i0"]


def test_reads_by_computed_indices(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    proved(nests["lookup"], lambda s: s.reorder_storage("t0", [1, 0]))


@pytest.mark.parametrize(
    ("buffer", "order", "reason"),
    [
        ("t2", [0, 0], "t2 has 2 dimensions; the order must name each once"),
        ("t2", [0], "t2 has 2 dimensions; the order must name each once"),
        ("in0", [1, 0], "in0 is no buffer of the nest's own"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], buffer: str, order: list[int], reason: str) -> None:
    s = Schedule(nests["layer_norm"])
    with pytest.raises(ScheduleError) as caught:
        s.reorder_storage(buffer, order)
    assert caught.value.reason == reason
