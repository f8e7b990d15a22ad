"""Who shares memory with whom: inputs, results, and results of earlier calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Subject


@case("A result that is an input is a copy of it.", "Later writes to one no longer reach the other.")
def result_is_an_input(subject: Subject) -> None:
    subject.agrees(lambda x, y: (x, x + y), lambda: (torch.randn(3), torch.randn(3)))


@case("A result that is a view of an input is a copy.", "Writes to heads or slices are lost.")
def result_is_a_view(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x[1:], x.t(), x.view(2, 2, 6), x.diagonal(), x.expand(2, 4, 6)

    subject.agrees(f, lambda: (torch.randn(4, 6),))


@case("A write to a returned view does not reach the input.", "Code that fills a view fills nothing.")
def written_result_reaches_the_input(subject: Subject) -> None:
    compiled = subject.compile(lambda x: x[1:].view(-1), fullgraph=True)
    x = torch.zeros(3, 2)
    compiled(x).add_(1)
    expect(x.sum().item() == 4, f"the input is {x.tolist()} after its view was written")


@case("Results of two calls share memory.", "What was kept of the first call changes with the second.")
def results_are_new_every_time(subject: Subject) -> None:
    compiled = subject.compile(lambda x: (x * 2, x.sum(0)), fullgraph=True)
    x = torch.randn(32, 32)
    first = compiled(x)
    copies = [t.clone() for t in first]
    compiled(x + 1)
    compiled(x + 2)
    for i, (now, before) in enumerate(zip(first, copies)):
        expect(torch.equal(now, before), f"result {i} of the first call changed when it was called again")


@case("Two results that share memory in eager are apart.", "A write to a part no longer shows in the whole.")
def results_share_memory(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x + 1
        return y, y[0], y.t()

    subject.agrees(f, lambda: (torch.randn(3, 3),))


@case("Equal results are one tensor.", "Common subexpressions are merged although both are returned.")
def equal_results_are_apart(subject: Subject) -> None:
    subject.agrees(lambda x: (x + 1, x + 1, x.sin(), x.sin()), lambda: (torch.randn(4),))


@case("One value returned twice becomes two tensors.", "Tied outputs come apart.")
def one_result_twice(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y

    subject.agrees(f, lambda: (torch.randn(4),))


@case("Arithmetic that changes nothing returns its input.", "x + 0 and clones are fresh memory in eager.")
def identities_are_copies(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x + 0, x * 1, x.clone(), x / 1, x.neg().neg(), x.t().contiguous().t().contiguous()

    subject.agrees(f, lambda: (torch.randn(3, 4),))


@case("What returns its input in eager is a copy.", "contiguous() and to() of the same type are no copies.")
def no_copies_where_eager_makes_none(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.contiguous(), x.to(torch.float32), x.detach(), x.reshape(-1)

    subject.agrees(f, lambda: (torch.randn(3, 4),))


@case("One tensor given twice is taken for two.", "A write through one argument is not seen through the other.")
def one_input_twice(subject: Subject) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b

    def same() -> tuple[Tensor, Tensor]:
        x = torch.randn(4)
        return x, x

    subject.agrees(f, same, lambda: (torch.randn(4), torch.randn(4)), same)


@case("Inputs that overlap are taken for apart.", "A write through one is not seen through the other.")
def overlapping_inputs(subject: Subject) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return a + b

    def overlapping() -> tuple[Tensor, Tensor]:
        base = torch.randn(6)
        return base[:4], base[2:]

    subject.agrees(f, overlapping)


@case("A written input that is returned is another tensor.", "In-place methods return their own tensor.")
def written_input_is_returned(subject: Subject) -> None:
    subject.agrees(lambda x: (x.add_(1), x[0]), lambda: (torch.randn(3, 2),))


class Tied(nn.Module):
    """Returns its weight beside a result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight


@case("A returned parameter is a copy, or is no Parameter.", "Optimizers and weight tying go by identity.")
def returned_parameter(subject: Subject) -> None:
    subject.agrees(Tied, lambda: (torch.randn(2, 3),), module=True, train=True)
