"""Schedule and Trace: what is recorded, how it reads, and that it replays."""

from __future__ import annotations

from textwrap import dedent

import pytest

from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES, Schedule, replay
from torch_mlc.scheduler.schedule.trace import Step, Trace

SCRIPT = """
@nest(outputs=["out0"])
def f(in0: float32[s0, 12], out0: float32[s0, 12]):
    s0 = size(lower=1)
    t0 = local(float32[s0, 12])
    for b0_i0 in serial(s0):
        for b0_i1 in serial(12):
            with block("b0"):
                i0 = spatial(s0, b0_i0)
                i1 = spatial(12, b0_i1)
                t0[i0, i1] = exp(in0[i0, i1])
    for b1_i0 in serial(s0):
        for b1_i1 in serial(12):
            with block("b1"):
                i0 = spatial(s0, b1_i0)
                i1 = spatial(12, b1_i1)
                out0[i0, i1] = mul(t0[i0, i1], float32(2.0))
"""


@pytest.fixture
def nest() -> LoopNest:
    found = parse(SCRIPT)
    assert isinstance(found, LoopNest)
    return found


@pytest.fixture
def schedule(nest: LoopNest) -> Schedule:
    s = Schedule(nest, "by_hand")
    s.merge("b0_i0", "b1_i0")
    outer, _ = s.split("b0_i0", [None, 8])
    s.parallel(outer)
    _, lanes = s.split("b0_i1", [None, symbol("s0")])
    s.compute_at("b0", "b1_i1", preserve_unit_loops=True)
    s.annotate("", "num_stages", 2)
    assert lanes == "b0_i1_1"
    return s


def test_it_reads_as_python(schedule: Schedule) -> None:
    assert str(schedule.trace) == dedent("""\
        s.merge(first='b0_i0', second='b1_i0')
        b0_i0_0, b0_i0_1 = s.split(loop='b0_i0', factors=[None, 8], tail='predicate')
        s.parallel(loop='b0_i0_0')
        b0_i1_0, b0_i1_1 = s.split(loop='b0_i1', factors=[None, s.size('s0')], tail='predicate')
        s.compute_at(block='b0', loop='b1_i1', preserve_unit_loops=True)
        s.annotate(at='', key='num_stages', value=2)""")


def test_json_and_back(schedule: Schedule, nest: LoopNest) -> None:
    trace = Trace.from_json(schedule.trace.to_json())
    assert trace == schedule.trace and trace.rule == "by_hand" and hash(trace) == hash(schedule.trace)
    assert replay(trace, nest).nest == schedule.nest


def test_traces_differ_by_their_arguments(nest: LoopNest) -> None:
    a, b = Schedule(nest), Schedule(nest)
    a.split("b0_i0", [None, 8])
    b.split("b0_i0", [None, 4])
    assert a.trace != b.trace and a.trace.to_json() != b.trace.to_json()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"steps": [["split"]]}', '{"steps": [["split", 3, []]]}',
                                  '{"steps": [["split", {"factors": [{"size": "import os"}]}, []]]}',
                                  '{"steps": [["split", {"factors": [{"size": "__import__()"}]}, []]]}',
                                  '{"steps": [["split", {"factors": {"a": 1}}, []]]}'])  # fmt: skip
def test_text_that_is_no_trace(text: str) -> None:
    with pytest.raises(ScheduleError, match="this is no trace"):
        Trace.from_json(text)


def step(primitive: str, results: tuple[str, ...] = (), **args: object) -> Trace:
    return Trace((Step(primitive, tuple(args.items()), results),))


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (step("explode", loop="b0_i0"), "there is no primitive 'explode'"),
        (step("_record", loop="b0_i0"), "there is no primitive '_record'"),
        (step("parallel", lop="b0_i0"), "the arguments do not fit the primitive"),
        (step("fuse", lops=()), "the arguments do not fit the primitive"),
        (step("parallel", loop="b7_i0"), "there is no loop b7_i0"),
        (step("split", ("x", "y"), loop="b0_i0", factors=(None, 8), tail="predicate"), "the trace is of another nest"),
        (step("split", ("x", "y"), loop="b0_i0", factors=8, tail="predicate"), "the arguments do not fit"),
    ],
)
def test_a_trace_that_does_not_fit(trace: Trace, reason: str, nest: LoopNest) -> None:
    with pytest.raises(ScheduleError) as caught:
        replay(trace, nest)
    assert reason in caught.value.reason


def test_looking_around(schedule: Schedule) -> None:
    assert schedule.get_blocks() == ["b0", "b1"] and schedule.get_block("b1") == "b1"
    assert schedule.get_loops("b1")[:2] == ["b0_i0_0", "b0_i0_1"] and schedule.get_loop("b1_i1") == "b1_i1"
    assert schedule.extent("b0_i0_1") == 8 and schedule.loop("b0_i0_1").extent == 8
    for ask in (lambda: schedule.get_block("b9"), lambda: schedule.get_loops("b9"), lambda: schedule.get_loop("b9")):
        with pytest.raises(ScheduleError, match=r"there is no (block|loop) b9"):
            ask()


def test_a_refusal_changes_nothing(schedule: Schedule) -> None:
    nest, trace = schedule.nest, schedule.trace
    with pytest.raises(ScheduleError):
        schedule.parallel("b0_i0_0")
    assert schedule.nest is nest and schedule.trace == trace


def test_every_primitive_is_a_method() -> None:
    assert all(callable(getattr(Schedule, p)) for p in PRIMITIVES)


def test_a_reason_is_cheap_and_its_text_shows_the_nest(nest: LoopNest) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nest).merge("b1_i0", "b0_i0")
    assert caught.value.reason == "b0_i0 stands before b1_i0"
    assert caught.value.args == (caught.value.reason,)
    lines = str(caught.value).splitlines()
    assert lines[0] == "merge(b1_i0, b0_i0): b0_i0 stands before b1_i0"
    assert lines[-1] == "hint: merge(b0_i0, b1_i0)"
    assert any(line.strip() == "^^^^^ here" for line in lines)
