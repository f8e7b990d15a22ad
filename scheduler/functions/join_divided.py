"""Dimensions of an input that lie together in memory become one, where every access takes a single number apart for
them: heads and their elements, which a product sums over as one row, are such a pair.

What reads the memory then sees steps of one number, and no quotient and remainder of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import sympy

from ...ir.expr.index import divisions, simplify
from ...ir.expr.value import Expr, Index, Load, is_value, rewrite, walk
from ...ir.function.function import TensorFunction
from ...ir.nest.loops import Buffer


def join_divided(function: TensorFunction) -> TensorFunction:
    """The function with such dimensions as one each, of inputs that are then read without quotients and remainders."""
    written = {o.buffer.name for o in function.outputs}
    divided = {e.buffer for e in function.loads if _is_divided(e.indices)} - written
    for buffer in function.inputs:  # joining dimensions of one changes no index of another
        if buffer.name in divided:
            found = function
            current: Buffer | None = buffer
            while current is not None:
                joined = _joined(found, current)
                found, current = (found, None) if joined is None else joined
            if not any(map(_is_divided, _sites(found, buffer.name))):
                function = found
    return function


def _is_divided(site: tuple[Index, ...]) -> bool:
    return any(divisions(i) for i in site if not is_value(i))


def _joined(function: TensorFunction, buffer: Buffer) -> tuple[TensorFunction, Buffer] | None:
    """The function with one pair of a buffer's dimensions joined, and the buffer; None where there is none."""
    sites = list(dict.fromkeys(_sites(function, buffer.name)))
    extents = {d.var: d.extent for d in function.dims}
    if any(isinstance(e, Load) and e.buffer == buffer.name for s in sites for i in s if is_value(i) for e in walk(i)):
        return None  # an element is chosen by another one
    for high, low in permutations(range(len(buffer.shape)), 2):
        size = buffer.shape[low]
        if sympy.expand(buffer.strides[high] - buffer.strides[low] * size) != 0:
            continue
        if any(is_value(i) for site in sites for i in (site[high], site[low])):
            continue
        if not any(site[high].free_symbols & site[low].free_symbols for site in sites):
            continue  # no number is taken apart
        whole = {s: simplify(sympy.expand(s[high] * size + s[low]), extents, function.symbols) for s in sites}
        if any(divisions(i) >= divisions(s[high]) + divisions(s[low]) for s, i in whole.items()):
            continue
        moved = {site: _without(site, high, low, index) for site, index in whole.items()}
        shape = _without(buffer.shape, high, low, buffer.shape[high] * size)
        strides = _without(buffer.strides, high, low, buffer.strides[low])
        made = replace(buffer, shape=shape, strides=strides)
        return _reading(function, buffer, made, moved), made
    return None


def _sites(function: TensorFunction, name: str) -> Iterator[tuple[Index, ...]]:
    return (e.indices for e in function.loads if e.buffer == name)


def _without(given: Sequence[Index], high: int, low: int, whole: Index) -> tuple[Index, ...]:
    """What belongs to each dimension, with ``whole`` in the place of ``low``, and none of ``high``."""
    return tuple(whole if k == low else e for k, e in enumerate(given) if k != high)


def _reading(
    function: TensorFunction, old: Buffer, new: Buffer, moved: dict[tuple[Index, ...], tuple[Index, ...]]
) -> TensorFunction:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer == old.name:
            return Load(e.buffer, moved[e.indices], e.dtype)
        return None

    stages = tuple(replace(s, values=tuple(rewrite(v, leaf) for v in s.values)) for s in function.stages)
    return replace(function, stages=stages, inputs=tuple(new if b is old else b for b in function.inputs))


__all__ = ["join_divided"]
