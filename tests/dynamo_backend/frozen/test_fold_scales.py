"""Scales and shifts in front of products are part of their weights: exact over rational numbers, as precise as before,
seen where made wrong, and done only where it is worth a copy of the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_mlc
from tests.dynamo_backend.frozen.frozen_graphs import graph_of
from tests.scheduler.passes.substitute.exact import OutOfRange, numbers, run_exact
from tests.scheduler.passes.substitute.faults import wrong_of
from torch_mlc.dynamo_backend.aten_passes.context import AtenContext
from torch_mlc.dynamo_backend.aten_passes.frozen import fold_scales as folding
from torch_mlc.ir.graph.facts import names_in
from torch_mlc.ir.graph.graph import Graph
from torch_mlc.runtime.frozen.kept import FrozenError
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.cost.frozen import folded_times, folding_pays

pytestmark = pytest.mark.usefixtures("without_gradients")
SEEDS = range(14)
Program = Callable[..., object]


def sizes(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(1, 7) for _ in range(count)]


def plain(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return (x * g) @ w


def shifted(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (g * x + b).flatten(0, 1) @ w


def with_bias(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(c, b + x * g, w.t())


def normed(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    y = F.layer_norm(x, g.shape, g, b).flatten(0, 1)
    return torch.addmm(c, y, w.t()).tanh() @ w


def two_norms(x: Tensor, g: Tensor, h: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    """Two norms of one tensor, one of which two products read."""
    y, z = (F.layer_norm(x, k.shape, k).flatten(0, 1) for k in (g, h))
    return [y @ w, z @ w, z @ v]


def instance(rng: random.Random) -> tuple[Program, tuple[tuple[int, ...], ...]]:
    """A program whose inputs but the first do not change, and the shapes of its inputs."""
    a, m, k, n, j = sizes(rng, 5)
    return rng.choice([
        (plain, ((m, k), (k,), (k, n))),
        (plain, ((m, k), (1, k), (k, n))),
        (shifted, ((a, m, k), (k,), (k,), (k, n))),
        (with_bias, ((m, k), (k,), (k,), (n, k), (n,))),
        (normed, ((a, m, k), (k,), (k,), (n, k), (n,))),
        (two_norms, ((a, m, k), (k,), (k,), (k, n), (k, j))),
    ])  # fmt: skip


def instances() -> Iterator[tuple[int, Program, tuple[tuple[int, ...], ...]]]:
    for seed in SEEDS:
        yield seed, *instance(random.Random(seed))


def traced(program: Program, shapes: Any, dtype: torch.dtype) -> fx.GraphModule:
    return make_fx(program, tracing_mode="fake")(*(torch.zeros(s, dtype=dtype) for s in shapes))


def folded(program: Program, shapes: Any, dtype: torch.dtype = torch.float64) -> tuple[fx.GraphModule, int]:
    """The graph with what the pass does to it, and how many products have other weights."""
    gm = traced(program, shapes, dtype)
    frozen = frozenset(n.name for n in gm.graph.find_nodes(op="placeholder")[1:])
    done = folding.fold_scales(gm, AtenContext(Options(), frozen=frozen))
    gm.recompile()
    return gm, done


def imported(gm: fx.GraphModule) -> Graph:
    return torch_mlc.from_fx(gm).graph


@pytest.fixture
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "folding_pays", lambda *times: True)


# --- the same results -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whatever_it_costs")
def test_both_sides_are_equal_over_rational_numbers() -> None:
    for seed, program, shapes in instances():
        gm, done = folded(program, shapes)
        assert done == {two_norms: 3}.get(program, 1), program
        rng = random.Random(seed)
        given = [numbers(rng, s) for s in shapes]
        before = run_exact(imported(traced(program, shapes, torch.float64)), given)
        for have, want in zip(run_exact(imported(gm), given), before, strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.usefixtures("whatever_it_costs")
def test_a_fold_made_wrong_is_seen() -> None:
    seen = unseen = 0
    for seed, program, shapes in instances():
        gm, _ = folded(program, shapes)
        rng = random.Random(seed)
        given = [numbers(rng, s) for s in shapes]
        graph, after = imported(traced(program, shapes, torch.float64)), imported(gm)
        want = run_exact(graph, given)
        for _, wrong in wrong_of(after, set(names_in(graph))):
            try:
                have = run_exact(wrong, given)
            except (OutOfRange, ValueError, IndexError):
                seen += 1
                continue
            equal = all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(have, want, strict=True))
            seen, unseen = seen + (not equal), unseen + equal
    assert seen >= 20 and unseen <= seen // 2, (seen, unseen)


@pytest.mark.usefixtures("whatever_it_costs")
def test_errors_are_at_most_twice_those_of_before() -> None:
    own = other = 0.0
    for seed, program, shapes in instances():
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(s, generator=generator) for s in shapes]
        before, (after, _) = traced(program, shapes, torch.float32), folded(program, shapes, torch.float32)
        exact = traced(program, shapes, torch.float64)(*(x.double() for x in given))
        for a, b, c in zip(*map(listed, (before(*given), after(*given), exact)), strict=True):
            size = float(c.abs().max())
            own += float((a - c).abs().max()) / size
            other += float((b - c).abs().max()) / size
    assert 0 < other <= 2 * own


@pytest.mark.usefixtures("whatever_it_costs")
@pytest.mark.parametrize("what", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_what_is_no_number_stays_where_it_is(what: float) -> None:
    for seed, program, shapes in instances():
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        given = [torch.randn(s, generator=generator) for s in shapes]
        chosen = rng.choice(given).view(-1)
        chosen[rng.randrange(chosen.numel())] = what
        before, (after, _) = traced(program, shapes, torch.float32), folded(program, shapes, torch.float32)
        for a, b in zip(listed(before(*given)), listed(after(*given)), strict=True):
            assert torch.equal(a.isfinite(), b.isfinite()), (seed, program)


def listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [*found]


# --- what stays -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whatever_it_costs")
def test_rows_that_others_read_stay_as_they_are() -> None:
    def read(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, g.shape, g)
        return y @ w + y

    def returned(x: Tensor, g: Tensor, w: Tensor) -> list[Tensor]:
        y = x * g
        return [y, y @ w]

    for program in (read, returned):
        assert folded(program, ((3, 4), (4,), (4, 4)))[1] == 0


@pytest.mark.usefixtures("whatever_it_costs")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_types_stay(dtype: torch.dtype) -> None:
    assert folded(plain, ((3, 4), (4,), (4, 5)), dtype)[1] == 0


@pytest.mark.usefixtures("whatever_it_costs")
def test_a_factor_of_rows_is_none_of_columns() -> None:
    assert folded(plain, ((3, 4), (3, 1), (4, 5)))[1] == 0
    gm = traced(plain, ((3, 4), (4,), (4, 5)), torch.float32)
    assert folding.fold_scales(gm, AtenContext(Options(), frozen=frozenset(("w_1",)))) == 0  # the scale may change


@pytest.mark.usefixtures("whatever_it_costs")
def test_rows_that_are_written_before_they_are_multiplied_stay() -> None:
    def written(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = x * g
        x.add_(1)
        return y @ w

    def of_a_view(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = x.view(-1, 4) * g
        x.add_(1)
        return y @ w

    for program in (written, of_a_view):
        assert folded(program, ((3, 4), (4,), (4, 5)))[1] == 0


class Twin(nn.Module):
    """Two norms of one input, each in front of a product, whose results are added."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, wide), nn.Linear(width, wide)
        for p in self.parameters():
            p.copy_(torch.randn(p.shape) / p.shape[-1] ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.first(x)).relu() * self.b(self.second(x))


def told(graph: Any) -> str:
    return " ".join(r.told for r in graph.frozen)


def test_two_norms_of_one_tensor_can_be_one_with_one_product() -> None:
    """By hand alone: their kernel takes as long, whatever it scales."""
    model, x = Twin(64, 48), torch.randn(2, 9, 64)
    plain_graph = graph_of(model, x)
    (decision,) = (d for d in plain_graph.decisions if d.kind == "folded-scale")
    assert decision.chosen == "apart" and sum(c.calls for c in plain_graph.libraries) == 2
    by_hand = {"decisions": {decision.name: "folded"}}
    graph = graph_of(model, x, **by_hand)
    assert sum(c.calls for c in graph.libraries) == 1 and "2 weights side by side" in told(graph)
    exact = Twin(64, 48).double()
    exact.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="mlc", options={"freeze": True, **by_hand})
    torch.testing.assert_close(compiled(x).double(), exact(x.double()), rtol=1e-4, atol=1e-4)


class Smoothed(nn.Module):
    """A scale of the inputs' columns in front of a linear layer."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(width) + 0.5), nn.Linear(width, wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale).relu()


def test_a_scale_of_what_lies_in_memory_is_gone() -> None:
    model, x = Smoothed(256, 80), torch.randn(2, 32, 256)
    graph, kept = graph_of(model, x), graph_of(model, x, numerics="eager")
    assert graph.launches < kept.launches and graph.typical_peak <= kept.typical_peak
    (decision,) = (d for d in graph.decisions if d.kind == "folded-scale")
    assert decision.chosen == "folded" and decision.cost("folded") < decision.cost("apart")
    assert not any(d.kind == "folded-scale" for d in kept.decisions)
    assert "weight with the scale in front of its product" in told(graph)
    assert graph.frozen_bytes >= 256 * 80 * 4


def test_folded_weights_follow_no_change() -> None:
    """They are counted while they are kept, a change is an error that names it, and a reset makes them anew."""
    model, x = Smoothed(256, 80), torch.randn(2, 32, 256)
    before = torch_mlc.memory_stats().frozen
    for factor in (1.0, 2.0):
        model.scale.mul_(factor)
        compiled = torch.compile(model, backend="mlc", options={"freeze": True}, dynamic=True)
        exact = Smoothed(256, 80).double()
        exact.load_state_dict(model.state_dict())
        for rows in (32, 1, 65):
            y = torch.randn(2, rows, 256)
            torch.testing.assert_close(compiled(y).double(), exact(y.double()), rtol=1e-4, atol=1e-4)
        assert torch_mlc.memory_stats().frozen - before >= 256 * 80 * 4
        with torch.no_grad():
            model.scale.mul_(1.0)
        with pytest.raises(FrozenError, match="scale changed"):
            compiled(x)
        torch._dynamo.reset()


def test_a_norm_keeps_its_scale() -> None:
    model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 48))
    graph = graph_of(model, torch.randn(32, 64))
    (decision,) = (d for d in graph.decisions if d.kind == "folded-scale")
    assert decision.chosen == "apart" and "scale" not in told(graph)
    other = graph_of(model, torch.randn(32, 64), decisions={decision.name: "folded"})
    assert "weight with the scale in front of its product" in told(other)


def test_costs_of_a_fold() -> None:
    cpu, gpu = target_for("cpu", None), target_for("cuda", "cuda:sm_90")

    def pays(size: tuple[int, int, int], passes: int, target: Any) -> bool:
        return folding_pays(*folded_times([size], passes, 4, target), target)

    assert pays((64, 1024, 256), 1, cpu) and not pays((64, 1024, 4096), 1, cpu)
    assert not pays((64, 1024, 256), 0, cpu) and not pays((4096, 4096, 64), 1, gpu)
