"""Inputs, buffers and parameters that a program writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Subject


@case("An input written in place keeps its old value.", "Caches and statistics that callers hold are never updated.")
def written_input(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    subject.agrees(f, lambda: (torch.randn(4, 5),))


@case("A function that writes nothing writes into its inputs.", "Callers' data are lost without a trace.")
def pure_functions_write_nothing(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x + y).exp() - x

    subject.agrees(f, lambda: (torch.randn(8, 8), torch.randn(8, 8)))


@case("What is read between two writes sees the last of them.", "Writes are put off, and reads are not.")
def read_between_writes(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        between = x + 1
        x.sub_(3)
        return between, x.sum()

    subject.agrees(f, lambda: (torch.randn(6),))


@case("A write through a view does not reach the input.", "Slices of a cache are filled that way.")
def written_through_a_view(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        x[1:3].mul_(10)
        x.t()[0].zero_()
        return x.sum(0)

    subject.agrees(f, lambda: (torch.randn(4, 4),))


@case("A write into an input that is not contiguous is written by wrong strides.", "Parameters are often transposed.")
def written_strided_input(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for t in (x, y):
            t.add_(torch.arange(12.0).view(3, 4))
        return x.cos(), y.sin()

    subject.agrees(f, lambda: (torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2]))


@case("A statistic of a module is not updated, or twice.", "Batch norms evaluate with wrong statistics.")
def running_statistics(subject: Subject) -> None:
    # Eager writes statistics without telling their version counters.
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())

    subject.agrees(net, lambda: (torch.randn(7, 6),), module=True, train=True, loose=100, leave_out=["written"])


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@case("Compiling runs the program on the caller's tensors.", "State moves once more than there were calls.")
def compiling_runs_nothing(subject: Subject) -> None:
    net = Counting()
    compiled = subject.compile(net)
    for call in range(1, 4):
        compiled(torch.ones(3))
        expect(int(net.calls) == call, f"after {call} calls a buffer that counts them is {int(net.calls)}")


@case("Two inputs that are swapped both end as one.", "The write of the first is taken for the second's old value.")
def swapped_inputs(subject: Subject) -> None:
    def f(a: Tensor, b: Tensor) -> None:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    subject.agrees(f, lambda: (torch.randn(5), torch.randn(5)))


@case("A gradient reads an input after the program wrote to it.", "Gradients are wrong by whatever was written.")
def written_after_it_was_read(subject: Subject) -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        y = x * cache.clone()
        cache.add_(1)
        return y

    subject.agrees(f, lambda: (torch.randn(5, requires_grad=True), torch.randn(5)), train=True)


@case("Parameters written under no_grad keep their values.", "An optimizer's compiled step does nothing.")
def optimizer_step(subject: Subject) -> None:
    def step(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        with torch.no_grad():
            momentum.mul_(0.9).add_(gradient)
            parameter.sub_(momentum, alpha=0.1)

    subject.agrees(step, lambda: (torch.randn(4, 3, requires_grad=True), torch.randn(4, 3), torch.randn(4, 3)))


@case("A step-by-step filled cache loses a row.", "Generated text goes wrong after some tokens.")
def filled_by_index(subject: Subject) -> None:
    def f(cache: Tensor, position: Tensor, row: Tensor) -> Tensor:
        cache.index_copy_(0, position, row)
        return cache.sum(0)

    cache, wanted = torch.zeros(4, 3), torch.zeros(4, 3)
    compiled = subject.compile(f, fullgraph=True)
    for i in range(4):
        row = torch.full((1, 3), float(i + 1))
        compiled(cache, torch.tensor([i]), row)
        wanted[i] = row[0]
        expect(torch.equal(cache, wanted), f"after step {i + 1} the cache is {cache.tolist()}")


@case("Integer, bool and half inputs are written through another type.", "Masks and counters lose what they held.")
def written_in_every_type(subject: Subject) -> None:
    def f(i: Tensor, b: Tensor, h: Tensor) -> Tensor:
        i.add_(3)
        b.logical_not_()
        h.mul_(3)
        return i.sum() + b.sum()

    def make() -> tuple[Any, ...]:
        return torch.arange(5, dtype=torch.int16), torch.tensor([True, False, True]), torch.randn(4).half()

    subject.agrees(f, make)
