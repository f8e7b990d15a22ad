"""What the layout of images costs where a library convolves them: with channels innermost or outermost, or as products
of matrices.

On a CPU by oneDNN 3 on one core of Zen 3; only the ratios matter. On a GPU by cuDNN, whose tensor cores convolve images
with channels innermost: of others it writes copies, before and behind a convolution.
Source: NVIDIA, "Optimizing Convolutional Layers User's Guide", section on tensor layouts.
"""

from __future__ import annotations

from ...ir.expr.dtypes import DType
from ...ir.machine import Machine
from ..facts.convolution import Convolution
from .rows import cache

# Nanoseconds: an element of an image that the library brings into its layout or back; an element of a filter, beyond
# what it costs with plain images, where all filters stay in the cache and where they do not; an element of an image
# that a loop of ours reads in one layout and writes in the other.
REORDER, FILTER, FILTER_PAST, TRANSPOSE = 1.1, 0.6, 3.5, 0.6
# The same of a transposed convolution, whose plain images the library computes more slowly beside reordering them.
REORDER_TRANSPOSED = 1.5
# Images of fewer channels have kernels of their own in the library, which read plain ones. Of a transposed convolution
# those are the images that it makes: it computes as the gradient of a convolution.
CHANNELS = 8
# A product for each image beat the library's call on Zen 3 and Sapphire Rapids where an image has so many elements, or
# where its filters have so few: they stay in the nearest caches.
ELEMENTS, FILTERS = 256, 1 << 16
# Columns that a block of BLAS has, and images below which ATen on one core multiplies each by itself.
COLUMNS, ATEN_IMAGES = 16, 16


def channels_last_time(c: Convolution, weight: int, images: int, machine: Machine) -> float:
    """Nanoseconds that a convolution takes longer with channels innermost; ``weight`` and ``images`` are elements."""
    if machine.is_gpu:  # filters are brought into that layout at each call either way
        return -_copying(machine, images * c.input.dtype.itemsize)
    if c.taps == 1 and not c.transposed:
        return _pixels_time(c, weight, images, machine)
    fits = weight * c.weight.dtype.itemsize <= 2 * cache(machine)
    short = c.output if c.transposed else c.input
    reorder = REORDER_TRANSPOSED if c.transposed else REORDER
    return weight * (FILTER if fits else FILTER_PAST) - (images * reorder if short.shape[1] >= CHANNELS else 0.0)


def _pixels_time(c: Convolution, weight: int, images: int, machine: Machine) -> float:
    """The same of a convolution by single elements: one product of all pixels beside one of each image, whose elements
    are the columns that BLAS fills up to whole blocks, or beside the library's call."""
    if any(s != 1 for s in c.stride) or any(c.padding):
        return 0.0
    channels = int(c.input.shape[1] + c.output.shape[1])
    pixels = max(images // channels, 1)
    batch, size = c.input.shape[0], c.input.shape[2:]
    if not all(n.is_Integer and n > 0 for n in (batch, *size)):
        return 0.0
    elements = pixels // int(batch)
    time = 2.0 * pixels * weight / machine.matmul
    last = time * machine.blas
    if batch == 1 or multiplies_points(2, elements, weight) or (machine.cores == 1 and batch < ATEN_IMAGES):
        return last - time * (-(-elements // COLUMNS) * COLUMNS / elements)
    return -images * REORDER


def transposing_time(elements: int, itemsize: int, machine: Machine) -> float:
    """Nanoseconds more of a loop that reads an image in one layout and writes it in the other; of a GPU, of a kernel
    that does nothing else."""
    return _copying(machine, elements * itemsize) if machine.is_gpu else elements * TRANSPOSE


def _copying(machine: Machine, nbytes: int) -> float:
    return machine.launch + 2 * nbytes / machine.bandwidth


def are_measured(machine: Machine) -> bool:
    """Whether products in the place of convolutions were measured: against a CPU's library."""
    return not machine.is_gpu


def are_known(machine: Machine, dtype: DType, transposed: bool) -> bool:
    """Whether the times of both layouts are known of images of a type: on a CPU of float32, on GPUs of half types that
    the tensor cores of cuDNN multiply, where transposed convolutions were not measured. MIOpen has kernels for both
    layouts."""
    if machine.is_gpu:
        copies = machine.libraries.convolutions == "cuDNN" and not transposed
        return copies and dtype.is_half and dtype in machine.multiplied
    return dtype is DType.FLOAT32


def multiplies_points(images: int, elements: int, weight: int) -> bool:
    """Whether a product for each of ``images`` of so many ``elements`` is faster than a convolution by filters of one
    element, ``weight`` in all."""
    return weight <= FILTERS or images == 1 or elements >= ELEMENTS
