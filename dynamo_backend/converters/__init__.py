"""Converters from ATen ops to nodes of the IR, one file for each family of ops."""

from __future__ import annotations

from . import libraries
from .context import ImportContext, ReductionSpace, Scalar, Tensor
from .index import (
    adaptive_pooling,
    borders,
    gather,
    grid,
    histograms,
    masked,
    pooling,
    ranks,
    resample,
    scatter,
    search,
    segments,
    unfolding,
    views,
)
from .index import concat as join
from .linear import attention, distance, factors, products
from .math import create, divisions, elementwise, foreach, gamma, logical, orthogonal, special
from .random import multinomial, rand, replays
from .reduce import batch_norm, losses, norms, reductions, softmax
from .registry import CONVERTERS, LIBRARY_REASONS, Converter, NoConversion, converter
from .scan import associative, scans
from .sizes import SizeMap
from .terms import axes, convert

FAMILIES = (
    adaptive_pooling, associative, attention, batch_norm, borders, create, distance, divisions, elementwise, factors,
    foreach, gamma, gather, grid, histograms, join, libraries, logical, losses, masked, multinomial, norms, orthogonal,
    pooling, products, rand, ranks, reductions, replays, resample, scans, scatter, search, segments, softmax, special,
    unfolding, views,
)  # fmt: skip

__all__ = [
    "CONVERTERS",
    "FAMILIES",
    "LIBRARY_REASONS",
    "Converter",
    "ImportContext",
    "NoConversion",
    "ReductionSpace",
    "Scalar",
    "SizeMap",
    "Tensor",
    "axes",
    "convert",
    "converter",
]
