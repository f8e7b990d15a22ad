"""split: factors, tails, and what is proved of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import sympy

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]


def test_a_tail_becomes_a_predicate(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["pointwise"], lambda s: s.split("b0_i0", [None, 8]))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def pointwise(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b0_i0_0 in serial((s0 + 7) // 8):
                for b0_i0_1 in serial(8):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0_1 + 8*b0_i0_0)
                        where(b0_i0_1 + 8*b0_i0_0 < s0)
                        out0[i0] = mul(in0[i0], in0[i0])
        """)


def test_a_size_known_to_be_divisible_has_no_tail(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["plane"], lambda s: s.split("b0_i0", [None, 4], tail="perfect"))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def plane(in0: tensor(float32, [s0, 8], strides=[16, 1]), in1: float32[8], out0: float32[s0, 8]):
            s0 = size(lower=4, divisor=4)
            for b0_i0_0 in serial(s0 // 4):
                for b0_i0_1 in serial(4):
                    for b0_i1 in serial(8):
                        with block("b0"):
                            i0 = spatial(s0, b0_i0_1 + 4*b0_i0_0)
                            i1 = spatial(8, b0_i1)
                            out0[i0, i1] = add(in0[i0, i1], in1[i1])
        """)


def test_a_tail_of_a_tail_is_one_predicate(nests: Mapping[str, LoopNest], proved: Prove, parsed: Parse) -> None:
    s = proved(nests["pointwise"], lambda s: s.split(s.split("b0_i0", [None, 4])[0], [None, 8]))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def pointwise(in0: float32[s0], out0: float32[s0]):
            s0 = size(lower=1)
            for b0_i0_0_0 in serial((s0 + 31) // 32):
                for b0_i0_0_1 in serial(8):
                    for b0_i0_1 in serial(4):
                        with block("b0"):
                            i0 = spatial(s0, b0_i0_1 + 4*b0_i0_0_1 + 32*b0_i0_0_0)
                            where(b0_i0_1 + 4*b0_i0_0_1 + 32*b0_i0_0_0 < s0)
                            out0[i0] = mul(in0[i0], in0[i0])
        """)


def test_the_inner_loop_of_a_tail_keeps_its_own(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Splitting the inner loop by what does not divide it is a tail of its own, which the first does not imply."""

    def build(s: Schedule) -> None:
        s.split(s.split("b0_i0", [None, 8])[1], [None, 3])

    assert len(proved(nests["pointwise"], build).block("b0").predicate) == 2


@pytest.mark.parametrize("factors", [[3, None], [2, None, 3], [None], [7], [4, 4], [None, 5, 2], [13, 1]])
def test_any_factors_that_cover_the_loop_will_do(
    nests: Mapping[str, LoopNest], proved: Prove, factors: list[int]
) -> None:
    static = 12 if 7 not in factors else 7
    loop = "b0_i1" if static == 12 else "b0_r1"
    s = proved(nests["transpose" if static == 12 else "argmax"], lambda s: s.split(loop, factors))
    assert len(s.trace.steps[0].results) == len(factors)


def test_a_factor_may_be_a_size(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    n = sympy.Symbol("s1", integer=True, nonnegative=True)
    s = proved(nests["layer_norm"], lambda s: s.split("b1_i0", [None, n]))
    assert s.extent("b1_i0_1") == n


def test_every_block_under_the_loop_gets_the_predicate(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    def build(s: Schedule) -> None:
        for k in (1, 2, 3):
            s.merge("b0_i0", f"b{k}_i0")
        s.split("b0_i0", [None, 4])

    s = proved(nests["softmax"], build)
    assert all(len(s.block(b).predicate) == 1 for b in s.get_blocks())


@pytest.mark.parametrize(
    ("nest", "loop", "factors", "tail", "reason"),
    [
        ("pointwise", "b0_i0", [None, 8], "perfect", "extent s0 is not provably divisible by 8"),
        ("transpose", "b0_i1", [None, 5], "perfect", "extent 12 is not provably divisible by 5"),
        ("transpose", "b0_i1", [2, 5], "predicate", "10 iterations do not cover extent 12"),
        ("pointwise", "b0_i0", [64], "predicate", "64 iterations do not cover extent s0"),
        ("pointwise", "b0_i0", [None, None], "predicate", "at most one of them None"),
        ("pointwise", "b0_i0", [None, 0], "predicate", "must be positive"),
        ("pointwise", "b0_i0", [], "predicate", "must be positive"),
        ("pointwise", "b0_i0", [None, 2], "mask", "it is 'predicate' or 'perfect'"),
        ("pointwise", "i0", [None, 2], "predicate", "there is no loop i0"),
    ],
)
def test_refusals(
    nests: Mapping[str, LoopNest], nest: str, loop: str, factors: list[int | None], tail: str, reason: str
) -> None:
    s = Schedule(nests[nest])
    with pytest.raises(ScheduleError) as caught:
        s.split(loop, factors, tail)
    assert reason in caught.value.reason
    assert s.nest is nests[nest] and not s.trace.steps


def test_a_bound_loop_is_not_split(nests: Mapping[str, LoopNest]) -> None:
    s = Schedule(nests["pointwise"])
    s.parallel("b0_i0")
    with pytest.raises(ScheduleError, match="parallel already"):
        s.split("b0_i0", [None, 8])


def test_the_error_shows_the_place_and_the_mend(nests: Mapping[str, LoopNest]) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(nests["pointwise"]).split("b0_i0", [None, 32], tail="perfect")
    text = str(caught.value).splitlines()
    assert text[0] == ("split(b0_i0, factors=(None, 32)): extent s0 is not provably divisible by 32 and tail='perfect'")
    loop = next(k for k, line in enumerate(text) if "for b0_i0 in" in line)
    assert text[loop + 1].split() == ["^^^^^", "here"]
    assert text[loop + 1].index("^") == text[loop].index("b0_i0")
    assert text[-1] == "hint: use tail='predicate', or mark the dimension divisible"
