"""The last rows of tiles whose number is known only when the kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.schedule.schedule import Schedule

COLUMNS, TERMS = 4, 32
PRODUCTS = """
    @nest(outputs=["out0"])
    def products(in0: float32[s0, 32], in1: float32[4, 32], in2: float32[4, 32], out0: float32[s0, 4]):
        s0 = size()
        t0 = local(float32[s0, 4])
        t1 = local(float32[s0, 4])
        for i in serial(s0):
            for j in serial(4):
                for k in serial(32):
                    with block("b0"):
                        i0 = spatial(s0, i)
                        i1 = spatial(4, j)
                        r0 = reduction(32, k)
                        t0[i0, i1] = sum.update(mul(in0[i0, r0], in1[i1, r0]))
        for i_ in serial(s0):
            for j_ in serial(4):
                for k_ in serial(32):
                    with block("b1"):
                        i0 = spatial(s0, i_)
                        i1 = spatial(4, j_)
                        r0 = reduction(32, k_)
                        t1[i0, i1] = max.update(sub(in0[i0, r0], in2[i1, r0]))
        for i__ in serial(s0):
            for j__ in serial(4):
                with block("b2"):
                    i0 = spatial(s0, i__)
                    i1 = spatial(4, j__)
                    out0[i0, i1] = add(t0[i0, i1], t1[i0, i1])
    """


def tiled(tile: int, is_parallel: bool) -> LoopNest:
    """Tiles of rows, whose sums of all columns are in registers; the tiles one after the other, or for a team."""
    nest = parse(dedent(PRODUCTS).strip() + "\n")
    assert isinstance(nest, LoopNest)
    s = Schedule(nest)
    for rows, columns, terms in (("i", "j", "k"), ("i_", "j_", "k_"), ("i__", "j__", "")):
        outer, inner = s.split(rows, [None, tile])
        if terms:
            over, lane = s.split(terms, [None, 16])
            s.reorder(outer, over, columns, inner, lane)
            s.unroll(columns)
            s.vectorize(lane)
        else:
            s.reorder(outer, inner, columns)
            s.vectorize(columns)
        s.unroll(inner)
    s.merge("i_0", "i__0")
    s.merge("i_0", "i___0")
    if is_parallel:
        s.parallel("i_0")
    return s.nest


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("tile", [2, 3, 4, 5])
def test_rows_that_are_left(tile: int, is_parallel: bool, execute: Callable[..., Any], target: Target) -> None:
    nest = tiled(tile, is_parallel)
    generator = np.random.default_rng(tile)
    weights = [generator.integers(-4, 5, (COLUMNS, TERMS)).astype(np.float32) for _ in range(2)]
    for rows in (*range(tile + 1), 2 * tile - 1, 2 * tile + 1):
        x = generator.integers(-4, 5, (rows, TERMS)).astype(np.float32)
        (found,) = execute(nest, [x, *weights], {"s0": rows}, target).values()
        np.testing.assert_array_equal(found, x @ weights[0].T + (x[:, None] - weights[1][None]).max(-1))


def test_no_row_is_asked_about_for_each_term(target: Target) -> None:
    """A condition for each of 4 x 3 sums of two blocks would be 24 branches."""
    conditions = emit_llvm(tiled(3, False), target).text.count("br i1")
    assert conditions < 24, conditions


SUMS_IN_MEMORY = """
    @nest(outputs=["out0"])
    def sums(in0: float32[s0, s1], in1: float32[s1, s2], out0: float32[s0, s2]):
        s0 = size()
        s1 = size()
        s2 = size()
        for i in serial(s0):
            for j in serial(s2):
                for k in serial(s1):
                    with block("b0"):
                        i0 = spatial(s0, i)
                        i1 = spatial(s2, j)
                        r0 = reduction(s1, k)
                        out0[i0, i1] = sum.update(mul(in0[i0, r0], in1[r0, i1]))
    """


@pytest.mark.parametrize("terms", [0, 1, 7])
def test_sums_in_memory_begin_in_the_rows_that_are_left(
    terms: int, execute: Callable[..., Any], target: Target
) -> None:
    """Of no terms too: nothing is written behind the last row."""
    nest = parse(dedent(SUMS_IN_MEMORY).strip() + "\n")
    assert isinstance(nest, LoopNest)
    s = Schedule(nest)
    outer, inner = s.split("i", [None, 3])
    s.reorder(outer, "k", "j", inner)
    s.unroll(inner)
    generator = np.random.default_rng(terms)
    for rows in (1, 2, 4, 5):
        x, w = (generator.integers(-4, 5, shape).astype(np.float32) for shape in ((rows, terms), (terms, 6)))
        (found,) = execute(s.nest, [x, w], {"s0": rows, "s1": terms, "s2": 6}, target).values()
        np.testing.assert_array_equal(found, x @ w)
