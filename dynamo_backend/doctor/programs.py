"""Small programs, one for each kind of kernel, that are compiled, run and compared with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.errors import MlcError
from ...runtime.counters import counters

Shape: TypeAlias = tuple[int, ...]
# An error may be so many times eager's own, and so many units in the last place of the largest value more.
_WORSE, _ULPS = 4.0, 64.0
_RATE = 0.1


class DisagreementError(MlcError):
    """A compiled program gave other numbers than eager."""


def pointwise(x: Tensor, y: Tensor) -> Tensor:
    """A chain over two tensors."""
    return F.gelu(x) * y + 0.5


def softmax(x: Tensor) -> Tensor:
    """A reduction of rows, read twice."""
    return torch.softmax(x * 2.0, -1)


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Its backward reduces rows and columns."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A matrix product with what follows it."""
    return torch.relu(x @ weight + bias)


def rows(x: Tensor) -> Tensor:
    """A kernel whose number of rows is a symbol."""
    return torch.log_softmax(x, -1).sum(0)


def step(x: Tensor, target: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The loss of a small network; ``descend`` takes the step."""
    return F.cross_entropy(F.layer_norm(F.gelu(x @ w1), (w1.shape[-1],)) @ w2, target)


def descend(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    """A step of gradient descent, in place."""
    for p, g in zip(parameters, gradients, strict=True):
        p.sub_(_RATE * g)


@dataclass(frozen=True, slots=True)
class SampleProgram:
    """``shapes`` are those of its tensors; ``classes``: the second tensor names so many classes. In ``training`` the
    gradients of all floats are compared, and with ``descends`` what a step of descent makes of the last two.
    ``first_sizes`` are other first dimensions of all tensors, under ``dynamic=True``."""

    name: str
    function: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    training: bool = False
    descends: bool = False
    classes: int = 0
    first_sizes: tuple[int, ...] = ()

    def inputs(self, device: str, first: int | None = None) -> list[Tensor]:
        """Random numbers, or with another first dimension."""
        generator = torch.Generator().manual_seed(0)
        made = []
        for k, shape in enumerate(self.shapes):
            shape = shape if first is None else (first, *shape[1:])
            if self.classes and k == 1:
                made.append(torch.randint(self.classes, shape, generator=generator).to(device))
            else:
                made.append(torch.randn(shape, generator=generator).to(device).requires_grad_(self.training))
        return made


PROGRAMS: Mapping[str, SampleProgram] = {
    p.name: p
    for p in (
        SampleProgram("pointwise", pointwise, ((33, 129), (33, 129))),
        SampleProgram("softmax", softmax, ((19, 1000),)),
        SampleProgram("norm backward", norm, ((33, 130), (130,), (130,)), training=True),
        SampleProgram("product", product, ((65, 67), (67, 33), (33,))),
        SampleProgram("dynamic shape", rows, ((7, 65),), first_sizes=(1, 33, 0)),
        SampleProgram("training step", step, ((24, 20), (24,), (20, 36), (36, 10)), True, True, classes=10),
    )
}


@dataclass(slots=True)
class Outcome:
    """``error`` and ``limit`` are shares of the largest value, of the tensor nearest to its limit."""

    kernels: int = 0
    error: float = 0.0
    limit: float = 1.0
    compared: int = 0

    def judge(self, name: str, got: Tensor, want: Tensor, eager: Tensor) -> None:
        """Compare a tensor with one of float64. Raises DisagreementError."""
        if got.shape != want.shape or got.dtype != eager.dtype:
            raise DisagreementError(f"{name} is {got.dtype}{list(got.shape)}, not {eager.dtype}{list(want.shape)}")
        self.compared += 1
        if not want.numel():
            return
        scale = want.abs().max().item() or 1.0
        errors = [((t.double() - want).abs() / scale).nan_to_num(nan=torch.inf) for t in (got, eager)]
        error, theirs = (e.max().item() for e in errors)
        limit = _WORSE * theirs + _ULPS * torch.finfo(eager.dtype).eps
        if error > limit:
            at = int(errors[0].flatten().argmax())
            raise DisagreementError(
                f"{name} differs from eager at element {at}: {got.flatten()[at].item():.9g}, not "
                f"{want.flatten()[at].item():.9g} (error {error:.1e} of the largest value, limit {limit:.1e})"
            )
        if error / limit >= self.error / self.limit:
            self.error, self.limit = error, limit


def run(
    program: SampleProgram,
    device: str,
    options: Mapping[str, object] | None = None,
    *,
    calls: int = 1,
    around: Callable[[Callable[[], None]], None] = lambda call: call(),
) -> Outcome:
    """Compile a program, run it and compare it with eager in float64, at each of its sizes and ``calls`` times.

    ``around`` makes the calls, in a thread or a stream of its own. Raises DisagreementError.
    """
    torch._dynamo.reset()
    outcome, before = Outcome(), counters.snapshot()
    given = dict(options or {})
    compiled = torch.compile(
        program.function, backend="mlc", dynamic=bool(program.first_sizes), fullgraph=True, options=given
    )
    descend_ = torch.compile(descend, backend="mlc", dynamic=False, fullgraph=True, options=given)
    for first in (None, *program.first_sizes):
        for k in range(calls):
            args = program.inputs(device, first)
            with torch.no_grad():
                for a in args:
                    if a.is_floating_point():
                        a.add_(k)
            got: dict[str, Tensor] = {}
            around(lambda args=args, got=got: got.update(_results(program, compiled, descend_, args)))  # type: ignore[misc]
            exact = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
            want = _results(program, program.function, descend, exact)
            eager = _results(program, program.function, descend, copy.deepcopy(args))
            for name in want:
                outcome.judge(name, got[name], want[name], eager[name])
    found = counters.since(before)
    outcome.kernels = found.get("kernels_generated", 0)
    if not outcome.kernels:
        raise DisagreementError("no kernel was made of it")
    return outcome


def _results(
    program: SampleProgram, function: Callable[..., Tensor], descend_: Callable[..., Any], args: Sequence[Tensor]
) -> dict[str, Tensor]:
    """What a program gives, by name: its output, gradients, and parameters after a step."""
    if not program.training:
        with torch.no_grad():
            return {"the result": function(*args)}
    leaves = {k: a for k, a in enumerate(args) if a.requires_grad}
    output = function(*args)
    gradients = torch.autograd.grad(output, list(leaves.values()), torch.ones_like(output))
    results = {"the result": output.detach()}
    results |= {f"the gradient of argument {k}": g for k, g in zip(leaves, gradients, strict=True)}
    if program.descends:
        moved = [a.detach().clone() for a in leaves.values()]
        with torch.no_grad():
            descend_(moved, list(gradients))
        results |= {f"argument {k} after a step": p for k, p in zip(leaves, moved, strict=True)}
    return results
