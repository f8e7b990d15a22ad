"""Sums of products over any number of tensors, read off a graph.

A matrix product is a sum over one axis of two factors. Where a factor is itself the result of a product, through views,
copies, transposed or repeated, the two are one sum over two axes of three factors, and so on. In this form nothing says
any more which product was computed first: (A B) C and A (B C) are the same sum. Nor does it matter which elements of
the result are wanted: the element that a slice reads is the sum with the slice's index in the place of an axis.

Source of the form: Smith and Gray 2018, "opt_einsum".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod

from ....ir.expr.index import simplify
from ....ir.expr.value import Index, Load, free_symbols, is_value, symbol
from ....ir.graph.facts import makers_of
from ....ir.graph.graph import Compute, Graph, TensorType
from ...facts.definitions import Definitions, unrounded
from ...facts.domain import quotient
from ..products.operands import Product, product_of, scaled
from .terms import scaled_loads

Extents = Mapping[sympy.Symbol, sympy.Expr]
_DIVISIONS = (FloorDiv, ModularIndexing, Mod, PythonMod)
# More factors are not put in another order: the orders are too many, and no model has them.
MOST_FACTORS = 6


@dataclass(frozen=True, slots=True)
class AxisCut:
    """An axis that became two: ``axis = high * size + low``, with ``low < size``."""

    axis: sympy.Symbol
    high: sympy.Symbol
    low: sympy.Symbol
    size: sympy.Expr

    @property
    def position(self) -> sympy.Expr:
        return self.high * self.size + self.low


@dataclass(frozen=True, slots=True)
class Einsum:
    """``result[axes] = scale * sum over summed of the product of factors``.

    ``factors`` are loads of tensors that own their memory, at indices in the axes. ``extents`` tells how long each axis
    is, ``cuts`` which axes were split, oldest first. ``replaced`` are the products of the graph that this one sum does
    the work of.
    """

    axes: tuple[sympy.Symbol, ...]
    summed: tuple[sympy.Symbol, ...]
    extents: Mapping[sympy.Symbol, sympy.Expr]
    factors: tuple[Load, ...]
    scale: float = 1.0
    cuts: tuple[AxisCut, ...] = ()
    replaced: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is multiplied: the result has no elements, or all of them are zero."""
        return any(n == 0 for n in self.extents.values())

    @property
    def uncut(self) -> tuple[sympy.Symbol, ...]:
        """The axes of the result before any was split."""
        axes = list(self.axes)
        for cut in reversed(self.cuts):
            if cut.high in axes:
                k = axes.index(cut.high)
                axes[k : k + 2] = [cut.axis]
        return tuple(axes)

    def axes_of(self, factor: Load) -> frozenset[sympy.Symbol]:
        """The axes along which a factor varies."""
        found: set[sympy.Symbol] = set()
        for i in factor.indices:
            found |= free_symbols(i) if is_value(i) else i.free_symbols
        return frozenset(found & self.extents.keys())


@dataclass(slots=True)
class EinsumReader:
    """Reads sums of products off a graph. Axes have fresh names, so that sums may be put into one another."""

    graph: Graph
    types: dict[str, TensorType]
    _numbers: Iterator[int] = field(default_factory=count)

    def fresh(self, size: int) -> tuple[sympy.Symbol, ...]:
        return tuple(symbol(f"sub{next(self._numbers)}") for _ in range(size))

    def of_product(self, product: Product) -> Einsum:
        """A matrix product, without what it adds."""
        axes, depth = self.fresh(product.rank), self.fresh(1)
        extents = dict(zip(axes, product.type.shape, strict=True)) | {depth[0]: self.types[product.left].shape[-1]}
        left = (*axes[:-1], depth[0])
        right = (*axes[:-2], depth[0], axes[-1])
        dtype = product.type.dtype
        factors = Load(product.left, left, dtype), Load(product.right, right, dtype)
        return self.through_views(Einsum(axes, depth, extents, factors, product.alpha, replaced=(product.name,)))

    def through_views(self, e: Einsum) -> Einsum:
        """Factors read through views, copies, and constants that multiply them."""
        found, scale = Definitions(self.graph, e.extents), e.scale
        factors = []
        for f in e.factors:
            inner, constant = scaled(found, f)
            load = unrounded(inner)
            assert isinstance(load, Load)
            factors.append(load)
            scale *= constant
        return replace(e, factors=tuple(factors), scale=scale)

    def at(self, e: Einsum, axes: tuple[sympy.Symbol, ...], indices: tuple[Index, ...], extents: Extents) -> Einsum:
        """The elements of a sum's result that are at ``indices``, which are in ``axes``."""
        found = Definitions(self.graph, {**e.extents, **extents})
        kept = {s: e.extents[s] for s in e.summed}
        factors = []
        for f in e.factors:
            moved = found.moved(f, e.axes, indices)
            assert isinstance(moved, Load)
            factors.append(moved)
        return replace(e, axes=axes, extents={**extents, **kept}, factors=tuple(factors))

    def expanded(self, e: Einsum, may_go: Iterable[str]) -> Einsum:
        """Factors that are products in ``may_go``, of matrices or element by element, replaced by what those are made
        of, again and again."""
        allowed, makers = set(may_go), makers_of(self.graph)
        k = 0
        while k < len(e.factors) and len(e.factors) < MOST_FACTORS:
            f = e.factors[k]
            two = self._scaled(e, f) if f.buffer in allowed else None
            if two is not None:
                e = self.through_views(replace(e, factors=(*e.factors[:k], *two, *e.factors[k + 1 :])))
                continue
            inner = product_of(makers.get(f.buffer)) if f.buffer in allowed else None
            if inner is None or inner.added is not None:
                k += 1
                continue
            part = self.of_product(inner)
            part = self.at(part, (), f.indices, {**e.extents, **{s: part.extents[s] for s in part.summed}})
            e = Einsum(
                e.axes, (*e.summed, *part.summed), {**e.extents, **{s: part.extents[s] for s in part.summed}},
                (*e.factors[:k], *part.factors, *e.factors[k + 1 :]), e.scale * part.scale, e.cuts,
                (*e.replaced, *part.replaced),
            )  # fmt: skip
            e = self.through_views(e)
        return e

    def _scaled(self, e: Einsum, f: Load) -> tuple[Load, Load] | None:
        """The two factors that one is the product of, element by element, where one of them has fewer axes."""
        made = makers_of(self.graph).get(f.buffer)
        if not isinstance(made, Compute):
            return None
        return scaled_loads(Definitions(self.graph, e.extents).moved(made.value, made.axes, f.indices))

    def without_ones(self, e: Einsum) -> Einsum:
        """Axes of one element left out of what is summed, and of what factors vary along."""
        ones = {s: sympy.S.Zero for s, n in e.extents.items() if n == 1}
        if not ones:
            return e
        found = Definitions(self.graph, e.extents)
        factors = tuple(_moved(found, f, ones) for f in e.factors)
        return replace(e, summed=tuple(s for s in e.summed if s not in ones), factors=factors)

    # --- digits -------------------------------------------------------------------------------------------------------

    def refined(self, e: Einsum) -> Einsum:
        """Axes that a factor's place in memory divides, in as many as they are divided in: heads of a row of all heads,
        groups of heads, images of a batch of pixels."""
        for _ in range(8):
            cut = self._cut(e)
            if cut is None:
                break
            axis, outer, inner = cut
            high, low = self.fresh(2)
            made = AxisCut(axis, high, low, inner)
            step = {axis: made.position}
            extents = {s: n for s, n in e.extents.items() if s != axis} | {high: outer, low: inner}
            axes = tuple(x for s in e.axes for x in ((high, low) if s == axis else (s,)))
            summed = tuple(x for s in e.summed for x in ((high, low) if s == axis else (s,)))
            found = Definitions(self.graph, extents)
            factors = tuple(_moved(found, f, step) for f in e.factors)
            e = replace(e, axes=axes, summed=summed, extents=extents, factors=factors, cuts=(*e.cuts, made))
        return e

    def _cut(self, e: Einsum) -> tuple[sympy.Symbol, sympy.Expr, sympy.Expr] | None:
        found = []
        for f in e.factors:
            place = self.place(f, e.extents)
            for part in place.atoms(*_DIVISIONS) if place is not None else ():
                axis = part.args[0]
                if axis not in e.extents:
                    continue
                by = part.args[1]
                if isinstance(part, ModularIndexing) and by == 1:
                    by = part.args[2]
                outer = quotient(e.extents[axis], by)
                if outer is not None and by != 1 and outer != 1:
                    found.append((str(by), axis, outer, by))
        if not found:
            return None
        _, axis, outer, by = min(found, key=lambda f: (len(f[0]), f[0], str(f[1])))
        return axis, outer, by

    def place(self, f: Load, extents: Extents) -> sympy.Expr | None:
        """Where an element of a factor lies in its tensor's memory, counted in elements; None where data decide."""
        if any(map(is_value, f.indices)):
            return None
        strides = self.types[f.buffer].strides
        place = sympy.Add(*(i * s for i, s in zip(f.indices, strides, strict=True)))  # type: ignore[operator]
        return sympy.expand(simplify(sympy.expand(place), extents, self.graph.symbols))

    def strides(self, f: Load, e: Einsum) -> Mapping[sympy.Symbol, sympy.Expr] | None:
        """How far an element of a factor is from its neighbour along each axis; None where that is not everywhere the
        same."""
        place = self.place(f, e.extents)
        if place is None:
            return None
        found = {}
        for axis in sorted(place.free_symbols & e.extents.keys(), key=str):
            step = place.coeff(axis)
            place = sympy.expand(place - step * axis)
            if step.free_symbols & e.extents.keys() or axis in place.free_symbols:
                return None
            found[axis] = step
        return found


def _moved(found: Definitions, f: Load, step: Mapping[sympy.Symbol, sympy.Expr]) -> Load:
    axes = tuple(step)
    moved = found.moved(f, axes, tuple(step[a] for a in axes))
    assert isinstance(moved, Load)
    return moved
