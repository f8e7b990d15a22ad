"""What it costs a product of matrices that rows begin anywhere, and what it costs to keep them from it.

Tensor cores are fed 16 bytes at a time: cuBLAS uses its fastest kernels where the pointers and leading dimensions of
all matrices are multiples of 16 bytes. Source: NVIDIA, "Matrix Multiplication Background User's Guide", section on
requirements of tensor cores. By how much the others are slower was not measured here. Kernels that copy operands an
element at a time are taken to reach what loops of ours reach of such rows; those that only write so are none of the
newest, which copy tiles by descriptors.
"""

from __future__ import annotations

from ...ir.expr.dtypes import DType
from ...ir.machine import Machine
from ...ir.target import Target

# Bytes at whose multiples rows are to begin.
WIDE = 16
# What is left of a library's rates where the rows of an operand begin elsewhere, and where only those of the result do.
ODD_OPERAND, ODD_RESULT = 0.4, 0.6
# What element-wise loops over rows with gaps, whose tails have masks, reach of the rate of flat ones: by the model of
# time, a GELU of 8192 rows of 3001 halves takes 39 us instead of 29.
IN_ROWS = 0.7
# A copy has to gain so many times what it costs: the shares above are estimates.
COPY_WORTH = 2.0
# By what share rows may grow.
MOST_GROWTH = 0.125


def rates_left(operands: bool, result: bool) -> tuple[float, float]:
    """What is left of a library's rates of reading and of multiplying in a product of half types, of which the rows of
    both operands, or of the result, begin at multiples of 16 bytes."""
    if not operands:
        return ODD_OPERAND, ODD_OPERAND
    return 1.0, 1.0 if result else ODD_RESULT


def wants_aligned(target: Target, dtype: DType) -> bool:
    """Whether products of a type run on a GPU's tensor cores, in the library or in kernels of ours."""
    return target.is_gpu and (dtype in target.machine.multiplied or target.multiplies(dtype))


def padded_row(length: int, itemsize: int) -> int | None:
    """The elements from one row of ``length`` to the next such that all begin at multiples of 16 bytes; None where
    that is as it is, or takes too much memory."""
    step = max(WIDE // itemsize, 1)
    padded = -(-length // step) * step
    return padded if length < padded <= length * (1 + MOST_GROWTH) else None


def copying_time(machine: Machine, nbytes: int) -> float:
    """Nanoseconds of a kernel that copies ``nbytes`` into rows that are padded."""
    return machine.launch + 2 * nbytes / machine.bandwidth


def scattering_time(machine: Machine, nbytes: int) -> float:
    """Nanoseconds that an element-wise kernel takes longer for a tensor whose rows have gaps."""
    return nbytes / machine.bandwidth * (1 / IN_ROWS - 1)


def filling_time(machine: Machine, nbytes: int) -> float:
    """Nanoseconds that a library takes longer to add a row to a result that is padded: it has no epilogue there, so it
    fills the result with that row first, and reads it."""
    return machine.launch + 2 * nbytes / machine.bandwidth
