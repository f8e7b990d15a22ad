"""Whether a product reads a wide copy of an operand that is kept between calls, or makes it of something smaller.

A wide copy is more bytes to read at each call, and spares the arithmetic that makes it. Products of few rows are bound
by the bytes of their weight, so they read the narrow one in loops; those of many rows are a library's, which needs it
wide.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.target import Target
from .products.contraction_cpu import ORDER, ROWS, onednn_multiplies

# The share of a time that is worth a copy of the weights.
NOTICED = 0.02

# Of BLAS beside oneDNN with a weight in its layout, on one core of Zen 4: the share of the bandwidth at which one row
# is multiplied by a plain weight; nanoseconds of an element of a weight that is put in order; how much faster many rows
# are multiplied; and what a call of oneDNN takes, in calls of BLAS.
VECTOR, PUT_IN_ORDER, PACKED_RATE, PACKED_CALL = 0.9, 0.15, 1.15, 18.0
# Of oneDNN with a plain weight beside one in its layout, there too: nanoseconds of an element that it puts in order,
# and how much longer it multiplies.
ONEDNN_IN_ORDER, ONEDNN_PLAIN = 0.12, 1.05
# Rows that loops of ours multiply by a large plain weight before oneDNN does by a packed one. Two rows of 4096 elements
# take 3.4 to 4.7 ms there, and 5.2 to 5.5 packed; from three on packed ones are as fast or faster.
LOOPS_ROWS = (1, 2)

# Nanoseconds on one core of Zen 5: of an element of a filter that oneDNN puts in order; of what a call of ATen's
# convolution does beside that, and one of oneDNN's does not; and the share of a convolution that is worth the copy.
FILTER_IN_ORDER, PLAIN_CALL, NOTICED_FILTERS = 0.3, 2e4, 0.005

# Steps of arithmetic from which a table is read where its elements would be made again, where so many elements are read
# with each: a load of a small table takes as long as a few of them.
STEPS, SPREAD = 6, 4


def wide_pays(rows: int, elements: int, read: int, wide: int, target: Target) -> bool:
    """Whether a product of ``rows`` rows with a weight of ``elements`` takes longer from ``read`` bytes, of which it
    makes each element, than from a copy of ``wide`` bytes."""
    if not rows:
        return False
    machine, flops = target.machine, 2.0 * rows * elements
    if target.is_gpu:
        # Tensor cores multiply what threads convert; a kernel of ours is a tenth slower than a library.
        return max(wide / machine.bandwidth, flops / machine.matmul) < max(
            read / machine.bandwidth, flops / machine.matmul / 0.9
        )
    library = max(wide / machine.bandwidth, (ORDER * elements if rows > 1 else 0.0) + flops / machine.matmul)
    # A conversion, a difference and a factor for each element, for every block of rows.
    made = 3.0 * elements / machine.issued * -(-rows // ROWS)
    loops = max(read / machine.bandwidth, made + flops / machine.float32)
    converted = (read + wide) / machine.bandwidth + library
    return library < min(loops, converted)


def is_for_libraries(target: Target) -> bool:
    """Whether weights are packed, or put side by side, for a library at all."""
    return not target.is_gpu


def joint_pays(sizes: Sequence[tuple[int, int, int]], itemsize: int, target: Target) -> bool:
    """Whether products of sizes (rows, inner, columns) that share their rows are worth a copy of their weights side by
    side. A CPU's library multiplies as fast in either form, so that calls are what is spared; products on a GPU that
    read one operand are one launch, or one kernel with what follows them, as they are."""
    if target.is_gpu or len(sizes) < 2:
        return False
    machine = target.machine
    flops = sum(2.0 * m * k * n for m, k, n in sizes)
    read = sum(k * n for _, k, n in sizes) * itemsize
    spared = (len(sizes) - 1) * machine.launch
    return spared >= NOTICED * max(read / machine.bandwidth, flops / machine.matmul)


def folded_times(
    sizes: Sequence[tuple[int, int, int]], passes: int, itemsize: int, target: Target
) -> tuple[float, float]:
    """Nanoseconds of products of sizes (rows, inner, columns) that read the same rows, with a scale of their columns
    folded into the weights, and with rows scaled at each call, for which they are written ``passes`` times. What a
    kernel does to rows that it makes anyway, as a norm does, costs nothing beside making them."""
    machine = target.machine
    flops = sum(2.0 * m * k * n for m, k, n in sizes)
    read = sum(k * n for _, k, n in sizes) * itemsize
    products = max(read / machine.bandwidth, flops / machine.matmul)
    rows, inner, _ = sizes[0]
    return products, products + passes * rows * inner * itemsize / machine.bandwidth


def folding_pays(folded: float, apart: float, target: Target) -> bool:
    """Whether the time of passes that are spared is worth a copy of the weights. On GPUs rows are scaled where a
    product reads them."""
    return is_for_libraries(target) and apart - folded >= NOTICED * apart


def packed_pays(rows: int, inner: int, columns: int, itemsize: int, target: Target) -> bool:
    """Whether a product of ``rows`` rows is faster with its weight in a library's own layout than with the plain one,
    which BLAS or oneDNN puts in order at each call. A single row of float32 it multiplies by the weight as it lies."""
    times = packed_times(rows, inner, columns, itemsize, target)
    return times is not None and times[0] < (1 - NOTICED) * times[1]


def packed_times(rows: int, inner: int, columns: int, itemsize: int, target: Target) -> tuple[float, float] | None:
    """Nanoseconds of a product with its weight packed and plain; None where nothing can be packed, or loops of ours
    read the weight as fast as memory gives it."""
    if target.is_gpu or not target.machine.calls_libraries:
        return None
    machine, elements = target.machine, inner * columns
    read, multiplied = elements * itemsize / machine.bandwidth, 2.0 * rows * elements / machine.matmul
    vector = rows == 1 and itemsize == 4
    if itemsize == 4 and rows in LOOPS_ROWS and elements * itemsize > machine.l2_bytes * machine.cores:
        return None
    call, packed = PACKED_CALL * machine.launch, max(read, multiplied / PACKED_RATE)
    plain = read / VECTOR if vector else PUT_IN_ORDER * elements + max(read, multiplied)
    if itemsize == 4 and onednn_multiplies(rows, inner, columns, machine):
        plain = min(plain, ONEDNN_IN_ORDER * elements + ONEDNN_PLAIN * packed + call)
    return packed + call, plain


def packed_filters_pay(elements: int, pixels: int, target: Target) -> bool:
    """Whether a convolution is faster by a noticeable share where its filters, of so many ``elements``, are in a
    library's own layout. ``pixels`` are those of all images, of a transposed convolution's input and else of its
    result: each is multiplied by every element."""
    if target.is_gpu or not target.machine.calls_libraries:
        return False
    return FILTER_IN_ORDER * elements + PLAIN_CALL >= NOTICED_FILTERS * 2.0 * elements * pixels / target.machine.matmul


def table_pays(steps: int, size: int, elements: int, target: Target) -> bool:
    """Whether a table of ``size`` numbers, each made by so many steps, is kept for kernels of so many ``elements``.
    Threads of a GPU make numbers while they wait for memory, and a table would be one more wait."""
    return not target.is_gpu and steps >= STEPS and elements >= SPREAD * size


__all__ = [
    "folded_times",
    "folding_pays",
    "is_for_libraries",
    "joint_pays",
    "packed_filters_pay",
    "packed_pays",
    "packed_times",
    "table_pays",
    "wide_pays",
]
