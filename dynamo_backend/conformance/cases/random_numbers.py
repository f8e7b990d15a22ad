"""Seeds, states, and the agreement of forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Subject


def drawn(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.rand_like(x), torch.nn.functional.dropout(x, 0.5)


@case("The same seed gives other numbers.", "Runs cannot be repeated.")
def seed_repeats(subject: Subject) -> None:
    compiled, x = subject.compile(drawn, fullgraph=True), torch.ones(100)
    runs = []
    for _ in range(3):
        torch.manual_seed(5)
        runs.append([t for _ in range(2) for t in compiled(x)])
    for number, run in enumerate(runs[1:], 2):
        same = all(torch.equal(a, b) for a, b in zip(runs[0], run))
        expect(same, f"run {number} after manual_seed(5) drew other numbers than run 1")


@case("Every call draws the same numbers.", "Dropout always drops the same units, and nobody notices.")
def calls_differ(subject: Subject) -> None:
    compiled, x = subject.compile(drawn, fullgraph=True), torch.ones(100)
    first, second, third = (compiled(x) for _ in range(3))
    for i, name in enumerate(("rand_like", "dropout")):
        same = torch.equal(first[i], second[i]) or torch.equal(second[i], third[i])
        expect(not same, f"{name} drew the same numbers twice")


@case("Another seed gives the same numbers.", "Ensembles have members that are equal.")
def seeds_differ(subject: Subject) -> None:
    compiled, x = subject.compile(drawn, fullgraph=True), torch.ones(100)
    torch.manual_seed(1)
    first = compiled(x)
    torch.manual_seed(2)
    second = compiled(x)
    expect(not torch.equal(first[0], second[0]), "seeds 1 and 2 drew the same numbers")


@case("A state that is set again draws other numbers.", "Checkpoints of training hold states, not seeds.")
def state_is_restored(subject: Subject) -> None:
    compiled, x = subject.compile(drawn, fullgraph=True), torch.ones(100)
    compiled(x)
    state = torch.get_rng_state()
    first = compiled(x)
    torch.set_rng_state(state)
    again = compiled(x)
    expect(torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]), "the state does not bring numbers back")


@case("Drawing leaves the generator where it was.", "What eager draws afterwards repeats what was drawn.")
def state_moves(subject: Subject) -> None:
    compiled, x = subject.compile(drawn, fullgraph=True), torch.ones(100)
    compiled(x)
    before = torch.get_rng_state()
    compiled(x)
    expect(not torch.equal(before, torch.get_rng_state()), "the generator's state did not move")


@case("Compiling draws from the caller's generator.", "The first run differs from all later ones.")
def compiling_draws_nothing(subject: Subject) -> None:
    x = torch.ones(100)
    states = []
    for _ in range(2):
        torch._dynamo.reset()
        compiled = subject.compile(drawn, fullgraph=True)
        for _ in range(2):
            torch.manual_seed(3)
            states.append((compiled(x)[0], torch.get_rng_state()))
    same = all(torch.equal(a, states[0][0]) and torch.equal(s, states[0][1]) for a, s in states)
    expect(same, "a call that compiles draws other numbers, or leaves another state, than one that does not")


@case("Dropout drops other units in the backward than in the forward.", "Training goes on, with noise for gradients.")
def dropout_agrees_with_its_backward(subject: Subject) -> None:
    compiled = subject.compile(lambda t: torch.nn.functional.dropout(t.sin() + 2, 0.4), fullgraph=True)
    for _ in range(3):
        x = torch.randn(40, 10, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        assert x.grad is not None
        wanted = torch.where(y.detach() != 0, x.detach().cos() / 0.6, 0.0)
        expect(torch.allclose(x.grad, wanted, atol=1e-5), "the gradient is not that of the units that were kept")


@case("Random numbers are not of their distribution.", "A constant passes every test of repetition.")
def distributions(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand_like(x), torch.randn_like(x), torch.nn.functional.dropout(x, 0.25),
            torch.randint_like(x, 3, 9), torch.bernoulli(x * 0.3),
        )  # fmt: skip

    compiled = subject.compile(f, fullgraph=True)
    uniform, normal, dropped, whole, coin = compiled(torch.ones(20000))
    expect(0 <= uniform.min() < 0.01 and 0.99 < uniform.max() < 1, "rand is not between 0 and 1")
    expect(abs(uniform.mean() - 0.5) < 0.02 and abs(uniform.var() - 1 / 12) < 0.01, "rand is not uniform")
    expect(abs(normal.mean()) < 0.05 and abs(normal.std() - 1) < 0.05, "randn is not of mean 0 and deviation 1")
    expect(abs((dropped == 0).float().mean() - 0.25) < 0.03, "dropout of 0.25 does not drop a quarter")
    expect(bool(torch.isclose(dropped[dropped != 0], torch.tensor(4 / 3)).all()), "what dropout keeps is not scaled")
    expect(sorted(set(whole.tolist())) == [3, 4, 5, 6, 7, 8], "randint is not of its range")
    expect(abs(coin.mean() - 0.3) < 0.03, "bernoulli of 0.3 is not")


@case("Two draws of one program are the same numbers.", "Both are named by one seed.")
def draws_of_one_program_differ(subject: Subject) -> None:
    a, b = subject.compile(lambda x: (torch.rand_like(x), torch.rand_like(x)), fullgraph=True)(torch.ones(500))
    expect(not torch.equal(a, b), "two calls of rand_like in one program gave the same numbers")


@case("Dropout drops in evaluation.", "The mode is read when a module is compiled, and never again.")
def evaluation_drops_nothing(subject: Subject) -> None:
    net = nn.Dropout(0.5)
    compiled, x = subject.compile(net), torch.ones(200)
    expect(bool((compiled(x) == 0).any()), "dropout in training drops nothing")
    net.eval()
    expect(torch.equal(compiled(x), x), "dropout in evaluation changes its input")
    net.train()
    expect(bool((compiled(x) == 0).any()), "dropout does not drop after training begins again")


@case("A program without random numbers moves the generator.", "Results depend on whether others were compiled.")
def nothing_random_moves_nothing(subject: Subject) -> None:
    subject.agrees(lambda x: torch.nn.functional.dropout(x.sin(), 0.5, training=False), lambda: (torch.randn(5),))
