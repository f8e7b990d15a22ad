"""pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....ir.expr.value import Expr, Load, free_symbols, rewrite, symbol
from ....ir.nest.loops import AxisKind, Block, Buffer, Loop, LoopNest, Node, Scope, Statement, Store, contiguous_strides
from ....ir.nest.loops import blocks as all_blocks
from ...error import ScheduleError
from ..analysis.dependence import accesses
from ..analysis.tree import blocks_under, find_block, fresh, replace_node
from .copies import free_name, in_range, parts_of, statement_values, under_choice


def pack(nest: LoopNest, block: str, buffer: str, order: Sequence[str]) -> tuple[LoopNest, list[str]]:
    """Read an operand through a copy that lies in memory as the block wants it; returns the name of the copying block.

    Rewrites::

                                              for k in range(K):
                                                  for i in range(n):
                                                      P[k, i] = A[i, k]
        for i in range(n):                    for i in range(n):
            for k in range(K):          ->        for k in range(K):
                C[i] += A[i, k] * B[k]                C[i] += P[k, i] * B[k]

    What is copied is the largest part of the block's values that loads ``buffer`` and nothing else, conversions and
    scales included, so that they are computed once an element. ``order`` names the axes of the block that it moves
    with, outermost first. The copy is of everything, before all else; ``compute_at`` then makes it the part that one
    iteration of a loop needs.

    Requires: one such part, of an input of the nest, that no condition keeps inside its buffer; ``order`` names its
    axes, each once.
    Raises: ScheduleError.    Source: packing in Goto and van de Geijn 2008; TVM ``Schedule.cache_read``.
    """
    asked = f"pack({block}, {buffer}, {list(order)})"
    node, _ = find_block(nest, block, asked)
    written = {name for b, _ in all_blocks(nest) for name in accesses(b).written}
    if buffer in written or all(p.name != buffer for p in nest.params):
        raise ScheduleError(asked, f"{buffer} is no input of the nest", nest, block)
    parts = list(dict.fromkeys(p for s in node.body for v in statement_values(s) for p in parts_of(v, buffer)))
    if len(parts) != 1:
        raise ScheduleError(asked, f"it reads {buffer} in {len(parts)} ways", nest, block)
    (part,) = parts
    axes = {a.var.name: a for a in node.axes if a.var in free_symbols(part)}
    if sorted(order) != sorted(axes):
        raise ScheduleError(asked, f"{buffer} is read along {', '.join(axes)}", nest, block)
    extents = {a.var: a.extent for a in axes.values()}
    if any(under_choice(v, part) for s in node.body for v in statement_values(s)) and not in_range(nest, part, extents):
        raise ScheduleError(
            asked, f"{buffer} is read where a condition holds, and elsewhere perhaps out of range", nest, block
        )
    own = tuple(replace(axes[name], kind=AxisKind.SPATIAL) for name in order)
    name = free_name({b.name for b in (*nest.params, *nest.locals)}, f"{buffer}_packed")
    shape = tuple(a.extent for a in own)
    made = Buffer(name, shape, contiguous_strides(shape), part.dtype, Scope.LOCAL)
    where = tuple(a.var for a in own)
    load = Load(name, where, part.dtype)

    def leaf(e: Expr) -> Expr | None:
        return load if e == part else None

    def statement(s: Statement) -> Statement:
        if isinstance(s, Store):
            return replace(s, value=rewrite(s.value, leaf))
        return replace(s, values=tuple(rewrite(v, leaf) for v in s.values))

    copier = free_name({b.name for b, _ in all_blocks(nest)}, f"{block}_{buffer}")
    taken: set[str] = set()
    loops = []
    for a in own:
        taken.add(fresh(nest, f"{copier}_{a.var.name}", taken))
        loops.append(symbol(fresh(nest, f"{copier}_{a.var.name}")))
    copy: Node = Block(copier, own, tuple(loops), (Store(name, where, part),))
    for var, a in zip(reversed(loops), reversed(own), strict=True):
        copy = Loop(var, a.extent, (copy,))
    body = replace_node(nest.body, node, lambda _: (replace(node, body=tuple(map(statement, node.body))),))
    root = next(k for k, n in enumerate(body) if any(b.name == block for b in blocks_under(n)))
    return replace(nest, body=(*body[:root], copy, *body[root:]), locals=(*nest.locals, made)), [copier]
