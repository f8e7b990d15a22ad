"""Sizes: none, one, changing ones, and numbers that are arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Make, Subject


def rows(n: int, columns: int = 3) -> Make:
    return lambda: (torch.randn(n, columns),)


def work(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A softmax over columns, a sum over rows, and a value that depends on the number of rows."""
    return torch.softmax(x, -1), x.sum(0), x / max(x.shape[0], 1) + torch.arange(x.shape[0]).unsqueeze(1)


@case("An empty input gives no result, garbage, or an error.", "The last batch of a day may have no rows.")
def empty_input(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x.sum(), x.sum(0), x.prod(0), torch.cat([x, x]), x.mean(0), x.any(0), x.t() @ x

    subject.agrees(f, rows(0), dynamic=False)


@case("Programs for any size are wrong for none and one.", "Zero and one are special, and must not be assumed away.")
def zero_and_one_rows(subject: Subject) -> None:
    subject.agrees(work, *(rows(n) for n in (5, 1, 0, 2, 0, 1)), dynamic=True)


@case("The first size is built into the program.", "Later batches are cut, or read beyond their end.")
def changing_sizes(subject: Subject) -> None:
    subject.agrees(work, *(rows(n) for n in (4, 7, 3, 64, 129, 4)), dynamic=True)


@case("Sizes that become symbolic by themselves are wrong.", "The second size triggers it without being asked.")
def sizes_become_symbolic(subject: Subject) -> None:
    subject.agrees(work, *(rows(n) for n in (4, 6, 9, 2, 33)))


@case("Two sizes that were equal are taken for one.", "Square at first, and not later.")
def equal_sizes_part(subject: Subject) -> None:
    def make(n: int, m: int) -> Make:
        return lambda: (torch.randn(n, m), torch.randn(m, n))

    subject.agrees(lambda a, b: (a.t() + b, a @ b), *(make(*p) for p in ((4, 4), (4, 5), (6, 3), (2, 2))), dynamic=True)


@case("A dimension of size one is broadcast, or not, as at the first call.", "Batch of one first, then more.")
def broadcast_changes(subject: Subject) -> None:
    def make(n: int, m: int) -> Make:
        return lambda: (torch.randn(n, 3), torch.randn(m, 3))

    subject.agrees(lambda a, b: a * b + 1, *(make(*p) for p in ((5, 5), (1, 5), (5, 1), (7, 7))), dynamic=True)


@case("A size returned or computed with is that of the first call.", "Lengths and offsets are wrong.")
def sizes_as_results(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[int, Tensor, Tensor]:
        n = x.shape[0]
        return n * 2, x.new_ones(n // 2 + 1), x[n // 3 :]

    subject.agrees(f, *(rows(n) for n in (6, 9, 4, 12)), dynamic=True)


@case("An integer argument is that of the first call.", "Steps, offsets and scales change from call to call.")
def integer_arguments(subject: Subject) -> None:
    def make(n: int) -> Make:
        return lambda: (torch.randn(6), n)

    subject.agrees(lambda x, n: (x * n, x + n % 3), *(make(n) for n in (2, 5, 1, -3, 7)))


@case("A float argument is that of the first call.", "A learning rate never changes.")
def float_arguments(subject: Subject) -> None:
    def make(a: float) -> Make:
        return lambda: (torch.randn(6), a)

    subject.agrees(lambda x, a: x * a + a, *(make(a) for a in (0.5, 0.25, 1.0, float("inf"), -2.0)))


@case("A branch over a size is that of the first call.", "The guard on a comparison is lost.")
def branches_over_sizes(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 5 else x - 1

    subject.agrees(f, *(rows(n) for n in (3, 8, 5, 6, 2)), dynamic=True)


@case("A size that data decide is built in.", "Masks choose another number of rows every time.")
def sizes_decided_by_data(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = x[x > 0]
        return chosen * 2, chosen.sum()

    def make(shift: float) -> Make:
        return lambda: (torch.randn(20) + shift,)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        subject.agrees(f, *(make(s) for s in (0.0, 1.0, -9.0, 9.0)))


@case("Every size compiles anew although sizes are symbolic.", "The backend adds guards, and calls stall.")
def one_program_for_all_sizes(subject: Subject) -> None:
    compiled = subject.compile(lambda x: torch.softmax(x * 2, -1).sum(0), dynamic=True, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for n in (5, 8, 16, 17, 64, 100, 256):
        compiled(torch.randn(n, n + 3))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    expect(graphs == 1, f"seven sizes compiled {graphs} graphs; one serves all with the backend eager")


@case("Training with changing sizes reads memory by the first one.", "The backward has sizes of its own.")
def gradients_of_changing_sizes(subject: Subject) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 2))

    subject.agrees(net, *(rows(n) for n in (4, 7, 2, 33)), module=True, train=True, dynamic=True, loose=4)


@case("A program for one chosen size is used for all of them.", "mark_dynamic(specialize_on=) asks for such a one.")
def specialized_sizes(subject: Subject) -> None:
    def make(n: int) -> Make:
        def made() -> tuple[Tensor]:
            x = torch.randn(n, 3)
            torch._dynamo.mark_dynamic(x, 0, specialize_on=[lambda rows: rows == 8])
            return (x,)

        return made

    subject.agrees(lambda x: (x.sin().sum(0) * x.shape[0], x + 1), *(make(n) for n in (5, 8, 6, 8, 16)))


@case("A size that has no number while compiling is an error, or is guessed.", "Sizes that data decide have none.")
def unbacked_sizes(subject: Subject) -> None:
    def make(n: int) -> Make:
        def made() -> tuple[Tensor]:
            x = torch.randn(n, 3)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            return (x,)

        return made

    torch._dynamo.utils.counters.clear()
    subject.agrees(lambda x: (x.sin() * 2, x.sum(0), torch.softmax(x, -1)), *(make(n) for n in (5, 9, 1, 0, 64)))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    expect(graphs == 1, f"five sizes without a number compiled {graphs} graphs; one serves all with the backend eager")
