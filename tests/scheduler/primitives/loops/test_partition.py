"""partition: what is left of each interval's conditions, and where a loop may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import sympy

from torch_mlc.ir.expr.value import Load, Select, loads, walk
from torch_mlc.ir.nest.loops import Block, LoopNest, Store
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.schedule.schedule import Schedule

Parse, Prove = Callable[[str], LoopNest], Callable[..., Schedule]

# Three tensors side by side; the sizes of two are symbols, one of which may be none.
JOIN = """
    @nest(outputs=["out0"])
    def join(in0: float32[s0, s1], in1: float32[s0, s2], in2: float32[s0, 3], out0: float32[s0, s1 + s2 + 3]):
        s0 = size(lower=1)
        s1 = size(lower=0)
        s2 = size(lower=1)
        for b0_i0 in serial(s0):
            for b0_i1 in serial(s1 + s2 + 3):
                with block("b0"):
                    i0 = spatial(s0, b0_i0)
                    i1 = spatial(s1 + s2 + 3, b0_i1)
                    last = select(lt(index(i1, int64), index(s1 + s2, int64)), in1[i0, i1 - s1], in2[i0, i1 - s1 - s2])
                    out0[i0, i1] = exp(select(lt(index(i1, int64), index(s1, int64)), in0[i0, i1], last))
    """


def one_dimension(value: str) -> str:
    """A nest of one loop over 12 elements."""
    return f"""
        @nest(outputs=["out0"])
        def one(in0: float32[12], in1: float32[20], out0: float32[12]):
            for b0_i0 in serial(12):
                with block("b0"):
                    i0 = spatial(12, b0_i0)
                    out0[i0] = {value}
        """


def stored(s: Schedule, block: str) -> Store:
    (statement,) = s.block(block).body
    assert isinstance(statement, Store)
    return statement


def selects(s: Schedule, block: str) -> int:
    return sum(isinstance(e, Select) for e in walk(stored(s, block).value))


def test_each_part_of_a_join_has_a_loop(proved: Prove, parsed: Parse) -> None:
    s1, s2 = (sympy.Symbol(n, integer=True, nonnegative=True) for n in ("s1", "s2"))
    s = proved(parsed(JOIN), lambda s: s.partition("b0_i1", [s1, s1 + s2]))
    assert s.nest == parsed("""
        @nest(outputs=["out0"])
        def join(in0: float32[s0, s1], in1: float32[s0, s2], in2: float32[s0, 3], out0: float32[s0, s1 + s2 + 3]):
            s0 = size(lower=1)
            s1 = size(lower=0)
            s2 = size(lower=1)
            for b0_i0 in serial(s0):
                for b0_i1_0 in serial(s1):
                    with block("b0"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(s1, b0_i1_0)
                        out0[i0, i1] = exp(in0[i0, i1])
                for b0_i1_1 in serial(s2):
                    with block("b0_1"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(s2, b0_i1_1)
                        out0[i0, i1 + s1] = exp(in1[i0, i1])
                for b0_i1_2 in serial(3):
                    with block("b0_2"):
                        i0 = spatial(s0, b0_i0)
                        i1 = spatial(3, b0_i1_2)
                        out0[i0, i1 + s1 + s2] = exp(in2[i0, i1])
        """)


def test_loops_inside_are_copied(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    s = proved(nests["transpose"], lambda s: s.partition("b0_i0", [3, 4]))
    assert s.get_blocks() == ["b0", "b0_1", "b0_2"]
    loops = [s.get_loops(b) for b in s.get_blocks()]
    assert loops == [["b0_i0_0", "b0_i1"], ["b0_i0_1", "b0_i1_1"], ["b0_i0_2", "b0_i1_2"]]
    assert [s.extent(lp[0]) for lp in loops] == [3, 1, 6]


def test_what_stays_inside_a_part_is_its_own(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """A row's maximum and sum are made for each row: rows may be cut where all of a row's stages share the loop."""

    def build(s: Schedule) -> None:
        for k in (1, 2, 3):
            s.merge("b0_i0", f"b{k}_i0")
        s.partition("b0_i0", [1])

    s = proved(nests["softmax"], build)
    locals_ = [b.name for b in s.nest.locals]
    assert len(locals_) == len(set(locals_)) == 2 * len(nests["softmax"].locals)
    inside = [[s.block(b) for b in s.get_blocks() if lp in s.get_loops(b)] for lp in ("b0_i0_0", "b0_i0_1")]
    first, second = ({a.buffer for b in found for a in (*b.reads, *b.writes)} for found in inside)
    assert not first & second & set(locals_)


def test_parts_are_scheduled_apart(proved: Prove, parsed: Parse) -> None:
    def build(s: Schedule) -> None:
        first, second = s.partition("b0_i0", [7])
        _, lane = s.split(first, [None, 4])
        s.vectorize(lane)
        s.unroll(second)

    value = "select(lt(index(i0, int64), int64(7)), in0[i0], in1[i0])"
    s = proved(parsed(one_dimension(value)), build)
    assert [len(s.block(b).predicate) for b in s.get_blocks()] == [1, 0]


def test_points_may_be_symbolic_and_parts_empty(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Of a size of at least one, the last element apart: the rest may be none."""
    s0 = nests["pointwise"].symbols.symbols[0]
    s = proved(nests["pointwise"], lambda s: s.partition("b0_i0", [s0 - 1]))
    assert [s.extent(s.get_loops(b)[0]) for b in s.get_blocks()] == [s0 - 1, 1]


@pytest.mark.parametrize(
    ("value", "points", "left"),
    [
        ("select(ge(index(i0 + 2, int64), int64(7)), in0[i0], in1[i0])", [5], [0, 0]),
        ("select(le(int64(4), index(i0, int64)), in0[i0], in1[i0])", [4], [0, 0]),
        ("select(eq(index(i0, int64), int64(6)), in0[i0], in1[i0])", [6, 7], [0, 0, 0]),
        ("select(ne(index(i0, int64), int64(6)), in0[i0], in1[i0])", [6], [0, 1]),
        ("select(logical_not(lt(index(i0, int64), int64(4))), in0[i0], in1[i0])", [4], [0, 0]),
        ("select(logical_and(ge(index(i0, int64), int64(3)), lt(index(i0, int64), int64(8))), in0[i0], in1[i0])",
         [3, 8], [0, 0, 0]),
        ("select(logical_or(lt(index(i0, int64), int64(3)), gt(in0[i0], float32(0.0))), in0[i0], in1[i0])",
         [3], [0, 1]),
        ("select(lt(index(2 * i0, int64), int64(10)), in0[i0], in1[i0])", [5], [0, 0]),
        ("select(lt(index(i0, int64), int64(5)), in0[i0], in1[i0])", [4], [0, 1]),
    ],
)  # fmt: skip
def test_conditions_that_an_interval_decides_are_gone(
    value: str, points: list[int], left: list[int], proved: Prove, parsed: Parse
) -> None:
    s = proved(parsed(one_dimension(value)), lambda s: s.partition("b0_i0", points))
    assert [selects(s, b) for b in s.get_blocks()] == left


def test_a_rotation_is_two_copies(proved: Prove, parsed: Parse) -> None:
    s = proved(parsed(one_dimension("in0[ModularIndexing(i0 + 5, 1, 12)]")), lambda s: s.partition("b0_i0", [7]))
    found = [next(loads(stored(s, b).value)) for b in s.get_blocks()]
    assert [str(ld.indices[0]) for ld in found if isinstance(ld, Load)] == ["i0 + 5", "i0"]


def test_a_bound_moves_along(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """A tail of another loop stays what it is in each part."""

    def build(s: Schedule) -> None:
        s.split("b0_i1", [None, 8])
        s.partition("b0_i0", [4])

    s = proved(nests["transpose"], build)
    for b in s.get_blocks():
        (bound,) = s.block(b).predicate
        assert {v.name for v in bound.lhs.free_symbols} == set(s.get_loops(b)[1:])


def test_a_part_may_be_cut_again(proved: Prove, parsed: Parse) -> None:
    value = "select(lt(index(i0, int64), int64(7)), in0[i0], in1[i0])"
    s = proved(parsed(one_dimension(value)), lambda s: s.partition(s.partition("b0_i0", [4])[1], [3]))
    assert [selects(s, b) for b in s.get_blocks()] == [0, 0, 0]
    assert len({n for b in s.get_blocks() for n in s.get_loops(b)}) == 3


@pytest.mark.parametrize(
    ("nest", "loop", "points", "reason"),
    [
        ("transpose", "b0_i1", [], "the points must be numbers or expressions in sizes"),
        ("transpose", "b0_i1", [0], "the interval from 0 to 0 is empty"),
        ("transpose", "b0_i1", [12], "the interval from 12 to 12 is empty"),
        ("transpose", "b0_i1", [13], "the interval from 13 to 12 is not provably one"),
        ("transpose", "b0_i1", [5, 4], "the interval from 5 to 4 is not provably one"),
        ("transpose", "b0_i1", [sympy.Symbol("b0_i0", integer=True, nonnegative=True)], "expressions in sizes"),
        ("pointwise", "b0_i0", [2], "the interval from 2 to s0 is not provably one"),
        ("pointwise", "b1_i0", [1], "there is no loop b1_i0"),
        ("chain", "b0_i0", [1], "b1, outside of the loop, uses t0"),
        ("column_sum", "b0_r0", [1], "b0 needs all of it for one result"),
    ],
)
def test_refusals(nests: Mapping[str, LoopNest], nest: str, loop: str, points: list[sympy.Expr], reason: str) -> None:
    s = Schedule(nests[nest])
    with pytest.raises(ScheduleError) as caught:
        s.partition(loop, points)
    assert reason in caught.value.reason and s.nest is nests[nest] and not s.trace.steps


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda s: s.parallel("b0_i0"), "the loop is parallel already"),
        (lambda s: s.split("b0_i0", [None, 5]), "it is not one whole axis of b0"),
        (lambda s: s.bind("b0_i1", "blockIdx.x"), "b0_i1, inside it, is blockIdx.x"),
    ],
)
def test_refusals_of_loops_that_are_something_else(
    nests: Mapping[str, LoopNest], before: Callable[[Schedule], object], reason: str
) -> None:
    s = Schedule(nests["transpose"])
    before(s)
    with pytest.raises(ScheduleError) as caught:
        s.partition(s.get_loops("b0")[0], [1])
    assert reason in caught.value.reason


def test_a_piece_is_a_block_of_its_own_domain(nests: Mapping[str, LoopNest], proved: Prove) -> None:
    """Axes are as long as the interval, so that whatever looks at a block sees what it covers."""
    s = proved(nests["transpose"], lambda s: s.partition("b0_i1", [5]))
    found = [s.block(b) for b in s.get_blocks()]
    assert [b.axes[1].extent for b in found if isinstance(b, Block)] == [5, 7]
