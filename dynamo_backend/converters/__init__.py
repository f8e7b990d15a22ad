"""Converters from ATen ops to nodes of the IR, one file for each family of ops."""

from __future__ import annotations

from . import (
    associative,
    attention,
    batch_norm,
    create,
    elementwise,
    foreach,
    gather,
    join,
    libraries,
    logical,
    losses,
    norms,
    pooling,
    products,
    rand,
    reductions,
    replays,
    resample,
    scans,
    scatter,
    softmax,
    views,
)
from .context import Domain, ImportContext, Scalar, Tensor, axes, convert
from .registry import CONVERTERS, LIBRARY_REASONS, Converter, NoConversion, converter
from .sizes import SizeMap

FAMILIES = (
    *(associative, attention, batch_norm, create, elementwise, foreach, gather, join, libraries, logical, losses),
    *(norms, pooling, products, rand, reductions, replays, resample, scans, scatter, softmax, views),
)

__all__ = [
    "CONVERTERS",
    "FAMILIES",
    "LIBRARY_REASONS",
    "Converter",
    "Domain",
    "ImportContext",
    "NoConversion",
    "Scalar",
    "SizeMap",
    "Tensor",
    "axes",
    "convert",
    "converter",
]
