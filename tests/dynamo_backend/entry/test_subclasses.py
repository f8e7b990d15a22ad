"""Tensor subclasses that AOTAutograd takes apart: the graph sees what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import torch_mlc

pytestmark = pytest.mark.usefixtures("fresh_compiler")
aten = torch.ops.aten


class Quantized(Tensor):
    """A matrix of bytes and a scale for each row, which stands for their product."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    @staticmethod
    def of(x: Tensor) -> Quantized:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return Quantized((x / scale).round().to(torch.int8), scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantized({tuple(self.shape)})"  # torch logs what it takes apart

    def real(self) -> Tensor:
        return self.values.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            made = Quantized(func(args[0].values), func(args[0].scale))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        args, kwargs = torch.utils._pytree.tree_map_only(Quantized, Quantized.real, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_a_quantized_weight_is_read_as_bytes() -> None:
    layer = nn.Linear(32, 24)
    layer.weight = nn.Parameter(Quantized.of(layer.weight.detach()), requires_grad=False)
    x = torch.randn(3, 32)
    with torch.no_grad():
        report = torch_mlc.explain(layer, x)
        ours = torch.compile(layer, backend="mlc", fullgraph=True)(x)
        torch.testing.assert_close(ours, layer(x), rtol=1e-5, atol=1e-5)
    (graph,) = report.graphs
    assert any("int8" in kernel.loops for kernel in graph.kernels), report.show(details=True)


def test_gradients_flow_past_a_subclass() -> None:
    weight = nn.Parameter(Quantized.of(torch.randn(8, 6)), requires_grad=False)
    norm = nn.LayerNorm(6)
    x = torch.randn(4, 6)

    def f(x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(norm(x), weight))

    grads = []
    for fn in (torch.compile(f, backend="mlc", fullgraph=True), f):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        fn(leaf).square().sum().backward()
        grads.append((leaf.grad, norm.weight.grad, norm.bias.grad))
    torch.testing.assert_close(*grads)


def test_a_subclass_goes_in() -> None:
    def f(q: Quantized, x: Tensor) -> Tensor:
        return (q + x).relu()

    q, x = Quantized.of(torch.randn(5, 7)), torch.randn(5, 7)
    torch.testing.assert_close(torch.compile(f, backend="mlc", fullgraph=True)(q, x), (q.real() + x).relu())


class Pair(Tensor):
    """Two tensors of one shape that every op is applied to, each by itself."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> Pair:
        return Tensor._make_wrapper_subclass(
            cls, a.shape, strides=a.stride(), dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pair({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = []
        for side in ("a", "b"):
            mine = torch.utils._pytree.tree_map_only(Pair, lambda t, side=side: getattr(t, side), (args, kwargs or {}))
            sides.append(func(*mine[0], **mine[1]))
        made = torch.utils._pytree.tree_map(lambda a, b: Pair(a, b) if isinstance(a, Tensor) else a, sides[0], sides[1])
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


def test_training_and_mutation_of_a_subclass() -> None:
    def f(p: Tensor, x: Tensor) -> Tensor:
        return ((p * x).sin() + p).sum(0)

    x = torch.randn(4, 3)
    grads = []
    for fn in (torch.compile(f, backend="mlc", fullgraph=True), f):
        leaf = Pair(torch.ones(4, 3), torch.full((4, 3), 2.0)).requires_grad_()
        out = fn(leaf, x)
        assert isinstance(out, Pair)
        out.sum().backward()
        assert isinstance(leaf.grad, Pair)
        grads.append((leaf.grad.a, leaf.grad.b))
    torch.testing.assert_close(*grads)

    def g(p: Tensor) -> Tensor:
        p.mul_(3)
        p[0] += 1
        return p.t()

    ours, eager = (Pair(torch.ones(4, 3), torch.zeros(4, 3)) for _ in range(2))
    a, b = torch.compile(g, backend="mlc", fullgraph=True)(ours), g(eager)
    for mine, theirs in ((ours, eager), (a, b)):
        torch.testing.assert_close((mine.a, mine.b), (theirs.a, theirs.b))
