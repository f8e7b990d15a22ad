"""Layers that repeat are planned once, and what comes out is what planning each of them gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.versions import torch_mends_it
from torch_mlc.dynamo_backend.compiling.pass_lists import context_of
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.graph_key import graph_key
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.repeats.layers import FEWEST, Layers, find_layers
from torch_mlc.dynamo_backend.repeats.repeating import NotAlike, Repeating
from torch_mlc.dynamo_backend.repeats.roll import unroll
from torch_mlc.ir.passes import Runner
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.fusion.fuse import Fusion, fuse
from torch_mlc.scheduler.passes import GRAPH_PASSES

Trace: TypeAlias = Callable[..., fx.GraphModule]
COUNT = FEWEST + 1
X, MASK = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(0, 1, 8)


def layer(x: Tensor, mask: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """A norm, two products and a gate on a residual stream, with something that all layers make alike."""
    return x + (F.gelu(F.layer_norm(x, (8,)) @ wide) @ narrow) * mask.exp()


def stack(x: Tensor, mask: Tensor, *weights: Tensor, end: Callable[[list[Tensor]], Any] = lambda xs: xs[-1]) -> Any:
    found = [x.cos()]
    for k in range(0, len(weights), 2):
        found.append(layer(found[-1], mask, weights[k], weights[k + 1]))
    return end(found)


def weights_of(*widths: int, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [shape for w in widths for shape in ((8, w), (w, 8))]
    return [(torch.randn(s, generator=generator) / 4).requires_grad_(grad) for s in shapes]


ALIKE = weights_of(*[12] * COUNT)


def layers_of(gm: fx.GraphModule) -> Layers | None:
    key = graph_key(gm, (), (), {})
    assert key is not None
    return find_layers(gm, key)


def planned(gm: fx.GraphModule, layers: Layers | None = None) -> tuple[Fusion, dict[str, str]]:
    names: dict[str, str] = {}
    skipped = layers.skipped if layers is not None else {}
    imported = import_graph(gm, skipped=skipped, called_after=names)
    graph = Runner(verify=True)(imported, GRAPH_PASSES, context_of(Options()))
    return fuse(graph), names


def unrolled(gm: fx.GraphModule, layers: Layers) -> Fusion | None:
    few, names = planned(gm, layers)
    try:
        return replace(few, graph=unroll(Repeating(few.graph, gm, layers, frozenset(), names)))
    except NotAlike:
        return None


def is_as_whole(gm: fx.GraphModule) -> bool:
    """Whether a few layers lead to the very plan that all of them do."""
    layers = layers_of(gm)
    assert layers is not None and layers.count >= FEWEST
    found, (whole, _) = unrolled(gm, layers), planned(gm)
    assert found is not None
    return found.graph == whole.graph and found.functions == whole.functions


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("end", [lambda xs: xs[-1].sin(), tuple], ids=["one", "all"])
def test_the_plan_of_few_layers_unrolls_to_that_of_all(
    trace: Trace, end: Callable[[list[Tensor]], Any], dynamic: bool
) -> None:
    assert is_as_whole(trace(lambda *xs: stack(*xs, end=end), (X, MASK, *ALIKE), dynamic))


def test_forward_and_backward() -> None:
    forward, backward = capture(stack, (X, MASK, *weights_of(*[12] * (COUNT + 1), grad=True)), training=True)
    assert is_as_whole(forward) and is_as_whole(backward)


@pytest.mark.parametrize(
    ("widths", "end"),
    [
        ([12] * (FEWEST - 1), lambda xs: xs[-1]),
        ([12] * (FEWEST - 4) + [16] + [12] * 4, lambda xs: xs[-1]),
        ([12] * COUNT, lambda xs: xs[COUNT // 2] + xs[-1]),
        ([12] * COUNT, lambda xs: (xs[COUNT // 2], xs[-1])),
    ],
    ids=["too few", "another in the middle", "one read behind them", "one leaves the graph"],
)
def test_layers_that_are_not_alike(trace: Trace, widths: Sequence[int], end: Callable[[list[Tensor]], Any]) -> None:
    assert layers_of(trace(lambda *xs: stack(*xs, end=end), (X, MASK, *weights_of(*widths)))) is None


def test_layers_that_share_weights_in_turn(trace: Trace) -> None:
    def turns(x: Tensor, mask: Tensor, *weights: Tensor) -> Any:
        return stack(x, mask, *(w for k in range(COUNT) for w in weights[k % 2 * 2 :][:2]))

    assert layers_of(trace(turns, (X, MASK, *weights_of(12, 12)))) is None


def one_kernel(x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
    for _ in range(COUNT):
        x = (x.sin() + mask).softmax(-1)
    return x


def writes_at_the_end(x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
        w.copy_(w + x.mean())
    return x


def draws(x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = F.dropout(x @ w)
    return x


@pytest.mark.parametrize("function", [one_kernel, writes_at_the_end, draws], ids=lambda f: f.__name__)
def test_a_plan_that_does_not_repeat_is_not_used(trace: Trace, function: Callable[..., Tensor]) -> None:
    gm = trace(function, (X, MASK, *weights_of(*[8] * (COUNT // 2))))
    layers = layers_of(gm)
    assert layers is None or unrolled(gm, layers) is None


class Running(nn.Module):
    """Each layer writes a buffer at the end of the graph. No bias goes into a norm, which takes it away, and what a
    norm makes is not all of the result: gradients would be rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) for _ in range(COUNT))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x) * mask
        return x


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights_of(*[12] * COUNT))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return stack(x, mask, *self.weights)


class Shared(nn.Module):
    """All layers have the same weights, whose gradient is one sum, of as many terms as there are layers. At these sizes
    it is made of those layers that the passes see, behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(10):
            x = x + F.gelu(self.linear(self.norm(x)))
        return x


class Convolutions(nn.Module):
    """What a layer hands on leaves the graph, and is copied in another layout: a pass calls the copy after it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Conv2d(128, 768, 1) for _ in range(COUNT))
        self.near = nn.ModuleList(nn.Conv2d(768, 768, 3, padding=1, groups=768) for _ in range(COUNT))
        self.narrow = nn.ModuleList(nn.Conv2d(768, 128, 1) for _ in range(COUNT))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for wide, near, narrow in zip(self.wide, self.near, self.narrow, strict=True):
            x = x + narrow(F.silu(near(F.silu(wide(x)))))
        return x


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(Stack, leaf(4, 8), marks=torch_mends_it),
        (Shared, leaf(24, 16)),
        (Running, leaf(24, 8).detach()),
        (Convolutions, leaf(2, 128, 6, 6).detach()),
    ],
    ids=["stack", "shared", "running", "convolutions"],
)
def test_training_as_eager(make: Callable[[], nn.Module], x: Tensor) -> None:
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    given = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2)]
    for call, own in zip((torch.compile(model, backend="mlc"), twin), given, strict=True):
        call(own, MASK).square().mean().backward()
    leaves = zip((given[0], *model.parameters()), (given[1], *twin.parameters()), strict=True)
    for mine, eager in ((a, b) for a, b in leaves if a.requires_grad):
        assert mine.grad is not None and eager.grad is not None
        torch.testing.assert_close(mine.grad, eager.grad, rtol=1e-4, atol=1e-5 * float(eager.grad.abs().max()))
    for mine, eager in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, eager)
