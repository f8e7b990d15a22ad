"""Fixtures of the converter tests: trace a function to ATen, import it, run it by the oracle, compare with eager."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo import pgo
from torch._functorch import config as functorch_config
from torch.fx.experimental.proxy_tensor import make_fx

from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table, whole_ops
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Graph, Library

# The benchmark models are scripts of the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.dynamo_backend.played_programs import both, played  # noqa: F401
from tests.versions import ISOLATES
from tests.workers import leave_guards_untimed

leave_guards_untimed()


@pytest.fixture(autouse=True)
def traced_graphs() -> Iterator[None]:
    """AOTAutograd traces every graph: what a test changes of our own code is no part of its cache's key. Sizes that
    earlier tests have seen make none of it vary, in torch.compile and in explain."""
    pgo.reset_code_state()
    if not ISOLATES:  # entries of explanations count toward the limit of those that a function may have
        torch._dynamo.reset()
    with functorch_config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before or left behind, kernels that fail are errors, and the same random numbers every time."""
    monkeypatch.setenv("MLC_STRICT", "1")
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The module ``reference.py`` beside this file."""
    spec = importlib.util.spec_from_file_location("import_reference", Path(__file__).with_name("reference.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trace_aten(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], dynamic: bool = False) -> fx.GraphModule:
    """The ATen graph of ``fn``, decomposed as the backend does."""
    mode, table = "symbolic" if dynamic else "fake", decomposition_table()
    with whole_ops():
        traced = make_fx(fn, decomposition_table=table, tracing_mode=mode)(*inputs)
        if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in traced.graph.nodes):
            functional = torch.func.functionalize(traced, remove="mutations")
            traced = make_fx(functional, decomposition_table=table, tracing_mode=mode)(*inputs)
    return traced


def library_ops(graph: Graph) -> list[str]:
    """Every library op of a graph but the seeds."""
    return [n.target for n in graph.nodes if isinstance(n, Library) and n.target != "mlc::seeds"]


@pytest.fixture
def trace() -> Callable[..., fx.GraphModule]:
    """``trace(fn, inputs, dynamic=False)``: the ATen graph of a function."""
    return trace_aten


@pytest.fixture
def check(reference: ModuleType) -> Callable[..., Graph]:
    """``check(fn, *inputs)``: imports the trace of ``fn``, runs it by the oracle, and compares each output with eager.

    ``library`` names the ops that may be library calls (none by default). ``rtol``/``atol`` None: torch's own for the
    type. ``exact`` stands in for ``fn`` in eager, where torch's own kernel depends on the processor.
    """

    def run(
        fn: Callable[..., Any],
        *inputs: torch.Tensor,
        dynamic: bool = False,
        library: Sequence[str] = (),
        rtol: float | None = None,
        atol: float | None = None,
        fast: bool = False,
        exact: Callable[..., Any] | None = None,
    ) -> Graph:
        traced = trace_aten(fn, inputs, dynamic)
        graph = import_graph(traced, inputs)
        assert set(library_ops(graph)) == set(library), str(traced.graph)
        results = (reference.run_fast if fast else reference.run_oracle)(graph, inputs)
        expected = torch.utils._pytree.tree_leaves((exact or fn)(*inputs))
        assert len(results) == len(expected)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
        return graph

    return run
