"""Element-wise functions over contiguous memory, whatever its number of elements: tensors of different shapes share
them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sympy

from ...ir.expr.symbols import Size, SymbolTable
from ...ir.expr.value import Expr, IndexValue, Load, is_value, rewrite, symbol, walk
from ...ir.function.function import Dim, TensorFunction
from ...ir.nest.loops import Buffer
from .lower import collapse, substitute_single_uses
from .scalars import is_elementwise

_COUNT = symbol("s0")
# Divisors beyond a vector of any machine tell schedules nothing more.
_LARGEST_DIVISOR = 64


@dataclass(frozen=True, slots=True)
class Flat:
    """A function of ``s0`` elements, and what ``s0`` is in the function that it was made from."""

    function: TensorFunction
    elements: sympy.Expr


def flatten(function: TensorFunction) -> Flat | None:
    """The function over one dimension of ``s0`` elements; None where some access is not contiguous, or a value depends
    on where it stands or on a size."""
    if function.inner or not is_elementwise(function) or _minds_its_place(function):
        return None
    flat = collapse(_by_stride(substitute_single_uses(function)))
    if len(flat.rows) != 1:
        return None
    (dim,) = flat.rows
    if any(isinstance(e, IndexValue) for s in flat.stages for v in s.values for e in walk(v)):
        return None
    shapes: dict[str, Buffer] = {}
    for b in flat.params:
        moved = _resized(b, dim)
        if moved is None:
            return None
        shapes[b.name] = moved
    sites = [(e.buffer, e.indices) for e in flat.loads]
    sites += [(o.buffer.name, o.indices) for o in flat.outputs]
    for name, indices in sites:
        if name in shapes and not all(not is_value(i) and i in (dim.var, 0) for i in indices):
            return None
    return Flat(
        replace(
            flat,
            rows=(Dim(dim.var, _COUNT),),
            inputs=tuple(shapes[b.name] for b in flat.inputs),
            outputs=tuple(replace(o, buffer=shapes[o.buffer.name]) for o in flat.outputs),
            symbols=SymbolTable((Size(_COUNT),)),
        ),
        dim.extent,
    )


def _minds_its_place(function: TensorFunction) -> bool:
    """Whether a value depends on where it stands, which no other form of the function changes."""
    along = {d.var for d in function.rows if d.extent != 1}
    parts = (e for s in function.stages for v in s.values for e in walk(v))
    return any(isinstance(e, IndexValue) and not along.isdisjoint(e.index.free_symbols) for e in parts)


def _by_stride(function: TensorFunction) -> TensorFunction:
    """Every buffer with its dimensions in the order of memory, so that a transposed tensor is as flat as any other."""
    orders: dict[str, tuple[int, ...]] = {}
    for b in function.params:
        if all(s.is_Integer for s in b.strides):
            order = tuple(sorted(range(len(b.shape)), key=lambda k, b=b: (-int(b.strides[k]), k)))  # type: ignore[misc]
            if order != tuple(range(len(b.shape))):
                orders[b.name] = order
    if not orders:
        return function

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in orders:
            return Load(e.buffer, tuple(e.indices[k] for k in orders[e.buffer]), e.dtype)
        return None

    def moved(b: Buffer) -> Buffer:
        order = orders.get(b.name, tuple(range(len(b.shape))))
        return replace(b, shape=tuple(b.shape[k] for k in order), strides=tuple(b.strides[k] for k in order))

    return replace(
        function,
        inputs=tuple(moved(b) for b in function.inputs),
        outputs=tuple(
            replace(o, buffer=moved(o.buffer), indices=tuple(o.indices[k] for k in orders[o.buffer.name]))
            if o.buffer.name in orders
            else o
            for o in function.outputs
        ),
        stages=tuple(replace(s, values=tuple(rewrite(v, leaf) for v in s.values)) for s in function.stages),
    )


def _resized(buffer: Buffer, dim: Dim) -> Buffer | None:
    if all(n == 1 for n in buffer.shape):
        return replace(buffer, strides=tuple(sympy.S.One for _ in buffer.shape))
    if len(buffer.shape) != 1 or buffer.strides != (1,) or buffer.shape[0] != dim.extent:
        return None
    return replace(buffer, shape=(_COUNT,))


def with_sizes(function: TensorFunction, sizes: list[int | None], total: int) -> TensorFunction:
    """A flat function with what is known of its sizes in all calls; ``total`` is how many elements all have."""
    known = [n for n in sizes if n is not None]
    exact = len(known) == len(sizes)
    divisor = math.gcd(*known) if exact and known else 1
    divisor = min(divisor & -divisor, _LARGEST_DIVISOR) if divisor else _LARGEST_DIVISOR
    upper = max(known) if exact and known else None
    return replace(function, symbols=SymbolTable((Size(_COUNT, 0, upper, max(divisor, 1), total),)))


__all__ = ["Flat", "flatten", "with_sizes"]
