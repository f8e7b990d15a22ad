"""How launches reach the code of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from ....ir.expr.value import symbol


@dataclass(frozen=True, slots=True)
class Grid:
    """The programs of a GPU kernel by dimension, in the sizes that it takes, whose names in order are ``symbols``; and
    how far its indices reach, where that decides its variant (``KernelSource.reach``)."""

    extents: tuple[sympy.Expr, ...]
    symbols: tuple[str, ...]
    reach: sympy.Expr | None = None

    def of(self, sizes: Sequence[sympy.Expr]) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """Three extents, of a launch with these sizes."""
        known = self._known(sizes)
        x, y, z = (*(e.xreplace(known) for e in self.extents), *[sympy.S.One] * (3 - len(self.extents)))
        return x, y, z

    def reach_of(self, sizes: Sequence[sympy.Expr]) -> sympy.Expr:
        """How far indices reach in a launch with these sizes; zero where that decides nothing."""
        return sympy.S.Zero if self.reach is None else self.reach.xreplace(self._known(sizes))

    def _known(self, sizes: Sequence[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
        return {symbol(name): size for name, size in zip(self.symbols, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How calls of a tensor function reach compiled code.

    ``kernel`` is the variable of the code (equal functions share one), ``sizes`` which of the call's sizes it takes, in
    its order. Code is called with an address for each tensor, then the sizes; or, where not ``by_pointer`` (ATen ops in
    a kernel's place, GPU kernels that copy what lies where they cannot read it), with the tuple of tensors and that of
    sizes. Code over a ``table`` is called with the number of rows first, and then tensors and sizes row by row. Code
    for a GPU, which has a ``grid``, takes the index of the device before all addresses.
    """

    kernel: str
    sizes: tuple[int, ...]
    by_pointer: bool = True
    table: bool = False
    grid: Grid | None = None
