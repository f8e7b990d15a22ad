"""What a workload of the suite ``static`` is made of: a function and fake inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..models.spec import Size

HALF = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Made:
    """A function and fake inputs of the CPU for it."""

    function: Callable[..., Any]
    inputs: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """``make(size)`` gives the function to compile; with ``training`` its backward is compiled too.

    ``aligned``: its rows are multiples of 16 bytes. ``compulsory(size)``: the bytes that the ratio of the backward is
    over, where they are not those of the graph's own inputs and outputs.
    """

    name: str
    make: Callable[[Size], Made]
    training: bool = False
    aligned: bool = True
    compulsory: Callable[[Size], int] | None = None


def fake(*shapes: tuple[int, ...], dtype: torch.dtype = HALF, gradients: bool = False) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(s, dtype=dtype, requires_grad=gradients) for s in shapes]
