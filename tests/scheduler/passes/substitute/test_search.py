"""What the search finds, in which order, and where it ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from tests.scheduler.passes.substitute.exact import numbers, run_exact
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.graph.facts import names_in
from torch_mlc.ir.graph.graph import Compute, Graph, IRModule
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL, PassContext
from torch_mlc.scheduler.fusion.fuse import fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES, substitute
from torch_mlc.scheduler.passes.products.operands import product_of
from torch_mlc.scheduler.passes.substitute import search
from torch_mlc.scheduler.passes.substitute.parts import MOST_NODES, GraphKeys, parts_of
from torch_mlc.scheduler.passes.substitute.peak import peak_of
from torch_mlc.scheduler.passes.substitute.rules import RULES
from torch_mlc.scheduler.passes.substitute.search import GraphBudget, RewriteSearch


def imported(fn: Callable[..., object], *inputs: Tensor) -> Graph:
    return torch_mlc.from_fx(make_fx(fn)(*inputs)).graph


def products(graph: Graph) -> int:
    return sum(product_of(n) is not None for n in graph.nodes)


def two_streams(a: Tensor, b: Tensor, *weights: Tensor) -> list[Tensor]:
    """Two inputs, each multiplied by the same weights."""
    return [(x @ w).tanh() for w in weights for x in (a, b)]


STREAMS = tuple(torch.zeros(s) for s in ((4, 2048), (4, 2048), *[(2048, 8)] * 8))


def test_a_step_that_costs_is_taken_where_the_next_ones_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both inputs side by side are a copy, which one joint product does not pay for, and eight do."""
    graph = imported(two_streams, *STREAMS)
    joins = [r for r in RULES if r.name == "join_products"]
    found = RewriteSearch(joins, USUAL, GraphBudget(), taken=names_in(graph)).best(graph)
    assert len(found.steps) > 1 and found.gain > 0
    assert products(graph) == 16 and products(found.graph) == 8
    assert sum(isinstance(n, Compute) and "_joined" in n.name for n in found.graph.nodes) == 1
    verify(IRModule({"main": found.graph}))
    rng = random.Random(0)
    given = [numbers(rng, (1, 3)), numbers(rng, (1, 3)), *(numbers(rng, (3, 2)) for _ in range(8))]
    small = imported(two_streams, *(torch.zeros(g.shape) for g in given))
    for have, want in zip(run_exact(substitute(small), given), run_exact(small, given), strict=True):
        np.testing.assert_array_equal(have, want)
    monkeypatch.setattr(search, "RELAXED", 1.0)
    assert RewriteSearch(joins, USUAL, GraphBudget(), taken=names_in(graph)).best(graph).graph is graph


def block(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = torch.nn.functional.layer_norm(x, x.shape[-1:])
    return x + torch.relu(y @ (w + a @ b)) @ w


def deep(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for _ in range(12):
        x = block(x, w, a, b)
    return x


DEEP = torch.zeros(16, 256), torch.zeros(256, 256), torch.zeros(256, 4), torch.zeros(4, 256)


def test_equal_parts_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = imported(deep, *DEEP)
    parts = list(parts_of(graph))
    assert len(parts) >= 3 and all(len(p.graph.nodes) <= MOST_NODES + 8 for p in parts)
    told = GraphKeys()
    keys = {told.of(p.graph) for p in parts}
    assert len(keys) < len(parts)
    searched: list[Graph] = []
    best = RewriteSearch.best
    monkeypatch.setattr(RewriteSearch, "best", lambda self, g: searched.append(g) or best(self, g))
    changed = substitute(graph)
    verify(IRModule({"main": changed}))
    assert products(changed) == products(graph) + 12  # x (w + a b) is x w + (x a) b, in each layer
    assert len(searched) < 2 * len(parts)


def test_parts_put_together_are_the_graph() -> None:
    """What is cut and searched gives what the whole does."""
    rng = random.Random(1)
    given = [numbers(rng, s) for s in ((3, 4), (4, 4), (4, 2), (2, 4))]
    graph = imported(lambda x, w, a, b: (x @ (w + a @ b)) @ w + x, *(torch.zeros(g.shape) for g in given))
    for have, want in zip(run_exact(substitute(graph), given), run_exact(graph, given), strict=True):
        np.testing.assert_array_equal(have, want)


def test_the_same_graph_gives_the_same_graph() -> None:
    for fn, inputs in ((deep, DEEP), (two_streams, STREAMS)):
        first, second = (show(IRModule({"main": substitute(imported(fn, *inputs))})) for _ in range(2))
        assert first == second


def test_a_search_ends_when_it_has_seen_enough() -> None:
    graph = imported(deep, *DEEP)
    assert RewriteSearch(RULES, USUAL, GraphBudget(0), taken=names_in(graph)).best(graph).graph is graph


def test_memory_does_not_rise() -> None:
    """Steps of a recurrence that are made at once would all be held at once."""

    def steps(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        h = x[:, 0] * 0
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ w + h @ u)
        return h

    graph = imported(steps, torch.zeros(32, 12, 256), torch.zeros(256, 256), torch.zeros(256, 256))
    changed = substitute(graph)
    assert peak_of(changed) <= peak_of(graph) and products(changed) == products(graph)


def test_steps_that_are_held_anyway_are_made_at_once() -> None:
    def steps(x: Tensor, w: Tensor) -> Any:
        return torch.cat([torch.tanh(x[:, t] @ w) for t in range(12)])

    graph = imported(steps, torch.zeros(32, 12, 256), torch.zeros(256, 1024))
    assert products(graph) == 12 and products(substitute(graph)) == 1


def test_queries_nobody_reads_are_not_computed() -> None:
    """The last token of an attention with its softmax written out: scores of one row alone."""

    def last(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 128, 3, 8, 32).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return y.transpose(1, 2).reshape(2, 128, 256)[:, -1].relu()

    changed = substitute(imported(last, torch.zeros(2, 128, 256), torch.zeros(256, 768)))
    verify(IRModule({"main": changed}))
    batched = [n for n in changed.nodes if (p := product_of(n)) is not None and p.rank == 3]
    assert len(batched) == 2 and all(n.types[0].shape[1] == 1 for n in batched)


def test_attention_of_the_queries_that_are_read_is_one_kernel() -> None:
    """A class token: the scores of its row alone are still made where they are combined."""

    def first(x: Tensor, w: Tensor, out: Tensor, bias: Tensor, up: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(34, 32)
        return (x + torch.addmm(bias, y, out).view(2, 17, 32)).tanh()[:, 0] @ up

    shapes = [(2, 17, 32), (32, 96), (32, 32), (32,), (32, 128)]
    graph = imported(first, *map(torch.zeros, shapes))
    for step in GRAPH_PASSES:
        graph = step.run(graph, USUAL) if step.applies(USUAL) else graph
    module = fuse(graph).module
    verify(module)
    (attention,) = (f for f in module.functions.values() if f.name.startswith("attention"))
    assert attention.rows[2].extent == 1
    assert {s.role for s in attention.stages} >= {Role.SCORE, Role.STATE}


# --- what is fused ----------------------------------------------------------------------------------------------------


def last_logits(h: Tensor, gain: Tensor, head: Tensor) -> Tensor:
    return (torch.nn.functional.rms_norm(h, gain.shape, gain, 1e-5) @ head)[:, -1].log_softmax(-1)


LAST = torch.zeros(8, 64, 128), torch.zeros(128), torch.zeros(128, 500)


def imported_as_compiled(fn: Callable[..., object], *inputs: Tensor) -> Graph:
    """The graph that substitution gets, of a function that is compiled."""
    graph = imported(fn, *inputs)
    for step in GRAPH_PASSES:
        if step.name == "substitute":
            return graph
        graph = step.run(graph, USUAL) if step.applies(USUAL) else graph
    raise AssertionError


def searched(graph: Graph, context: PassContext, budget: GraphBudget) -> RewriteSearch:
    near = [r for r in RULES if not r.wide]
    return RewriteSearch(near, context, budget, taken=names_in(graph))


def test_of_the_best_few_the_fastest_is_taken_once_they_are_fused() -> None:
    """Whatever the estimate says, and of graphs that need no more memory than the one at hand."""
    graph = imported_as_compiled(last_logits, *LAST)
    leading = searched(graph, USUAL, GraphBudget())
    leading.best(graph)
    count = len(leading.leading)
    assert 2 <= count <= search.MOST_FUSED
    assert [s.gain for s in leading.leading] == sorted((s.gain for s in leading.leading), reverse=True)
    for wanted in range(count):
        asked: list[Graph] = []

        def time_of(fused: Graph, context: PassContext, asked: list[Graph] = asked, wanted: int = wanted) -> float:
            asked.append(fused)
            return 1.0 if len(asked) == wanted + 1 else 2.0

        budget = GraphBudget()
        found = searched(graph, replace(USUAL, fused_time=time_of), budget).chosen(graph)
        assert len(asked) == count and found.gain == leading.leading[wanted].gain
        assert peak_of(found.graph) <= peak_of(graph) and budget.nodes < search.FUSED_NODES


def test_no_more_is_fused_than_the_budget_allows() -> None:
    def never(fused: Graph, context: PassContext) -> float:
        raise AssertionError("it is fused")

    graph = imported_as_compiled(last_logits, *LAST)
    context = replace(USUAL, fused_time=never)
    few = searched(graph, context, GraphBudget(nodes=10)).chosen(graph)
    assert few.gain == searched(graph, USUAL, GraphBudget()).chosen(graph).gain > 0
    alone = imported_as_compiled(lambda x, w, a, b: x @ (w + a @ b), *DEEP)  # one way is nothing to choose among
    assert searched(alone, context, GraphBudget()).chosen(alone).gain > 0


def test_what_fuses_better_moves_less() -> None:
    """Two ways to the logits of the last token: that of the better estimate would make the norm of every token."""
    report = torch_mlc.explain(last_logits, *LAST, options={"cache": False})
    tokens = 8 * 64 * 128 * 4
    assert report.graphs[0].moved < tokens


def test_a_part_of_a_tensor_counts_as_that_part() -> None:
    """Else factors of a few rows of a large tensor are exchanged for ever, which seems to save a pass over it."""
    graph = imported_as_compiled(last_logits, *(torch.zeros(s) for s in ((8, 2048, 128), (128,), (128, 500))))
    budget = GraphBudget()
    found = searched(graph, USUAL, budget).best(graph)
    assert found.gain > 0 and len(found.steps) <= 3 and budget.left > search.MOST_GRAPHS - 20
