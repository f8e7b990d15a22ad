"""sample_perfect_tile and sample_categorical: decisions, kept in the trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.hints import EVICT
from torch_mlc.ir.nest.loops import LoopKind, LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

Prove = Callable[..., Schedule]


def designed(s: Schedule) -> None:
    """Tiles by chance, and an unrolled part of which the size is drawn."""
    outer, inner = s.sample_perfect_tile("b0_i1", 2, 8)
    s.split("b0_i1", [outer, inner])
    s.vectorize("b0_i1_1")
    s.split("b0_i0", [None, s.sample_categorical([2, 5], [1.0, 3.0])])
    s.unroll("b0_i0_1")
    s.annotate("b0", EVICT.key("in0"), s.sample_categorical(["evict_first", "evict_last"]))


def test_the_trace_names_what_was_drawn(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["transpose"], designed)
    lines = str(s.trace).splitlines()
    assert lines[0].startswith("v0, v1 = s.sample_perfect_tile(loop='b0_i1', n=2, max_innermost=8, decision=[")
    assert lines[1] == "b0_i1_0, b0_i1_1 = s.split(loop='b0_i1', factors=[v0, v1], tail='predicate')"
    assert "factors=[None, v2]" in lines[4] and "value=v3" in lines[-1]
    assert EVICT.found(s.block("b0"), "in0") is not None
    again = Schedule(nests["transpose"])
    exec("\n".join(lines), {"s": again})
    assert again.nest == s.nest


def test_the_same_seed_draws_the_same(nests: Mapping[str, LoopNest]) -> None:
    found = set()
    for seed in (0, 1, 2, 3, 4, 5):
        runs = []
        for _ in range(2):
            s = Schedule(nests["transpose"], seed=seed)
            designed(s)
            runs.append(s.trace)
        assert runs[0] == runs[1]
        found.add(runs[0])
    assert len(found) > 2


def test_a_decision_may_be_another(nests: Mapping[str, LoopNest], unchanged: Callable[..., None]) -> None:
    """The steps that use what was drawn follow."""
    s = Schedule(nests["transpose"])
    designed(s)
    (tiles, unrolled, policy) = s.trace.decisions
    assert (tiles, policy) == (0, 6)
    trace = s.trace.with_decision(tiles, [3, 4]).with_decision(unrolled, 1)
    other = replay(Trace.from_json(trace.to_json()), nests["transpose"])
    assert other.extent("b0_i1_1") == 4 and other.loop("b0_i1_1").kind is LoopKind.VECTORIZED
    assert other.extent("b0_i0_1") == 5 and other.trace == trace
    unchanged(nests["transpose"], other.nest)
    with pytest.raises(ScheduleError, match=r"\[5, 3\] are not 2 factors of extent 12"):
        replay(s.trace.with_decision(tiles, [5, 3]), nests["transpose"])
    with pytest.raises(ScheduleError, match="no such step draws anything; those that do are 0, "):
        s.trace.with_decision(1, [3, 4])


def test_factors_are_perfect(nests: Mapping[str, LoopNest]) -> None:
    seen: Counter[tuple[int | None, ...]] = Counter()
    s = Schedule(nests["softmax"], seed=7)
    for _ in range(60):
        factors = s.sample_perfect_tile("b0_r0", 3, 4)
        assert math.prod(f or 0 for f in factors) == 12 and (factors[-1] or 9) <= 4
        seen[tuple(factors)] += 1
    assert len(seen) > 5


def test_what_is_known_to_divide_a_size(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Of a size that 4 divides, inner factors share out the 4."""

    def build(s: Schedule) -> None:
        factors = s.sample_perfect_tile("b0_i0", 2)
        assert factors[0] is None and factors[1] in (1, 2, 4)
        s.split("b0_i0", factors, tail="perfect")

    for _ in range(3):
        proved(nests["plane"], build)
    assert Schedule(nests["pointwise"]).sample_perfect_tile("b0_i0", 2) == [None, 1]


def test_weights_count(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["plane"])
    drawn = Counter(s.sample_categorical([1, 2, 3], [0, 1, 9]) for _ in range(200))
    assert drawn[1] == 0 and 2 <= drawn[2] < 50 < drawn[3]


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda s: s.sample_perfect_tile("x"), "there is no loop x"),
        (lambda s: s.sample_perfect_tile("b0_r0", 0), "there must be a factor, and room for one"),
        (lambda s: s.sample_perfect_tile("b0_r0", 1, 8), "the one factor 12 is more than 8"),
        (lambda s: s.sample_perfect_tile("b0_r0", 2, 4, [2, 6]), "[2, 6] are not 2 factors of extent 12"),
        (lambda s: s.sample_perfect_tile("b0_r0", 2, 4, [None, 3]), "[None, 3] are not 2 factors of extent 12"),
        (lambda s: s.sample_perfect_tile("b0_i0", 2, 4, [None, 2]), "[None, 2] are not 2 factors of extent s0"),
        (lambda s: s.sample_categorical([]), "the choices must be numbers or texts, and at least one"),
        (lambda s: s.sample_categorical([True]), "the choices must be numbers or texts, and at least one"),
        (lambda s: s.sample_categorical([1, 2], [1.0]), "[1.0] are no weights of 2 choices"),
        (lambda s: s.sample_categorical([1, 2], [0.0, 0.0]), "[0.0, 0.0] are no weights of 2 choices"),
        (lambda s: s.sample_categorical([1, 2], decision=2), "2 is no place among 2 choices"),
    ],
)
def test_refusals(draw: Callable[[Schedule], object], reason: str, nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["softmax"])
    with pytest.raises(ScheduleError) as caught:
        draw(s)
    assert caught.value.reason == reason and not s.trace.steps


def test_a_trace_that_uses_what_nobody_drew(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["transpose"])
    designed(s)
    lost = Trace(s.trace.steps[1:])
    with pytest.raises(ScheduleError, match="nothing has drawn v0"):
        replay(lost, nests["transpose"])
