"""Scatters as machine code: lanes whose places are data, tails, and reports of places out of range."""

from __future__ import annotations

import numpy as np
import pytest

from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.errors import OutOfRangeError
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.schedule import Schedule

EACH = """
@nest(outputs=["in2"], annotations={"in_place": "in2"})
def each(in0: int64[s0, s1], in1: float32[s0, s1], in2: float32[6, s1]):
    s0 = size()
    s1 = size()
    for x in serial(s0):
        for y in serial(s1):
            with block("b0"):
                x0 = scatter(s0, x)
                x1 = spatial(s1, y)
                in2[in0[x0, x1], x1] = sum.update(in1[x0, x1], begins=False)
"""


def nest_of(text: str = EACH) -> LoopNest:
    found = parse(text)
    assert isinstance(found, LoopNest)
    return found


def lanes(nest: LoopNest) -> LoopNest:
    s = Schedule(nest)
    _, lane = s.split("y", [None, 8])
    s.vectorize(lane)
    return s.nest


def run(nest: LoopNest, index: np.ndarray, values: np.ndarray, start: np.ndarray) -> np.ndarray:
    target = cpu_target()
    kernel = load_kernel(emit_llvm(nest, target), target)
    guard = np.full((start.shape[0] + 8, start.shape[1]), 7.0, np.float32)
    out = guard[4:-4]
    out[:] = start
    try:
        kernel(index.ctypes.data, values.ctypes.data, out.ctypes.data, *index.shape)
    finally:
        assert (guard[:4] == 7).all() and (guard[-4:] == 7).all()
    return out


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("how", ["sum", "product", "max", "min", "set"])
def test_places_of_each_lane(vector: bool, how: str) -> None:
    text = EACH.replace("sum.", f"{how}.")
    if how == "set":
        text = EACH.replace("sum.update(in1[x0, x1], begins=False)", "in1[x0, x1]")
    plain = nest_of(text)
    nest = lanes(plain) if vector else default_schedule(plain, cpu_target()).nest
    rng = np.random.default_rng(0)
    for rows, columns in ((9, 16), (5, 13), (3, 1), (0, 4)):
        index = rng.integers(0, 6, (rows, columns))
        values, start = (rng.normal(size=(n, columns)).astype(np.float32) for n in (rows, 6))
        wanted = run_nest(plain, {"in0": index, "in1": values, "in2": start}, {"s0": rows, "s1": columns})
        np.testing.assert_allclose(run(nest, index, values, start), wanted["in2"], rtol=1e-6)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("wrong", [6, -1, 1 << 50])
def test_places_out_of_range_are_reported(vector: bool, wrong: int) -> None:
    nest = lanes(nest_of()) if vector else nest_of()
    index = np.zeros((3, 13), np.int64)
    values, start = np.ones((3, 13), np.float32), np.zeros((6, 13), np.float32)
    for row, column in ((0, 0), (1, 7), (2, 12)):
        index[row, column] = wrong
        with pytest.raises(OutOfRangeError, match=f"index {wrong} is out of bounds for dimension 0 with size 6"):
            run(nest, index, values, start)
        index[row, column] = 0
    assert run(nest, index, values, start)[0].sum() == 39


@pytest.mark.parametrize("features", [1, 2, 3, 4, 5, 7, 8, 10, 11, 15])
def test_features_that_go_to_the_same_places(features: int) -> None:
    """Rows that are updated at the same places share what is made of these, whatever their number."""
    text = f"""
@nest(outputs=["out0"])
def f(in0: int64[50], in1: float32[{features}, 50], out0: float32[{features}, 9]):
    for c in serial({features}):
        for j in serial(9):
            with block("b0"):
                c0 = spatial({features}, c)
                j0 = spatial(9, j)
                out0[c0, j0] = float32(0.0)
    for e in serial({features}):
        for k in serial(50):
            with block("b1"):
                x0 = spatial({features}, e)
                x1 = scatter(50, k)
                out0[x0, in0[x1]] = sum.update(in1[x0, x1], begins=False)
"""
    nest, target = nest_of(text), cpu_target(2)
    rng = np.random.default_rng(features)
    index = rng.integers(0, 9, 50)
    values = rng.integers(-9, 9, (features, 50)).astype(np.float32)
    wanted = run_nest(nest, [index, values.reshape(-1)], {})["out0"]
    scheduled = default_schedule(nest, target)
    out = np.full((features, 9), 7.0, np.float32)
    load_kernel(emit_llvm(scheduled.nest, target), target)(index.ctypes.data, values.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, wanted.reshape(features, 9))
    exact = np.zeros((features, 9))
    np.add.at(exact, (slice(None), index), values)
    np.testing.assert_array_equal(out, exact)
