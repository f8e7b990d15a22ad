"""Reductions over no elements, whatever order their loops are in; workspaces of the nest's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from torch_mlc.codegen.kernel import EmitError
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.schedule.schedule import Schedule

COLUMNS = """
@nest(outputs=["out0", "out1"])
def columns(in0: float32[s0, s1], out0: float32[s1], out1: int64[s1]):
    s0 = size()
    s1 = size()
    for i in serial(s1):
        for r in serial(s0):
            with block("b0"):
                a = spatial(s1, i)
                b = reduction(s0, r)
                (out0[a], out1[a]) = argmax.update(in0[b, a], index(b, int64))
"""
CHAIN = """
@nest(outputs=["out0"])
def chain(in0: float32[s0], out0: float32[s0]):
    s0 = size()
    t0 = local(float32[s0])
    for i in serial(s0):
        with block("b0"):
            a = spatial(s0, i)
            t0[a] = add(in0[a], float32(1.0))
    for j in serial(s0):
        with block("b1"):
            a = spatial(s0, j)
            out0[a] = mul(t0[a], t0[s0 - 1 - a])
"""


def nest_of(text: str) -> LoopNest:
    nest = parse(text.strip() + "\n")
    assert isinstance(nest, LoopNest)
    return nest


def reordered(s: Schedule) -> None:
    s.reorder("r", "i")


def lanes_inside(s: Schedule) -> None:
    outer, inner = s.split("i", [None, 4])
    s.reorder("r", outer, inner)
    s.vectorize(inner)


def in_a_team(s: Schedule) -> None:
    outer, inner = s.split("i", [None, 3])
    s.reorder(outer, "r", inner)
    s.parallel(outer)


@pytest.mark.parametrize("build", [reordered, lanes_inside, in_a_team])
def test_targets_in_memory_are_begun_where_there_is_nothing_to_reduce(
    build: Callable[[Schedule], None], execute: Callable[..., dict[str, np.ndarray]], target: Target
) -> None:
    s = Schedule(nest_of(COLUMNS))
    build(s)
    for n, m in ((0, 5), (3, 7), (0, 0), (1, 4)):
        x, sizes = np.arange(n * m, dtype=np.float32).reshape(n, m), {"s0": n, "s1": m}
        want = run_nest(s.nest, [x], sizes)
        for name, array in execute(s.nest, [x], sizes, target).items():
            np.testing.assert_array_equal(array, want[name])


def test_targets_of_which_there_are_none(execute: Callable[..., dict[str, np.ndarray]], target: Target) -> None:
    """A loop of them that is written out has no iteration to write."""
    text = COLUMNS.replace("s0 = size()", "").replace("s1 = size()", "").replace("s1", "0").replace("s0", "2")
    s = Schedule(nest_of("\n".join(line for line in text.split("\n") if line.strip())))
    s.reorder("r", "i")
    s.unroll("i")
    got = execute(s.nest, [np.zeros((2, 0), np.float32)], {}, target)
    assert {name: array.shape for name, array in got.items()} == {"out0": (0,), "out1": (0,)}


def test_one_loop_over_targets_and_elements_that_may_be_none_is_an_error(target: Target) -> None:
    text = COLUMNS.replace("for i in serial(s1):\n        for r in serial(s0):", "for i in serial(s1*s0):")
    text = text.replace("(s1, i)", "(s1, i // s0)").replace("(s0, r)", "(s0, i % s0)")
    text = "\n".join(line[4:] if line.startswith(" " * 12) else line for line in text.split("\n"))
    with pytest.raises(EmitError, match="nothing would begin them"):
        emit_llvm(nest_of(text), target)
    assert "define" in emit_llvm(nest_of(text.replace("s0 = size()", "s0 = size(lower=1)")), target).text


@pytest.mark.parametrize("n", [1, 5, 40000])
def test_a_workspace_is_seen_by_all_threads(
    n: int, execute: Callable[..., dict[str, np.ndarray]], target: Target
) -> None:
    s = Schedule(nest_of(CHAIN))
    s.set_scope("t0", "global")
    s.parallel("i")
    s.parallel("j")
    x = np.arange(n, dtype=np.float32) % 7
    got = execute(s.nest, [x], {"s0": n}, target)["out0"]
    np.testing.assert_array_equal(got, (x + 1) * (x + 1)[::-1])
