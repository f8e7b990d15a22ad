"""Loads behind a condition: which of them every lane may do, and which those alone where it holds."""

from __future__ import annotations

import re

import pytest

from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")
TEXT = """
@function
def f(in0: float32[{m}, {n}], in1: float32[{k}], out0: output(float32[{m}, {n}])):
    {sizes}
    i0 = row({m})
    i1 = row({n})
    t0 = compute(rows, select(lt(in0[i0, i1], float32(0.25)), div(in0[i0, 0], in1[{at}]), float32(7.0)))
    out0[i0, i1] = t0
"""


def masked_loads(agrees, m: object, n: object, k: object, at: str, sizes: str = "", **given: int) -> list[bool]:
    """Of the loads of ``in1``, whether they have a mask; the kernel is compared with its definition."""
    function = parse(TEXT.format(m=m, n=n, k=k, at=at, sizes=sizes))
    assert isinstance(function, TensorFunction)
    source = agrees(default_schedule(lower_to_loops(function, SM90), SM90).nest, given)
    return ["mask=" in line for line in re.findall(r"tl\.load\(in1_ptr.*", source.text)]


@pytest.mark.parametrize(("m", "n"), [(3, 2048), (5, 1024)])
@pytest.mark.parametrize(("k", "at"), [(1, "0"), (9, "i0"), (9, "8 - i0")])
def test_what_is_the_same_for_a_row_is_loaded_once_whatever_the_condition(agrees, m: int, n: int, k: int, at: str):
    assert masked_loads(agrees, m, n, k, at) == [False]


@pytest.mark.parametrize("n", [1, 37, 1000])
def test_rows_that_are_no_multiple_of_a_tile(agrees, n: int):
    assert len(masked_loads(agrees, 7, n, 9, "i0 + 2")) == 1


@pytest.mark.parametrize(("lower", "masked"), [(0, True), (1, False)])
@pytest.mark.parametrize("s0", [1, 5])
def test_an_array_that_may_be_empty_has_no_first_element(agrees, lower: int, masked: bool, s0: int):
    assert masked_loads(agrees, 3, 2048, "s0", "0", f"s0 = size(lower={lower})", s0=s0) == [masked]


@pytest.mark.parametrize(("k", "at"), [(2, "i0 - 1"), (2, "i0")])
def test_what_a_condition_keeps_inside_of_an_array_is_loaded_where_it_holds(agrees, k: int, at: str):
    text = TEXT.replace("lt(in0[i0, i1], float32(0.25))", "logical_and(lt(in0[i0, i1], float32(0.25)), {inside})")
    inside = {"i0 - 1": "gt(index(i0, int64), int64(0))", "i0": "lt(index(i0, int64), int64(2))"}[at]
    function = parse(text.format(m=3, n=2048, k=k, at=at, sizes="", inside=inside))
    assert isinstance(function, TensorFunction)
    source = agrees(default_schedule(lower_to_loops(function, SM90), SM90).nest)
    assert all("mask=" in line for line in re.findall(r"tl\.load\(in1_ptr.*", source.text))
