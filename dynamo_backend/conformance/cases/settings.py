"""Torch's modes and settings around a call, and changed inside of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import expect
from ..kit.subject import Subject


@case("Under no_grad results need gradients, or a program of one mode is used in the other.", "Evaluation leaks.")
def no_grad_around(subject: Subject) -> None:
    layer = nn.Linear(3, 2)
    compiled, x = subject.compile(layer), torch.randn(4, 3)
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            y = compiled(x)
        expect(y.requires_grad == enabled, f"with grad mode {enabled} the result has requires_grad={y.requires_grad}")
    y.sum().backward()
    expect(layer.bias.grad is not None, "there is no gradient after a call under no_grad")


@case("no_grad inside of the function is ignored, or holds to its end.", "Targets are computed under it.")
def no_grad_inside(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            target = x * 2
        return target, x.sin() * target

    subject.agrees(f, lambda: (torch.randn(4, requires_grad=True),), train=True)


@case("A grad mode set inside stays otherwise than in eager.", "Everything after the call is trained, or is not.")
def grad_mode_set_inside(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        torch.set_grad_enabled(False)
        return y + x

    x = torch.randn(3, requires_grad=True)
    compiled = subject.compile(f)
    for _ in range(2):
        torch.set_grad_enabled(True)
        compiled(x)
        stays = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        expect(not stays, "the grad mode that the function set is not set after it")


@case("In inference mode results are ordinary tensors, or written ones an error.", "Serving code runs in it.")
def inference_mode(subject: Subject) -> None:
    layer = nn.Linear(3, 2)
    compiled, x = subject.compile(layer), torch.randn(4, 3)
    with torch.inference_mode():
        first = compiled(x)
        kept = first.is_inference()
    second = compiled(x)
    expect(kept, "a result in inference mode is no inference tensor")
    expect(not second.is_inference() and second.requires_grad, "a result after inference mode is an inference tensor")
    told = unequal(first.clone(), second.detach())
    expect(not told, f"the result in inference mode {told}")
    second.sum().backward()


@case("Inputs made in inference mode fail outside of it.", "Features are computed in it, and used elsewhere.")
def inference_tensors(subject: Subject) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 3)
    compiled = subject.compile(lambda t: t * 2 + 1)
    for _ in range(2):
        told = unequal(compiled(x).clone(), x.clone() * 2 + 1)
        expect(not told, f"the result of an inference tensor {told}")


@case("Autocast around a call is ignored, or the other program is used.", "Mixed precision trains in float32.")
def autocast_around(subject: Subject) -> None:
    layer = nn.Linear(8, 4)
    compiled, x = subject.compile(layer), torch.randn(3, 8)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            got, wanted = compiled(x), layer(x)
        told = unequal(got, wanted, 4)
        expect(not told, f"with autocast {enabled} the result {told}")


@case("Autocast inside of the function is ignored, or leaks out.", "Losses are kept in float32 by leaving it.")
def autocast_inside(subject: Subject) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = x @ w
        return y, z

    make = lambda: (torch.randn(3, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True))  # noqa: E731
    subject.agrees(f, make, train=True, loose=400)


@case("Types that autocast chooses differ in the backward.", "Gradients of parameters have the wrong type.")
def autocast_and_gradients(subject: Subject) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))

    class UnderAutocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)  # type: ignore[no-any-return]

    # Roundings of bfloat16 add up over layers; types, shapes and None are what is asked here.
    subject.agrees(UnderAutocast, lambda: (torch.randn(5, 6),), module=True, train=True, loose=4000)


@case("Deterministic mode gives other bits from call to call, or an error.", "Runs that must repeat do not.")
def deterministic_mode(subject: Subject) -> None:
    def f(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(5, 4).index_add(0, index, x), torch.softmax(x, -1).sum(0)

    torch.use_deterministic_algorithms(True)
    compiled = subject.compile(f, fullgraph=True)
    x, index = torch.randn(2000, 4), torch.randint(0, 5, (2000,))
    runs = [compiled(x, index) for _ in range(4)]
    for run in runs[1:]:
        expect(all(map(torch.equal, run, runs[0])), "two runs in deterministic mode differ in bits")
    for mine, theirs in zip(runs[0], f(x, index)):
        told = unequal(mine, theirs, 100)
        expect(not told, f"the result in deterministic mode {told}")


@case("In deterministic mode new memory is not filled.", "torch fills it, so that what is not written shows.")
def deterministic_fill(subject: Subject) -> None:
    torch.use_deterministic_algorithms(True)
    subject.agrees(lambda x: (torch.empty(4), torch.empty_like(x)), lambda: (torch.randn(3),))


@case("A number of threads set later is ignored, or reset by a call.", "Servers divide processors among models.")
def number_of_threads(subject: Subject) -> None:
    before = torch.get_num_threads()
    compiled, x = subject.compile(lambda t: torch.softmax(t, -1), fullgraph=True), torch.randn(100, 200)
    for threads in (before, 1, 2, before):
        torch.set_num_threads(threads)
        told = unequal(compiled(x), torch.softmax(x, -1))
        expect(not told, f"with {threads} threads the result {told}")
        expect(torch.get_num_threads() == threads, f"a call changed the number of threads to {torch.get_num_threads()}")


@case("A call under torch's profiler fails, or leaves a range open.", "Time is put down to what ran before it.")
def profiler_around(subject: Subject) -> None:
    compiled, x = subject.compile(lambda t: torch.softmax(t, -1) * 2, fullgraph=True), torch.randn(5, 7)
    compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = compiled(x)
        torch.erfinv(got)
        compiled(x)
    told = unequal(got, torch.softmax(x, -1) * 2)
    expect(not told, f"the result {told}")
    parents = [e.cpu_parent.name for e in profile.events() if e.name == "aten::erfinv" and e.cpu_parent is not None]
    expect(not parents, f"what runs after the call is a part of {parents[0] if parents else ''!r} in the profile")
