"""split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.index import simplify
from ....ir.expr.value import symbol
from ....ir.nest.loops import Block, Bound, Loop, LoopKind, LoopNest, Node, map_nodes
from ...error import ScheduleError
from ..analysis.region import at_least, terms
from ..analysis.tree import find_loop, fresh, substitute, with_node


def split(
    nest: LoopNest, loop: str, factors: Sequence[int | sympy.Expr | None], tail: str = "predicate"
) -> tuple[LoopNest, list[str]]:
    """Split one loop into nested loops, outermost first.

    Rewrites::

        for i in range(n):            for i_0 in range(ceildiv(n, 32)):
            C[i] = A[i]         ->        for i_1 in range(32):
                                              if i_0 * 32 + i_1 < n: C[i_0 * 32 + i_1] = A[i_0 * 32 + i_1]

    Factors are numbers or expressions in sizes.

    Requires: a serial loop; at most one factor None, which is inferred, and otherwise factors that provably cover the
    extent. Where they do not provably divide it the blocks under the loop get a predicate, or with ``tail="perfect"``
    the split is refused.
    Raises: ScheduleError.    Source: TVM ``Schedule.split``, Halide ``Func.split``.
    """
    asked = f"split({loop}, factors={tuple(factors)})"
    node, outer = find_loop(nest, loop, asked)
    if tail not in ("predicate", "perfect"):
        raise ScheduleError(asked, f"tail is {tail!r}; it is 'predicate' or 'perfect'")
    if node.kind is not LoopKind.SERIAL:
        raise ScheduleError(asked, f"the loop is {node.kind.value} already", nest, loop, "split it before")
    given = [None if f is None else sympy.sympify(f) for f in factors]
    known: sympy.Expr = sympy.Mul(*(f for f in given if f is not None))
    if not given or given.count(None) > 1 or not all(f is None or _is_size(nest, f) for f in given):
        raise ScheduleError(asked, "the factors must be positive, and at most one of them None", nest, loop)
    inferred, exact = _quotient(nest, node.extent, known)
    extents = [inferred if f is None else f for f in given]
    if None not in given:
        exact = sympy.expand(known - node.extent) == 0
        if not exact and not at_least(known, node.extent, nest.symbols):
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
    if bound:
        body = _without_implied(body, node, bound[0])
    for v, e in zip(reversed(variables[1:]), reversed(extents[1:]), strict=True):
        body = (Loop(v, e, body),)
    new = replace(node, var=variables[0], extent=extents[0], body=body)
    return with_node(nest, node, new), names


def _is_size(nest: LoopNest, factor: sympy.Expr) -> bool:
    """A positive number, or an expression in sizes that is one."""
    if factor.is_Integer:
        return bool(factor >= 1)
    return factor.free_symbols <= set(nest.symbols.symbols) and at_least(factor, sympy.S.One, nest.symbols)


def _quotient(nest: LoopNest, extent: sympy.Expr, factor: sympy.Expr) -> tuple[sympy.Expr, bool]:
    """The extent over the factor, rounded up, and whether there is no remainder."""
    if factor.is_Integer:
        exact = nest.symbols.is_divisible(extent, int(factor))
        if extent.is_Integer:
            return sympy.Integer(-(-int(extent) // int(factor))), exact
        if exact:
            return simplify(FloorDiv(extent, factor), {}, nest.symbols), True
        if isinstance(extent, FloorDiv) and extent.args[1].is_Integer:
            # Rounding up twice is rounding up once: the loop comes of a split by ``by``.
            base, by = extent.args
            size = sympy.expand(base - by + 1)
            if _rounded_up(size, by) == extent:
                return _rounded_up(size, by * factor), False
        return _rounded_up(extent, factor), False
    quotient, denominator = (extent / factor).as_numer_denom()
    if denominator == 1:
        return sympy.expand(quotient), True
    return simplify(FloorDiv(sympy.expand(extent + factor - 1), factor), {}, nest.symbols), False


def _without_implied(nodes: tuple[Node, ...], node: Loop, tail: Bound) -> tuple[Node, ...]:
    """Blocks without the new bound where an older one says as much.

    The loop may itself come of a split, of ``n`` iterations by ``c``: it ran ``ceildiv(n, c)`` times under the bound
    ``c * loop + rest < n``, which fails wherever the loop's variable reaches its extent.
    """

    def visit(n: Node) -> Node | None:
        if not isinstance(n, Block):
            return None
        rest = tuple(p for p in n.predicate if p != tail)
        if not any(_implies(p, node.extent, tail) for p in rest):
            return None
        return replace(n, predicate=rest)

    return map_nodes(nodes, visit)


def _implies(older: Bound, extent: sympy.Expr, tail: Bound) -> bool:
    ours = terms(tail.lhs)
    for c in {t.as_coeff_Mul()[0] for t in terms(older.lhs)}:
        if c.is_Integer and c > 1 and _rounded_up(older.rhs, c) == extent:
            rest = set(terms(older.lhs)) - {c * t for t in ours}
            if len(rest) == len(terms(older.lhs)) - len(ours) and not any(t.could_extract_minus_sign() for t in rest):
                return True
    return False


def _rounded_up(extent: sympy.Expr, factor: sympy.Expr) -> sympy.Expr:
    if extent.is_Integer:
        return sympy.Integer(-(-int(extent) // int(factor)))
    return FloorDiv(extent + factor - 1, factor)
