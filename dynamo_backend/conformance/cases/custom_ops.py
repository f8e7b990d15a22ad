"""Ops of users: functional ones, writing ones, ones with several results."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kit import ops
from ..kit.case import case
from ..kit.subject import Subject


@case("An op of the user's breaks the graph, or is not called.", "Extensions in C++ are such ops.")
def functional_op(subject: Subject) -> None:
    ops.register()
    make = lambda: (torch.randn(4, requires_grad=True),)  # noqa: E731
    subject.agrees(lambda x: torch.ops.mlc_conformance.twice(x.sin()) + 1, make, train=True)


@case("What an op writes into its argument is lost.", "Optimizers and caches of extensions write in place.")
def writing_op(subject: Subject) -> None:
    ops.register()

    def f(x: Tensor, y: Tensor) -> Tensor:
        torch.ops.mlc_conformance.add_to(x, y)
        return x * 2

    subject.agrees(f, lambda: (torch.randn(3), torch.randn(3)))


@case("An op writes over a value that is read again.", "Its argument is an intermediate, and reused too early.")
def writing_op_on_an_intermediate(subject: Subject) -> None:
    ops.register()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        before = y * 3
        total = torch.ops.mlc_conformance.add_to_and_sum(y, None)
        return before + y, total

    subject.agrees(f, lambda: (torch.randn(3, 2),))


@case("What an op writes through a view does not reach the whole.", "Rows of caches are given to such ops.")
def writing_op_on_a_view(subject: Subject) -> None:
    ops.register()

    def f(x: Tensor, y: Tensor) -> Tensor:
        torch.ops.mlc_conformance.add_to(x[1], y)
        return x.sum(1)

    subject.agrees(f, lambda: (torch.randn(3, 4), torch.randn(4)))


@case("An op that returns a list returns something else.", "Its parts have sizes of their own.")
def list_of_results(subject: Subject) -> None:
    ops.register()

    def f(x: Tensor) -> Tensor:
        first, rest = torch.ops.mlc_conformance.parts(x * 2)
        return first + rest

    subject.agrees(f, lambda: (torch.randn(4, 3),))


@case("An op sees sizes of the first call.", "Its arguments have symbolic sizes.")
def op_of_changing_sizes(subject: Subject) -> None:
    ops.register()
    sizes = [lambda n=n: (torch.randn(n, 2),) for n in (3, 5, 2, 8)]
    subject.agrees(lambda x: [p.sum() for p in torch.ops.mlc_conformance.parts(x + 1)], *sizes, dynamic=True)
