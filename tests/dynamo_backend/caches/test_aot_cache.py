"""AOTAutograd's cache holds graphs of ours: found by equal calls alone, and rebuilt where our own cache lost them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import warm_processes
from tests.settings import default_dtype
from torch_mlc.dynamo_backend.caches import aot_cache, aot_key
from torch_mlc.runtime.counters import counters

COUNTS = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_saved", "autograd_cache_bypass")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty folders for both caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "mlc"))
    with functorch_config.patch(enable_autograd_cache=True):
        yield tmp_path


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def step(net: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    out = net(x)
    out.square().sum().backward()
    return [out.detach(), x.grad]  # type: ignore[list-item]


def as_new_process(x: Tensor, **how: Any) -> tuple[list[Tensor], dict[str, int], int]:
    """A training step of a compiled model with nothing in memory: results, what the cache counted, graphs compiled."""
    torch._dynamo.reset()
    dynamo_counters.clear()
    before = counters.snapshot()["graphs_compiled"]
    got = step(torch.compile(model(), backend="mlc", **how), x.clone().requires_grad_())
    found = {name: dynamo_counters["aot_autograd"][name] for name in COUNTS}
    return got, found, counters.snapshot()["graphs_compiled"] - before


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_second_process_traces_nothing(dynamic: bool) -> None:
    x = torch.randn(5, 6)
    want = step(model(), x.clone().requires_grad_())
    got, counts, compiled = as_new_process(x, dynamic=dynamic)
    assert counts["autograd_cache_miss"] >= 1 and (counts["autograd_cache_saved"], compiled) == (1, 2)
    torch.testing.assert_close(got, want)
    got, counts, compiled = as_new_process(x, dynamic=dynamic)
    assert (counts["autograd_cache_hit"], compiled) == (1, 0)
    torch.testing.assert_close(got, want)
    assert not functorch_config.bundled_autograd_cache, "the setting of the process is as it was"


def test_a_stored_graph_may_be_retained() -> None:
    """Whether a backward is the last one is no part of the key: an entry must serve both."""
    x = torch.randn(5, 6)
    want, _, _ = as_new_process(x)
    torch._dynamo.reset()
    dynamo_counters.clear()
    given = x.clone().requires_grad_()
    loss = torch.compile(model(), backend="mlc")(given).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert dynamo_counters["aot_autograd"]["autograd_cache_hit"] == 1
    torch.testing.assert_close(given.grad, 2 * want[1])


def test_inference_is_found_again() -> None:
    x = torch.randn(5, 6)
    with torch.no_grad():
        for hits in (0, 1):
            torch._dynamo.reset()
            dynamo_counters.clear()
            torch.testing.assert_close(torch.compile(model(), backend="mlc")(x), model()(x))
            assert dynamo_counters["aot_autograd"]["autograd_cache_hit"] == hits


def test_settings_never_share_an_entry() -> None:
    """The key of AOTAutograd knows no backend: another setting, thread count or backend must miss."""
    x = torch.randn(5, 6)
    assert as_new_process(x)[1]["autograd_cache_saved"] == 1
    assert as_new_process(x, options={"numerics": "eager"})[1]["autograd_cache_hit"] == 0
    assert as_new_process(x, options={"threads": 3})[1]["autograd_cache_hit"] == 0
    torch._dynamo.reset()
    dynamo_counters.clear()
    with functorch_config.patch(force_autograd_cache=True, bundled_autograd_cache=True):
        torch.compile(model(), backend="aot_eager")(x)
    assert dynamo_counters["aot_autograd"]["autograd_cache_hit"] == 0


def test_what_our_cache_lost_is_compiled_again(caches: Path) -> None:
    x = torch.randn(5, 6)
    want, _, _ = as_new_process(x)
    shutil.rmtree(caches / "mlc")
    got, counts, compiled = as_new_process(x)
    assert (counts["autograd_cache_hit"], compiled) == (0, 2)
    torch.testing.assert_close(got, want)
    assert as_new_process(x)[1]["autograd_cache_hit"] == 1


def test_graphs_with_tensors_of_their_own_are_not_kept() -> None:
    table = torch.arange(6.0)

    def program(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + table

    for _ in range(2):
        torch._dynamo.reset()
        x = torch.randn(5, 6, requires_grad=True)
        torch.testing.assert_close(torch.compile(program, backend="mlc")(x), program(x))


def test_other_sources_never_share_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry names a program that these sources made: a newer torch-mlc, or an edited torch, must not find it."""
    x = torch.randn(5, 6)
    assert as_new_process(x)[1]["autograd_cache_saved"] == 1
    for name in ("environment_fingerprint", "torch_sources"):
        with monkeypatch.context() as patched:
            patched.setattr(aot_cache, name, lambda *_: "other")
            assert as_new_process(x)[1]["autograd_cache_hit"] == 0
    assert as_new_process(x)[1]["autograd_cache_hit"] == 1


@pytest.mark.parametrize(
    "setting",
    [
        lambda: functorch_config.patch(activation_memory_budget=0.5),
        lambda: inductor_config.patch(fallback_random=True),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: default_dtype(torch.float64),
    ],
    ids=["functorch", "inductor", "autocast", "dtype"],
)
def test_what_tracing_looks_at_is_in_the_key(setting: Callable[[], AbstractContextManager[Any]]) -> None:
    def program(x: Tensor) -> Tensor:
        return x @ x.T + torch.ones(5, dtype=x.dtype)

    def hits() -> int:
        torch._dynamo.reset()
        dynamo_counters.clear()
        with torch.no_grad():
            torch.compile(program, backend="mlc")(torch.ones(5, 6, dtype=torch.float32))
        return dynamo_counters["aot_autograd"]["autograd_cache_hit"]

    assert (hits(), hits()) == (0, 1)
    with setting():
        assert hits() == 0


def test_torchs_key_serves_other_backends_and_foreign_ops() -> None:
    with aot_key.KEYS_WITHOUT_INDUCTOR.here():
        thread = ThreadPoolExecutor(1).submit(lambda: type(details(lambda x: x + 1)))
        assert thread.result() is aot_key.AOTAutogradCacheDetails, "another thread is not at work for this backend"
        ours = details(lambda x: x + 1)
        assert type(ours) is aot_key.GraphDetails and not hasattr(ours, "system_info")
        with torch.library._scoped_library("mlc_key_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
            foreign = details(lambda x: torch.ops.mlc_key_test.twice(x))
        assert hasattr(foreign, "system_info")
    assert aot_key.autograd_cache.AOTAutogradCacheDetails is aot_key.AOTAutogradCacheDetails


def details(function: Callable[[Tensor], Tensor]) -> Any:
    """What the key of a graph is made of."""
    gm = torch.fx.symbolic_trace(function)
    config = SimpleNamespace()
    with torch._guards.tracing(torch._guards.TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        return aot_key.autograd_cache.AOTAutogradCacheDetails(gm, [torch.randn(3)], config, {})


def test_a_warm_process_loads_no_generator_of_inductors(caches: Path) -> None:
    script = """
import sys
import torch
from torch._dynamo.utils import counters

def program(x):
    return torch.softmax(x * 2, -1)

torch.compile(program, backend="mlc")(torch.ones(3, 4))
loaded = [name for name in ("torch._inductor.scheduler", "torch._inductor.codegen.wrapper") if name in sys.modules]
print(counters["aot_autograd"]["autograd_cache_hit"], loaded)
"""
    assert [warm_processes.start(script).output() for _ in range(2)] == ["0 []\n", "1 []\n"]


class Stateful(nn.Module):
    """Buffers that training changes, weights that are read twice, and a part that a checkpoint runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(lambda y: self.inner(y).relu(), self.norm(x), use_reentrant=False)
        return self.inner(x)


def written(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    state[1:] += x.detach()[1:]
    return x * state, x.view(-1), x.T[1:]


def narrowed(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.T).float()


def counted(x: Tensor, n: int) -> Tensor:
    return x.reshape(-1)[:n].cumsum(0) if x.shape[0] > 4 else x.sum()


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], list[Any]]]] = {
    "buffers": lambda: (Stateful(), [torch.randn(5, 6, requires_grad=True)]),
    "writes and views": lambda: (written, [torch.randn(5, 6, requires_grad=True), torch.ones(5, 6)]),
    "dropout": lambda: (lambda x: nn.functional.dropout(x.sin(), 0.5), [torch.randn(5, 6, requires_grad=True)]),
    "sizes": lambda: (counted, [torch.randn(7, 6, requires_grad=True), 11]),
    "autocast": lambda: (narrowed, [torch.randn(5, 6, requires_grad=True)]),
    "constants": lambda: (lambda x: x * torch.tensor([2.0, 3.0]), [torch.randn(4, 2, requires_grad=True)]),
    "effects": lambda: (
        lambda x: torch.linalg.inv(x + 9 * torch.eye(5)), [torch.randn(5, 5, requires_grad=True)]),
    "no gradient": lambda: (lambda x: (x > 0, x.argmax(-1), x.exp()), [torch.randn(5, 6)]),
}  # fmt: skip

# Tensors of the graph's own, which no other process has.
NOT_KEPT = ("constants",)
# What some versions of torch call unsafe to keep, and others do not; what has tokens, which no wrapper gives to what is
# found, where it has any: from torch 2.13 on.
MAY_BE_KEPT = ("autocast", "effects")


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found_does_what_was_compiled(name: str) -> None:
    """Results, writes, buffers and gradients of two calls, compiled and then found, with one seed."""

    def run(compiled: bool) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        function, inputs = PROGRAMS[name]()
        call = torch.compile(function, backend="mlc", dynamic=name == "sizes") if compiled else function
        seen: list[Any] = []
        for _ in range(2):
            results = call(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            seen += [r.detach().clone() for r in results]
            if any(r.requires_grad for r in results):
                sum(r.square().sum() for r in results if r.requires_grad).backward()
        seen += [x.grad for x in inputs if isinstance(x, Tensor)] + [x for x in inputs if isinstance(x, Tensor)]
        return seen + (list(function.state_dict().values()) if isinstance(function, nn.Module) else [])

    dynamo_counters.clear()
    first = run(True)
    missed = dynamo_counters["aot_autograd"]["autograd_cache_hit"]
    found = run(True)
    torch.testing.assert_close(found, first, rtol=0, atol=0)
    if name != "dropout":
        torch.testing.assert_close(found, run(False), rtol=2e-2 if name == "autocast" else 1.3e-6, atol=1e-5)
    assert missed == 0
    if name not in MAY_BE_KEPT:
        assert (dynamo_counters["aot_autograd"]["autograd_cache_hit"] > 0) == (name not in NOT_KEPT)


@pytest.mark.parametrize("number", [4.5, 3], ids=["float", "integer"])
def test_plain_numbers_that_a_graph_took_for_constants(number: float) -> None:
    """An entry holds guards of integers alone: a graph of another float would be taken for the same."""

    def fn(x: Tensor, n: float) -> tuple[Tensor, Tensor]:
        return x.new_full((2,), n), torch.addcmul(x, x, x, value=n)

    x = torch.randn(3)
    for _ in range(2):  # the second time out of the cache
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mlc", dynamic=True)
        for n in (number, number + 2, -number):
            torch.testing.assert_close(compiled(x, n), fn(x, n))


def test_guards_of_sizes_that_are_equal_to_others() -> None:
    """Of an odd size torch's entry said only that it is that of another tensor.

    Symbols are named after arguments, and which of two equal ones stands for both depends on their names.
    """

    def fn(x1: Tensor, x2: Tensor, x3: Tensor, x4: Tensor) -> tuple[Tensor, ...]:
        least = torch.minimum(x1, x2)
        put = torch.index_put(least, (x3 % least.shape[0],), x4, accumulate=True)
        return put, *torch.tensor_split(x4, 2, 1)

    for _ in range(2):  # the second time out of the cache
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mlc")
        for size in (7, 17, 4, 6, 9):
            leaves = [torch.randn(size, size, 1, requires_grad=True), torch.randn(4, size, 4, requires_grad=True)]
            args = torch.randn(size, 4), leaves[0], torch.arange(4), leaves[1]
            torch._dynamo.maybe_mark_dynamic(leaves[1], 1)
            results = [f(*args) for f in (compiled, fn)]
            torch.testing.assert_close(*results)
            gradients = [torch.autograd.grad([t.sum() for t in r], leaves) for r in results]
            torch.testing.assert_close(*gradients)


def test_guards_that_say_or() -> None:
    """Of the others none was asked then: the graph for a slice of one column was found for those of any width."""

    def fn(x: Tensor, n: int) -> Tensor:
        return torch.view_as_complex(x.view(2, -1, 2)).conj()[..., :n]

    for _ in range(2):  # the second time out of the cache
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="mlc", dynamic=True)
        for n in (1, 2, 3):
            x = torch.randn(4, 4)
            torch.testing.assert_close(compiled(x, n), fn(x, n))


def overlapping() -> tuple[Tensor, Tensor]:
    base = torch.arange(12.0)
    return base[:8], base[4:]


def apart() -> tuple[Tensor, Tensor]:
    return overlapping()[0], overlapping()[1]


def touching() -> tuple[Tensor, Tensor]:
    base = torch.arange(16.0)
    return base[:8], base[8:]


def writes(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.add_(1)
    return x * y, y.sin()


def sees(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x[1:], y + 1


@pytest.mark.parametrize("fn", [writes, sees], ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", [overlapping, apart, touching], ids=lambda f: f.__name__)
def test_arguments_that_share_memory(
    first: Callable[[], tuple[Tensor, Tensor]], fn: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> None:
    """Types, sizes and places of arguments do not tell whether what is written to one is seen in another."""
    for make in (first, overlapping, apart, touching, overlapping, apart):
        torch._dynamo.reset()
        mine, eagers = make(), make()
        results = torch.compile(fn, backend="mlc", dynamic=False)(*mine)
        torch.testing.assert_close((*results, *mine), (*fn(*eagers), *eagers))
        assert fn is writes or results[0].data_ptr() == mine[0][1:].data_ptr()


@pytest.mark.parametrize("order", [(9, 5, 20, 3), (5, 9, 3, 20)], ids=str)
def test_arguments_that_overlap_where_sizes_vary(order: tuple[int, ...]) -> None:
    """Dynamo guards that, but is told so by AOTAutograd as it traces: a graph for parts that lie apart was found."""

    def parts(begin: int) -> tuple[Tensor, Tensor]:
        base = torch.arange(40.0)
        return base[:8], base[begin : begin + 8]

    for _ in range(2):  # the second time out of the cache
        torch._dynamo.reset()
        compiled = torch.compile(writes, backend="mlc", dynamic=True)
        for begin in order:
            mine, eagers = parts(begin), parts(begin)
            torch.testing.assert_close((*compiled(*mine), *mine), (*writes(*eagers), *eagers))


@pytest.mark.parametrize("overload", ["", ".other"], ids=["op", "overload"])
def test_ops_whose_gradients_the_user_writes(overload: str) -> None:
    """Who edits one gets its results: the text of a traced function is in no key."""
    for factor in (2, 3):
        torch._dynamo.reset()
        with torch.library._scoped_library("mlc_gradients", "FRAGMENT") as library:
            library.define(f"scaled{overload}(Tensor x) -> Tensor")
            library.impl(f"scaled{overload}", lambda x, f=factor: x * f, "CompositeImplicitAutograd")
            op = torch.ops.mlc_gradients.scaled

            def fn(x: Tensor) -> Tensor:
                return op(x).sin()  # noqa: B023

            x = torch.randn(3, requires_grad=True)
            results = [f(x) for f in (torch.compile(fn, backend="mlc"), fn)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*[torch.autograd.grad(r.sum(), x)[0] for r in results])
