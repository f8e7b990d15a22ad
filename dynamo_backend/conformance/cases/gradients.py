"""Which gradients there are, and which are None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Make, Subject


def leaves(*shapes: tuple[int, ...]) -> Make:
    return lambda: tuple(torch.randn(shape, requires_grad=True) for shape in shapes)


@case("An input that nothing depends on gets zeros for its gradient.", "Optimizers move what they should skip.")
def unused_input(subject: Subject) -> None:
    subject.agrees(lambda x, y, z: (x * 2).sin() + y.detach().sum(), leaves((3,), (3,), (3,)), train=True)


@case("A gradient that autograd leaves undefined is an error, or garbage.", "Losses often use one of two results.")
def undefined_gradient(subject: Subject) -> None:
    def first(results: Sequence[Tensor]) -> None:
        results[0].sum().backward()

    def last(results: Sequence[Tensor]) -> None:
        results[-1].sum().backward()

    for chosen in (first, last):
        subject.agrees(
            lambda x, y: (x * y, x.exp(), y.cos()), leaves((4,), (4,)), train=True, backward=chosen,
            leave_out=["zero gradients"],
        )  # fmt: skip


@case("A result that reaches only some inputs gives gradients to all.", "Parameters that took no part are moved.")
def partial_gradients(subject: Subject) -> None:
    def second(results: Sequence[Tensor]) -> None:
        results[1].sum().backward()

    subject.agrees(
        lambda x, y: (x.sin(), y.sin()), leaves((4,), (4,)), train=True, backward=second, leave_out=["zero gradients"]
    )


@case("Integer and bool inputs break the gradient of the others.", "Indices and masks take part in every model.")
def inputs_without_gradients(subject: Subject) -> None:
    def f(table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, table[index].sum(-1), 0.5)

    def make() -> tuple[Any, ...]:
        return (
            torch.randn(5, 3, requires_grad=True),
            torch.tensor([1, 4, 1, 0]),
            torch.tensor([True, False, True, True]),
        )

    subject.agrees(f, make, train=True)


class TwoLayers(nn.Module):
    """Two layers; the first may be frozen."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@case("Frozen parameters get gradients.", "Fine-tuning trains what should stay.")
def frozen_parameters(subject: Subject) -> None:
    subject.agrees(TwoLayers, lambda: (torch.randn(3, 4),), module=True, train=True)


@case("Parameters that are frozen, or thawed, after compiling keep what they were.", "The guard is missing.")
def frozen_later(subject: Subject) -> None:
    net = TwoLayers(frozen=False)
    compiled = subject.compile(net)
    for wanted in (True, False, True):
        net.first.requires_grad_(wanted)
        net.zero_grad()
        compiled(torch.randn(3, 4)).sum().backward()
        has = net.first.weight.grad is not None
        expect(has == wanted, f"with requires_grad={wanted} the parameter's gradient is {'there' if has else 'None'}")


@case("Results need gradients where eager's do not.", "Integer results and detached ones are leaves.")
def results_without_gradients(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(), x.detach() * 2, x > 0, x.sin()

    subject.agrees(f, leaves((5,)), train=True)


@case("A program compiled without gradients is used with them.", "requires_grad of inputs changes.")
def gradients_come_and_go(subject: Subject) -> None:
    def make(needed: bool) -> Make:
        return lambda: (torch.randn(4, requires_grad=needed), torch.randn(4, requires_grad=not needed))

    subject.agrees(lambda x, y: x.sin() * y, *(make(n) for n in (False, True, False)), train=True)


@case("A second backward replaces gradients instead of adding.", "Accumulation over small batches is lost.")
def gradients_add_up(subject: Subject) -> None:
    net, copy = TwoLayers(False), TwoLayers(False)
    copy.load_state_dict(net.state_dict())
    compiled = subject.compile(net)
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        compiled(x).sum().backward()
        copy(x).sum().backward()
    for (name, p), q in zip(net.named_parameters(), copy.parameters()):
        assert p.grad is not None and q.grad is not None
        expect(torch.allclose(p.grad, q.grad, atol=1e-5), f"the gradient of {name} after three steps is not their sum")


class Doubling(torch.autograd.Function):
    """Has a backward of its own, which is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x.sign() * 7


@case("A function with its own backward gets the derivative.", "Straight-through estimators are written that way.")
def own_backward(subject: Subject) -> None:
    subject.agrees(lambda x: Doubling.apply(x.sin()) + x, leaves((5,)), train=True)


@case("One parameter used in two places gets half of its gradient.", "Embeddings are tied to output layers.")
def tied_parameters(subject: Subject) -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.table(index))

    subject.agrees(Embedding, lambda: (torch.tensor([1, 3, 3]),), module=True, train=True)


@case("Gradients of empty inputs are None, or garbage.", "A batch may be empty in training too.")
def gradients_of_nothing(subject: Subject) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.ReLU())

    subject.agrees(net, lambda: (torch.randn(0, 3, requires_grad=True),), module=True, train=True)


@case("A gradient has another type than its input.", "Half parameters get float32 gradients, and memory doubles.")
def types_of_gradients(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x.float() * y).sum(0)

    def make() -> tuple[Any, ...]:
        return torch.randn(3, 4).bfloat16().requires_grad_(), torch.randn(3, 4, requires_grad=True)

    subject.agrees(f, make, train=True)


@case("Gradients inside of the region are wrong.", "Penalties on gradients are computed within the step.")
def gradient_inside_of_the_region(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: t.sin().sum())(x) * x

    subject.agrees(f, lambda: (torch.randn(4),))
