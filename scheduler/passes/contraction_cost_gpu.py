"""Which products a GPU computes with our loops, by a roofline model of its time.

cuBLAS multiplies a little faster than any loop of ours. What our loops save is memory traffic and launches: an operand
that is made on the way from something smaller need not be written and read again, and what follows a product runs on
its tiles while they are in registers. Reading the weights is nearly all of the time of few rows, multiplying that of
many.
"""

from __future__ import annotations

from ...ir.dtypes import DType
from ...ir.graph import Compute, Reduction
from ..contraction import Decision, Operand, Product

# An H200: bytes a nanosecond to and from memory, nanoseconds between kernels, and operations a nanosecond of the
# tensor cores on half types, of float32 in full precision, and of what makes an operand's elements. Only their ratios
# matter.
BANDWIDTH, LAUNCH = 4300.0, 2000.0
TENSOR, PLAIN, MAKING = 790e3, 50e3, 30e3
# What our loops reach of the library's rates: multiplying half types, multiplying float32, and reading.
OURS, OURS_PLAIN, OURS_READING = 0.9, 0.6, 0.9
# Opening has to save this share of the time: the model is a model.
WORTH = 0.08
# The least that the tensor cores take along an axis, and the rows or columns that share a tile of an operand.
LEAST, TILE = 16, 256


def decide_gpu(product: Product) -> Decision:
    """Open where what our loops need not read, write and launch is worth more than the library's higher rate."""
    if not product.type.dtype.is_float or product.type.dtype is DType.FLOAT64:
        return Decision(False, f"matrix product of {product.type.dtype.value}: the library")
    few = min(product.m, product.n)
    if product.k < LEAST or max(product.m, product.n) < LEAST:
        return Decision(False, "matrix product: cuBLAS; too small for tiles of the tensor cores")
    packed = product.a.is_packed, product.b.is_packed
    if few == 1 and not any(packed):
        return Decision(False, "matrix product with a vector: cuBLAS; nothing to read in packed form")
    library, ours = _library_time(product, packed), _loop_time(product, packed)
    if any(packed) and product.shared != (True, True):
        unpacked = _loop_time(product, (False, False)) + _making_time(product, packed)
        if unpacked < ours:
            packed, ours = (False, False), unpacked
    sizes = f"{product.m} x {product.k} x {product.n}"
    what = _gain(product, packed)
    if ours < library * (1 - WORTH):
        return Decision(True, f"{what}: {sizes} in {_time(ours)} rather than {_time(library)}", packed)
    return Decision(False, f"matrix product: cuBLAS in {_time(library)}; in loops with {what} {_time(ours)}")


def _gain(p: Product, packed: tuple[bool, bool]) -> str:
    made = [
        f"{o.name} made of {o.read >> 10} KiB, {o.bytes >> 10} as it is"
        for o, inlined in zip((p.a, p.b), packed, strict=True)
        if inlined
    ]
    saved = _saved_bytes(p)
    after = [f"{saved >> 10} KiB of the result kept in registers"] if saved else []
    return ", ".join(made + after) or "nothing saved"


def _time(ns: float) -> str:
    return f"{ns / 1e3:.1f} us"


def _result_bytes(p: Product) -> int:
    return p.batch * p.m * p.n * p.type.dtype.itemsize


def _followed(p: Product) -> bool:
    """Whether all that reads the result can run on its tiles."""
    return bool(p.readers) and all(isinstance(r, Compute) for r in p.readers)


def _saved_bytes(p: Product) -> int:
    """Bytes of the result that are not written, and not read back, where its readers run on its tiles.

    A reader that feeds a reduction ends its tile in memory all the same, where the reduction's kernel would have made
    it.
    """
    if not _followed(p):
        return 0
    ends = any(isinstance(n, Reduction) for n in p.then)
    return _result_bytes(p) * ((not p.leaves) + (not ends))


def _saved_launches(p: Product) -> int:
    return int(_followed(p) and not any(isinstance(n, Reduction) for n in p.then))


def _making_time(p: Product, packed: tuple[bool, bool]) -> float:
    """Operands made and written by kernels of their own, unless something else needs them in memory anyway."""
    total = 0.0
    for o, inlined, shared in zip((p.a, p.b), packed, p.shared, strict=True):
        if inlined and not shared:
            total += (o.read + o.bytes) / BANDWIDTH + LAUNCH
    return total


def _flops(p: Product) -> float:
    return 2.0 * p.batch * p.m * p.n * p.k


def _rate(p: Product) -> float:
    return TENSOR if p.type.dtype.is_half else PLAIN


def _library_time(p: Product, packed: tuple[bool, bool]) -> float:
    """Operands made, the product, and its result read back by what follows."""
    moved = p.a.bytes + p.b.bytes + _result_bytes(p)
    after = _saved_launches(p) * LAUNCH + max(_saved_bytes(p) - _result_bytes(p) * (not p.leaves), 0) / BANDWIDTH
    return _making_time(p, packed) + max(moved / BANDWIDTH, _flops(p) / _rate(p)) + after


def _loop_time(p: Product, packed: tuple[bool, bool]) -> float:
    """One visit of what is read; an element is made for every tile that it is part of."""
    read = sum(o.read if inlined else o.bytes for o, inlined in zip((p.a, p.b), packed, strict=True))
    kept = _result_bytes(p) if _followed(p) and not p.leaves else 0
    making = sum(
        _elements(o) * (1 + o.flops) * -(-others // TILE) / MAKING
        for o, others, inlined in zip((p.a, p.b), (p.n, p.m), packed, strict=True)
        if inlined
    )
    rate = _rate(p) * (OURS if p.type.dtype.is_half else OURS_PLAIN)
    return max((read + _result_bytes(p) - kept) / (BANDWIDTH * OURS_READING), _flops(p) / rate + making)


def _elements(o: Operand) -> float:
    return o.bytes / o.type.dtype.itemsize
