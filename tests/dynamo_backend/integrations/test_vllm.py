"""The adapter to vLLM, against a stand-in of what calls it: a manager that compiles parts of a graph, keeps handles in
a file of Python literals, and loads by them in another process.

The stand-in mirrors the protocol of vLLM 0.12 and later as its public source has it: ``initialize_cache``,
``compute_hash``, ``compile`` with ``compile_range`` and ``key``, ``load`` by handle.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

from torch_mlc.dynamo_backend.integrations.vllm import FOLDER, HandleError, MlcCompiler
from torch_mlc.runtime.counters import counters


class Range(NamedTuple):
    """For which numbers of tokens, both ends included."""

    start: int
    end: int


class Manager:
    """What vLLM does with a compiler: every graph is looked up by range, number and compiler first."""

    def __init__(self, folder: Path, disable_cache: bool = False) -> None:
        self.compiler = MlcCompiler()
        self.compiler.initialize_cache(str(folder), disable_cache=disable_cache, prefix="backbone")
        self.file = folder / "vllm_compile_cache.py"
        known = self.file.is_file() and not disable_cache
        self.handles: dict[Any, Any] = ast.literal_eval(self.file.read_text()) if known else {}
        self.loaded = 0

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_range, index = Range(1, 8192), 0
        place = (tuple(compile_range), index, self.compiler.name)
        if place in self.handles:
            self.loaded += 1
            return self.compiler.load(self.handles[place], gm, list(inputs), index, compile_range)
        config = {"max_autotune": True, "mlc": {"numerics": "fast"}}
        compiled, handle = self.compiler.compile(gm, inputs, config, compile_range, f"artifact_{index}")
        if handle is not None:
            self.handles[place] = handle
            self.file.write_text(repr(self.handles))
        return compiled


def layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w).sum(-1) + x.mean(-1)


def check(manager: Manager) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=manager.backend, dynamic=True, fullgraph=True)
    for tokens in (3, 8, 17):
        x, w = torch.randn(tokens, 8), torch.randn(8, 8)
        torch.testing.assert_close(compiled(x, w), layer(x, w))


def test_compiled_and_loaded(tmp_path: Path) -> None:
    first = Manager(tmp_path)
    check(first)
    assert first.loaded == 0 and any((tmp_path / FOLDER).iterdir())
    second = Manager(tmp_path)
    before = counters.snapshot()
    check(second)
    # Loaded from the folder: no kernel is compiled.
    assert second.loaded == 1 and second.handles == first.handles
    assert counters.since(before).get("kernels_compiled", 0) == 0


def test_without_a_cache(tmp_path: Path) -> None:
    manager = Manager(tmp_path, disable_cache=True)
    check(manager)
    assert not manager.handles and not (tmp_path / FOLDER).exists()


def test_a_part_that_returns_a_tensor_alone() -> None:
    """Parts of a split graph need not return a tuple, and are left as they are."""
    graph = fx.symbolic_trace(lambda x: x.sin() + 1)
    compiler = MlcCompiler()
    x = torch.randn(5)
    compiled, handle = compiler.compile(graph, [x], None, Range(5, 5))
    assert handle is None
    torch.testing.assert_close(compiled(x), x.sin() + 1)
    torch.testing.assert_close(graph(x), x.sin() + 1)


def test_the_older_form_of_the_protocol(tmp_path: Path) -> None:
    compiler = MlcCompiler()
    compiler.initialize_cache(str(tmp_path))
    graph, x = fx.symbolic_trace(lambda x: x.cos() * 2), torch.randn(4)
    compiled, handle = compiler.compile(graph, [x], {}, runtime_shape=4)
    again = compiler.load(handle, graph, [x], 0, runtime_shape=4)
    torch.testing.assert_close(compiled(x), again(x))


def test_the_hash_tells_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = MlcCompiler()
    plain = compiler.compute_hash(object())
    assert plain == MlcCompiler().compute_hash(object())
    monkeypatch.setenv("MLC_NUMERICS", "eager")
    assert compiler.compute_hash(object()) != plain


@pytest.mark.parametrize("handle", [None, ("hash", "path"), "inductor:1", "mlc:"])
def test_handles_of_others(tmp_path: Path, handle: object) -> None:
    compiler = MlcCompiler()
    compiler.initialize_cache(str(tmp_path))
    graph = fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(HandleError, match="no handle of the compiler mlc"):
        compiler.load(handle, graph, [torch.ones(2)], 0)
    with pytest.raises(HandleError, match="initialize_cache has to be called"):
        MlcCompiler().load("mlc:a:{}", graph, [torch.ones(2)], 0)
