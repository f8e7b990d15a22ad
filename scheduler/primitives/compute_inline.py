"""compute_inline."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.expr import Expr, Index, Load, cast, rewrite
from ...ir.loops import Block, LoopNest, Node, Statement, Store, Update, map_nodes
from ..error import ScheduleError
from ..views import map_value
from .tree import find_block, with_node


def compute_inline(nest: LoopNest, block: str) -> LoopNest:
    """Compute a point-wise block's value again wherever it is read, and drop the block and its buffer.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        C[i] = (A[i] + 1) * 2
        for j in range(n):
            C[j] = B[j] * 2

    Requires: the block stores one local buffer, at its own axes; it is no reduction and writes no output.
    Raises: ScheduleError.    Source: TVM ``Schedule.compute_inline``, Halide's default.
    """
    asked = f"compute_inline({block})"
    node, _ = find_block(nest, block, asked)
    if len(node.body) != 1 or not isinstance(node.body[0], Store):
        raise ScheduleError(asked, "it is not one point-wise store", nest, block)
    store = node.body[0]
    if store.buffer in nest.outputs:
        raise ScheduleError(asked, f"it writes the output {store.buffer}", nest, block)
    axes = [a.var for a in node.axes if a.extent != 1 or a.var in store.indices]
    plain = all(isinstance(i, sympy.Symbol) for i in store.indices)
    if not plain or set(axes) != set(store.indices):
        raise ScheduleError(asked, f"it does not write {store.buffer} at its own axes", nest, block)

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer == store.buffer:
            env: dict[sympy.Symbol, Index] = dict(zip(store.indices, e.indices, strict=True))
            return cast(map_value(store.value, env), e.dtype)
        return None

    def statement(s: Statement) -> Statement:
        match s:
            case Store():
                value = rewrite(s.value, leaf)
                return s if value is s.value else replace(s, value=value)
            case Update():
                values = tuple(rewrite(v, leaf) for v in s.values)
                same = all(a is b for a, b in zip(values, s.values, strict=True))
                return s if same else replace(s, values=values)

    def visit(n: Node) -> Node | None:
        if not isinstance(n, Block):
            return None
        body = tuple(statement(s) for s in n.body)
        return None if all(a is b for a, b in zip(body, n.body, strict=True)) else replace(n, body=body)

    without = with_node(nest, node)
    kept = tuple(b for b in nest.locals if b.name != store.buffer)
    return replace(without, body=map_nodes(without.body, visit), locals=kept)
