"""What the layout of images costs on a CPU, where oneDNN convolves them: with channels innermost or outermost, or as
products of matrices.

One core of Zen 3 and oneDNN 3; only the ratios matter.
"""

from __future__ import annotations

from ...ir.machine import Machine
from ..facts.convolution import Convolution
from .rows import cache

# Nanoseconds: an element of an image that the library brings into its layout or back; an element of a filter, beyond
# what it costs with plain images, where all filters stay in the cache and where they do not; an element of an image
# that a loop of ours reads in one layout and writes in the other.
REORDER, FILTER, FILTER_PAST, TRANSPOSE = 1.1, 0.6, 3.5, 0.6
# Images of fewer channels have kernels of their own in the library, which read plain ones.
CHANNELS = 8
# A product for each image beat the library's call on Zen 3 and Sapphire Rapids where an image has so many elements, or
# where its filters have so few: they stay in the nearest caches.
ELEMENTS, FILTERS = 256, 1 << 16


def channels_last_time(c: Convolution, weight: int, images: int, machine: Machine) -> float:
    """Nanoseconds that a convolution takes longer with channels innermost; ``weight`` and ``images`` are elements."""
    if c.taps == 1:
        return 0.0  # a product of matrices, as fast on either
    fits = weight * c.weight.dtype.itemsize <= 2 * cache(machine)
    return weight * (FILTER if fits else FILTER_PAST) - (images * REORDER if c.input.shape[1] >= CHANNELS else 0.0)


def transposing_time(elements: int) -> float:
    """Nanoseconds more of a loop that reads an image in one layout and writes it in the other."""
    return elements * TRANSPOSE


def are_measured(machine: Machine) -> bool:
    """Whether the times of both layouts are known: of a CPU's library."""
    return not machine.is_gpu


def multiplies_points(images: int, elements: int, weight: int) -> bool:
    """Whether a product for each of ``images`` of so many ``elements`` is faster than a convolution by filters of one
    element, ``weight`` in all."""
    return weight <= FILTERS or images == 1 or elements >= ELEMENTS
