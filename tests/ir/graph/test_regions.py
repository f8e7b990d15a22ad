"""Calls of regions: their text, what they mean, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from torch_mlc.ir.errors import VerifyError
from torch_mlc.ir.graph.effects import has_effect, written
from torch_mlc.ir.graph.facts import aliases_of
from torch_mlc.ir.graph.graph import CallRegion, Graph, every_node, uses
from torch_mlc.ir.graph.regions import write_out_regions
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.text.parser import ParseError, parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.ir.verify.verify import verify

TEXT = """@graph
def main(x: float32[n, 8], w0: float32[8], w1: float32[8], w2: float32[8], m: float32[8]):
    n = size(lower=2)
    start = compute(float32[n, 8], lambda i0, i1: exp(x[i0, i1]))
    @graph
    def layer(a: float32[n, 8], before: float32[n, 8], w: float32[8], m: float32[8]):
        b = compute(float32[n, 8], lambda i0, i1: add(mul(a[i0, i1], w[i1]), m[i1]))
        c = compute(float32[n, 8], lambda i0, i1: sub(b[i0, i1], before[i0, i1]))
        return (c, a, b)
    last, other, b0, b1, b2 = repeat(layer, 3, [start, x], [[w0, w1, w2]], [m])
    y = compute(float32[n, 8], lambda i0, i1: mul(last[i0, i1], other[i0, i1]))
    return (y, b0, b1, b2, w1)
"""


def read(text: str = TEXT) -> Graph:
    found = parse(text)
    assert isinstance(found, Graph)
    return found


def test_text_and_key() -> None:
    graph = read()
    verify(graph)
    assert show(graph) == TEXT and parse(show(graph)) == graph
    renamed = read(
        TEXT.replace("layer", "block").replace("b = ", "bb = ").replace("b[", "bb[").replace("a, b)", "a, bb)")
    )
    assert renamed != graph and structural_key(renamed) == structural_key(graph)
    assert structural_key(read(TEXT.replace("sub(b", "add(b"))) != structural_key(graph)


def test_what_it_tells() -> None:
    node = next(n for n in read().nodes if isinstance(n, CallRegion))
    assert uses(node) == ("start", "x", "w0", "w1", "w2", "m") and node.given(1) == ("w1", "m")
    assert node.kept == (("b0", "b1", "b2"),) and len(node.types) == len(node.names) == 5
    assert [times for _, times in every_node(read())] == [1, 1, 3, 3, 1]
    assert not written(node) and not has_effect(node)
    assert "x" in aliases_of(read())["other"], "a region may hand on what it was given"


def test_it_means_what_its_calls_do() -> None:
    rng = np.random.default_rng(0)
    x, *weights = (rng.standard_normal(shape, dtype=np.float32) for shape in ((4, 8), (8,), (8,), (8,), (8,)))
    found = run_graph(read(), [x, *weights], {"n": 4})
    a, before, m, kept = np.exp(x), x, weights[3], []
    for w in weights[:3]:
        kept.append(a * w + m)
        a, before = kept[-1] - before, a
    for mine, own in zip(found.values(), (a * before, *kept, weights[1]), strict=True):
        np.testing.assert_allclose(mine, own, rtol=1e-5)


def test_written_out() -> None:
    written_out = write_out_regions(read(), lambda name, call: f"{name}_of_{call}")
    verify(written_out)
    assert [n.names[0] for n in written_out.nodes] == ["start", "b0", "c_of_0", "b1", "c_of_1", "b2", "c_of_2", "y"]
    assert uses(written_out.nodes[-1]) == ("c_of_2", "c_of_1"), "what is handed on needs no node"
    plain = write_out_regions(read())
    verify(plain)
    assert structural_key(plain) == structural_key(written_out) and write_out_regions(plain) is plain


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[w0, w1, w2]", "[w0, w1]", "does not take as much"),
        ("[start, x]", "[start]", "4 inputs and 3 outputs, of which 1 are carried"),
        ("b0, b1, b2 =", "b0, b1 =", "4 results of 3 calls"),
        ("[m])", "[x])", "takes x as m, which is of another type"),
        ("return (c, a, b)", "return (w, a, b)", "hands on w as a, which is of another type"),
        ("return (c, a, b)", "return (c, c, b)", "gives one result twice"),
        ("return (c, a, b)", "return (before, b, c)", None),
        ("return (c, a, b)", "return (before, a, c)", "round in a circle"),
        ("return (c, a, b)", "return (c, before, b)", None),
        ("[w0, w1, w2]", "[w0, w1, w1]", "w1 is to be an input of the graph that one call has for itself"),
        ("last[i0, i1], other", "b1[i0, i1], other", "b1 is kept of one call, and is read"),
        ("b[i0, i1], before", "b[i0, i1], a", None),
        ("exp(x[i0, i1])", "exp(x[i0, i1 + 1])", "and x has 8 there"),
        ("w[i1]), m[i1]", "w[i1 + 1]), m[i1]", "and w has 8 there"),
    ],
)  # fmt: skip
def test_what_is_refused(old: str, new: str, said: str | None) -> None:
    assert old in TEXT
    graph = read(TEXT.replace(old, new))
    if said is None:
        return verify(graph)
    with pytest.raises(VerifyError, match=said):
        verify(graph)


def test_a_region_stands_above_its_call() -> None:
    with pytest.raises(ParseError, match="repeat of a region above it"):
        parse(TEXT.replace("repeat(layer,", "repeat(layers,"))
