"""A compiler that a user has changed in the process is never answered with programs of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from torch_mlc.dynamo_backend.converters.registry import CONVERTERS
from torch_mlc.runtime.counters import counters
from torch_mlc.scheduler import calls, passes, rules

SIN = "aten.sin.default"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty folders for both caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "mlc"))
    with functorch_config.patch(enable_autograd_cache=True):
        yield
    torch._dynamo.reset()


def f(x: Tensor) -> Tensor:
    return x.sin().sum(-1) + 1


def run() -> tuple[Tensor, int]:
    """The result of a program that is asked for anew, and how many graphs were compiled for it."""
    torch._dynamo.reset()
    before = counters.snapshot()["graphs_compiled"]
    with torch.no_grad():
        got = torch.compile(f, backend="mlc")(torch.arange(15.0).view(3, 5))
    return got, counters.snapshot()["graphs_compiled"] - before


def times(factor: int) -> Callable[..., Any]:
    multiply = CONVERTERS["aten.mul.Tensor"]

    def sin(ctx: Any, x: Any) -> Any:
        return multiply(ctx, x, factor)

    return sin


def test_converters(monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = run()
    assert run()[1] == 0
    x = torch.arange(15.0).view(3, 5)
    for converter, expected in ((times(2), x * 2), (times(3), x * 3)):
        with monkeypatch.context() as patched:
            patched.setitem(CONVERTERS, SIN, converter)
            for compiled in (1, 0):
                got, count = run()
                torch.testing.assert_close(got, expected.sum(-1) + 1)
                assert count == compiled, "and found again, since what it does can be told"
    got, count = run()
    torch.testing.assert_close(got, want)
    assert count == 0, "as it was, with the program that was there"


def test_tables_of_our_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    for patch in (
        lambda p: p.setattr(passes, "GRAPH_PASSES", passes.GRAPH_PASSES[1:]),
        lambda p: p.setattr(calls, "CALL_PASSES", calls.CALL_PASSES[:-1]),
        lambda p: p.setattr(rules, "RULES", rules.RULES[::-1]),
        lambda p: p.setitem(CONVERTERS, SIN, CONVERTERS["aten.cos.default"]),
        lambda p: p.delitem(CONVERTERS, SIN),
        lambda p: p.setattr(rules, "RULES", tuple(replace(r, matches=of_mine(r.matches)) for r in rules.RULES)),
    ):
        with monkeypatch.context() as patched:
            patch(patched)
            assert run()[1] == 1
    assert run()[1] == 0


def of_mine(matches: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *given: matches(*given)


def test_nothing_is_kept_of_what_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONVERTERS, SIN, Mock(wraps=CONVERTERS[SIN]))
    monkeypatch.setenv("MLC_LOG", "cache")
    for _ in range(2):
        assert run()[1] == 1
    assert "CONVERTERS.aten.sin.default is made of a unittest.mock.Mock" in capfd.readouterr().err
    assert not list((tmp_path / "mlc").rglob("*/graph/*"))
