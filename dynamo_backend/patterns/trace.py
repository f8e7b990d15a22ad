"""Functions of tensors as graphs of ATen ops, decomposed as the backend decomposes models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..importing.decompositions import decomposition_table, whole_ops
from ..tracing.fake_device import retarget


@dataclass(frozen=True, slots=True)
class TensorExample:
    """A tensor that a function of a user's is traced with: a rank, and an element type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Example: TypeAlias = TensorExample | bool | int | float


def trace_symbolic(function: Callable[..., Any], examples: Sequence[Example]) -> fx.GraphModule:
    """A function of tensors whose sizes are symbols, but for those of 0 and 1. Numbers among the examples are
    literals, as they stand."""
    with _disable_current_modes():
        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
        tensors = [_symbolic(e, k, mode) for k, e in enumerate(examples) if isinstance(e, TensorExample)]
        return _traced(_of_tensors(function, examples), tensors, mode)


def trace_like(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """A function of fake tensors, and of numbers, as it is for these."""
    tensors = [v for v in values if isinstance(v, FakeTensor)]
    device = tensors[0].device
    elsewhere = not torch.get_device_module(device).is_available()
    with _disable_current_modes():
        # Tracing computes with constants, which have to be somewhere.
        given = [_on_cpu(t) for t in tensors] if elsewhere else tensors
        made = _traced(_of_tensors(function, values), given, tensors[0].fake_mode)
    if elsewhere:
        retarget([made], str(device))
    return made


def _of_tensors(function: Callable[..., Any], values: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function of the tensors alone, and its results as a list."""

    def call(*tensors: Any) -> list[Any]:
        left = iter(tensors)
        return tree_leaves(
            function(*(next(left) if isinstance(v, (TensorExample, torch.Tensor)) else v for v in values))
        )

    return call


def _traced(call: Callable[..., Any], tensors: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    with mode, torch.no_grad(), whole_ops():
        made = make_fx(call, decomposition_table=decomposition_table(), tracing_mode="real")(*tensors)
        if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in made.graph.nodes):
            functional = torch.func.functionalize(call, remove="mutations")
            made = make_fx(functional, decomposition_table=decomposition_table(), tracing_mode="real")(*tensors)
    made.graph.eliminate_dead_code()
    return made


def _symbolic(example: TensorExample, k: int, mode: FakeTensorMode) -> FakeTensor:
    dims = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(example.shape))
    real = torch.empty(example.shape, dtype=example.dtype)
    return mode.from_tensor(real, symbolic_context=dims, source=ConstantSource(f"x{k}"))


def _on_cpu(value: FakeTensor) -> FakeTensor:
    """A tensor like it on a CPU, at the same place of its memory."""
    with value.fake_mode:
        memory = torch.empty(value.untyped_storage().nbytes() // value.dtype.itemsize, dtype=value.dtype)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())  # type: ignore[return-value]
