"""Which copies a product on a CPU reads from memory of their own: operands that lie there as its loops want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import SUM, Monoid
from ...ir.expr.product import BYTES
from ...ir.expr.value import Call, Cast, Const, Expr, Load, Select, free_symbols, is_value, loads, walk
from ...ir.graph.graph import Compute, Graph, Reduction, Scan, TensorType
from ...ir.target import fills_windows

# Terms for which an element is read, from which a copy costs next to nothing beside them.
REUSED = 32


class MadeTensor(Protocol):
    """A node to be fused, as far as it says how a tensor lies and what it is made of."""

    @property
    def axes(self) -> tuple[sympy.Symbol, ...]: ...
    @property
    def types(self) -> tuple[TensorType, ...]: ...
    @property
    def monoid(self) -> Monoid | None: ...
    @property
    def loads(self) -> tuple[Load, ...]: ...
    @property
    def values(self) -> tuple[Expr, ...]: ...


def packed_for(
    node: Compute | Reduction | Scan,
    values: Sequence[Expr],
    nodes: Mapping[str, MadeTensor],
    extents: Mapping[sympy.Symbol, sympy.Expr],
    graph: Graph,
) -> frozenset[str]:
    """The tensors that a sum of products reads for many terms each, and that are other tensors laid out otherwise (as
    those lie, each vector would be gathered), with a border (each term would ask for it), or rounded to bytes."""
    if not isinstance(node, Reduction) or node.monoid is not SUM or not fills_windows(node.types[0].device):
        return frozenset()
    value = values[0]
    while isinstance(value, Cast):
        value = value.value
    if not isinstance(value, Call) or value.fn != "mul" or len(node.reduce_axes) < 2:
        return frozenset()
    hint = graph.symbols.hint
    terms, types = hint(sympy.Mul(*extents.values())), graph.types()
    return frozenset(
        ld.buffer
        for ld in loads(value)
        if (made := nodes.get(ld.buffer)) is not None
        and made.monoid is None
        and hint(made.types[0].numel) * REUSED <= terms
        and (_is_laid_out(made, types) or _has_border(made) or rounds(made.types[0].dtype, made.values))
    )


def rounds(dtype: DType, values: Sequence[Expr]) -> bool:
    """Whether values of a type are bytes that floats are rounded to."""
    parts = (e for v in values for e in walk(v)) if dtype in BYTES else ()
    return any(isinstance(e, Cast) and e.dtype in BYTES and e.value.dtype.is_float for e in parts)


def _has_border(made: MadeTensor) -> bool:
    """Whether a tensor is another one only at some of its places, and a number at the others."""
    return any(isinstance(v, Select) and isinstance(v.if_false, Const) for v in made.values)


def _is_laid_out(made: MadeTensor, types: Mapping[str, TensorType]) -> bool:
    """Whether neighbours of a tensor are none of the one tensor that it is made of."""
    inner = [
        a for a, s, n in zip(made.axes, made.types[0].strides, made.types[0].shape, strict=True) if s == 1 and n != 1
    ]
    return len(inner) == 1 and len(made.loads) == 1 and not _is_contiguous(made.loads[0], inner[0], types)


def _is_contiguous(load: Load, along: sympy.Symbol, types: Mapping[str, TensorType]) -> bool:
    strides = types[load.buffer].strides
    if any(is_value(i) and along in free_symbols(i) for i in load.indices):
        return False
    places = sympy.Add(*(i * s for i, s in zip(load.indices, strides, strict=True) if not is_value(i)))
    return bool(sympy.diff(places, along) == 1)


__all__ = ["packed_for", "rounds"]
