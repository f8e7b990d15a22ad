"""Programs that are compiled with what users have registered, and those that are not, are never one another's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import torch_mlc
from torch_mlc.dynamo_backend.caches.surroundings import surroundings
from torch_mlc.ir.expr.value import const
from torch_mlc.ir.graph.graph import Graph
from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.passes import eliminate_dead, simplify_algebra
from torch_mlc.scheduler.rules.cpu.plain import CPU_PLAIN


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty folders for both caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "mlc"))
    with functorch_config.patch(enable_autograd_cache=True):
        yield
    torch._dynamo.reset()


def f(x: Tensor) -> Tensor:
    return torch.celu(x).sin() + 1


X = torch.linspace(-3, 3, 15).view(3, 5)


def run() -> tuple[Tensor, int]:
    """The result of a program that is asked for anew, and how many graphs were compiled for it."""
    torch._dynamo.reset()
    before = counters.snapshot()["graphs_compiled"]
    with torch.no_grad():
        got = torch.compile(f, backend="mlc")(X)
    return got, counters.snapshot()["graphs_compiled"] - before


def scaled(by: float) -> Any:
    return torch_mlc.register_converter("aten.celu", lambda x: x * by, pointwise=True)


def test_our_own_functions_as_converters() -> None:
    keys = []
    for function in (torch_mlc.Formula.__abs__, torch_mlc.Formula.__neg__):
        with torch_mlc.register_converter("aten.celu", function, pointwise=True):
            keys.append(str(key()))
    assert keys[0] != keys[1]


def test_converters() -> None:
    torch.testing.assert_close(run()[0], f(X))
    for factor in (2.0, 3.0, 2.0):
        with scaled(factor):
            torch.testing.assert_close(run()[0], (X * factor).sin() + 1)
            assert run()[1] == 0, "and found again"
    got, compiled = run()
    torch.testing.assert_close(got, f(X))
    assert compiled == 0, "as it was"


def key() -> dict[str, str]:
    return surroundings(Options(), ["cpu"])


def test_rules() -> None:
    def rule(lanes: int, kinds: tuple[str, ...] = ("cpu",)) -> torch_mlc.Rule:
        return torch_mlc.Rule("mine", kinds, lambda *_: True, lambda *_: {"lanes": (lanes,)}, CPU_PLAIN.apply)

    before, keys = key(), []
    for lanes, kinds, place in (
        (8, ("cpu",), None), (16, ("cpu",), None), (8, ("cpu", "cuda"), None), (8, ("cpu",), "cpu_plain")
    ):  # fmt: skip
        with torch_mlc.register_rule(rule(lanes, kinds), before=place):
            keys.append(key())
            assert key() == keys[-1]
    assert len({str(k) for k in [before, *keys]}) == 5 and key() == before


def test_intrinsics() -> None:
    with torch_mlc.register_converter("aten.celu", lambda x: x.mine(), pointwise=True):
        for factor in (2.0, 3.0, 2.0):
            with mine(factor):
                torch.testing.assert_close(run()[0], (X * factor).sin() + 1)
                assert run()[1] == 0
        keys = []
        for given in ({}, {"triton": "{0}"}, {"triton": "-{0}"}, {"flops": 3}):
            with torch_mlc.register_intrinsic("mine", lambda x: x, **given):
                keys.append(str(key()))
        assert len(set(keys)) == 4


def times(factor: float) -> Any:
    return lambda x: x * factor


def mine(factor: float) -> Any:
    return torch_mlc.register_intrinsic("mine", lambda x: x * factor)


def test_passes() -> None:
    keys = [key()]
    for rewrite in (eliminate_dead, simplify_algebra, lambda g: g, lambda g, c: g):
        for place in ({}, {"before": "split_reductions"}, {"after": "eliminate_dead"}):
            with torch_mlc.register_pass(rewrite, name="mine", **place):
                keys.append(key())
                assert key() == keys[-1]
    assert len({str(k) for k in keys}) == 9, "at the end is after the last of them"
    torch.testing.assert_close(run()[0], f(X))
    for value in (2.0, 3.0):
        with torch_mlc.register_pass(constant(value), name="mine"):
            assert run()[1] == 1 and run()[1] == 0
            torch.testing.assert_close(run()[0], torch.full((3, 5), value))


def constant(value: float) -> Any:
    def rewrite(graph: Graph) -> Graph:
        return replace(
            graph,
            nodes=tuple(replace(n, value=const(value, n.type.dtype)) for n in graph.nodes),  # type: ignore
        )

    return rewrite


def test_patterns() -> None:
    def pattern(x: Tensor) -> Tensor:
        return x.sin() + 1

    ops, keys = (torch.ops.aten.cos.default, torch.ops.aten.exp.default, torch.cos), [key()]
    for replacement in (*ops, lambda x: x * 2, lambda x: x * 3):
        for examples in ([torch.empty(2, 3)], [torch.empty(2, 3, 4)]):
            with torch_mlc.register_pattern(pattern, replacement, examples=examples):
                keys.append(key())
                assert key() == keys[-1]
    assert len({str(k) for k in keys}) == 11 and key() == keys[0]
    run()
    for factor in (2.0, 3.0):
        with torch_mlc.register_pattern(pattern, times(factor), examples=[torch.empty(2, 3)]):
            torch.testing.assert_close(run()[0], torch.celu(X) * factor)
            assert run()[1] == 0


SCRIPT = """
import sys
from dataclasses import replace
import torch
import torch_mlc
from torch_mlc.runtime.counters import counters
from torch_mlc.scheduler.rules.cpu.plain import CPU_PLAIN

factor = float(sys.argv[1])
if factor:
    torch_mlc.register_intrinsic("times", lambda x: x * factor)
    torch_mlc.register_converter("aten.celu", lambda x: x.times(), pointwise=True)
    torch_mlc.register_pattern(
        lambda x: x.exp() + 1, lambda x: torch.celu(x) + 1, examples=[torch.empty(3)], name="exponential"
    )
    torch_mlc.register_rule(replace(CPU_PLAIN, name="mine"))
    torch_mlc.register_pass(lambda graph: graph, name="nothing")
with torch.no_grad():
    found = torch.compile(lambda x: torch.exp(x) + 1, backend="mlc")(torch.zeros(3) + torch.ones(3))[0].item()
print(round(found, 3), counters.snapshot()["graphs_compiled"])
"""


def test_other_processes(tmp_path: Path) -> None:
    def told(factor: float) -> str:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        return subprocess.run(
            [sys.executable, script, str(factor)], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert [told(k) for k in (0.0, 4.0, 0.0, 4.0)] == ["3.718 1", "5.0 1", "3.718 0", "5.0 0"]
