"""In which order the factors of a sum of products are multiplied: the fastest of all, by a model of time.

A sum of n factors is n - 1 products of two. The best way to multiply a set of factors is the best way to multiply one
part of it, the best way to multiply the rest, and the product of both, so the best orders of all sets are found from
small ones to large ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.symbols import SymbolTable
from ....ir.machine import Machine
from ...cost.products.substitutions import ProductSize, pass_time, product_time
from .einsum import Einsum

Axes = frozenset[sympy.Symbol]


@dataclass(frozen=True)
class Multiplication:
    """The product of two operands, each a factor (by its number) or another step; what it varies along is ``axes``.

    A sum of one factor alone is a step without a right operand.
    """

    left: Operand
    right: Operand | None
    axes: Axes
    time: float


Operand = int | Multiplication


@dataclass(frozen=True)
class Orders:
    """The orders of one sum on one machine, whose times are means over the typical sizes of some ``tables``.
    ``copied`` are the factors that no library reads as they lie."""

    e: Einsum
    tables: tuple[SymbolTable, ...]
    machine: Machine
    dtype: DType
    copied: frozenset[int] = frozenset()

    def best(self) -> Multiplication:
        """The fastest order."""
        n = len(self.e.factors)
        best: dict[int, Operand] = {1 << k: k for k in range(n)}
        if n == 1:
            return Multiplication(0, None, self._kept(1), self._summing_time(1) + self._copying_time(1))
        for chosen in sorted(range(1, 1 << n), key=int.bit_count):
            if chosen & (chosen - 1) == 0:
                continue
            lowest = chosen & -chosen
            found: list[Multiplication] = []
            part = (chosen - 1) & chosen
            while part:
                if part & lowest:  # each pair of parts once
                    found.append(self._pair(part, chosen ^ part, best))
                part = (part - 1) & chosen
            best[chosen] = min(found, key=lambda s: s.time)
        step = best[(1 << n) - 1]
        assert isinstance(step, Multiplication)
        return step

    def _pair(self, a: int, b: int, best: Mapping[int, Operand]) -> Multiplication:
        left, right = best[a], best[b]
        before = sum(o.time for o in (left, right) if isinstance(o, Multiplication))
        before += sum(self._summing_time(x) + self._copying_time(x) for x in (a, b) if x & (x - 1) == 0)
        axes = self._kept(a | b)
        return Multiplication(left, right, axes, before + self._product_time(self._kept(a), self._kept(b), axes))

    def _product_time(self, a: Axes, b: Axes, kept: Axes) -> float:
        def time(table: SymbolTable) -> float:
            batch, m, n, k = (self._numel(s, table) for s in (a & b & kept, a - b, b - a, (a & b) - kept))
            if k == 1 or m * n == 1:  # no library multiplies these: they are a pass over memory
                elements = sum(self._numel(s, table) for s in (a, b, kept))
                return pass_time(elements * self.dtype.itemsize, self.machine)
            return product_time(ProductSize(batch, m, n, k, self.dtype), self.machine)

        return fmean(map(time, self.tables))

    def _summing_time(self, factor: int) -> float:
        """That of summing a factor along axes that it alone has."""
        own, kept = self._axes[factor.bit_length() - 1], self._kept(factor)
        return self._pass_time(own, kept) if own != kept else 0.0

    def _copying_time(self, factor: int) -> float:
        kept = self._kept(factor)
        return self._pass_time(kept, kept) if factor.bit_length() - 1 in self.copied else 0.0

    def _pass_time(self, read: Axes, written: Axes) -> float:
        elements = fmean(self._numel(read, t) + self._numel(written, t) for t in self.tables)
        return pass_time(elements * self.dtype.itemsize, self.machine)

    def _kept(self, factors: int) -> Axes:
        """What the product of some factors varies along: the axes of the result, and those of other factors."""
        inside: set[sympy.Symbol] = set()
        outside = set(self.e.axes)
        for k, axes in enumerate(self._axes):
            (inside if factors >> k & 1 else outside).update(axes)
        return frozenset(inside & outside)

    @cached_property
    def _axes(self) -> list[Axes]:
        ones = {s for s, n in self.e.extents.items() if n == 1}
        return [self.e.axes_of(f) - ones for f in self.e.factors]

    def _numel(self, axes: Axes, table: SymbolTable) -> int:
        return math.prod(max(table.hint(self.e.extents[s]), 1) for s in axes)
