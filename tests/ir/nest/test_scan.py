"""Scans in graphs and in loop nests: their text, their rules, and what they mean."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from torch_mlc.ir.errors import IRError, VerifyError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import MONOIDS, associative
from torch_mlc.ir.expr.value import Load
from torch_mlc.ir.graph.graph import Graph, Scan
from torch_mlc.ir.nest.loops import LoopNest, Update, blocks
from torch_mlc.ir.oracle.oracle import run_graph, run_nest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.ir.verify.verify import verify

GRAPH = """
@graph
def main(x: float32[n, 4]):
    n = size()
    y, = scan(sum, [float32[n, 4]], i1, lambda i0, i1: (exp(x[i0, i1]),))
    top, total = scan(logsumexp, [float32[n, 4], float32[n, 4]], i0, lambda i0, i1: (x[i0, i1], float32(1.0)))
    z = compute(float32[n, 4], lambda i0, i1: add(top[i0, i1], log(total[i0, i1])))
    return (y, z,)
"""
NEST = """
@nest(outputs=['out'])
def f(a: float32[3, n], out: float32[3, n]):
    n = size()
    state = local(float32[3])
    for p in serial(3):
        for qo in serial(n):
            with block('b0'):
                i0 = spatial(3, p)
                r0 = scan(n, qo)
                state[i0] = sum.update(a[i0, r0])
                out[i0, r0] = state[i0]
"""


def graph(text: str = GRAPH) -> Graph:
    parsed = parse(text)
    assert isinstance(parsed, Graph)
    return parsed


def nest(text: str = NEST) -> LoopNest:
    parsed = parse(text)
    assert isinstance(parsed, LoopNest)
    return parsed


def test_scripts_round_trip() -> None:
    assert parse(show(graph())) == graph() and sum(isinstance(n, Scan) for n in graph().nodes) == 2
    assert parse(show(nest())) == nest()
    ((block, _),) = blocks(nest())
    assert block.is_scan and block.is_reduction


USERS = "associative(select(lt(var('b0', float32), float32(0.0)), var('a0', float32), var('b0', float32)))"


def test_a_function_of_the_users_is_part_of_the_text() -> None:
    """The last of the elements that are not negative; with a neutral element adjoined."""
    text = NEST.replace("sum.update(a[i0, r0])", f"{USERS}.update(a[i0, r0], bool(True))")
    text = text.replace("                state[i0] =", "                (state[i0], some[i0]) =")
    text = text.replace("    for p in", "    some = local(bool[3])\n    for p in", 1)
    read = nest(text)
    assert parse(show(read)) == read
    assert structural_key(read) != structural_key(nest(text.replace("lt(", "le(")))
    a = np.array([[-1, 2, -3, 4], [0, -5, -6, -7], [-1, -1, -1, 8]], np.float32)
    got = run_nest(read, {"a": a}, {"n": 4})["out"]
    np.testing.assert_array_equal(got, [[-1, 2, 2, 4], [0, 0, 0, 0], [-1, -1, -1, 8]])
    combine = next(s.monoid for b, _ in blocks(read) for s in b.body if isinstance(s, Update))
    assert pickle.loads(pickle.dumps(combine)) == combine and combine.name not in MONOIDS
    with pytest.raises(IRError, match="a function of a0, b0 alone"):
        associative(Load("a", (), DType.FLOAT32))


def test_sound_ones_pass() -> None:
    verify(graph())
    verify(nest())


def test_the_axis_is_one_of_the_node() -> None:
    with pytest.raises(VerifyError, match="the scan axis r0 is none of its axes"):
        verify(graph(GRAPH.replace("i1, lambda i0, i1: (exp", "r0, lambda i0, i1: (exp")))


def test_there_is_a_value_for_each_component() -> None:
    with pytest.raises(VerifyError, match="logsumexp has 2 components, here 1"):
        verify(graph(GRAPH.replace("(x[i0, i1], float32(1.0))", "(x[i0, i1],)")))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_each_element_is_the_state_up_to_it(rows: int) -> None:
    x = np.random.default_rng(0).normal(0, 3, (rows, 4)).astype(np.float32)
    y, z = run_graph(graph(), [x], {"n": rows}).values()
    np.testing.assert_allclose(y, np.cumsum(np.exp(x.astype(np.float64)), 1), rtol=1e-5)
    np.testing.assert_allclose(z, np.logaddexp.accumulate(x.astype(np.float64), 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 6])
def test_a_nest_begins_anew_for_each_row(length: int) -> None:
    a = np.random.default_rng(1).normal(0, 1, (3, length)).astype(np.float32)
    (out,) = run_nest(nest(), [a], {"n": length}).values()
    np.testing.assert_allclose(out, np.cumsum(a, 1, dtype=np.float64), rtol=1e-5, atol=1e-6)


def test_keys_tell_axes_and_monoids_apart() -> None:
    other = (GRAPH.replace("float32[n, 4]], i1,", "float32[n, 4]], i0,"), GRAPH.replace("scan(sum", "scan(product"))
    keys = {structural_key(graph(text)) for text in (GRAPH, *other)}
    assert len(keys) == 3
    assert structural_key(graph(GRAPH.replace("y", "w"))) in keys
    kinds = {structural_key(nest(text)) for text in (NEST, NEST.replace("scan(n", "spatial(n"))}
    assert len(kinds) == 2
