"""What goes in and comes out beside tensors."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kit.case import case
from ..kit.errors import expect
from ..kit.subject import Subject


class Both(NamedTuple):
    """A result of two parts."""

    loss: Tensor
    logits: Tensor


@dataclass
class Scores:
    """A result that is an object."""

    value: Tensor
    name: str


@case("Nested results come back flat, or in another order.", "Models return dicts of tuples.")
def nested_results(subject: Subject) -> None:
    def f(x: Tensor) -> dict[str, Any]:
        return {"b": (x + 1, [x.sin(), {"deep": x.sum()}]), "a": Both(x.mean(), x * 2), "o": OrderedDict(z=x - 1, y=x)}

    subject.agrees(f, lambda: (torch.randn(3),))


@case("None, numbers and strings among results are lost, or tensors.", "Optional results are None.")
def results_that_are_no_tensors(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Any, ...]:
        return None, x + 1, 3, 2.5, "text", True, x.shape, x.dtype, [], x.dim()

    subject.agrees(f, lambda: (torch.randn(3, 2),))


@case("A program without results, or with an empty one, fails.", "Steps that only write return nothing.")
def no_results(subject: Subject) -> None:
    def f(x: Tensor) -> None:
        x.add_(1)

    subject.agrees(f, lambda: (torch.randn(3),))
    subject.agrees(lambda x: (), lambda: (torch.randn(3),))


@case("Nested arguments arrive in another order.", "Caches are lists of tuples.")
def nested_arguments(subject: Subject) -> None:
    def f(batch: dict[str, Any], cache: list[tuple[Tensor, Tensor]], *rest: Tensor, scale: float = 2.0) -> Any:
        return [k + v * scale for k, v in cache], batch["x"] - batch["y"], sum(rest)

    def make() -> tuple[Any, ...]:
        t = [torch.randn(2) for _ in range(8)]
        return {"x": t[0], "y": t[1]}, [(t[2], t[3]), (t[4], t[5])], t[6], t[7]

    subject.agrees(f, make)


@case("A list or dict that the function writes is not written.", "Caches grow by append.")
def written_containers(subject: Subject) -> None:
    def f(x: Tensor, kept: list[Tensor], named: dict[str, Any]) -> Tensor:
        kept.append(x * 2)
        named["last"] = x + 1
        return x.sum()

    compiled = subject.compile(f)
    for _ in range(2):
        kept: list[Tensor] = []
        named: dict[str, Any] = {}
        x = torch.randn(3)
        compiled(x, kept, named)
        expect(len(kept) == 1 and torch.equal(kept[0], x * 2), f"the list holds {kept}")
        expect("last" in named and torch.equal(named["last"], x + 1), f"the dict holds {named}")


@case("A result that is an object of the user's loses its tensors.", "Libraries return dataclasses.")
def objects_as_results(subject: Subject) -> None:
    compiled = subject.compile(lambda x: Scores(x * 2, "scores"))
    x = torch.randn(3)
    got = compiled(x)
    expect(isinstance(got, Scores) and got.name == "scores", f"the result is {got!r}")
    expect(torch.equal(got.value, x * 2), "the tensor of the result is wrong")


@case("A result that depends on no input is made once, and shared.", "Writing to it changes the next call's.")
def constants_are_fresh(subject: Subject) -> None:
    compiled = subject.compile(
        lambda x: (x + 1, torch.zeros(3), torch.arange(3), torch.tensor([1.0, 2.0])), fullgraph=True
    )
    x = torch.randn(3)
    first = compiled(x)
    for t in first[1:]:
        t.fill_(9)
    second = compiled(x)
    wanted = torch.zeros(3), torch.arange(3), torch.tensor([1.0, 2.0])
    for number, (mine, right) in enumerate(zip(second[1:], wanted), 1):
        expect(torch.equal(mine, right), f"result {number} is {mine.tolist()} after the last call's was written")


@case("Tensors made without a device are on another one.", "Tables and masks are made inside of models.")
def tensors_made_inside(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[-1]
        mask = torch.ones(n, n).tril().bool()
        return (
            x * torch.arange(n),
            torch.where(mask, x, 0.0),
            torch.full((2,), 7),
            torch.eye(n) + x,
            torch.tensor(3) * x,
        )

    subject.agrees(f, lambda: (torch.randn(4),))
