"""transform_layout: other dimensions for a buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_tiles_of_rows(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["lookup"], lambda s: s.transform_layout("t0", "n, k -> n // 4, k, n % 4"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def lookup(in0: float32[6, 4], in1: int64[5], out0: float32[5, 4]):
            t0 = local(float32[2, 4, 4])
            for b0_i0 in serial(6):
                for b0_i1 in serial(4):
                    with block("b0"):
                        i0 = spatial(6, b0_i0)
                        i1 = spatial(4, b0_i1)
                        t0[i0 // 4, i1, i0 % 4] = add(in0[i0, i1], float32(1.0))
            for b1_i0 in serial(5):
                for b1_i1 in serial(4):
                    with block("b1"):
                        i0 = spatial(5, b1_i0)
                        i1 = spatial(4, b1_i1)
                        row = floordiv(in1[i0], index(4, int64))
                        rest = remainder(floordiv(in1[i0], index(1, int64)), index(4, int64))
                        out0[i0, i1] = t0[row, i1, rest]
        """)


@pytest.mark.parametrize(
    ("nest", "buffer", "mapping", "shape"),
    [
        ("softmax", "t1", "i, j -> j, i", "12, s0"),
        ("softmax", "t1", "i, j -> j // 8, i, j % 8", "2, s0, 8"),
        ("softmax", "t1", "i, j -> i // 4, j // 8, i % 4, j % 8", "((s0 + 3)//4), 2, 4, 8"),
        ("softmax", "t1", "i, j -> i * 12 + j", "12*s0"),
        ("softmax", "t1", "i, j -> j * s0 + i", "12*s0"),
        ("softmax", "t1", "i, j -> i, j // 6, j // 2 % 3, j % 2", "s0, 2, 3, 2"),
        ("layer_norm", "t2", "a, b -> b, a", "s1, s0"),
        ("stencil", "t0", "i -> i % 6, i // 6", "6, 3"),
    ],
)
def test_layouts(
    nest: str, buffer: str, mapping: str, shape: str, nests: Mapping[str, LoopNest], proved: Prove
) -> None:
    s = proved(nests[nest], lambda s: s.transform_layout(buffer, mapping))
    assert ", ".join(map(str, s.nest.buffer(buffer).shape)) == shape


def test_a_packed_copy_of_an_operand(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """As a matrix product wants its right operand: panels of columns, each contiguous."""

    def build(s: Schedule) -> None:
        s.cache_read("b0", "in0")
        s.transform_layout("in0_local", "k, n -> n // 4, k, n % 4")
        s.split("b0_i0", [None, 4])

    s = proved(nests["transpose"], build)
    assert [int(e) for e in s.nest.buffer("in0_local").strides] == [48, 4, 1]


def test_loops_may_still_be_joined(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.transform_layout("t0", "i -> i // 4, i % 4")
        s.merge("b0_i0", "b1_i0")
        s.parallel("b0_i0")

    proved(nests["chain"], build)


@pytest.mark.parametrize(
    ("buffer", "mapping", "reason"),
    [
        ("in0", "i, j -> j, i", "in0 is no buffer of the nest's own"),
        ("t1", "i, j -> i", "the new indices do not tell all of j"),
        ("t1", "i, j -> i // 2, j", "the new indices do not tell all of i"),
        ("t1", "i, j -> i, j // 4, j % 2", "the new indices do not tell all of j"),
        ("t1", "i, j -> i, j % 8", "the new indices do not tell all of j"),
        ("t1", "i, j -> i + j", "the digits in i + j run into each other"),
        ("t1", "i, j -> i * 8 + j", "the digits in 8*i + j run into each other"),
        ("t1", "i, j -> i * j, i", "i*j is no digit of a dimension"),
        ("t1", "i -> i", "t1 has 2 dimensions, and the mapping names 1"),
        ("t1", "i, j -> k, i, j", "the mapping speaks of k, which is nothing"),
        ("t1", "s0, j -> s0, j", "the mapping needs a name of its own for each dimension before the arrow"),
        ("t1", "i, j", "the mapping has no arrow"),
        ("t1", "i, j -> (", "the mapping cannot be read"),
        ("t1", "i, 3 -> i", "the mapping cannot be read"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], buffer: str, mapping: str, reason: str) -> None:
    s = Schedule(nests["softmax"])
    with pytest.raises(ScheduleError) as caught:
        s.transform_layout(buffer, mapping)
    assert caught.value.reason.startswith(reason) and s.nest is nests["softmax"]
