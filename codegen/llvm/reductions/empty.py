"""Reductions over no elements that are updated in memory: nothing begins their targets but this."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.expr.value import symbol
from ....ir.nest.loops import AxisKind, Loop, LoopKind, Node, Store, Update
from ...kernel import EmitError
from ..text.context import Context
from .accumulators import Reduced, spatial_vars


def without_elements(ctx: Context, reduced: Reduced, loop: Loop) -> tuple[Node, ...]:
    """Loops that write the identity where the reduction, which starts at ``loop``, has no elements; none where it has.

    They visit the targets that the loops inside visit, so that buffers of the nest's own are written where they live.
    """
    block, over = reduced.block, reduced.block.axes_of(AxisKind.REDUCTION)
    if all(ctx.nest.symbols.bounds(a.extent)[0] > 0 for a in over):
        return ()
    if reduced.vars & spatial_vars(block):
        raise EmitError(
            f"block {block.name} reduces over a loop that selects its targets too, and may have no elements: then "
            "nothing would begin them; fuse loops of a reduction with one another alone"
        )
    stores = tuple(
        Store(target.buffer, target.indices, value)
        for s in block.body
        if isinstance(s, Update) and s.begins
        for target, value in zip(s.targets, s.monoid.identity(tuple(v.dtype for v in s.values)), strict=True)
    )
    if not stores:
        return ()
    kept = [k for k, a in enumerate(block.axes) if a.kind is not AxisKind.REDUCTION]
    node: Node = replace(
        block,
        axes=tuple(block.axes[k] for k in kept),
        bindings=tuple(block.bindings[k] for k in kept),
        body=stores,
        predicate=tuple(b for b in block.predicate if not (b.lhs.free_symbols | b.rhs.free_symbols) & reduced.vars),
    )
    for lp in reversed(reduced.path[reduced.path.index(loop) :]):
        if lp.var not in reduced.vars:
            node = replace(lp, body=(node,), kind=LoopKind.SERIAL, annotations=())
    elements = sympy.Mul(*(a.extent for a in over))
    return (Loop(symbol(f"{loop.var.name}_none"), sympy.Max(0, 1 - elements), (node,)),)
