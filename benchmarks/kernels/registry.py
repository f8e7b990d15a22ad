"""Every kernel case by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    attention,
    blocks,
    convolutions,
    images,
    movement,
    norms,
    points,
    pointwise,
    products,
    quantized,
    reductions,
    substitutions,
)
from .case import KernelCase

_FILES = (
    pointwise, reductions, norms, movement, quantized, attention, convolutions, images, points, blocks, products,
    substitutions,
)  # fmt: skip
KERNELS: Mapping[str, KernelCase] = MappingProxyType({case.name: case for file in _FILES for case in file.CASES})
