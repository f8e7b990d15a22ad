"""Facts of a graph: what they say, and that each is computed once and goes with the graph."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Load, symbol
from torch_mlc.ir.graph.facts import aliases_of, fact, makers_of, names_in, places_of, users_of
from torch_mlc.ir.graph.graph import CallTensor, Compute, Graph, Input, Library, Ref, TensorType, View
from torch_mlc.ir.graph.slices import JOINED, MEMORY
from torch_mlc.ir.text.printer import show

N, AT = sympy.Integer(8), symbol("i")
KIND = TensorType((N,), (sympy.S.One,), DType.FLOAT32)


def copied(name: str, source: str) -> Compute:
    return Compute(name, KIND, (AT,), Load(source, (AT,), DType.FLOAT32))


def viewed(name: str, source: str) -> View:
    return View(name, KIND, source, (AT,), (AT,))


def called(target: str, name: str, *given: str) -> Library:
    return Library((name,), (KIND,), target, tuple(map(Ref, given)))


def graph(*nodes: Compute | View | Library | CallTensor, outputs: tuple[str, ...] = ()) -> Graph:
    return Graph("main", (Input("x", KIND), Input("y", KIND)), nodes, outputs)


@pytest.fixture
def plain() -> Graph:
    return graph(copied("a", "x"), viewed("b", "a"), called("aten::relu.default", "c", "b"), outputs=("b",))


def test_makers_places_and_users(plain: Graph) -> None:
    assert makers_of(plain)["b"] is plain.nodes[1] and "x" not in makers_of(plain)
    assert places_of(plain) == {"a": 0, "b": 1, "c": 2}
    assert users_of(plain) == {"x": [0], "a": [1], "b": [2]}
    assert names_in(plain) == {"x", "y", "a", "b", "c"}


def test_views_share_memory(plain: Graph) -> None:
    shared = aliases_of(plain)
    assert shared["b"] == shared["a"] == {"a"} and shared["c"] == {"c"} and shared["size"] == frozenset()
    assert shared.readers == {"x": [0], "a": [1, 2]} and shared.leaving == {"a"}


@pytest.mark.parametrize(
    ("target", "bases"),
    [
        ("aten::relu.default", {"c"}),
        ("aten::relu_.default", {"c", "x", "y"}),
        ("aten::view.default", {"c", "x", "y"}),
        ("aten::no_such_op.default", {"c", "x", "y"}),
        ("hop::cond", {"c", "x", "y"}),
        ("mlc::seeds", {"c"}),
        ("aten::copy_.default", {"c"}),
    ],
)
def test_what_a_library_may_pass_on(target: str, bases: set[str]) -> None:
    assert aliases_of(graph(called(target, "c", "x", "y")))["c"] == bases


def test_results_that_lie_in_other_memory() -> None:
    call = CallTensor(("c", "d"), (KIND, KIND), "f", ("y",), into=("x", None))
    joined = (called(MEMORY, "m"), viewed("part", "m"), called(JOINED, "whole", "m", "part"))
    shared = aliases_of(graph(call, *joined))
    assert (shared["c"], shared["d"], shared["whole"]) == ({"c", "x"}, {"d"}, {"m"})


def test_a_fact_is_computed_once_for_each_graph(plain: Graph) -> None:
    asked: list[Graph] = []

    @fact
    def count(graph: Graph) -> int:
        asked.append(graph)
        return len(graph.nodes)

    assert (count(plain), count(plain)) == (3, 3) and asked == [plain]
    other = replace(plain, nodes=plain.nodes[:1])
    assert (count(other), count(plain)) == (1, 3) and len(asked) == 2


def test_facts_are_no_part_of_the_graph(plain: Graph) -> None:
    text, other = show(plain), replace(plain)
    aliases_of(plain)
    assert plain.known and not other.known
    assert plain == other and hash(plain) == hash(other) and show(plain) == text and "known" not in repr(plain)


def test_facts_go_with_the_graph() -> None:
    class Large:
        pass

    found: list[weakref.ref[Large]] = []

    @fact
    def large(_: Graph) -> Large:
        made = Large()
        found.append(weakref.ref(made))
        return made

    standing = graph(copied("a", "x"))
    assert large(standing) is found[0]()
    del standing
    gc.collect()
    assert found[0]() is None
