"""tensorize: contractions whose tile is that of an instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.printer import show
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.primitives.analysis.contraction import INTRINSICS, ContractionBlock, contraction_of
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_tile_of_a_product(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        s.blockize("m")
        s.tensorize("b0", "dot")
        s.bind("mo", "blockIdx.x")

    s = proved(nests["product"], build)
    assert s.block("b0").annotations == (("tensorize", "dot"),)
    found = contraction_of(s.block("b0"))
    assert isinstance(found, ContractionBlock) and found.dtypes == (DType.BFLOAT16, DType.BFLOAT16)
    assert [str(v) for v in (*found.m, *found.n, *found.k, *found.batch)] == ["i0", "i1", "r0"]
    assert INTRINSICS["dot"].kinds == ("cuda", "hip")


def test_factors_are_told_by_the_result(nests: Mapping[str, LoopNest], parsed: Parse) -> None:
    """In whatever order the product is written."""
    text = show(nests["product"])
    a, b = "cast(in0[i0, r0], float32)", "cast(in1[r0, i1], float32)"
    turned = parsed(text.replace(f"mul({a}, {b})", f"mul({b}, {a})"))
    assert turned != nests["product"]
    assert contraction_of(Schedule(turned).block("b0")) == contraction_of(Schedule(nests["product"]).block("b0"))


def test_from_one_loop_an_axis(parsed: Parse, proved: Prove) -> None:
    nest = parsed("""
        @nest(outputs=["out0"])
        def f(in0: float32[2, 8, 32], in1: float32[2, 16, 32], out0: float32[2, 8, 16]):
            for b in serial(2):
                for m in serial(8):
                    for n in serial(16):
                        for k in serial(32):
                            with block("b0"):
                                i0 = spatial(2, b)
                                i1 = spatial(8, m)
                                i2 = spatial(16, n)
                                r0 = reduction(32, k)
                                out0[i0, i1, i2] = sum.update(mul(in0[i0, i1, r0], in1[i0, i2, r0]))
        """)

    s = proved(nest, innermost_tile)
    found = contraction_of(s.block("b0"))
    assert isinstance(found, ContractionBlock) and [str(v) for v in found.batch] == ["i0"]


def innermost_tile(s: Schedule) -> None:
    _, inner = s.split("k", [None, 16])
    s.reorder("k_0", "m", "n", inner)
    for loop in ("m", "n", inner):
        s.bind(loop, "threadIdx.x")
    s.tensorize("b0", "dot")


def test_an_axis_of_neither_factor_is_one_of_a_batch(parsed: Parse, proved: Prove) -> None:
    text = """
        @nest(outputs=["out0"])
        def f(in0: float32[8, 32], in1: float32[16, 32], out0: float32[2, 8, 16]):
            for b in serial(2):
                for m in serial(8):
                    for n in serial(16):
                        for k in serial(32):
                            with block("b0"):
                                i0 = spatial(2, b)
                                i1 = spatial(8, m)
                                i2 = spatial(16, n)
                                r0 = reduction(32, k)
                                out0[i0, i1, i2] = sum.update(mul(in0[i1, r0], in1[i2, r0]))
        """
    s = proved(parsed(text), innermost_tile)
    found = contraction_of(s.block("b0"))
    assert isinstance(found, ContractionBlock) and [str(v) for v in found.batch] == ["i0"]
    s = Schedule(parsed(text))
    s.bind("b", "threadIdx.x")
    with pytest.raises(ScheduleError, match="the loop b of the tile runs over none of m, n and k alone"):
        innermost_tile(s)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("sum.update", "max.update", "it is no single sum"),
        ("mul(", "add(", "what it sums is no product"),
        ("in0[i0, r0]", "in0[i0, 0]", "its reduction axis r0 is not in both factors"),
        ("in1[r0, i1]", "in1[r0, 0]", "the loop n of the tile runs over none of m, n and k alone"),
        ("in0[i0, r0]", "in0[i1, r0]", "no loop of the tile run over m, the axes of which there are none"),
        ("n in thread_x", "n in serial", "no loop of the tile run over n, the axes i1"),
        ("k in thread_x(16)", "k in thread_x(8)", "k runs 8 times, and k of dot is a power of two of at least 16"),
        ("cast(in0[i0, r0], float32)", "add(cast(in0[i0, r0], float32), float32(1.0))", ""),
        ("in1: bfloat16", "in1: int32", "its operands are bfloat16 and float32, and dot takes"),
    ],
)
def test_what_is_no_tile(nests: Mapping[str, LoopNest], parsed: Parse, old: str, new: str, reason: str) -> None:
    text = show(nests["product"])
    assert old in text
    text = text.replace(old, new)
    if "int32" in new:
        text = text.replace("cast(in1[r0, i1], float32)", "in1[r0, i1]").replace("out0: float32", "out0: int32")
        text = text.replace("cast(in0[i0, r0], float32)", "cast(in0[i0, r0], int32)")
        reason = "its operands are int32 and int32, and dot takes float16, bfloat16, float32"
    s = Schedule(parsed(text))
    if not reason:
        s.tensorize("b0", "dot")
        return
    with pytest.raises(ScheduleError) as caught:
        s.tensorize("b0", "dot")
    assert reason in caught.value.reason
    assert any(line.strip().startswith("^^") for line in str(caught.value).splitlines())


def test_other_refusals(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["product"])
    with pytest.raises(ScheduleError, match="there is no intrinsic 'wmma'; there are dot"):
        s.tensorize("b0", "wmma")
    s.blockize("ko")
    with pytest.raises(ScheduleError, match="the unit ko holds more than the tile of b0"):
        s.tensorize("b0", "dot")


def test_it_stays_a_tile(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["product"])
    s.tensorize("b0", "dot")
    with pytest.raises(ScheduleError, match="b0_rf would be tensorized and no tile of dot: what it sums is no product"):
        s.rfactor("ko")
    s.reorder("ko", "mo")
