"""Models that no benchmark has, in training: results and gradients against float64, at two sizes of one compilation."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.accuracy import judge
from tests.dynamo_backend.architectures import ARCHITECTURES
from torch_mlc.runtime.counters import counters

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# One that always runs; the others take minutes between them.
QUICK = ("diffusion",)


def outcome(run: Any, model: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Results of a step and the gradients of all that has one, by name."""
    inputs = tuple(x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs)
    model.zero_grad(set_to_none=True)
    results = pytree.tree_leaves(run(*inputs))
    flowing = [r for r in results if r.requires_grad]
    sum((r * torch.linspace(0.5, 1.5, r.numel(), dtype=dtype).view(r.shape)).sum() for r in flowing).backward()
    found = {f"result {k}": r.detach() for k, r in enumerate(results)}
    found |= {f"gradient of input {k}": x.grad for k, x in enumerate(inputs) if x.grad is not None}
    return found | {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES])
def test_training_equals_float64(name: str, dynamic: bool) -> None:
    torch.manual_seed(3)
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    run = torch.compile(model, backend="mlc", dynamic=dynamic, fullgraph=True)
    before = counters.snapshot()
    for n in architecture.sizes[: 1 + dynamic]:
        inputs = architecture.inputs(n)
        start, exact = deepcopy(model.state_dict()), deepcopy(model).double()
        eager = outcome(model, model, inputs, torch.float32)
        model.load_state_dict(start)
        values = outcome(run, model, inputs, torch.float32)
        accuracy = judge(values, eager, outcome(exact, exact, inputs, torch.float64), torch.float32)
        assert accuracy.ok, (n, accuracy)
    assert counters.since(before).get("kernel_fallbacks", 0) == 0
