"""compute_inline."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.expr.index import Extents, simplify
from ....ir.expr.value import Expr, Index, Load, cast, is_value, loads, rewrite
from ....ir.nest.loops import Block, LoopNest, Node, Statement, Store, Update, map_nodes
from ...error import ScheduleError
from ...facts.views import map_value
from ..analysis.dependence import accesses, refuse_scatter
from ..analysis.tree import find_block


def compute_inline(nest: LoopNest, block: str) -> LoopNest:
    """Compute a point-wise block's values again wherever they are read, and drop their buffers.

    Rewrites::

        for i in range(n):            for i in range(n):
            B[i] = A[i] + 1     ->        C[i] = (A[i] + 1) * 2
        for j in range(n):
            C[j] = B[j] * 2

    Statements of the block that store outputs remain; a block that is left with none disappears.

    Requires: a point-wise block, whose local buffers are written at all of its axes and by nobody else; what it reads
    is not overwritten before its readers come.
    Raises: ScheduleError.    Source: TVM ``Schedule.compute_inline``, Halide's default.
    """
    asked = f"compute_inline({block})"
    node, _ = find_block(nest, block, asked)
    refuse_scatter(nest, node, asked)
    if node.is_reduction:
        raise ScheduleError(asked, "it is a reduction", nest, block)
    inlined: dict[str, Store] = {}
    left: list[Statement] = []
    for s in node.body:
        assert isinstance(s, Store)
        s = replace(s, value=_substituted(s.value, inlined))
        if s.buffer in nest.outputs:
            left.append(s)
            continue
        axes = {a.var for a in node.axes if a.extent != 1 or a.var in s.indices}
        if any(is_value(i) or not i.is_Symbol for i in s.indices) or axes != set(s.indices):  # type: ignore[union-attr]
            raise ScheduleError(asked, f"it does not write {s.buffer} at its own axes", nest, block)
        inlined[s.buffer] = s
    if not inlined:
        raise ScheduleError(asked, f"it writes only outputs ({', '.join(s.buffer for s in left)})", nest, block)  # type: ignore[union-attr]
    _check(nest, node, set(inlined), asked)

    def statement(s: Statement, extents: Extents) -> Statement:
        def simpler(value: Expr) -> Expr:
            value = _substituted(value, inlined)
            return rewrite(value, lambda _: None, lambda i: simplify(i, extents, nest.symbols))

        match s:
            case Store():
                return replace(s, value=simpler(s.value))
            case Update():
                return replace(s, values=tuple(map(simpler, s.values)))

    def visit(n: Node) -> Node | tuple[Node, ...] | None:
        if not isinstance(n, Block):
            return None
        if n is node:
            return replace(n, body=tuple(left)) if left else ()
        if not accesses(n).read & inlined.keys():
            return None
        extents = {a.var: a.extent for a in n.axes}
        return replace(n, body=tuple(statement(s, extents) for s in n.body))

    kept = tuple(b for b in nest.locals if b.name not in inlined)
    return replace(nest, body=map_nodes(nest.body, visit), locals=kept)


def _substituted(value: Expr, inlined: dict[str, Store]) -> Expr:
    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in inlined:
            store = inlined[e.buffer]
            env: dict[sympy.Symbol, Index] = dict(zip(store.indices, e.indices, strict=True))  # type: ignore[arg-type]
            # The buffer holds e.dtype, whatever the value was computed in.
            return cast(map_value(store.value, env), e.dtype)
        return None

    return rewrite(value, leaf) if any(ld.buffer in inlined for ld in loads(value)) else value


def _check(nest: LoopNest, node: Block, buffers: set[str], asked: str) -> None:
    """Nobody else writes the buffers; between the block and its last reader nobody writes what it reads."""
    read = accesses(node).read
    overwritten = ""
    passed = False

    def visit(n: Node) -> None:
        nonlocal overwritten, passed
        if not isinstance(n, Block):
            return
        if n is node:
            passed = True
            return
        theirs = accesses(n)
        if theirs.written & buffers:
            raise ScheduleError(asked, f"{n.name} writes {min(theirs.written & buffers)} too", nest, n.name)
        if passed and overwritten and theirs.read & buffers:
            raise ScheduleError(asked, f"{overwritten}, before {n.name} reads it", nest, n.name)
        if passed and theirs.written & read:
            overwritten = f"{n.name} overwrites {min(theirs.written & read)}"

    map_nodes(nest.body, visit)
