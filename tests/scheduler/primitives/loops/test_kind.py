"""bind, parallel, vectorize, unroll."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from textwrap import dedent

import pytest

from torch_mlc.ir.nest.loops import Block, Bound, Loop, LoopKind, LoopNest, Node
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Prove = Callable[..., Schedule]


def merged(s: Schedule) -> None:
    for k in (1, 2, 3):
        s.merge("b0_i0", f"b{k}_i0")


def test_a_cpu_row_kernel(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        merged(s)
        s.parallel("b0_i0")
        for b in s.get_blocks():
            s.vectorize(s.split(s.get_loops(b)[1], [None, 4])[1])

    s = proved(nests["softmax"], build)
    assert [s.loop(x).kind for x in s.get_loops("b3")] == [LoopKind.PARALLEL, LoopKind.SERIAL, LoopKind.VECTORIZED]


def test_a_gpu_row_kernel(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        merged(s)
        o, i = s.split("b0_i0", [None, 2])
        s.bind(o, "blockIdx.x")
        s.bind(i, "threadIdx.x")
        for b in s.get_blocks():
            s.bind(s.get_loops(b)[2], "threadIdx.x")

    s = proved(nests["softmax"], build)
    kinds = [s.loop(x).kind for x in s.get_loops("b0")]
    assert kinds == [LoopKind.BLOCK_X, LoopKind.THREAD_X, LoopKind.THREAD_X]


def test_a_reduction_in_lanes_and_copies(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        _, u, v = s.split("b0_r0", [None, 2, 4])
        s.unroll(u)
        s.vectorize(v)

    proved(nests["column_sum"], build)


def test_two_grid_axes(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.bind("b0_i0", "blockIdx.y")
        s.bind("b0_i1", "blockIdx.x")

    proved(nests["transpose"], build)


Step = Callable[[Schedule], object]


@pytest.mark.parametrize(
    ("nest", "steps", "reason"),
    [
        ("column_sum", [lambda s: s.reorder("b0_r0", "b0_i0"), lambda s: s.parallel("b0_r0")], "b0 reduces over it"),
        ("column_sum", [lambda s: s.bind("b0_r0", "blockIdx.x")], "b0 reduces over it"),
        ("plane", [lambda s: s.parallel("b0_i1")], "a team of threads runs outermost loops"),
        ("plane", [lambda s: s.vectorize("b0_i0")], "extent s0 is not constant"),
        ("plane", [lambda s: s.unroll("b0_i0")], "extent s0 is not constant"),
        ("plane", [lambda s: s.bind("b0_i0", "threadIdx.x")], "extent s0 is not constant"),
        ("transpose", [lambda s: s.vectorize("b0_i0")], "b0_i1 would be inside b0_i0, which is vectorized"),
        ("plane", [lambda s: s.split("b0_i0", [None, 512]), lambda s: s.vectorize("b0_i0_1")], "512 iterations are"),
        ("plane", [lambda s: s.split("b0_i0", [None, 128]), lambda s: s.unroll("b0_i0_1")], "128 iterations are"),
        ("plane", [lambda s: s.bind("b0_i0", "blockIdx.w")], "there is no 'blockIdx.w'; there are blockIdx.x"),
        ("plane", [lambda s: s.parallel("b0_i0"), lambda s: s.bind("b0_i0", "blockIdx.x")], "is parallel already"),
        ("transpose", [lambda s: s.bind("b0_i0", "blockIdx.x"), lambda s: s.bind("b0_i1", "blockIdx.x")],
         "b0_i1, blockIdx.x, would be inside b0_i0, which is blockIdx.x"),
        ("transpose", [lambda s: s.bind("b0_i0", "threadIdx.x"), lambda s: s.bind("b0_i1", "blockIdx.x")],
         "would be inside b0_i0, which is threadIdx.x"),
        ("plane", [lambda s: s.unroll("nowhere")], "there is no loop nowhere"),
        ("siblings", [lambda s: s.fuse("b0_i0", "b0_r0"), lambda s: s.split("b0_i0_b0_r0", [None, 4]),
                      lambda s: s.vectorize("b0_i0_b0_r0_1")], "carries a reduction of b0 and another axis at once"),
    ],
)  # fmt: skip
def test_refusals(nests: Mapping[str, LoopNest], nest: str, steps: list[Step], reason: str) -> None:
    s = Schedule(nests[nest])
    for step in steps[:-1]:
        step(s)
    before = s.nest
    with pytest.raises(ScheduleError) as caught:
        steps[-1](s)
    assert reason in caught.value.reason
    assert s.nest is before


def test_iterations_that_need_each_other_stay_in_order(nests: Mapping[str, LoopNest]) -> None:
    """A reader two elements behind the writer in one loop: what it reads comes from earlier iterations."""
    nest = nests["stencil"]
    first, second = nest.body
    assert isinstance(first, Loop) and isinstance(second, Loop)
    one = Loop(first.var, first.extent, (*first.body, *_guarded(second, first)))
    s = Schedule(replace(nest, body=(one,)))
    for step in (lambda: s.parallel("b0_i0"), lambda: s.vectorize("b0_i0"), lambda: s.bind("b0_i0", "blockIdx.x")):
        with pytest.raises(ScheduleError, match="b1 reads t0 from other iterations"):
            step()
    s.unroll("b0_i0")


def _guarded(second: Node, first: Node) -> tuple[Node, ...]:
    """The reader two elements behind the writer."""
    assert isinstance(second, Loop) and isinstance(first, Loop)
    (block,) = second.body
    assert isinstance(block, Block)
    return (replace(block, bindings=(first.var - 2,), predicate=(Bound(1 - first.var, first.var * 0),)),)


POOLED = """
@nest(outputs=["out0"])
def pooled(in0: float32[s0, s1, s1, 3], out0: float32[s0, s1, s1]):
    s0 = size(lower=1)
    s1 = size(lower=1)
    t0 = local(float32[s0, s1, s1])
    for b0_i0 in serial(s0):
        for b0_i1 in serial(s1):
            for b0_i2 in serial(s1):
                for b0_r0 in serial(3):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(s1, b0_i1)
                        i2 = spatial(s1, b0_i2)
                        r0 = reduction(3, b0_r0)
                        t0[i0, i1, i2] = max.update(in0[i0, i1, i2, r0])
    for b1_i0 in serial(s0):
        for b1_i1 in serial(s1):
            for b1_i2 in serial(s1):
                with block("b1"):
                    i0 = spatial(s0, b1_i0)
                    i1 = spatial(s1, b1_i1)
                    i2 = spatial(s1, b1_i2)
                    out0[i0, i1, i2] = mul(t0[i0, i1, {column}], float32(2.0))
"""


def rows_as_one(s: Schedule) -> None:
    """Fuse the rows of both blocks into one loop, whose digits are quotients and remainders by a symbol; and cut it."""
    for k in range(3):
        s.merge(s.get_loops("b0")[k], s.get_loops("b1")[k])
    over, within = s.split(s.fuse(*s.get_loops("b0")[:3]), [None, 4])
    s.bind(over, "blockIdx.x")
    s.bind(within, "threadIdx.x")


def test_digits_by_a_symbol_are_read_where_they_were_written(proved: Prove) -> None:
    s = proved(parse(dedent(POOLED.format(column="i2"))), rows_as_one)
    assert [s.loop(x).kind for x in s.get_loops("b1")] == [LoopKind.BLOCK_X, LoopKind.THREAD_X]


def test_a_mirrored_read_is_another_iteration() -> None:
    nest = parse(dedent(POOLED.format(column="s1 - 1 - i2")))
    assert isinstance(nest, LoopNest)
    with pytest.raises(ScheduleError, match="other iterations"):
        rows_as_one(Schedule(nest))
