"""fuse (of loops)."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.value import symbol
from ....ir.nest.loops import AxisKind, Loop, LoopKind, LoopNest
from ...error import ScheduleError
from ..analysis.dependence import mixed
from ..analysis.tree import blocks_under, find_loop, fresh, substitute, with_node


def fuse(nest: LoopNest, loops: list[str]) -> tuple[LoopNest, list[str]]:
    """Make one loop of nested ones.

    Rewrites::

        for i in range(n):            for i_j in range(n * m):
            for j in range(m):  ->        C[i_j // m, i_j % m] = A[i_j // m, i_j % m]
                C[i, j] = A[i, j]

    Requires: serial loops that stand one directly inside the other, outermost first, alone in each other's bodies; a
    loop that carries a reduction which may be empty is not fused with one that carries its results.
    Raises: ScheduleError.    Source: TVM ``Schedule.fuse``, Halide ``Func.fuse``.
    """
    asked = f"fuse({', '.join(loops)})"
    if not loops:
        raise ScheduleError(asked, "no loops were given")
    outermost, outer = find_loop(nest, loops[0], asked)
    chain: list[Loop] = [outermost]
    for name in loops[1:]:
        inner, _ = find_loop(nest, name, asked)
        if chain[-1].body != (inner,):
            raise ScheduleError(asked, f"{name} does not stand alone directly inside {chain[-1].var}", nest, name)
        chain.append(inner)
    for lp in chain:
        if lp.kind is not LoopKind.SERIAL:
            raise ScheduleError(asked, f"{lp.var} is {lp.kind.value} already", nest, lp.var.name, "fuse it before")
    if len(chain) == 1:
        return nest, [loops[0]]
    name = fresh(nest, "_".join(loops))
    var = symbol(name)
    extent = _product(nest, [lp.extent for lp in chain])
    mapping: dict[sympy.Symbol, sympy.Expr] = {}
    step: sympy.Expr = sympy.S.One
    for k, lp in reversed(list(enumerate(chain))):
        # A loop over nothing has no iteration whose index could be asked for, and is nothing to divide by.
        turns = lp.extent if lp.extent != 0 else sympy.S.One
        mapping[lp.var] = FloorDiv(var, step) if k == 0 else ModularIndexing(var, step, turns)
        step = step * turns
    scope = {lp.var: lp.extent for lp in outer} | {var: extent}
    body = substitute(chain[-1].body, mapping, scope, nest)
    for b in blocks_under(replace(outermost, var=var, extent=extent, body=body)):
        empty = [a for a in b.axes_of(AxisKind.REDUCTION) if nest.symbols.bounds(a.extent)[0] < 1]
        if empty and var in mixed(b):
            raise ScheduleError(
                asked, f"{b.name} reduces over {empty[0].extent} elements, which may be none: then no iteration would "
                "begin its results", nest, b.name, "fuse loops of the reduction with one another alone",
            )  # fmt: skip
    return with_node(nest, outermost, replace(outermost, var=var, extent=extent, body=body)), [name]


def _product(nest: LoopNest, extents: list[sympy.Expr]) -> sympy.Expr:
    """The product, where a quotient meets the number that it was divided by without remainder: the dividend."""
    product: sympy.Expr = sympy.Mul(*extents)
    for f in sympy.Mul.make_args(product):
        if isinstance(f, FloorDiv) and f.args[1].is_Integer and nest.symbols.is_divisible(f.args[0], int(f.args[1])):
            rest = sympy.Mul(*(g for g in sympy.Mul.make_args(product) if g is not f))
            if (rest / f.args[1]).as_numer_denom()[1] == 1:
                return sympy.expand(rest / f.args[1] * f.args[0])
    return product
