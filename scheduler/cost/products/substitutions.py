"""How long the products and the passes over memory take that a substitution puts in the place of others.

Both sides of a substitution are judged by the same few terms, so that what they leave out (what fuses with what, how
many programs a multiprocessor holds) falls out of the comparison where it is alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ir.expr.dtypes import DType
from ....ir.machine import Machine
from .contraction_cpu import MATRIX, ORDER
from .gpu_tiles import PLAIN_SHAPES, SHAPES, VECTOR_SHAPES, Extent, Rates, multiplying_time, reach

# A substitution has to save this share of the time, and so many nanoseconds: the model is a model.
WORTH, LEAST_GAIN = 0.1, 1000.0
# Pieces of the summed axis that a GPU's library may cut a product into.
PIECES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class ProductSize:
    """``batch`` products of ``m`` rows, ``n`` columns and ``k`` terms, of elements of one type."""

    batch: int
    m: int
    n: int
    k: int
    dtype: DType

    @property
    def bytes(self) -> int:
        """What is read and written, once each."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Operations."""
        return 2.0 * self.batch * self.m * self.n * self.k


def product_time(p: ProductSize, machine: Machine) -> float:
    """Nanoseconds of a library's product."""
    few = min(p.m, p.n)
    if not machine.is_gpu:
        order = p.batch * p.n * p.k * ORDER if few > 1 else 0.0
        begun = machine.launch + (p.batch - 1) * MATRIX
        rate = machine.matmul if few > 1 else machine.float32
        return begun + max(p.bytes / machine.bandwidth, min(order, p.flops / machine.matmul) + p.flops / rate)
    multiplied = p.dtype in machine.multiplied
    rates = Rates(
        machine.cores, machine.bandwidth, machine.matmul if multiplied else machine.float32, reach(machine)
    )  # fmt: skip
    shapes = VECTOR_SHAPES if few == 1 else SHAPES if multiplied else PLAIN_SHAPES
    size = Extent(p.batch, p.m, p.n, p.k)
    best = min(multiplying_time(size, k, p.bytes, rates, shapes) for k in PIECES)
    return machine.launch + best


def pass_time(nbytes: float, machine: Machine) -> float:
    """Nanoseconds of a kernel that reads and writes so many bytes and does nothing else that takes time."""
    return (machine.launch if machine.is_gpu else 0.0) + nbytes / machine.bandwidth


def gain_of(before: float, after: float) -> float:
    """Nanoseconds that a substitution saves beyond the least that it has to: it pays where that is above zero, and
    several together where their sum is."""
    return min(before * (1 - WORTH) - after, before - after - LEAST_GAIN)


def joins_copies(by_rows: bool, machine: Machine) -> bool:
    """Whether operands may be put side by side for one product in the place of several: rows always, columns not on
    GPUs, where products of one operand with several weights are one launch as they are."""
    return by_rows or not machine.is_gpu
