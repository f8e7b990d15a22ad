"""Nests without a reduction whose stages are over different loops: what is made once for a row, among elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.nest.loops import LoopKind, LoopNest, blocks
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.rules import default_schedule

SM90 = gpu_target("cuda:sm_90")

# Elements, then a number for each row, then elements that read both.
ROWS = """
@nest(outputs=[{outputs}])
def kernel(in0: tensor(float32, [5, 37]), in1: tensor(float32, [5]), out0: tensor(float32, [5, 37]){more}):
    t0 = local(float32[5, 37])
    t1 = local(float32[5, 37])
    t2 = local(float32[5])
    for b0_i0 in serial(5):
        for b0_r0 in serial(37):
            with block('b0'):
                i0 = spatial(5, b0_i0)
                r0 = spatial(37, b0_r0, dim=inner)
                t0[i0, r0] = exp(in0[i0, r0])
                t1[i0, r0] = mul(in0[i0, r0], float32(0.5))
    for b1_i0 in serial(5):
        with block('b1'):
            i0 = spatial(5, b1_i0)
            t2[i0] = exp(in1[i0])
            {of_row}
    for b2_i0 in serial(5):
        for b2_r0 in serial(37):
            with block('b2'):
                i0 = spatial(5, b2_i0)
                r0 = spatial(37, b2_r0, dim=inner)
                out0[i0, r0] = add(mul(t0[i0, r0], t2[i0]), mul(t1[i0, r0], t2[i0]))
"""
NUMBER = """
@nest(outputs=['out0', 'out1'])
def kernel(in0: tensor(float32, [700]), in1: tensor(float32, []), out0: tensor(float32, [700]), out1: tensor(float32, [{alone}])):
    t0 = local(float32[700])
    t1 = local(float32[()])
    t2 = local(float32[()])
    for b0_r0 in serial(700):
        with block('b0'):
            r0 = spatial(700, b0_r0, dim=inner)
            t0[r0] = exp(in0[r0])
            {first}
    with block('b1'):
        t1[()] = exp(in1[()])
        t2[()] = mul(t1[()], float32(2.0))
        {second}
    for b2_r0 in serial(700):
        with block('b2'):
            r0 = spatial(700, b2_r0, dim=inner)
            out0[r0] = add(mul(t0[r0], t1[()]), t2[()])
"""  # noqa: E501
ALONE = """
@nest(outputs=['out0', 'out1'])
def kernel(in0: tensor(float32, [5, 37]), in1: tensor(float32, [5]), out0: tensor(float32, [5, 37]), out1: tensor(float32, [5])):
    t0 = local(float32[5, 37])
    for b0_i0 in serial(5):
        for b0_r0 in serial(37):
            with block('b0'):
                i0 = spatial(5, b0_i0)
                r0 = spatial(37, b0_r0, dim=inner)
                t0[i0, r0] = exp(in0[i0, r0])
    for b1_i0 in serial(5):
        with block('b1'):
            i0 = spatial(5, b1_i0)
            out1[i0] = exp(in1[i0])
    for b2_i0 in serial(5):
        for b2_r0 in serial(37):
            with block('b2'):
                i0 = spatial(5, b2_i0)
                r0 = spatial(37, b2_r0, dim=inner)
                out0[i0, r0] = mul(t0[i0, r0], in1[i0])
"""  # noqa: E501
EVEN = {
    "rows": ROWS.format(outputs="'out0'", more="", of_row="t2[i0] = exp(in1[i0])"),
    "a result of each row": ROWS.format(
        outputs="'out0', 'out1'", more=", out1: tensor(float32, [5])", of_row="out1[i0] = mul(in1[i0], in1[i0])"
    ),
    "one number": NUMBER.format(alone=700, first="out1[r0] = mul(in0[r0], in0[r0])", second="t2[()] = in1[()]"),
    "a result that is one number": NUMBER.format(alone="", first="t0[r0] = exp(in0[r0])", second="out1[()] = in1[()]"),
}


def nest_of(text: str) -> LoopNest:
    found = parse(text)
    assert isinstance(found, LoopNest)
    return found


@pytest.mark.parametrize("name", EVEN)
def test_every_element_is_a_lane(name: str, agrees: Callable[..., Any]) -> None:
    schedule = default_schedule(nest_of(EVEN[name]), SM90)
    assert schedule.rule == "gpu_pointwise"
    agrees(schedule.nest)
    kinds = (LoopKind.BLOCK_X, LoopKind.THREAD_X)
    assert all(lp.kind in kinds or lp.extent == 1 for _, outer in blocks(schedule.nest) for lp in outer)


def test_a_result_of_a_row_that_no_element_reads(agrees: Callable[..., Any]) -> None:
    schedule = default_schedule(nest_of(ALONE), SM90)
    assert schedule.rule.startswith("gpu_row")
    assert emit_triton(schedule.nest, SM90).text.count("exp(") == 2
    agrees(schedule.nest)
