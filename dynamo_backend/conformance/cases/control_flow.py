"""Control flow in graphs, breaks between them, and functions that transform functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as control_flow_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Subject


@case("torch.cond takes the branch of the first call.", "The condition is data.")
def cond(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos() - 1, (x,))  # type: ignore[no-any-return]

    subject.agrees(f, *[lambda s=s: (torch.rand(4) * s,) for s in (1, -1, 1, -2)])


@case("Gradients of torch.cond are those of the other branch.", "The backward has to branch alike.")
def gradients_of_cond(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.exp(), (x,))  # type: ignore[no-any-return]

    subject.agrees(f, *[lambda s=s: ((torch.rand(4) * s).requires_grad_(),) for s in (1, -1, 1)], train=True)


@case("A while_loop runs as often as at the first call, or once too often.", "Decoders end when data say so.")
def loop(subject: Subject) -> None:
    def f(n: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return while_loop(lambda i, t: i > 0, lambda i, t: (i - 1, t * 2 + 1), (n, x))  # type: ignore[no-any-return]

    subject.agrees(
        f, *[lambda n=n: (torch.tensor(n), torch.randn(3)) for n in (3, 0, 1, 7)], leave_out=["shared", "same"]
    )


def _scanned(x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = carry * 0.5 + row
        return carry, (carry * row).sin()

    return scan(step, start, x, dim=0)  # type: ignore[no-any-return]


@case("A scan hands on the state of the first step, or one too few.", "Recurrent layers are written so.")
def scan_over_rows(subject: Subject) -> None:
    makes = [lambda n=n: (torch.randn(n, 3), torch.randn(3)) for n in (5, 1, 9)]
    subject.agrees(_scanned, *makes, leave_out=["shared", "strides"])


@case("An associative scan combines in the wrong order.", "The function need not commute.")
def associative(subject: Subject) -> None:
    def combine(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return associative_scan(combine, (x, y), dim=0, combine_mode="generic")  # type: ignore[no-any-return]

    makes = [lambda n=n: (torch.rand(n, 3), torch.randn(n, 3)) for n in (6, 1, 7)]
    subject.agrees(f, *makes, leave_out=["shared", "strides"], loose=10)


@case("A mapped function sees one row for all.", "torch's own loop over rows has a graph of its own.")
def map_over_rows(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return control_flow_map(lambda row, other: (row * other).cumsum(0) + row.max(), x, y)  # type: ignore[no-any-return]

    subject.agrees(f, lambda: (torch.randn(4, 5), torch.randn(5)), leave_out=["shared", "strides"])


@case("Graphs around a break disagree about what goes between.", "A print in a model breaks its graph.")
def graph_break(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin() * 2
        y.add_(1)
        torch._dynamo.graph_break()
        x.mul_(3)
        return y + x.cos()

    subject.agrees(f, lambda: (torch.randn(4),), whole=False)


@case("Gradients stop at a graph break.", "Both graphs have a backward.")
def gradients_over_a_break(subject: Subject) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).sin()
        torch._dynamo.graph_break()
        return (y * w).exp()

    make = lambda: (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True))  # noqa: E731
    subject.agrees(f, make, train=True, whole=False)


@case("A branch over data takes the way of the first call.", "It breaks the graph, and both ways are compiled.")
def branch_over_data(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        return y.sin() if bool(y.sum() > 0) else y - 1

    subject.agrees(f, *[lambda s=s: (torch.rand(4) * s,) for s in (1, -1, 1, -3)], whole=False)


@case("A function that must not be compiled is.", "torch.compiler.disable is how users get round a fault.")
def disabled_function(subject: Subject) -> None:
    eager: list[bool] = []

    @torch.compiler.disable
    def inner(x: Tensor) -> Tensor:
        eager.append(not torch.compiler.is_compiling())
        return x + 1

    compiled = subject.compile(lambda x: inner(x * 2) * 3)
    x = torch.randn(3)
    expect(torch.allclose(compiled(x), (x * 2 + 1) * 3), "the result is wrong")
    expect(eager == [True], f"the disabled function ran as {eager}")


@case("A compiled function called in another is compiled wrongly.", "Libraries compile parts of models.")
def compiled_inside_of_compiled(subject: Subject) -> None:
    inner = subject.compile(lambda x: x.sin() + 1)
    subject.agrees(lambda x: inner(x * 2) - x, lambda: (torch.randn(4),), whole=False)


@case("vmap maps over the wrong dimension.", "Ensembles and gradients of each sample are mapped.")
def mapped(subject: Subject) -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(lambda a, b: (a * b).sum() + b, in_dims=(0, 1))(w, x)  # type: ignore[no-any-return]

    subject.agrees(f, lambda: (torch.randn(3, 4), torch.randn(4, 3)))


@case("Loops over layers of Python are cut short.", "Every layer is in the graph, or is called.")
def python_loops(subject: Subject) -> None:
    def make(n: int):  # type: ignore[no-untyped-def]
        return lambda: ([torch.randn(3) for _ in range(n)],)

    def f(xs: list[Tensor]) -> Tensor:
        total = torch.zeros(3)
        for i, x in enumerate(xs):
            total = total * 0.5 + x * i
        return total

    subject.agrees(f, *(make(n) for n in (2, 5, 0)))


@torch.compiler.nested_compile_region
def _layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) + x


def _layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return _layer(_layer(x, w), v) - _layer(x, v)


@case("A region that repeats runs with the tensors of its first place.", "Layers are marked as such regions.")
def repeated_region(subject: Subject) -> None:
    subject.agrees(_layers, lambda: [torch.randn(4, 4) for _ in range(3)], loose=4)


@case("A region that repeats has the gradients of one place.", "It is compiled once, and differentiated once.")
def gradients_of_repeated_region(subject: Subject) -> None:
    make = lambda: [torch.randn(4, 4, requires_grad=True) for _ in range(3)]  # noqa: E731
    subject.agrees(_layers, make, train=True, loose=4)


@case("flex_attention leaves out the user's function of scores.", "Positions and masks are such functions.")
def flexible_attention(subject: Subject) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        def score(s: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return torch.where(row >= column, s + slopes[head] * (column - row), -float("inf"))

        return flex_attention(q, k, v, score_mod=score)  # type: ignore[no-any-return]

    def make() -> tuple[Tensor, ...]:
        return (*(torch.randn(1, 2, 16, 16) for _ in range(3)), torch.rand(2))

    subject.agrees(f, make, loose=10, leave_out=["strides"])
