"""Lanes whose sums go from one iteration to the next are as many as a power of two.

LLVM takes a vector of another number apart, lane by lane, where it goes from one basic block to the next and no single
register holds it: sums of 24 columns of float32 took three times as long as those of 32.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from ....ir.nest.loops import Block, Bound, Loop, LoopKind, LoopNest, Node, Update, blocks, map_nodes
from ....ir.target import Target
from .accumulators import reductions_of


def with_whole_registers(nest: LoopNest, target: Target) -> LoopNest:
    """The nest with lanes beyond the end, where no block does anything, up to the next power of two."""
    wider = _odd(nest, 4 * target.lanes(4))
    if not wider:
        return nest

    def widened(node: Node) -> Node | None:
        if not isinstance(node, Loop) or node.var not in wider:
            return None
        bound = Bound(node.var, node.extent)
        body = map_nodes(
            node.body, lambda n: replace(n, predicate=(*n.predicate, bound)) if isinstance(n, Block) else None
        )
        return replace(node, extent=sympy.Integer(1 << (int(node.extent) - 1).bit_length()), body=body)

    return replace(nest, body=map_nodes(nest.body, widened))


def _odd(nest: LoopNest, register: int) -> set[sympy.Symbol]:
    """Vector loops of so many lanes that a reduction around them has sums in more than one register of so many bytes,
    and not in two, four or eight."""
    found = set()
    for reduced in reductions_of({b.name: (b, outer) for b, outer in blocks(nest)}).values():
        for k, loop in enumerate(reduced.path):
            if loop.kind is not LoopKind.VECTORIZED or not loop.extent.is_Integer:
                continue
            lanes = int(loop.extent)
            values = [v.dtype for s in reduced.block.body if isinstance(s, Update) for v in s.values]
            widest = max((lanes * d.itemsize for d in values if d.is_float or d.is_int), default=0)
            if lanes & (lanes - 1) and widest > register and any(lp.var in reduced.vars for lp in reduced.path[:k]):
                found.add(loop.var)
    return found
