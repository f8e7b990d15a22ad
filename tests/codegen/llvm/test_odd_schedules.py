"""Schedules that no rule makes: odd numbers of vectors, and tails of loops whose lanes are all live."""

from __future__ import annotations

import pytest
import torch

import torch_mlc
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.schedule.schedule import Schedule


def lowered(text: str) -> LoopNest:
    function = parse(text)
    assert isinstance(function, TensorFunction)
    return lower_to_loops(function)


TRANSPOSE = """
@function
def f(x: tensor(float32, [{columns}, {rows}], align=16), o: output(tensor(float32, [{rows}, {columns}], align=16))):
    i0 = row({rows})
    i1 = row({columns})
    t = compute(points, x[i1, i0])
    o[i0, i1] = t
"""


@pytest.mark.parametrize("columns", [24, 40, 48, 56, 88, 96])
def test_tiles_of_any_number_of_blocks(columns: int) -> None:
    """Lanes of a last part, and of a whole loop, are no power of two of the blocks that are transposed."""
    x = torch.randn(columns, 32)
    for lanes in (32, 64, columns):
        s = Schedule(lowered(TRANSPOSE.format(rows=32, columns=columns)))
        outer, inner = s.split("b0_i0", [None, 8])
        wide = "b0_i1"
        if lanes < columns:
            _, wide = s.split(wide, [None, lanes])
        s.reorder(outer, *(lp for lp in s.get_loops("b0") if lp not in (outer, inner, wide)), inner, wide)
        s.unroll(inner)
        s.vectorize(wide)
        assert torch.equal(torch_mlc.compile(s)(x), x.t())


SUM = """
@function
def f(x: tensor(float32, [5, {n}], align=16), o: output(tensor(float32, [5], align=16))):
    i0 = row(5)
    r0 = inner({n})
    t, = reduce({monoid}, rows, inner, (x[i0, r0],))
    o[i0] = t
"""


@pytest.mark.parametrize("monoid", ["sum", "max"])
@pytest.mark.parametrize("n", [64, 384, 768, 700])
@pytest.mark.parametrize("lanes", [16, 64, 128])
def test_copies_of_vectors_of_which_the_last_are_left_out(n: int, lanes: int, monoid: str) -> None:
    """The copies of an unrolled loop end within its last iteration: there all lanes are live, or none."""
    x = torch.randint(-9, 9, (5, n)).float()
    for copies in (3, 4):
        s = Schedule(lowered(SUM.format(n=n, monoid=monoid)))
        vectors, inner = s.split("b0_r0", [None, lanes])
        s.vectorize(inner)
        s.unroll(s.split(vectors, [None, copies])[1])
        assert torch.equal(torch_mlc.compile(s)(x), x.sum(1) if monoid == "sum" else x.amax(1))
