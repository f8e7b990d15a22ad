"""Layouts of inputs, results and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.subject import Subject


def mixed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A pointwise result, a reduction, and a product."""
    return torch.sin(x) + 1, x.sum(-1), x * torch.arange(float(x.shape[-1]))


def reads(subject: Subject, *makes: Callable[[], Tensor]) -> None:
    """``mixed`` of a tensor of each layout, with gradients, in one program."""
    subject.agrees(
        lambda *xs: [mixed(x) for x in xs], lambda: [make().detach().requires_grad_() for make in makes], train=True
    )


def reads_in_turn(subject: Subject, *makes: Callable[[], Tensor], train: bool = False) -> None:
    """``mixed`` of a tensor of each layout, in one call after the other."""
    bound = [(lambda make=make: (make().detach().requires_grad_(train),)) for make in makes]
    subject.agrees(mixed, *bound, train=train)


@case("A transposed input is read as if it were contiguous.", "Rows and columns are exchanged, silently.")
def transposed_input(subject: Subject) -> None:
    reads(subject, lambda: torch.randn(5, 4).t())


@case("An expanded input is read beyond its memory.", "A stride of zero is no stride of one.")
def expanded_input(subject: Subject) -> None:
    reads(subject, lambda: torch.randn(1, 4).expand(3, 4), lambda: torch.randn(3, 1).expand(3, 4))


@case("Every second element is read as every one.", "Steps of slices are strides.")
def stepped_input(subject: Subject) -> None:
    reads(subject, lambda: torch.randn(8, 10)[::2, ::3])


@case("An input that begins inside of its memory is read from its beginning.", "Slices are read at the wrong place.")
def offset_input(subject: Subject) -> None:
    reads(subject, lambda: torch.randn(5, 8)[2:], lambda: torch.randn(3, 9)[:, 1:])


@case("An input is taken to begin at an aligned address.", "Wide loads fault, or read beside it.")
def unaligned_input(subject: Subject) -> None:
    reads_in_turn(
        subject,
        lambda: torch.randn(65)[1:].view(8, 8),
        lambda: torch.randn(8, 8),
        lambda: torch.randn(67)[3:].view(8, 8),
        train=True,
    )


@case("Elements that share memory are read as if apart.", "Windows of signals are made with as_strided.")
def overlapping_input(subject: Subject) -> None:
    subject.agrees(
        lambda x, y: (mixed(x), mixed(y)),
        lambda: (torch.randn(10).as_strided((4, 5), (1, 1)), torch.randn(11).unfold(0, 5, 2)),
    )


@case("A layout that changes between calls is taken for the first one.", "Strides need a guard as sizes do.")
def layout_changes(subject: Subject) -> None:
    reads_in_turn(
        subject, lambda: torch.randn(4, 4), lambda: torch.randn(4, 4).t(), lambda: torch.randn(8, 4)[::2],
        lambda: torch.randn(4, 4),
    )  # fmt: skip


@case("Odd strides of dimensions of size one are trusted.", "They mean nothing, and torch hands out any.")
def size_one_strides(subject: Subject) -> None:
    reads(
        subject, lambda: torch.randn(6).as_strided((1, 6), (77, 1)), lambda: torch.randn(6).as_strided((6, 1), (1, 99))
    )


@case("Channels-last images come out in another order.", "The next convolution copies, or view() raises.")
def channels_last(subject: Subject) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).to(
            memory_format=torch.channels_last
        )

    make = lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),)  # noqa: E731
    subject.agrees(net, make, module=True, train=True, loose=100, leave_out=["written"])


@case("A result has other strides than in eager.", "as_strided, view and CUDA libraries behind it break.")
def strides_of_results(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.t() + 1, x.permute(1, 0).exp().contiguous(), torch.empty_like(x.t()).fill_(2), torch.cat([x.t(), x.t()]),
            (x.t() * 2).reshape(2, -1), x.unsqueeze(1).expand(4, 3, 6) * 2, x.new_zeros(3, 2).t(),
        )  # fmt: skip

    subject.agrees(f, lambda: (torch.randn(4, 6),))


@case("Results of inputs with different layouts have the wrong one.", "Eager asks all inputs for their order.")
def strides_of_mixed_inputs(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + y, y + x, torch.where(x > 0, x, y), y * 2

    subject.agrees(f, lambda: (torch.randn(2, 3, 4), torch.randn(4, 3, 2).permute(2, 1, 0)))


@case("A permuted dense tensor of three dimensions is made contiguous.", "Attention heads are laid out that way.")
def permuted_dense_result(subject: Subject) -> None:
    subject.agrees(lambda x: x.transpose(1, 2).mul(2), lambda: (torch.randn(2, 3, 4, 5),))


@case("A gradient that is expanded or transposed is read as if contiguous.", "sum().backward() gives such a one.")
def strided_gradient(subject: Subject) -> None:
    def backward(results: list[Tensor]) -> None:
        for result in results:
            result.backward(torch.arange(1.0, 4.0).expand(4, 3) if result.shape == (4, 3) else torch.ones_like(result))

    make = lambda: (torch.randn(4, 3, requires_grad=True),)  # noqa: E731
    subject.agrees(lambda x: x.sin() * 2, make, train=True, backward=backward)  # type: ignore[arg-type]


@case("A tensor without dimensions is taken for one of size one.", "Losses have none.")
def no_dimensions(subject: Subject) -> None:
    make = lambda: (torch.tensor(2.0, requires_grad=True), torch.randn(3))  # noqa: E731
    subject.agrees(lambda x, y: (x * 3, x * y, y.sum()), make, train=True)
