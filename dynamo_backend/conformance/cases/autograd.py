"""What autograd keeps between forward and backward (versions, lifetimes, second backwards), and hooks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import NotApplicable, Violation, expect
from ..kit.subject import Subject


def curve(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).tanh()


# One shape, so that a backend with a cache of programs compiles the curve once for most of these cases.
SHAPE = (4, 4)


def points() -> Tensor:
    """A fresh leaf to draw the curve at."""
    return torch.randn(SHAPE, requires_grad=True)


def gradient_of_curve(x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(curve(leaf).sum(), leaf)[0]


def check(mine: Tensor | None, wanted: Tensor, what: str) -> None:
    told = "is None" if mine is None else unequal(mine, wanted)
    expect(not told, f"{what} {told}")


@case("A graph that is retained has other gradients the second time.", "The backward writes into what was saved.")
def retained_graph(subject: Subject) -> None:
    x = points()
    y = subject.compile(curve, fullgraph=True)(x).sum()
    for number in (1, 2, 3):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        check(gradient, gradient_of_curve(x), f"the gradient of backward {number}")


@case("A second backward of a graph that was freed gives numbers.", "Eager says that its memory is gone.")
def freed_graph(subject: Subject) -> None:
    x = points()
    y = subject.compile(curve, fullgraph=True)(x).sum()
    y.backward()
    try:
        y.backward()
    except RuntimeError:
        return
    raise Violation("a second backward through a freed graph did not raise")


@case("An input written between forward and backward is read as written.", "Eager finds it by its version.")
def input_written_before_the_backward(subject: Subject) -> None:
    x = torch.randn(5, requires_grad=True)
    scale = torch.randn(5)
    wanted = scale.clone()
    y = subject.compile(lambda a, b: a * b, fullgraph=True)(x, scale)
    scale.add_(1)
    _raises_or_is(y, x, wanted)


@case("A result written between forward and backward is read as written.", "Eager finds it by its version.")
def result_written_before_the_backward(subject: Subject) -> None:
    x = torch.randn(5, requires_grad=True)
    wanted = x.detach().exp()
    y = subject.compile(torch.exp, fullgraph=True)(x)
    with torch.no_grad():
        y.add_(1)
    _raises_or_is(y, x, wanted)


def _raises_or_is(y: Tensor, x: Tensor, wanted: Tensor) -> None:
    try:
        y.sum().backward()
    except RuntimeError:
        return
    check(x.grad, wanted, "the gradient neither raised nor was right: it")


@case("Two forwards before their backwards share what they saved.", "Siamese models and accumulation do that.")
def interleaved_calls(subject: Subject) -> None:
    compiled = subject.compile(curve, fullgraph=True)
    inputs = [points() for _ in range(3)]
    results = [compiled(x) for x in inputs]
    for number in (0, 2, 1):
        results[number].sum().backward()
        check(inputs[number].grad, gradient_of_curve(inputs[number]), f"the gradient of call {number + 1}")


@case("What was saved lives on after the backward.", "Memory grows with every step until there is none.")
def saved_memory_is_freed(subject: Subject) -> None:
    compiled = subject.compile(curve, fullgraph=True)
    watched = []
    for _ in range(3):
        leaf = points()
        compiled(leaf).sum().backward()
        watched.append(weakref.ref(leaf))
        del leaf
    gc.collect()
    alive = sum(w() is not None for w in watched)
    expect(not alive, f"{alive} of 3 inputs live on after their backwards")


@case("A graph that is dropped without a backward keeps its memory.", "Evaluation without no_grad leaks.")
def dropped_graph_is_freed(subject: Subject) -> None:
    compiled = subject.compile(curve, fullgraph=True)
    x = points()
    compiled(x)
    watched = weakref.ref(x)
    del x
    gc.collect()
    expect(watched() is None, "an input lives on although its results are gone")


@case("A second derivative is silently wrong.", "Where it is not supported it has to raise.")
def second_derivative(subject: Subject) -> None:
    x = points()
    leaf = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(curve(leaf).sum(), leaf, create_graph=True)
    (wanted,) = torch.autograd.grad(first.sum(), leaf)
    try:
        y = subject.compile(curve, fullgraph=True)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
    except RuntimeError:
        return
    check(second, wanted, "the second derivative neither raised nor was right: it")


@case("What was saved lies otherwise than the backward was compiled for.", "A compiler that changes layouts must tell.")
def layouts_of_what_was_saved(subject: Subject) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = (x.transpose(1, 2) * 2).sin()
        return (y * w).exp().sum(1)

    def make() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)

    subject.agrees(f, make, train=True)
    images = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    net = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 1))  # noqa: E731
    subject.agrees(net, lambda: (images.clone().requires_grad_(),), module=True, train=True, loose=4)


@case("Hooks of saved tensors get something else back than they gave.", "Offloading to the CPU is made of them.")
def saved_tensor_hooks(subject: Subject) -> None:
    packed: list[int] = []

    def pack(t: Any) -> Any:
        packed.append(t.numel() if isinstance(t, Tensor) else 0)
        return (t.clone(),) if isinstance(t, Tensor) else t

    def unpack(t: Any) -> Any:
        return t[0] if isinstance(t, tuple) else t

    x = points()
    compiled = subject.compile(curve)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        compiled(x).sum().backward()
    check(x.grad, gradient_of_curve(x), "the gradient with hooks of saved tensors")


@case("A checkpoint computes something else again.", "Memory is saved by it, and gradients may not change.")
def checkpointed(subject: Subject) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda a: (a @ w).sin().exp(), x, use_reentrant=False).sum(-1)  # type: ignore[no-any-return]

    make = lambda: (torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))  # noqa: E731
    subject.agrees(f, make, train=True, loose=4)


@case("A checkpoint around a compiled region draws other random numbers.", "Dropout differs in the backward.")
def checkpoint_around(subject: Subject) -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    compiled = subject.compile(net)
    x = torch.ones(4, 8, requires_grad=True)
    y = checkpoint(compiled, x, use_reentrant=False)
    y.sum().backward()
    kept = (y.detach() != 0).sum(0).float()
    bias = net[0].bias
    assert isinstance(bias, Tensor) and bias.grad is not None
    check(bias.grad, kept * 2, "the gradient of the bias, which counts what dropout kept,")


@case("Gradients of several results of one forward mix.", "GANs have two losses over one forward.")
def two_losses(subject: Subject) -> None:
    x = torch.randn(5, requires_grad=True)
    a, b = subject.compile(lambda t: (t.sin(), t.exp()), fullgraph=True)(x)
    (first,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(b.sum(), x)
    check(first, x.detach().cos(), "the gradient of the first loss")
    check(second, x.detach().exp(), "the gradient of the second loss")


@case("Anomaly mode fails, or finds something where there is nothing.", "It is what users turn on to find NaN.")
def anomaly_mode(subject: Subject) -> None:
    x = points()
    with torch.autograd.detect_anomaly(check_nan=True):
        subject.compile(curve, fullgraph=True)(x).sum().backward()
    check(x.grad, gradient_of_curve(x), "the gradient in anomaly mode")


@case("A derivative in forward mode is missing, without an error.", "Jacobians are computed with it.")
def forward_mode(subject: Subject) -> None:
    compiled = subject.compile(curve)
    x, direction = torch.randn(SHAPE), torch.randn(SHAPE)
    try:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent
    except RuntimeError as error:
        raise NotApplicable(f"forward mode raises, which is right: {str(error)[:80]}") from error
    check(tangent, gradient_of_curve(x) * direction, "the derivative in forward mode")


@case("A hook of an input runs twice, or sees another gradient.", "Clipping and logging are done in hooks.")
def hook_of_an_input(subject: Subject) -> None:
    found: list[Tensor] = []
    x = torch.randn(4, requires_grad=True)
    x.register_hook(found.append)
    subject.compile(lambda t: t * 2, fullgraph=True)(x).sum().backward()
    expect(len(found) == 1 and torch.equal(found[0], torch.full((4,), 2.0)), f"the hook saw {found}")


@case("A hook that changes a gradient is ignored.", "Gradients are scaled and reversed that way.")
def hook_that_changes(subject: Subject) -> None:
    x = torch.randn(4, requires_grad=True)
    x.register_hook(lambda g: g * 10)
    y = subject.compile(lambda t: t * 2, fullgraph=True)(x)
    y.register_hook(lambda g: g + 1)
    y.sum().backward()
    expect(x.grad is not None and torch.equal(x.grad, torch.full((4,), 40.0)), f"the gradient is {x.grad}")


@case("Hooks of modules do not run.", "Features are taken out of models by them.")
def hooks_of_modules(subject: Subject) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    seen: list[tuple[int, ...]] = []

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        seen.append(tuple(output.shape))
        return output * 2

    net[1].register_forward_hook(hook)
    x = torch.randn(2, 3)
    wanted = net(x)
    seen.clear()
    got = subject.compile(net)(x)
    expect(bool(seen), "a module's forward hook did not run")
    expect(torch.allclose(got, wanted, atol=1e-5), "what the hook returned was not used")


@case("Hooks that wait for a parameter's gradient do not run.", "Optimizers in the backward are made of them.")
def hooks_after_accumulation(subject: Subject) -> None:
    layer = nn.Linear(3, 2)
    steps: list[str] = []
    for name, p in layer.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: steps.append(name))
    compiled = subject.compile(layer)
    for count in (1, 2):
        compiled(torch.randn(4, 3)).sum().backward()
        expect(sorted(steps) == sorted(["bias", "weight"] * count), f"after {count} backwards hooks ran for {steps}")


@case("Full backward hooks of modules see nothing.", "Probes of training read gradients there.")
def backward_hooks_of_modules(subject: Subject) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    seen: list[int] = []
    net.register_full_backward_hook(lambda module, given, got: seen.append(len(got)))
    x = torch.randn(2, 3, requires_grad=True)
    subject.compile(net)(x).sum().backward()
    expect(seen == [1], f"the hook ran {len(seen)} times")
    expect(x.grad is not None, "the input has no gradient behind the hook")
