"""Who keeps tensors and modules alive: calls are boxed, so that inputs may die before results are made."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..kit import ops
from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import expect
from ..kit.subject import Subject


def dead(watched: Any) -> bool:
    gc.collect()
    return watched() is None


@case("The backend keeps its inputs.", "Memory of a batch is held until the next one, or forever.")
def inputs_die(subject: Subject) -> None:
    compiled = subject.compile(lambda x: x * 2 + 1, fullgraph=True)
    for call in (1, 2):
        x = torch.randn(4, 3)
        watched = weakref.ref(x.untyped_storage())
        here = weakref.ref(x)
        compiled(x)
        del x
        expect(dead(here) and dead(watched), f"the input of call {call} lives on after the call")


@case("The backend keeps its results.", "Memory is held that nobody can reach.")
def results_die(subject: Subject) -> None:
    compiled = subject.compile(lambda x: (x * 2, x.sum(0)), fullgraph=True)
    for call in (1, 2):
        results = compiled(torch.randn(32, 32))
        watched = [weakref.ref(r) for r in results]
        del results
        expect(all(map(dead, watched)), f"a result of call {call} lives on")


@case("A module that was compiled never dies.", "Models that are made one after another fill the memory.")
def modules_die(subject: Subject) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = subject.compile(net)
    compiled(torch.randn(2, 4)).sum().backward()
    watched, weight = weakref.ref(net), weakref.ref(net[0].weight)
    del net, compiled
    torch._dynamo.reset()
    expect(dead(watched), "the module lives on after torch._dynamo.reset()")
    expect(dead(weight), "a parameter lives on after torch._dynamo.reset()")


@case("A value that only the next graph reads lives to its end.", "The peak of memory is that of two values, not one.")
def values_between_graphs_die(subject: Subject) -> None:
    alive: list[bool] = []
    watched: list[Any] = []

    @torch.compiler.disable
    def watch(t: Tensor) -> None:
        watched.append(weakref.ref(t))

    @torch.compiler.disable
    def look(t: Tensor) -> Tensor:
        alive.append(watched[-1]() is not None)
        return t

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        watch(y)
        z = y.exp()
        del y
        return look(z)

    compiled = subject.compile(f)
    for _ in range(2):
        compiled(torch.randn(16))
    expect(not alive[-1], "a value that the second graph alone reads is alive after that graph")


@case("A call that raises keeps its inputs.", "A service that meets bad requests runs out of memory.")
def inputs_of_a_call_that_raises_die(subject: Subject) -> None:
    compiled = subject.compile(lambda table, index: table[index] * 2, fullgraph=True)
    compiled(torch.randn(4, 3), torch.tensor([1, 2]))
    table = torch.randn(4, 3)
    watched = weakref.ref(table)
    try:
        compiled(table, torch.tensor([1, 40]))
    except Exception as error:
        error.__traceback__ = None
    del table
    expect(dead(watched), "an input lives on after a call that raised")


@case("What was saved lives to the end of the backward.", "Calls are boxed so that activations die as they are read.")
def saved_values_die_in_the_backward(subject: Subject) -> None:
    ops.register()
    compiled = subject.compile(lambda x: torch.ops.mlc_conformance.noted(x.exp()).sin(), fullgraph=True)
    for _ in range(2):
        ops.ALIVE.clear()
        x = torch.randn(16, requires_grad=True)
        compiled(x).sum().backward()
        told = unequal(x.grad, x.detach().exp().cos() * x.detach().exp()) if x.grad is not None else "is None"
        expect(not told, f"the gradient {told}")
        expect(bool(ops.ALIVE), "the gradient of an op of the user's was not called")
        expect(not ops.ALIVE[-1], "a saved activation is alive after its last reader in the backward")
