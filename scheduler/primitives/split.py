"""split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ...ir.expr import symbol
from ...ir.index import simplify
from ...ir.loops import Bound, Loop, LoopNest, Node
from ..error import ScheduleError
from .tree import find_loop, fresh, substitute, with_node


def split(
    nest: LoopNest, loop: str, factors: Sequence[int | None], tail: str = "predicate"
) -> tuple[LoopNest, list[str]]:
    """Split one loop into nested loops, outermost first.

    Rewrites::

        for i in range(n):            for i_0 in range(ceildiv(n, 32)):
            C[i] = A[i]         ->        for i_1 in range(32):
                                              if i_0 * 32 + i_1 < n: C[i_0 * 32 + i_1] = A[i_0 * 32 + i_1]

    Requires: at most one factor None, which is inferred. Where the factors do not provably divide the extent the
    blocks under the loop get a predicate, or with ``tail="perfect"`` the split is refused.
    Raises: ScheduleError.    Source: TVM ``Schedule.split``, Halide ``Func.split``.
    """
    asked = f"split({loop}, factors={tuple(factors)})"
    node, outer = find_loop(nest, loop, asked)
    if tail not in ("predicate", "perfect"):
        raise ScheduleError(asked, f"tail is {tail!r}; it is 'predicate' or 'perfect'")
    if sum(f is None for f in factors) > 1 or not factors or any(f is not None and f < 1 for f in factors):
        raise ScheduleError(asked, "the factors must be positive, and at most one of them None", nest, loop)
    known = 1
    for f in factors:
        known *= f or 1
    extents: list[sympy.Expr] = []
    exact = _divides(nest, node.extent, known)
    inferred = _ceildiv(node.extent, known, exact)
    for f in factors:
        extents.append(inferred if f is None else sympy.Integer(f))
    if None not in factors:
        exact = node.extent == known
        if not (node.extent.is_Integer and int(node.extent) <= known):
            raise ScheduleError(
                asked, f"{known} iterations do not cover extent {node.extent}", nest, loop, "leave one factor None"
            )
    if not exact and tail == "perfect":
        raise ScheduleError(
            asked, f"extent {node.extent} is not provably divisible by {known} and tail='perfect'", nest, loop,
            "use tail='predicate', or mark the dimension divisible",
        )  # fmt: skip
    names = [fresh(nest, f"{loop}_{k}") for k in range(len(factors))]
    variables = [symbol(n) for n in names]
    value: sympy.Expr = variables[0]
    for v, e in zip(variables[1:], extents[1:], strict=True):
        value = sympy.expand(value * e + v)
    scope = {lp.var: lp.extent for lp in outer} | dict(zip(variables, extents, strict=True))
    value = simplify(value, scope, nest.symbols)
    bound = () if exact else (Bound(value, node.extent),)
    body: tuple[Node, ...] = substitute(node.body, {node.var: value}, scope, nest, bound)
    for v, e in zip(reversed(variables[1:]), reversed(extents[1:]), strict=True):
        body = (Loop(v, e, body),)
    new = replace(node, var=variables[0], extent=extents[0], body=body)
    return with_node(nest, node, new), names


def _divides(nest: LoopNest, extent: sympy.Expr, factor: int) -> bool:
    return nest.symbols.is_divisible(extent, factor)


def _ceildiv(extent: sympy.Expr, factor: int, exact: bool) -> sympy.Expr:
    if extent.is_Integer:
        return sympy.Integer(-(-int(extent) // factor))
    return FloorDiv(extent if exact else extent + (factor - 1), sympy.Integer(factor))
