"""What a kernel case is, and the makers of inputs that several cases share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Maker = Callable[[Shape, torch.Generator], tuple[Tensor, ...]]

VARIANTS = ("aligned", "odd")


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A function of tensors that ought to become one kernel or very few.

    ``shapes``: by device type and variant.
    ``make``: inputs in float32 (or integers) on the CPU for a shape; ``inputs`` converts and moves them.
    ``touched``: bytes that must move where that is not all of the inputs and outputs (a gather reads some rows only).
    ``gradients``: how many of the first inputs take gradients in training; with none the case is of inference alone.
    """

    name: str
    function: Callable[..., Any]
    make: Maker
    shapes: Mapping[str, Mapping[str, Shape]]
    touched: Callable[[Sequence[Tensor], Sequence[Tensor]], int] | None = None
    gradients: int = 0

    def inputs(self, variant: str, device: str, dtype: torch.dtype, shape: Shape | None = None) -> tuple[Tensor, ...]:
        """Inputs of a variant, or of any other ``shape`` of the same rank."""
        shape = self.shapes[torch.device(device).type][variant] if shape is None else shape
        made = self.make(shape, torch.Generator().manual_seed(0))
        return tuple(t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype) for t in made)

    def compulsory_bytes(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Bytes that any implementation has to move: every input read once, every output written once."""
        if self.touched is not None:
            return self.touched(inputs, outputs)
        return sum(t.nbytes for t in (*inputs, *outputs))


# One float32 tensor is 16 MiB on the CPU and 256 MiB on a GPU. Not more on the CPU: glibc maps blocks of 32 MiB and
# more anew at each allocation, and the page faults of the outputs would outweigh every kernel.
ROWS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (4096, 1024), "odd": (4095, 1021)},
    "cuda": {"aligned": (16384, 4096), "odd": (16381, 4097)},
}
# Few long rows: the reduction over a row does not fit a core's first cache.
LONG: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (128, 32768), "odd": (127, 32003)},
    "cuda": {"aligned": (4096, 32768), "odd": (4093, 50257)},
}
IMAGES: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (16, 64, 64, 64), "odd": (15, 61, 65, 63)},
    "cuda": {"aligned": (64, 256, 56, 56), "odd": (63, 255, 57, 55)},
}
# batch, sequence, heads, width of a head
HEADS: Mapping[str, Mapping[str, Shape]] = {
    "cpu": {"aligned": (8, 512, 16, 64), "odd": (7, 511, 17, 62)},
    "cuda": {"aligned": (16, 2048, 32, 64), "odd": (15, 2047, 33, 62)},
}


def normal(*shapes_of: Callable[[Shape], Shape]) -> Maker:
    """A maker of normal floats, one tensor for each function from the case's shape to the tensor's."""

    def make(shape: Shape, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(torch.randn(of(shape), generator=generator) for of in shapes_of)

    return make


def same(shape: Shape) -> Shape:
    return shape


def last(shape: Shape) -> Shape:
    """The shape of a bias or weight over the last axis."""
    return shape[-1:]


def channels(shape: Shape) -> Shape:
    """The shape of a statistic by channel of an image batch."""
    return shape[1:2]
