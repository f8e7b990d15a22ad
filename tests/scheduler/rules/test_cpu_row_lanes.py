"""Lanes of rows on CPUs: enough of them in flight that a reduction of little work does not wait for itself."""

from __future__ import annotations

import pytest

from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import LoopKind, blocks
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

AVX2, WIDE = Target("cpu", "znver3", 2), Target("cpu", "znver5", 2, vector_bytes=64)

ROWS = """
@function
def f(x: tensor(float32, [4000, {n}], align=16), o: output(tensor(float32, [4000], align=16))):
    i0 = row(4000)
    r0 = inner({n})
    t, = reduce(sum, rows, inner, ({value},))
    o[i0] = t
"""


def lanes(n: int, target: Target, value: str = "x[i0, r0]") -> int:
    function = parse(ROWS.format(n=n, value=value))
    assert isinstance(function, TensorFunction)
    ((_, path),) = blocks(default_schedule(lower_to_loops(function), target).nest)
    (lane,) = [lp for lp in path if lp.kind is LoopKind.VECTORIZED]
    return int(lane.extent)


@pytest.mark.parametrize(
    ("n", "target", "wanted"),
    [
        (768, AVX2, 32), (768, WIDE, 64), (1000, AVX2, 32), (1000, WIDE, 64),  # no tail, or one in any case
        (784, AVX2, 32), (784, WIDE, 64), (1552, WIDE, 64), (200, AVX2, 32),  # a tail is less than waiting
        (112, AVX2, 16), (80, WIDE, 16), (208, WIDE, 32), (56, AVX2, 8),  # short rows
        (24, AVX2, 24),
    ],
)  # fmt: skip
def test_lanes_of_a_sum(n: int, target: Target, wanted: int) -> None:
    assert lanes(n, target) == wanted


def test_much_work_does_not_wait() -> None:
    """What is summed takes long enough to make: without a tail it is faster."""
    assert lanes(784, WIDE, "erf(mul(x[i0, r0], exp(x[i0, r0])))") == 16
