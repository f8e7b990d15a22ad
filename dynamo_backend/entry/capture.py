"""The ATen graphs that torch.compile hands to a backend, captured without compiling them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...runtime.settings.options import Options
from ..aten_passes.views.written_arguments import views_as_they_are
from ..importing.decompositions import decomposition_table, whole_ops
from .partition import partition, rewrite_whole

_DEFAULTS = Options()


def capture(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dynamic: bool | None = False,
    training: bool = False,
    options: Options = _DEFAULTS,
) -> list[fx.GraphModule]:
    """AOTAutograd's graphs of ``model(*inputs)``: the inference graph, or forward and backward in that order.

    The model is run, by eager ops, once; with ``training`` the sum of its floating outputs is differentiated and the
    gradients left in ``.grad`` are dropped. ``inputs`` and parameters may be fake tensors of any device of one
    ``FakeTensorMode``. One graph (pair) comes back for every graph that Dynamo makes.
    """
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def keep_whole(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        rewrite_whole(gm, options)
        return keep(gm, inputs)

    aot = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        inference_compiler=keep_whole,
        partition_fn=partition(options),
        decompositions=decomposition_table(),
        keep_inference_input_mutations=False,
    )

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        with whole_ops(), views_as_they_are():
            return aot(gm, example_inputs)

    torch._dynamo.reset()
    try:
        with fake_mode_of(model, inputs) or contextlib.nullcontext(), torch.set_grad_enabled(training):
            result = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
            if training:
                _backward(result)
    finally:
        torch._dynamo.reset()
        if isinstance(model, torch.nn.Module) and training:
            model.zero_grad(set_to_none=True)
    return graphs


def fake_mode_of(model: Any, inputs: Sequence[Any]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among inputs and parameters."""
    tensors = [*inputs, *(model.parameters() if isinstance(model, torch.nn.Module) else ())]
    for t in tensors:
        data = t.data if isinstance(t, torch.nn.Parameter) else t
        for candidate in (t, data):
            if isinstance(candidate, FakeTensor):
                return candidate.fake_mode
    return None


def _backward(result: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves(result)
    losses = [t.float().sum() for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if losses:
        torch.autograd.backward(losses)
