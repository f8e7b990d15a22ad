"""The ATen graphs that torch.compile hands to a backend, captured without compiling them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...runtime.settings.options import Options
from .backend import job_of, through_aot
from .partition import copied_graph

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

    def compiler(kind: str) -> Callable[..., Any]:
        def keep(gm: fx.GraphModule, given: Sequence[Any]) -> Any:
            eager = fx.GraphModule(gm, copied_graph(gm.graph))
            graphs.append(job_of(gm, given, settings=options, kind=kind, whole=True).gm)
            return make_boxed_func(eager.forward)

        return keep

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return through_aot(gm, example_inputs, options, compiler)

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
