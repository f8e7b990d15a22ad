"""Random programs of torch: chains of point-wise steps with reductions, broadcasts and transposes between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Step: TypeAlias = Callable[[Tensor, Sequence[Tensor]], Tensor]
_ONE: Sequence[Callable[[Tensor], Tensor]] = (
    torch.exp, torch.tanh, torch.sigmoid, torch.relu, torch.abs, torch.square, torch.neg,
    lambda t: t * 0.5 + 1, lambda t: torch.where(t > 0, t, t * 0.1), lambda t: torch.rsqrt(t * t + 1),
    lambda t: F.gelu(t, approximate="tanh"), lambda t: F.softplus(t), lambda t: t.to(torch.bfloat16).float(),
)  # fmt: skip
_TWO: Sequence[Callable[[Tensor, Tensor], Tensor]] = (torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum)
_REDUCE: Sequence[Callable[[Tensor, int], Tensor]] = (
    lambda t, d: t.sum(d, keepdim=True),
    lambda t, d: t.amax(d, keepdim=True),
    lambda t, d: t.mean(d, keepdim=True),
    lambda t, d: t.var(d, keepdim=True),
    lambda t, d: t.logsumexp(d, keepdim=True),
)
# Shapes from what a first cache holds to what none does.
_SHAPES = (
    (64, 64), (257, 33), (128, 1000), (1024, 256), (31, 4099), (4096, 128), (2048, 768), (16, 32, 129), (8, 64, 64, 32),
    (1 << 20,), (12, 197, 64), (100003,), (512, 2048), (7, 5, 1025),
)  # fmt: skip


def random_program(seed: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function and inputs of the CPU for it; the same for the same seed."""
    rng = random.Random(seed)
    shape = rng.choice(_SHAPES)
    inputs = [_input(shape, rng, seed + k) for k in range(rng.randint(1, 3))]
    steps = [_step(shape, rng) for _ in range(rng.randint(2, 7))]
    last = rng.choice((None, None, None, "reduce"))
    axis, how = rng.randrange(len(shape)), rng.choice(_REDUCE)

    def program(*tensors: Tensor) -> Tensor:
        value = tensors[0]
        for step in steps:
            value = step(value, tensors)
        return how(value, axis) if last else value

    return program, inputs


def _input(shape: tuple[int, ...], rng: random.Random, seed: int) -> Tensor:
    """Whole, transposed in memory, or of fewer dimensions."""
    generator = torch.Generator().manual_seed(seed)
    kind = rng.choice(("whole", "whole", "whole", "transposed", "row", "half"))
    if kind == "transposed" and len(shape) > 1:
        return torch.randn(*reversed(shape), generator=generator).permute(*reversed(range(len(shape))))
    if kind == "row":
        return torch.randn(shape[-1], generator=generator)
    made = torch.randn(shape, generator=generator)
    return made.to(torch.bfloat16) if kind == "half" else made


def _step(shape: tuple[int, ...], rng: random.Random) -> Step:
    kinds = ["one", "one", "two", "two", "norm", "norm", "softmax"]
    # A running sum over one axis alone would be a benchmark of its own.
    kind = rng.choice([*kinds, "cumsum"] if len(shape) > 1 else kinds)
    if kind == "one":
        one = rng.choice(_ONE)
        return lambda t, _: one(t)
    if kind == "two":
        two, other = rng.choice(_TWO), rng.randrange(3)
        return lambda t, tensors: two(t, tensors[other % len(tensors)].float().expand(shape))
    axis = rng.randrange(len(shape))
    if kind == "norm":
        reduce, two = rng.choice(_REDUCE), rng.choice((torch.sub, torch.mul))
        return lambda t, _: two(t.float().expand(shape), reduce(t.float().expand(shape), axis))
    if kind == "softmax":
        return lambda t, _: torch.softmax(t.float().expand(shape), axis)
    return lambda t, _: torch.cumsum(t.float().expand(shape), axis)


