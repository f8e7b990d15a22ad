"""Running fused graphs by definition: library calls by torch, kernels by the oracle."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, Library, Ref, SizeInput, TensorType, View
from torch_mlc.ir.nest.loops import Buffer, LoopNest
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.passes import run_passes
from torch_mlc.scheduler.context import USUAL
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES

Sizes = Mapping[sympy.Symbol, int]


def to_numpy(t: Tensor) -> np.ndarray[Any, Any]:
    if t.dtype is torch.bfloat16:
        return t.contiguous().view(torch.int16).numpy().view(DType.BFLOAT16.numpy)
    return t.contiguous().numpy()


def from_numpy(a: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    if dtype is torch.bfloat16:
        return torch.from_numpy(a.astype(np.float32)).to(dtype)
    return torch.from_numpy(a.copy()).to(dtype)


class Reference:
    """One graph and a run of it."""

    def __init__(self, fusion: Fusion, nests: Mapping[str, LoopNest]) -> None:
        self.fusion, self.nests = fusion, nests

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        graph = self.fusion.graph
        env: dict[str, Any] = {}
        sizes: dict[sympy.Symbol, int] = {}
        for node, value in zip(graph.inputs, inputs, strict=True):
            if isinstance(node, Input):
                env[node.name] = value
            elif isinstance(node, SizeInput) and node.value.is_Symbol:
                sizes[node.value] = int(value)
        for node in graph.nodes:
            match node:
                case View():
                    env[node.name] = self._view(env[node.source], node, sizes)
                case Library():
                    self._library(node, env, sizes)
                case CallTensor():
                    self._kernel(node, env, sizes)
        return [env[o] if isinstance(o, str) else o for o in graph.outputs]

    def _kernel(self, node: CallTensor, env: dict[str, Any], sizes: Sizes) -> None:
        nest = self.nests[node.function]
        local = {s.name: evaluate(v, sizes) for s, v in zip(nest.symbols.symbols, node.sizes, strict=True)}
        inputs = {b.name: to_numpy(shaped(env[a], b, local)) for b, a in zip(nest.params, node.args, strict=False)}
        results = run_nest(nest, inputs, local)
        for name, kind, out in zip(node.names, node.types, nest.outputs, strict=True):
            buffer = nest.buffer(out)
            tensor = empty(kind, sizes)
            shaped(tensor, buffer, local).copy_(from_numpy(results[out], kind.dtype.torch))
            env[name] = tensor

    def _library(self, node: Library, env: dict[str, Any], sizes: Sizes) -> None:
        if node.target == "mlc::seeds":
            env[node.names[0]] = torch.randint(-(2**63), 2**63 - 1, (int(node.args[0]),))
            return

        def arg(a: Any) -> Any:
            match a:
                case Ref(name):
                    return env[name]
                case tuple() | list():
                    return [arg(x) for x in a]
                case sympy.Expr():
                    return evaluate(a, sizes)
                case _:
                    return a

        namespace, rest = node.target.split("::")
        op, overload = rest.split(".")
        call = getattr(getattr(getattr(torch.ops, namespace), op), overload)
        result = call(*map(arg, node.args), **{k: arg(v) for k, v in node.kwargs})
        results = result if isinstance(result, (tuple, list)) else (result,)
        env.update(zip(node.names, results, strict=True))

    def _view(self, base: Tensor, node: View, sizes: Sizes) -> Tensor:
        shape = [evaluate(s, sizes) for s in node.type.shape]
        strides = [evaluate(s, sizes) for s in node.type.strides]
        return torch.as_strided(base, shape, strides, base.storage_offset() + evaluate(node.offset, sizes))


def evaluate(expr: sympy.Expr | int, sizes: Mapping[Any, int]) -> int:
    if isinstance(expr, int):
        return expr
    return int(expr.xreplace({s: sympy.Integer(sizes.get(s, sizes.get(s.name))) for s in expr.free_symbols}))  # type: ignore[call-overload]


def shaped(t: Tensor, buffer: Buffer, sizes: Mapping[Any, int]) -> Tensor:
    shape = [evaluate(s, sizes) for s in buffer.shape]
    strides = [evaluate(s, sizes) for s in buffer.strides]
    return torch.as_strided(t, shape, strides, t.storage_offset())


def empty(kind: TensorType, sizes: Sizes) -> Tensor:
    shape = [evaluate(s, sizes) for s in kind.shape]
    return torch.empty_strided(shape, [evaluate(s, sizes) for s in kind.strides], dtype=kind.dtype.torch)


def compile_reference(fn: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False) -> Reference:
    """Capture, import, run the graph passes, fuse and lower; one graph is expected."""
    (gm,) = capture(fn, inputs, dynamic=dynamic)
    return lower_all(import_graph(gm))


def lower_all(graph: Graph) -> Reference:
    graph = run_passes(GRAPH_PASSES, graph, USUAL)
    fusion = fuse(graph)
    return Reference(fusion, {name: lower_to_loops(f) for name, f in fusion.functions.items()})


@pytest.fixture
def reference() -> Callable[..., Reference]:
    return compile_reference


def _beside(name: str) -> ModuleType:
    """A module that is a file beside this one."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def attention_functions() -> ModuleType:
    return _beside("attention_functions")


@pytest.fixture(scope="session")
def attention_gradients() -> ModuleType:
    return _beside("attention_gradients")
