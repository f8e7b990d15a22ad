"""Loads behind a condition that reads memory itself: done beside it, or where it holds."""

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
def f(in0: float32[{m}, {k}], in1: float32[{m}, {n}], out0: output(float32[{m}, {n}])):
    i0 = row({m})
    i1 = row({n})
    t0 = compute(rows, select(lt(in0[i0, {by}], float32(0.25)), mul(in1[i0, {at}], float32(3.0)), float32(7.0)))
    out0[i0, i1] = t0
"""


def is_masked(agrees, n: int, by: str = "i1", at: str = "i1", k: int | None = None) -> list[bool]:
    """Of the loads of ``in1``, whether they have a mask; the kernel is compared with its definition."""
    function = parse(TEXT.format(m=3, n=n, k=n if k is None else k, by=by, at=at))
    assert isinstance(function, TensorFunction)
    source = agrees(default_schedule(lower_to_loops(function), SM90).nest)
    return ["mask=" in line for line in re.findall(r"tl\.load\(in1_ptr.*", source.text)]


def test_an_element_of_each_is_loaded_whatever_the_condition_reads(agrees):
    assert is_masked(agrees, 1024) == [False]
    assert is_masked(agrees, 1024, at="1023 - i1") == [False]


@pytest.mark.parametrize("n", [1, 37, 1000])
def test_lanes_that_hold_no_element_load_none(agrees, n: int):
    assert is_masked(agrees, n)


def test_a_condition_of_many_elements_spares_loading_them(agrees):
    assert is_masked(agrees, 1024, by="0", k=1) == [True]


def test_what_may_lie_outside_is_loaded_where_the_condition_holds(agrees):
    text = TEXT.format(m=3, n=1024, k=1024, by="i1", at="i1 + 1")
    text = text.replace("lt(in0[i0, i1], float32(0.25))", "logical_and(lt(in0[i0, i1], float32(0.25)), {inside})")
    function = parse(text.format(inside="lt(index(i1, int64), int64(1023))"))
    assert isinstance(function, TensorFunction)
    source = agrees(default_schedule(lower_to_loops(function), SM90).nest)
    assert all("mask=" in line for line in re.findall(r"tl\.load\(in1_ptr.*", source.text))
