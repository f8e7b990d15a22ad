"""AOTAutograd's cache holds graphs of ours: found by equal calls alone, and rebuilt where our own cache lost them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config

from torch_mlc.dynamo_backend import aot_cache
from torch_mlc.runtime.counters import counters

COUNTS = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_saved", "autograd_cache_bypass")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty folders for both caches, and every graph large enough."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "mlc"))
    monkeypatch.setattr(aot_cache, "LEAST_TRAINED", 0)
    monkeypatch.setattr(aot_cache, "LEAST_INFERRED", 0)
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


def test_small_graphs_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_cache, "LEAST_TRAINED", 100)
    counts = as_new_process(torch.randn(5, 6))[1]
    assert set(counts.values()) == {0}
