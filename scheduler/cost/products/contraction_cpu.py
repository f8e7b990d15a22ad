"""Which products a CPU computes with our loops, by a model of time.

BLAS multiplies many rows faster than any loop of ours, so such a plain product is its. What our loops save is memory
traffic: an operand that is made on the way from something smaller need not be written and read again. For few rows,
when a product is bound by reading its weight, that is nearly all of the time; for many, it is little. Few rows are ours
for a plain weight too, which libraries put in order before they multiply and our loops read as it lies. A call of the
library takes its time before it multiplies at all, which is more than small products take in loops of ours, and those
fuse with what is around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Load
from ....ir.graph.products import is_plain_product
from ....ir.machine import ONLY_PRODUCTS, Libraries, Machine
from ...facts.contraction import R0, Decision, LibraryProduct, Operand
from ..cpu_kernels import DOT_ROWS, PANEL_TILE, product_tile
from ..regions import FEW

# One core of Zen 3, in nanoseconds, beside the rates of a machine: an element of the weight that BLAS puts in order; a
# byte of memory that is new at each call, as allocations past 32 MiB are. Only their ratios matter.
ORDER, PAGED = 0.7, 0.5
NEW_PAST = 32 << 20
# What each matrix of a batch adds to a call of the library; an operation of our loops on sizes that fill no registers,
# and one of ATen's plain loops for integers.
MATRIX, SMALL, PLAIN = 400.0, 1 / 5, 1 / 12
# Rows that share one conversion of an operand's elements: as many as have their sums in registers.
ROWS = 4
# How many times as fast as other loops of ours those are whose weight lies in registers' worth of bytes.
WORDS_RATE = 1.5
# Of oneDNN beside MKL on one core of Zen 5: rows from which it reads a plain weight as fast, and what more a call
# takes, in calls of BLAS.
ONEDNN_ROWS, ONEDNN_CALL = 4, 14.0

# Of products of few rows, by weights that no cache holds, on one core of Zen 5: the share of the bandwidth at which
# BLAS reads the weight for one row and for several; that of oneDNN and of our loops, where the weight lies along the
# sum and where it lies along its columns; and how many times the rate of ``Machine.float32`` our loops then multiply
# at, with vectors of 32 bytes. Longer vectors multiply as much faster.
BLAS_ROW, BLAS_ROWS, VECTOR = 0.75, 0.4, 32
ONEDNN_READS, LOOPS_READ, LOOPS_MULTIPLY = (0.6, 0.34), (1.0, 0.9), (1.2, 0.6)


def decide_cpu(product: LibraryProduct, machine: Machine, fast: bool = True) -> Decision:
    """Open where reading the packed operand saves more time than BLAS does, and where few rows are read faster. Not
    ``fast``: a plain product has the roundings of the library."""
    a, b = product.a, product.b
    packed = (a.is_packed and product.n * 4 >= product.m, b.is_packed)
    if product.n > product.m * 4:
        packed = (False, b.is_packed)
    if _adds_bytes(product, machine):
        packed = (True, True)
    sizes = f"{product.m} x {product.k} x {product.n}"
    if not (machine.calls_libraries or _is_for(machine.libraries, product)):
        return Decision(True, f"matrix product: {sizes} in loops, for no library may be called", packed)
    if product.depth == 1:
        return Decision(True, f"no sum: {sizes}, each element of the result is one product", packed)
    small = _small_times(product, machine) if not any(packed) else None
    if small is not None and small[0] < small[1]:
        told = f"small product in loops: {sizes} takes less than a call of a library"
        return _weighed(True, told, packed, *small)
    if fast and not any(packed) and (few := _few_rows(product, machine)) is not None:
        loops, called = few
        told = f"few rows: {sizes} in loops in {_time(loops)}, in a library in {_time(called)}"
        return _weighed(loops < called, told, packed, loops, called)
    if not any(packed):
        stop = b.stop or a.stop
        told = f"matrix product: BLAS; nothing to read in packed form{f' ({stop})' if stop else ''}"
        weighs = small is not None and fast and product.type.dtype.is_float
        return _weighed(False, told, packed, *small) if small is not None and weighs else Decision(False, told)
    if not product.type.dtype.is_float:
        return Decision(False, "matrix product of integers: ATen")
    library, ours = _library_time(product, packed, machine), _loop_time(product, packed, machine)
    what = " and ".join(_told(o) for o, inlined in zip((a, b), packed, strict=True) if inlined)
    if ours < library:
        told = f"{what} in its loops: {sizes} in {_time(ours)} rather than {_time(library)}"
        return _weighed(True, told, packed, ours, library)
    told = f"matrix product: BLAS in {_time(library)}; with {what} it would take {_time(ours)}"
    return _weighed(False, told, packed, ours, library)


def _is_for(libraries: Libraries, product: LibraryProduct) -> bool:
    """Whether a library that multiplies plain matrices alone (CBLAS) can compute a product."""
    return libraries == ONLY_PRODUCTS and is_plain_product(
        product.node.target, product.a.type, product.b.type, product.type
    )


def _weighed(decomposed: bool, told: str, packed: tuple[bool, bool], loops: float, library: float) -> Decision:
    """A decision between two times, and what it is otherwise."""
    opened, called = Decision(True, told, packed), Decision(False, told)
    taken, other = (opened, called) if decomposed else (called, opened)
    return replace(taken, loops=loops, library=library, otherwise=other)


def onednn_multiplies(rows: int, inner: int, columns: int, machine: Machine) -> bool:
    """Whether oneDNN multiplies plain matrices of float32 faster than BLAS, where that has narrower vectors than the
    processor: MKL, on one of another company."""
    least = onednn_rows(inner, columns, machine)
    return least is not None and rows >= least


def onednn_rows(inner: int, columns: int, machine: Machine) -> int | None:
    """The rows from which it does; None where it never does."""
    if machine.is_gpu or machine.blas >= 1.0 or not inner * columns:
        return None
    spared = (1.0 - machine.blas) * 2.0 * inner * columns / machine.matmul
    return max(ONEDNN_ROWS, math.floor(ONEDNN_CALL * machine.launch / spared) + 1)


def onednn_times(rows: int, inner: int, columns: int, machine: Machine) -> tuple[float, float] | None:
    """Nanoseconds of BLAS and of oneDNN, beyond what both take to call; None where there is no oneDNN."""
    if machine.is_gpu:
        return None
    time = 2.0 * rows * inner * columns / machine.matmul
    return time, machine.blas * time + ONEDNN_CALL * machine.launch


def weight_reading(rows: int, nbytes: int, is_onednn: bool, machine: Machine) -> float:
    """Nanoseconds that a library's product of float32 takes longer than memory does to read a plain weight of so many
    bytes; none for one that the caches hold. Of many rows the weight is put in order once, for all."""
    if nbytes <= machine.l2_bytes * machine.cores:
        return 0.0
    share = ONEDNN_READS[0] if is_onednn else BLAS_ROW if rows == 1 else BLAS_ROWS
    return nbytes / machine.bandwidth * (1.0 / share - 1.0)


def _small_times(p: LibraryProduct, machine: Machine) -> tuple[float, float] | None:
    """The times of our loops over sizes that fill no registers, and of a call of the library; None for sizes that vary,
    which may be larger in the next call."""
    if not all(e.is_Integer for e in (*p.shape, p.depth)):
        return None
    library = 1 / (machine.matmul * _rate(p, machine)) if p.type.dtype.is_float else PLAIN
    return _flops(p) * SMALL, machine.launch + p.batch * MATRIX + _flops(p) * library


def _few_rows(p: LibraryProduct, machine: Machine) -> tuple[float, float] | None:
    """The times of a product of plain matrices in our loops and in the faster library; None where these do not tell:
    a weight that a cache holds or that the graph has just made costs little to read, an operand in which no elements to
    be read are neighbours is for a library, and so are sizes that vary, which may be larger in the next call. Where
    rows vary among few these are the means of the typical number and the most."""
    if p.type.dtype is not DType.FLOAT32 or p.batch != 1 or not p.depth.is_Integer:
        return None
    (rows, most, other), (columns, most_columns, weight) = sorted(
        ((p.m, p.most_m, p.a), (p.n, p.most_n, p.b)), key=lambda side: side[0]
    )
    if most_columns != columns or most is None or (most != rows and most >= FEW):
        return None
    if not weight.is_given or weight.bytes <= machine.l2_bytes * machine.cores:
        return None
    along_sum, along_columns = (_step(o, R0) for o in (other, weight)), _columns_step(weight)
    if all(s == 1 for s in along_sum):
        across = 0
    elif along_columns == 1:
        across = 1
    else:
        return None
    counts, read, row = {rows, most}, weight.bytes / machine.bandwidth, 2.0 * columns * p.k
    times = [_times_of_rows(n, read, row, across, machine) for n in counts]
    loops, library = (sum(t) / len(counts) / machine.cores for t in zip(*times, strict=True))
    return loops, library


def _times_of_rows(rows: int, read: float, row: float, across: int, machine: Machine) -> tuple[float, float]:
    """Nanoseconds of one core in our loops and in the faster library, of ``row`` operations for each row. ``read`` are
    those of reading the weight, which lies along the sum, or ``across``: 0 or 1."""
    flops, wide = rows * row, max(1.0, machine.vector_bytes / VECTOR)
    blas = read / (BLAS_ROW if rows == 1 else BLAS_ROWS) + flops / (machine.matmul * machine.blas * wide)
    onednn = read / ONEDNN_READS[across] + flops / (machine.matmul * wide)
    # Tiles of rows that are not full take as long as those that are.
    tile = min(rows, PANEL_TILE if across else product_tile(machine)[0])
    padded = row * tile * -(-rows // tile)
    loops = read / LOOPS_READ[across] + padded / (machine.float32 * LOOPS_MULTIPLY[across] * wide)
    return loops, min(blas, onednn)


def _step(o: Operand, var: sympy.Symbol) -> sympy.Expr:
    """Elements from one place of an operand to the next along an axis of the product."""
    assert isinstance(o.plain, Load)
    places = zip(o.plain.indices, o.type.strides, strict=True)
    return sympy.Add(*(stride for index, stride in places if index == var))


def _columns_step(o: Operand) -> sympy.Expr:
    """The same along the axis of the product that is not summed; none where there is no such axis."""
    assert isinstance(o.plain, Load)
    places = zip(o.plain.indices, o.type.strides, strict=True)
    return sympy.Add(*(stride for index, stride in places if index != R0))


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
    rows, rate = ROWS, machine.float32
    if p.b.in_words and packed[1]:  # in registers as instructions want it, for more rows
        rows, rate = DOT_ROWS, rate * (machine.dots if _adds_bytes(p, machine) else WORDS_RATE)
    read = sum(o.read if is_packed else o.bytes for o, is_packed in both)
    made = sum(_making(o, machine) for o, is_packed in both if is_packed) * -(-p.m // rows)
    return max(read / machine.bandwidth, made + _flops(p) / rate)


def _adds_bytes(p: LibraryProduct, machine: Machine) -> bool:
    """Whether an instruction adds products of both operands up as integers: they are read as they are then."""
    return bool(machine.dots) and p.a.codes and p.b.codes and p.b.in_words


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
