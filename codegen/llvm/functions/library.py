"""Functions that are not written inline: Sleef's, which torch carries, for vectors, and the C library's for scalars.

Where Sleef may not be called, those of float32 are computed in float64 (``wide``), and the C library's one by one for
the lanes of others.
"""

from __future__ import annotations

from ....ir.expr.dtypes import DType
from ..text.builder import Builder, Val, element_type
from . import wide

# Sleef's name and its error bound in tenths of an ulp.
_SLEEF = {
    "exp": "exp u10", "exp2": "exp2 u10", "expm1": "expm1 u10", "log": "log u10", "log2": "log2 u10",
    "log10": "log10 u10", "log1p": "log1p u10", "tanh": "tanh u10", "sin": "sin u10", "cos": "cos u10",
    "tan": "tan u10",
    "asin": "asin u10", "acos": "acos u10", "atan": "atan u10", "sinh": "sinh u10", "cosh": "cosh u10",
    "asinh": "asinh u10", "acosh": "acosh u10", "atanh": "atanh u10", "erf": "erf u10", "erfc": "erfc u15",
    "lgamma": "lgamma u10", "pow": "pow u10", "atan2": "atan2 u10", "hypot": "hypot u05", "fmod": "fmod",
    "nextafter": "nextafter",
}  # fmt: skip
LIBRARY = frozenset(_SLEEF)
PREFIX = "Sleef_"


def library_call(b: Builder, fn: str, *args: Val) -> Val:
    """``fn`` of float32 or float64 values by a library: vectors in pieces of the machine's width."""
    args = b.same(*args)
    dtype, lanes = args[0].dtype, args[0].lanes
    if not b.sleef and dtype is DType.FLOAT32 and (ours := wide.ONE.get(fn) or wide.TWO.get(fn)) is not None:
        return ours(b, *args)
    width = _width(b, dtype)
    if not lanes or not width:
        return wide.scalars(b, fn, args)
    stem, _, error = _SLEEF[fn].partition(" ")
    letter = "f" if dtype.itemsize == 4 else "d"
    name = f"{PREFIX}{stem}{letter}{width}{'_' + error if error else ''}"
    pieces = []
    for start in range(0, lanes, width):
        part = [_slice(b, a, start, width) for a in args]
        kind = f"<{width} x {element_type(dtype)}>"
        pieces.append(Val(b.call(kind, name, *(str(p) for p in part)), dtype, width))
    return _join(b, pieces, lanes)


def _width(b: Builder, dtype: DType) -> int:
    """Lanes of the vector that Sleef's functions of this machine take; 0 where torch has none, or it is not to be
    called."""
    if not b.sleef:
        return 0
    bits = 512 if "avx512f" in b.features else 256 if "avx2" in b.features else 0
    return bits // (dtype.itemsize * 8)


def _slice(b: Builder, v: Val, start: int, width: int) -> Val:
    if v.lanes == width:
        return v
    # Lanes past the end repeat the last one: no poison goes into a function that may look at it.
    picks = ", ".join(f"i32 {min(start + k, v.lanes - 1)}" for k in range(width))
    return Val(b.op(f"shufflevector {v}, {v.type} poison, <{width} x i32> <{picks}>"), v.dtype, width)


def _join(b: Builder, pieces: list[Val], lanes: int) -> Val:
    while len(pieces) > 1:
        merged = []
        for k in range(0, len(pieces) - 1, 2):
            merged.append(_concat(b, pieces[k], pieces[k + 1]))
        if len(pieces) % 2:
            merged.append(pieces[-1])
        pieces = merged
    (whole,) = pieces
    return whole if whole.lanes == lanes else _slice(b, whole, 0, lanes)


def _concat(b: Builder, x: Val, y: Val) -> Val:
    """The lanes of x, then those of y."""
    size = max(x.lanes, y.lanes)
    wide_x, wide_y = _slice(b, x, 0, size), _slice(b, y, 0, size)
    picks = [*range(x.lanes), *(size + k for k in range(y.lanes))]
    text = ", ".join(f"i32 {p}" for p in picks)
    name = b.op(f"shufflevector {wide_x}, {wide_y}, <{len(picks)} x i32> <{text}>")
    return Val(name, x.dtype, len(picks))
