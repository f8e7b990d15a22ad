"""Scatters in graphs and in loop nests: their text, their rules, and what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.graph.graph import Graph, Scatter
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.oracle.oracle import OracleError, run_graph, run_nest
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.ir.verify.verify import verify

GRAPH = """
@graph
def main(x: float32[5, 3], at: int64[n], v: float32[n, 3]):
    n = size()
    y = scatter(sum, float32[5, 3], lambda i0, i1: x[i0, i1],
                [n, 3], lambda r0, r1: (v[r0, r1], at[r0], index(r1, int64)))
    z = scatter(None, float32[5, 3], lambda i0, i1: float32(0.0), [n], lambda r0: (v[r0, 0], at[r0], index(2, int64)))
    return (y, z,)
"""
NEST = """
@nest(outputs=['out'])
def f(at: int64[n], v: float32[n, 3], out: float32[5, 3]):
    n = size()
    for p in serial(5):
        for q in serial(3):
            with block('b0'):
                i0 = spatial(5, p)
                i1 = spatial(3, q)
                out[i0, i1] = float32(0.0)
    for r in serial(n):
        for s in serial(3):
            with block('b1'):
                x0 = scatter(n, r)
                x1 = spatial(3, s)
                out[at[x0], x1] = sum.update(v[x0, x1], begins=False)
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
    assert parse(show(graph())) == graph() and sum(isinstance(n, Scatter) for n in graph().nodes) == 2
    assert parse(show(nest())) == nest()
    verify(graph())
    verify(nest())


def test_duplicates_combine_in_order_and_the_last_one_stays() -> None:
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(7, 3)).astype(np.float32)
    at = np.array([4, 1, 1, 0, 4, 4, 2])
    out = run_graph(graph(), {"x": x, "at": at, "v": v}, {"n": 7})
    y, z = x.copy(), np.zeros_like(x)
    np.add.at(y, at, v)
    z[at, 2] = v[:, 0]
    np.testing.assert_allclose(out["y"], y, rtol=1e-6)
    np.testing.assert_array_equal(out["z"], z)
    total = np.zeros_like(x)
    np.add.at(total, at, v)
    np.testing.assert_allclose(run_nest(nest(), [at, v], {"n": 7})["out"], total, rtol=1e-6)


@pytest.mark.parametrize("wrong", [5, -1])
def test_a_place_out_of_range_is_an_error(wrong: int) -> None:
    at, v = np.array([0, wrong]), np.zeros((2, 3), np.float32)
    with pytest.raises(OracleError, match="update of"):
        run_nest(nest(), [at, v], {"n": 2})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("at[r0], index(r1, int64))", "at[r0])", "1 positions of 2 dimensions"),
        ("at[r0], index(r1, int64))", "at[r0], index(r0 + 7, int64))", ""),
        ("at[r0], index(r1, int64))", "at[r0], index(r1 + 3, int64))", "3..5"),
        ("at[r0], index(r1, int64))", "v[r0, r1], index(r1, int64))", "integer"),
        ("scatter(sum, ", "scatter(welford, ", "3 components"),
        ("(v[r0, r1]", "(at[r0]", "float32"),
        ("(v[r0, r1]", "(v[r0, i1]", "i1"),
    ],
)
def test_what_is_no_scatter_of_a_graph(old: str, new: str, says: str) -> None:
    assert old in GRAPH
    broken = graph(GRAPH.replace(old, new, 1))
    if not says:  # nothing is known of a size
        verify(broken)
        return
    with pytest.raises(VerifyError, match=says):
        verify(broken)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("x0 = scatter(n, r)", "x0 = spatial(n, r)", "may write the same places"),
        ("x0 = scatter(n, r)", "x0 = reduction(n, r)", "may write the same places"),
        (", begins=False", "", "begins by itself"),
    ],
)
def test_what_is_no_scatter_of_a_nest(old: str, new: str, says: str) -> None:
    with pytest.raises(VerifyError, match=says):
        verify(nest(NEST.replace(old, new)))


def test_keys_tell_what_is_combined() -> None:
    same = GRAPH.replace("r0", "q0").replace("i1", "j1")
    assert structural_key(graph(same)) == structural_key(graph())
    for old, new in (
        ("scatter(sum", "scatter(max"),
        ("index(2, int64)", "index(1, int64)"),
        ("[n, 3], lambda", "[n, 2], lambda"),
    ):
        assert old in GRAPH
        assert structural_key(graph(GRAPH.replace(old, new, 1))) != structural_key(graph())
