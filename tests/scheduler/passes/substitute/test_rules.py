"""Every rule of the registry, alone, on random instances of its own: exact over rational numbers, as precise as its
class says, and seen where it is made wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from tests.scheduler.passes.substitute.exact import OutOfRange, numbers, run_exact
from tests.scheduler.passes.substitute.faults import wrong_of
from tests.scheduler.passes.substitute.instances import INSTANCES, Instance
from torch_mlc.ir.graph.facts import names_in
from torch_mlc.ir.graph.graph import Graph, IRModule, Library
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.passes.products.operands import product_of
from torch_mlc.scheduler.passes.substitute import joined, sites
from torch_mlc.scheduler.passes.substitute import rewrite as rewriting
from torch_mlc.scheduler.passes.substitute.rules import RULES, Numerics, RewriteRule
from torch_mlc.scheduler.passes.substitute.search import GraphBudget, RewriteSearch

SEEDS = range(14)
BY_NAME = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)


@pytest.fixture(autouse=True)
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joined, rewriting, sites):
        monkeypatch.setattr(module, "gain_of", lambda before, after: 1e9)


def graph_of(instance: Instance, dtype: torch.dtype = torch.float64) -> Graph:
    return torch_mlc.from_fx(make_fx(instance.program)(*instance.inputs(random.Random(0), dtype))).graph


def rewritten(graph: Graph, rule: RewriteRule) -> Graph:
    """The graph by one rule, wherever that has something to do."""
    return RewriteSearch((rule,), USUAL, GraphBudget(4), taken=names_in(graph)).best(graph).graph


def instances(rule: RewriteRule) -> Iterator[tuple[int, Instance]]:
    for seed in SEEDS:
        yield seed, INSTANCES[rule.name](random.Random(seed))


def given(instance: Instance, seed: int) -> list[Any]:
    rng = random.Random(seed)
    chosen = instance.inputs(rng)
    return [
        np.asarray(x).astype(object) if c else numbers(rng, s)
        for x, s, c in zip(chosen, instance.shapes, instance.choices, strict=True)
    ]  # fmt: skip


def test_every_rule_has_instances() -> None:
    """A rule without them is a rule that nobody has checked."""
    assert {r.name for r in RULES} == INSTANCES.keys()


@BY_NAME
def test_both_sides_are_equal_over_rational_numbers(rule: RewriteRule) -> None:
    changed = 0
    for seed, instance in instances(rule):
        graph = graph_of(instance)
        after = rewritten(graph, rule)
        if after is graph:
            continue
        changed += 1
        verify(IRModule({"main": after}))
        arrays = given(instance, seed)
        for have, want in zip(run_exact(after, arrays), run_exact(graph, arrays), strict=True):
            np.testing.assert_array_equal(have, want)
    assert changed >= len(SEEDS) // 2, f"{rule.name} has something to do in {changed} of {len(SEEDS)} instances"


# --- roundings, and what is no number ---------------------------------------------------------------------------------


def ran(graph: Graph, inputs: list[torch.Tensor]) -> list[Any]:
    """What a graph gives in the type of its inputs."""

    def multiplied(node: Library, arrays: dict[str, Any]) -> list[Any]:
        p = product_of(node)
        assert p is not None
        with np.errstate(all="ignore"):
            result = (np.float32(p.alpha) * (arrays[p.left] @ arrays[p.right])).astype(arrays[p.left].dtype)
            return [result if p.added is None else result + np.float32(p.beta) * arrays[p.added]]

    found = run_graph(graph, [x.numpy() for x in inputs], {}, library=multiplied)
    return [found[o] for o in graph.outputs if isinstance(o, str)]


@BY_NAME
def test_errors_are_those_of_the_class(rule: RewriteRule) -> None:
    """Against float64, at most twice as far as the graph that was there, over all instances together."""
    own = other = 0.0
    for seed, instance in instances(rule):
        graph = graph_of(instance, torch.float32)
        after = rewritten(graph, rule)
        inputs = instance.inputs(random.Random(seed), torch.float32)
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        for a, b, c in zip(ran(graph, inputs), ran(after, inputs), ran(graph_of(instance), wide), strict=True):
            size = np.abs(c).max(initial=0.0)
            if size:
                own += float(np.abs(a - c).max() / size)
                other += float(np.abs(b - c).max() / size)
    assert other <= 2 * own + 1e-7 * len(SEEDS)


@BY_NAME
@pytest.mark.parametrize("what", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_is_no_number_stays_where_it_is(rule: RewriteRule, what: float) -> None:
    for seed, instance in instances(rule):
        rng = random.Random(seed)
        graph = graph_of(instance, torch.float32)
        inputs = instance.inputs(rng, torch.float32)
        floats = [x for x, c in zip(inputs, instance.choices, strict=True) if not c and x.numel()]
        if not floats:
            continue
        chosen = rng.choice(floats)
        chosen.view(-1)[rng.randrange(chosen.numel())] = what
        for a, b in zip(ran(graph, inputs), ran(rewritten(graph, rule), inputs), strict=True):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))


@pytest.mark.parametrize("rule", [r for r in RULES if r.numerics is Numerics.BITWISE], ids=lambda r: r.name)
def test_bitwise_rules_do_not_overflow(rule: RewriteRule) -> None:
    """Where results are near the greatest number, they stay numbers."""
    for seed, instance in instances(rule):
        graph = graph_of(instance, torch.float32)
        inputs = instance.inputs(random.Random(seed), torch.float32, scale=2e18)
        for a, b in zip(ran(graph, inputs), ran(rewritten(graph, rule), inputs), strict=True):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
            np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.mark.parametrize("numerics", Numerics)
def test_classes_decide_where_a_rule_is_used(numerics: Numerics) -> None:
    eager = replace(USUAL, numerics="eager")
    types = {name: torch_mlc.ir.expr.dtypes.DType[name] for name in ("FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64")}
    allowed = {name for name, t in types.items() if numerics.allows(t, USUAL)}
    wanted = {
        Numerics.BITWISE: set(types), Numerics.REASSOCIATED: set(types) - {"FLOAT16"},
        Numerics.OVERFLOW_PRONE: {"FLOAT32", "FLOAT64"},
    }  # fmt: skip
    assert allowed == wanted[numerics]
    assert all(numerics.allows(t, eager) == (numerics is Numerics.BITWISE) for t in types.values())


# --- rules made wrong -------------------------------------------------------------------------------------------------


@BY_NAME
def test_a_rule_made_wrong_is_seen(rule: RewriteRule) -> None:
    """Of all faults, few change nothing: what is exchanged or left out may be alone."""
    seen = unseen = 0
    for seed, instance in instances(rule):
        graph = graph_of(instance)
        after = rewritten(graph, rule)
        if after is graph or any(0 in s for s in instance.shapes):
            continue
        arrays = given(instance, seed)
        want = run_exact(graph, arrays)
        known = set(names_in(graph))
        for _, wrong in wrong_of(after, known):
            try:
                have = run_exact(wrong, arrays)
            except (OutOfRange, ValueError, IndexError):  # it reads beside a tensor, or sizes do not fit
                seen += 1
                continue
            equal = all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(have, want, strict=True))
            seen, unseen = seen + (not equal), unseen + equal
    assert seen >= 10 and unseen <= seen // 2, (seen, unseen)
