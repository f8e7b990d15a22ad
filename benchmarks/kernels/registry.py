"""Every kernel case by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import (
    attention,
    convolutions,
    images,
    movement,
    norms,
    pointwise,
    products,
    quantized,
    reductions,
    substitutions,
)
from .case import KernelCase

_FILES = (pointwise, reductions, norms, movement, quantized, attention, convolutions, images, products, substitutions)
KERNELS: Mapping[str, KernelCase] = MappingProxyType({case.name: case for file in _FILES for case in file.CASES})
