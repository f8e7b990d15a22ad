"""Which products a CPU computes with our loops, by a model of time.

BLAS multiplies faster than any loop of ours, so a plain product is its. What our loops save is memory traffic: an
operand that is made on the way from something smaller need not be written and read again. For few rows, when a product
is bound by reading its weight, that is nearly all of the time; for many, it is little. A call of the library takes its
time before it multiplies at all, which is more than small products take in loops of ours, and those fuse with what is
around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....ir.expr.dtypes import DType
from ....ir.machine import Machine
from ...facts.contraction import Decision, LibraryProduct, Operand

# One core of Zen 3, in nanoseconds, beside the rates of a machine: an element of the weight that BLAS puts in order; a
# byte of memory that is new at each call, as allocations past 32 MiB are. Only their ratios matter.
ORDER, PAGED = 0.7, 0.5
NEW_PAST = 32 << 20
# What each matrix of a batch adds to a call of the library; an operation of our loops on sizes that fill no registers,
# and one of ATen's plain loops for integers.
MATRIX, SMALL, PLAIN = 400.0, 1 / 5, 1 / 12
# Rows that share one conversion of an operand's elements: as many as have their sums in registers.
ROWS = 4
# Of oneDNN beside MKL on one core of Zen 5: rows from which it reads a plain weight as fast, and what more a call
# takes, in calls of BLAS.
ONEDNN_ROWS, ONEDNN_CALL = 4, 14.0


def decide_cpu(product: LibraryProduct, machine: Machine) -> Decision:
    """Open where reading the packed operand saves more time than BLAS does."""
    a, b = product.a, product.b
    packed = (a.is_packed and product.n * 4 >= product.m, b.is_packed)
    if product.n > product.m * 4:
        packed = (False, b.is_packed)
    sizes = f"{product.m} x {product.k} x {product.n}"
    if product.depth == 1:
        return Decision(True, f"no sum: {sizes}, each element of the result is one product", packed)
    if not any(packed) and _is_small(product, machine):
        return Decision(True, f"small product in loops: {sizes} takes less than a call of a library")
    if not any(packed):
        stop = b.stop or a.stop
        return Decision(False, f"matrix product: BLAS; nothing to read in packed form{f' ({stop})' if stop else ''}")
    if not product.type.dtype.is_float:
        return Decision(False, "matrix product of integers: ATen")
    library, ours = _library_time(product, packed, machine), _loop_time(product, packed, machine)
    what = " and ".join(_told(o) for o, inlined in zip((a, b), packed, strict=True) if inlined)
    if ours < library:
        return Decision(True, f"{what} in its loops: {sizes} in {_time(ours)} rather than {_time(library)}", packed)
    return Decision(False, f"matrix product: BLAS in {_time(library)}; with {what} it would take {_time(ours)}")


def onednn_multiplies(rows: int, inner: int, columns: int, machine: Machine) -> bool:
    """Whether oneDNN multiplies plain matrices of float32 faster than BLAS, where that has narrower vectors than the
    processor: MKL, on one of another company."""
    if machine.is_gpu or machine.blas >= 1.0 or rows < ONEDNN_ROWS:
        return False
    spared = (1.0 - machine.blas) * 2.0 * rows * inner * columns / machine.matmul
    return spared > ONEDNN_CALL * machine.launch


def _is_small(p: LibraryProduct, machine: Machine) -> bool:
    """Whether our loops are done before a call of the library is. Sizes that vary may be larger in the next call."""
    known = all(e.is_Integer for e in (*p.shape, p.depth))
    library = 1 / (machine.matmul * _rate(p, machine)) if p.type.dtype.is_float else PLAIN
    return known and _flops(p) * SMALL < machine.launch + p.batch * MATRIX + _flops(p) * library


def _rate(p: LibraryProduct, machine: Machine) -> float:
    """How many times as fast as float32 the library multiplies. Our loops multiply half types as float32."""
    return machine.halves if p.type.dtype is DType.BFLOAT16 else 1.0


def _told(o: Operand) -> str:
    return f"{o.name} made of {o.read >> 10} KiB, {o.bytes >> 10} as it is,"


def _time(ns: float) -> str:
    return f"{ns / 1e3:.0f} us"


def _library_time(p: LibraryProduct, packed: tuple[bool, bool], machine: Machine) -> float:
    """Operands made and written, then BLAS, which is bound by reading them or by multiplying."""
    made = 0.0
    for o, is_packed, shared in zip((p.a, p.b), packed, p.shared, strict=True):
        if is_packed and not shared:
            made += max((o.read + o.bytes) / machine.bandwidth, _making(o, machine)) + (
                o.bytes * PAGED if o.bytes > NEW_PAST else 0.0
            )
    order = p.batch * p.n * p.k * ORDER if p.m > 1 else 0.0
    multiplied = (order + _flops(p) / machine.matmul) / _rate(p, machine)
    return made + max((p.a.bytes + p.b.bytes) / machine.bandwidth, multiplied)


def _loop_time(p: LibraryProduct, packed: tuple[bool, bool], machine: Machine) -> float:
    """One visit of what is read; elements are made once for every block of rows."""
    both = tuple(zip((p.a, p.b), packed, strict=True))
    read = sum(o.read if is_packed else o.bytes for o, is_packed in both)
    made = sum(_making(o, machine) for o, is_packed in both if is_packed) * -(-p.m // ROWS)
    return max(read / machine.bandwidth, made + _flops(p) / machine.float32)


def _making(o: Operand, machine: Machine) -> float:
    return o.bytes / o.type.dtype.itemsize * (1 + o.flops) / machine.issued


def _flops(p: LibraryProduct) -> float:
    return 2.0 * p.batch * p.m * p.n * p.k


# --- products with what stands around them, block by block of rows ----------------------------------------------------

# A library takes as much longer for a block as for so many rows. Measured on Zen 5 with MKL: 4096 columns of 1024
# terms take 10 % longer in blocks of 256 rows, 6 % of 512 rows, 2 % of 1024 rows.
LOST_ROWS = 35.0
# Rows of a block, and the bytes of scratch that it may take.
BLOCK_ROWS, BLOCK_BYTES = (1024, 512, 256, 128, 64), 64 << 20
# Blocks for each core at least, so that none waits long for another.
BLOCK_SHARES = 4
# Results that are larger are new memory at each call: less is taken out of what calls before have left.
BLOCK_NEW_PAST = 64 << 20


def rows_of_block(rows: int, row_bytes: int, machine: Machine) -> int:
    """The rows of a block, of so many rows in all that take ``row_bytes`` of scratch each."""
    for size in BLOCK_ROWS:
        if size * row_bytes <= BLOCK_BYTES and (machine.cores == 1 or rows >= size * machine.cores * BLOCK_SHARES):
            return size
    return BLOCK_ROWS[-1]


@dataclass(frozen=True, slots=True)
class Between:
    """A result of ``bytes`` that one call of a group makes and others read, ``reads`` times; ``kept`` where it is also
    needed as a whole, ``fresh`` where a library makes it, which writes over nothing."""

    bytes: int
    reads: int
    kept: bool
    fresh: bool


def gain_of_blocks(
    block: int, flops: Iterable[float], between: Iterable[Between], leaving: int, machine: Machine
) -> float:
    """Nanoseconds that a group gains by running in blocks of so many rows. ``leaving``: bytes of its largest result,
    which takes the place of another one where the group runs call by call."""
    gained, gone = 0.0, 0
    for b in between:
        if b.bytes > machine.l2_bytes * machine.cores:  # a smaller one is in a cache as it is
            gained += (b.reads + (not b.kept)) * b.bytes / machine.bandwidth
        if b.fresh and not b.kept:
            gone = max(gone, b.bytes)
    if gone > BLOCK_NEW_PAST:
        gained += max(gone - leaving, 0) * PAGED
    return gained - sum(flops) / machine.matmul * LOST_ROWS / block


__all__ = ["Between", "decide_cpu", "gain_of_blocks", "rows_of_block"]
