"""Graphs with several programs by a size: each size gets what eager gives, whichever runs, in one compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_mlc
from torch_mlc.dynamo_backend.variants import choose
from torch_mlc.ir.expr.size_regions import Below, SizeRegion, at_cuts
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.runtime.counters import counters
from torch_mlc.scheduler.regions.choose import Cuts

# Every size around every cut of the programs below, around tiles, and primes.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129)
CUTS = "=1,4,16,64,%8"
ONE_MORE = fx_config.patch(backed_size_oblivious=True)


class Counted:
    """The backend, which says how often it compiled."""

    def __init__(self, **options: Any) -> None:
        self.inner = CompileCounterWithBackend("mlc")
        self.options = options

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.inner.frame_count += 1
        return torch._dynamo.lookup_backend("mlc")(gm, inputs, options=self.options)  # type: ignore[no-any-return]


def compiled(fn: Callable[..., Any], regions: Any = CUTS, **options: Any) -> tuple[Callable[..., Any], Counted]:
    backend = Counted(regions=regions, **options)
    return torch.compile(fn, backend=backend, fullgraph=True), backend


def dynamic(x: Tensor, *dims: int) -> Tensor:
    for d in dims:
        torch._dynamo.mark_dynamic(x, d)
    return x


def close(got: Tensor, want: Tensor) -> None:
    """The same as a float64 reference, in the strides that eager has."""
    torch.testing.assert_close(got.double(), want.double(), atol=2e-5, rtol=2e-5)


def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x @ a) @ b, -1) + x.mean(0)


def test_every_size_around_every_cut_equals_eager_in_one_compilation() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(24, 40), torch.randn(40, 24)
    fn, backend = compiled(mlp)
    before = counters["variants_compiled"]
    with ONE_MORE:
        for n in (33, *SIZES):
            x = dynamic(torch.randn(n, 24), 0)
            got = fn(x, a, b)
            close(got, mlp(x.double(), a.double(), b.double()))
            assert got.stride() == mlp(x, a, b).stride()
    assert backend.inner.frame_count == 1
    assert counters["variants_compiled"] - before == 6


def test_no_guard_comes_of_it() -> None:
    """A compilation with several programs has the guards of one with one."""

    def guards(regions: Any) -> set[str]:
        torch._dynamo.reset()
        found: set[str] = set()
        backend = Counted(regions=regions)

        def noting(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            made = backend(gm, inputs)
            env = torch._guards.TracingContext.get().fake_mode.shape_env
            found.update(str(g.expr) for g in env.guards)
            return made

        fn = torch.compile(mlp, backend=noting)
        fn(dynamic(torch.randn(33, 24), 0), torch.randn(24, 40), torch.randn(40, 24))
        return found

    assert guards(CUTS) == guards(0)


def test_sizes_that_have_no_value_are_parted_too() -> None:
    """A size that is marked as unbacked has no hint, and nobody asks for one."""
    fn, backend = compiled(lambda x: torch.relu(x).sum(1) * 2.0)
    for n in (9, *SIZES):
        x = torch.randn(n, 12)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        close(fn(x), torch.relu(x.double()).sum(1) * 2.0)
    assert backend.inner.frame_count == 1


def test_training_gives_eagers_gradients() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 6))
    wide = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 6)).double()
    wide.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    fn, backend = compiled(model)
    for n in (17, *SIZES[1:]):
        x = dynamic(torch.randn(n, 12, requires_grad=True), 0)
        y = x.detach().double().requires_grad_()
        model.zero_grad()
        wide.zero_grad()
        fn(x).square().sum().backward()
        wide(y).square().sum().backward()
        for p, q in zip((x, *model.parameters()), (y, *wide.parameters()), strict=True):
            assert p.grad is not None and q.grad is not None
            torch.testing.assert_close(p.grad.double(), q.grad, atol=1e-4, rtol=1e-4)
    assert backend.inner.frame_count == 1


def test_several_sizes_are_parted_by_one_of_them() -> None:
    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), -1)

    fn, _ = compiled(scores)
    for n, m in [(5, 7), (2, 33), (16, 16), (17, 64), (64, 3), (65, 129), (129, 65), (4, 16)]:
        q, k = dynamic(torch.randn(3, n, 8), 1), dynamic(torch.randn(3, m, 8), 1)
        close(fn(q, k), scores(q.double(), k.double()))


def test_arguments_are_written_and_results_are_views_of_them() -> None:
    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2.0)
        cache[: x.shape[0]].copy_(x)
        return x[1:], cache.t()

    fn, backend = compiled(step)
    for n in (9, *SIZES[2:]):  # two rows are a size of their own for torch: of x[1:] one is left
        x, cache = dynamic(torch.randn(n, 6), 0), torch.zeros(200, 6)
        y, other = x.clone(), cache.clone()
        got, want = fn(x, cache), step(y, other)
        for one, two, of in zip((*got, x, cache), (*want, y, other), (x, cache, x, cache), strict=True):
            assert torch.equal(one, two) and one.stride() == two.stride()
            assert one.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    assert backend.inner.frame_count == 1


def test_caches_hold_all_programs(tmp_path: Path) -> None:
    a, b = torch.randn(24, 40), torch.randn(40, 24)
    options = {"cache_dir": str(tmp_path)}
    x = dynamic(torch.randn(33, 24), 0)
    compiled(mlp, **options)[0](x, a, b)
    torch._dynamo.reset()
    torch_mlc.dynamo_backend.entry.backend.kernel_store.cache_clear()
    before = counters.snapshot()
    fn, _ = compiled(mlp, **options)
    for n in (33, 2, 4, 16, 65, 72):
        y = torch.randn(n, 24)
        close(fn(dynamic(y, 0), a, b), mlp(y.double(), a.double(), b.double()))
    spent = {name: counters[name] - before.get(name, 0) for name in ("graphs_compiled", "kernels_generated")}
    assert spent == {"graphs_compiled": 0, "kernels_generated": 0}


def test_kernels_that_do_not_differ_are_shared() -> None:
    x, a, b = dynamic(torch.randn(33, 24), 0), torch.randn(24, 40), torch.randn(40, 24)
    (graph,) = torch_mlc.explain(mlp, x, a, b, options={"regions": "8,64"}).graphs
    size = graph.variants[0].condition.split()[0]
    conditions = [f"{size} < 8", f"8 <= {size} < 64", f"{size} >= 64"]
    assert [v.condition for v in graph.variants] == conditions
    assert sum(v.is_typical for v in graph.variants) == 1 and graph.variants[1].is_typical
    assert graph.shared_kernels >= 1
    assert "proof: " in str(graph) and "each of 3 classes is in exactly one region" in graph.proof
    assert all(v.condition in str(graph) for v in graph.variants)
    assert graph.program.count("def call(args):") == 4


def test_a_decision_by_hand_leaves_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs decide is a decision like others."""
    monkeypatch.setattr("torch_mlc.scheduler.cost.regions.LEAST_SAVED", 0.0)
    monkeypatch.setattr("torch_mlc.scheduler.cost.regions.LEAST_SHARE", 0.0)
    x, a, b = dynamic(torch.randn(400, 64), 0), torch.randn(64, 640), torch.randn(640, 64)
    (graph,) = torch_mlc.explain(mlp, x, a, b).graphs
    found = [d for d in graph.decisions if d.kind == "regions"]
    assert len(found) == 1 and len(graph.variants) > 1 and found[0].chosen != "one"
    (other,) = torch_mlc.explain(mlp, x, a, b, options={"decisions": {found[0].name: "one"}}).graphs
    assert not other.variants


def test_a_wrong_condition_is_found_by_the_proof(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regions that overlap are refused before anything is compiled of them, and said so."""

    def overlapping(tree: Any) -> tuple[SizeRegion, ...]:
        found = list(real(tree))
        if len(found) > 1:
            (condition, wanted), *rest = found[-1].literals
            assert isinstance(condition, Below)
            found[-1] = SizeRegion(((replace(condition, bound=condition.bound - 1), wanted), *rest))
        return tuple(found)

    real = choose.regions_of
    monkeypatch.setattr(choose, "regions_of", overlapping)
    before = counters["variants_compiled"]
    fn, _ = compiled(mlp, "16")
    x, a, b = dynamic(torch.randn(33, 24), 0), torch.randn(24, 40), torch.randn(40, 24)
    close(fn(x, a, b), mlp(x.double(), a.double(), b.double()))
    assert counters["variants_compiled"] == before
    assert "= 15 is in (" in caplog.text and "each size has to be in exactly one region" in caplog.text


def test_a_variant_whose_results_lie_otherwise_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "differs_outside", lambda plan, variant: "result 0 is somewhere else")
    before = counters["variants_compiled"]
    fn, _ = compiled(mlp, "16")
    x, a, b = dynamic(torch.randn(33, 24), 0), torch.randn(24, 40), torch.randn(40, 24)
    close(fn(x, a, b), mlp(x.double(), a.double(), b.double()))
    assert counters["variants_compiled"] == before and "result 0 is somewhere else" in caplog.text


@pytest.mark.parametrize("form", ["python", "native"])
def test_both_forms_of_host_programs(form: str) -> None:
    a, b = torch.randn(24, 40), torch.randn(40, 24)
    fn, backend = compiled(mlp, host_program=form)
    for n in (33, 2, 3, 4, 15, 16, 17, 63, 64, 65, 72):
        x = dynamic(torch.randn(n, 24), 0)
        for _ in range(3):
            close(fn(x, a, b), mlp(x.double(), a.double(), b.double()))
    assert backend.inner.frame_count == 1


def test_small_graphs_have_one_program() -> None:
    before = counters["variants_compiled"]
    fn, _ = compiled(mlp, "auto")
    fn(dynamic(torch.randn(33, 24), 0), torch.randn(24, 40), torch.randn(40, 24))
    assert counters["variants_compiled"] == before


def test_a_program_for_few_rows_multiplies_by_loops() -> None:
    """Where rows are few for sure, and the weight is read from memory; the results of each number are eager's."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(x) @ weight.t()

    torch.manual_seed(0)
    weight = torch.randn(2816, 1024)
    x = dynamic(torch.randn(64, 1024), 0)
    graph = torch_mlc.explain(layer, x, weight, options={"regions": "=1,6", "threads": 1}).graphs[0]
    called = {v.condition: len(v.graph.libraries) for v in graph.variants}
    assert [*called.values()] == [0, 1], called
    fn, backend = compiled(layer, "=1,6", threads=1)
    for n in (64, 2, 3, 4, 5, 6, 7, 13):
        x = dynamic(torch.randn(n, 1024), 0)
        torch.testing.assert_close(fn(x, weight).double(), layer(x.double(), weight.double()), atol=2e-3, rtol=1e-4)
    assert backend.inner.frame_count == 1


def test_few_rows_leave_out_those_that_nobody_reads() -> None:
    """Of four rows the last costs as much as all, for the weight is read; of sixteen, which the program has too, much
    less."""

    def last(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (torch.relu(x @ a.t()) @ b.t())[-1:]

    torch.manual_seed(0)
    a, b = torch.randn(2816, 1024), torch.randn(1024, 2816)
    x = dynamic(torch.randn(64, 1024), 0)
    graph = torch_mlc.explain(last, x, a, b, options={"regions": "17", "threads": 1}).graphs[0]
    (few,) = (v.graph for v in graph.variants if v.condition.endswith("< 17"))
    s0 = {o.buffer.shape for k in few.kernels for o in k.function.outputs}
    assert all(size.is_Integer for shape in s0 for size in shape), "one row of each product"
    fn, _ = compiled(last, "17", threads=1)
    for n in (64, 2, 3, 16, 17):
        x = dynamic(torch.randn(n, 1024), 0)
        want = last(x.double(), a.double(), b.double())
        torch.testing.assert_close(fn(x, a, b).double(), want, atol=2e-2, rtol=1e-4)


def test_costs_are_weighed_at_the_most_too() -> None:
    symbol, other = choose.sympy.symbols("s0 s1")
    table = SymbolTable((Size(symbol, 2, None, hint=4, most=16), Size(other, hint=8)))
    assert [t.hint(symbol * other) for t in table.weighed()] == [32, 128]
    assert SymbolTable((Size(other, hint=8, most=8),)).weighed() == (SymbolTable((Size(other, hint=8),)),)


def test_the_most_of_a_size_is_known_where_its_program_runs() -> None:
    symbol = choose.sympy.Symbol("s0")
    size = Size(symbol, 2, None, hint=64)
    few = SizeRegion().having(Below(symbol, 16), True).told(size)
    assert (few.lower, few.upper, few.most) == (2, None, 15)
    table = SymbolTable((few,))
    assert table.most(4 * symbol + 1) == 61 and SymbolTable((size,)).most(symbol) is None
    assert table.most(choose.sympy.Integer(3)) == 3 and table.most(choose.sympy.Symbol("other")) is None


def test_a_wrong_setting_is_refused_with_what_is_right() -> None:
    for wrong in ("few", "%8,%16", "=", "16;32", [-1]):
        with pytest.raises(torch_mlc.OptionError, match="regions"):
            torch_mlc.explain(torch.relu, torch.randn(3), options={"regions": wrong})


def test_cuts_know_their_text() -> None:
    assert str(Cuts()) == "=1,17,256" and str(Cuts((), (), 1)) == "one"
    assert at_cuts(choose.sympy.Symbol("s0"), ()).number == 0  # type: ignore[union-attr]
