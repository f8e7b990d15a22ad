"""Compiled modules as objects: copies, files, state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import expect
from ..kit.subject import Subject


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def agree(mine: Tensor, wanted: Tensor, what: str) -> None:
    told = unequal(mine, wanted, 4)
    expect(not told, f"{what} {told}")


@case("A copy of a compiled module trains the original.", "Averages of weights are kept in deep copies.")
def deep_copy(subject: Subject) -> None:
    first, x = net(), torch.randn(5, 3)
    compiled = subject.compile(first)
    compiled(x)
    second: Any = copy.deepcopy(compiled)
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1)
    agree(compiled(x), net()(x), "the original, after its copy changed,")
    second(x).sum().backward()
    expect(all(p.grad is None for p in first.parameters()), "training the copy gave gradients to the original")
    expect(all(p.grad is not None for p in second.parameters()), "the copy has no gradients")


@case("A compiled module cannot be pickled, or comes back otherwise.", "Processes are started with pickles.")
def pickled(subject: Subject) -> None:
    first, x = net(), torch.randn(5, 3)
    compiled = subject.compile(first)
    compiled(x)
    text = pickle.dumps(compiled)
    agree(pickle.loads(text)(x), first(x), "the module that comes back")


@case("State cannot be saved and loaded.", "Checkpoints of training are state dicts.")
def state_dict(subject: Subject) -> None:
    compiled, x = subject.compile(net()), torch.randn(5, 3)
    compiled(x)
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    with torch.no_grad():
        for p in compiled.parameters():
            p.zero_()
    agree(compiled(x), torch.zeros(5, 2), "the result of zeroed weights")
    file.seek(0)
    compiled.load_state_dict(torch.load(file))
    agree(compiled(x), net()(x), "the result of loaded weights")


@case("A module moved to another type is computed in the first one.", "Models are compiled, then cast.")
def cast_later(subject: Subject) -> None:
    model, x = net(), torch.randn(5, 3)
    compiled = subject.compile(model)
    compiled(x)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        agree(compiled(x.to(dtype)), model(x.to(dtype)), f"the result in {dtype}")


@case("A training loop comes to other weights.", "Small faults add up over steps.")
def training_loop(subject: Subject) -> None:
    models = [net(), net()]
    forwards = [subject.compile(models[0]), models[1]]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in models]
    for step in range(8):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        for forward, optimizer in zip(forwards, optimizers):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            (forward(x) - 1).square().mean().backward()
            optimizer.step()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters()):
        told = unequal(mine.detach(), theirs.detach(), 50)
        expect(not told, f"after eight steps {name} {told}")


@case("A compiled optimizer's step differs from eager's.", "All its tensors are written in place.")
def compiled_step(subject: Subject) -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True) for m in models]
    steps = [subject.compile(optimizers[0].step), optimizers[1].step]
    for _ in range(3):
        for model, optimizer, step in zip(models, optimizers, steps):
            model(torch.ones(2, 3)).sum().backward()
            step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].named_parameters()):
        told = unequal(mine.detach(), theirs[1].detach(), 10)
        expect(not told, f"after three steps {name} {told}")


@case("A parametrized weight is computed once and kept.", "Weight norms depend on what is trained.")
def parametrized_weight(subject: Subject) -> None:
    def make() -> nn.Module:
        return torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    subject.agrees(make, lambda: (torch.randn(4, 3),), module=True, train=True, loose=4)


@case("A buffer that is replaced is read as before.", "Masks and tables are exchanged between calls.")
def replaced_buffer(subject: Subject) -> None:
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask

    model = Masked()
    compiled, x = subject.compile(model), torch.randn(3)
    for value in (1.0, 0.0, 5.0):
        model.mask = torch.full((3,), value)
        agree(compiled(x), x * value, f"the result with a mask of {value}")
