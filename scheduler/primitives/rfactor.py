"""rfactor."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.expr import Load, substitute_index, symbol
from ...ir.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Buffer,
    Loop,
    LoopNest,
    Node,
    Scope,
    Update,
    contiguous_strides,
)  # fmt: skip
from ..error import ScheduleError
from .tree import blocks_under, find_loop, fresh, with_node


def rfactor(nest: LoopNest, loop: str) -> tuple[LoopNest, list[str]]:
    """Make a reduction loop carry partial results, to be combined afterwards; returns the name of the partial block.

    Rewrites::

        for ko in range(8):                   for ko in range(8):
            for ki in range(128):                 for ki in range(128):
                B += A[ko * 128 + ki]   ->            B_rf[ko] += A[ko * 128 + ki]
                                              for ko in range(8):
                                                  B += B_rf[ko]

    Requires: exactly one block, a reduction, is inside the loop, and the loop carries its reduction.
    Raises: ScheduleError.    Source: TVM ``Schedule.rfactor``, Suriana et al. 2017.
    """
    asked = f"rfactor({loop})"
    target, outer = find_loop(nest, loop, asked)
    inside = blocks_under(target)
    if len(inside) != 1 or len(inside[0].body) != 1 or not isinstance(inside[0].body[0], Update):
        raise ScheduleError(asked, "exactly one reduction must be inside the loop", nest, loop)
    block, update = inside[0], inside[0].body[0]
    reduced = [a for a in block.axes if a.kind is AxisKind.REDUCTION]
    binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    if not any(target.var in binding[a.var].free_symbols for a in reduced):
        raise ScheduleError(asked, f"{block.name} does not reduce over it", nest, loop)
    root = outer[0] if outer else target
    if len(blocks_under(root)) != 1:
        raise ScheduleError(asked, f"other blocks share the loop {root.var}", nest, loop)
    spatial = [a for a in block.axes if a.kind is AxisKind.SPATIAL]
    axis = Axis(symbol(f"{block.name}_rf"), target.extent)
    # The reduction axes become the loops that carry them, so that one of them can be spatial.
    extents = {lp.var: lp.extent for lp in _loops_around(root, block)}
    carriers = [v for v in extents if any(v in binding[a.var].free_symbols for a in reduced)]
    rest = [Axis(symbol(f"{block.name}_{v.name}"), extents[v], AxisKind.REDUCTION) for v in carriers if v != target.var]
    renamed: dict[sympy.Symbol, sympy.Expr] = {target.var: axis.var}
    others = (v for v in carriers if v != target.var)
    renamed.update(zip(others, (a.var for a in rest), strict=True))
    mapping = {a.var: binding[a.var].xreplace(renamed) for a in reduced}
    if any(s in extents and s not in carriers for e in mapping.values() for s in e.free_symbols):
        raise ScheduleError(asked, "a loop carries both kinds of axis", nest, loop)
    shape = (target.extent, *(a.extent for a in spatial))
    names = [f"{t.buffer}_rf" for t in update.targets]
    buffers = [
        Buffer(n, shape, contiguous_strides(shape), v.dtype, Scope.LOCAL)
        for n, v in zip(names, update.values, strict=True)
    ]
    at = (axis.var, *(a.var for a in spatial))
    partial = replace(
        block,
        name=f"{block.name}_rf",
        axes=(axis, *spatial, *rest),
        bindings=(target.var, *(binding[a.var] for a in spatial), *(v for v in carriers if v != target.var)),
        body=(
            Update(
                update.monoid,
                tuple(Access(n, at) for n in names),
                tuple(substitute_index(v, mapping) for v in update.values),
            ),
        ),
    )
    final_axis = Axis(symbol(f"{block.name}_k"), target.extent, AxisKind.REDUCTION)
    where = (final_axis.var, *(a.var for a in spatial))
    loads = tuple(Load(n, where, v.dtype) for n, v in zip(names, update.values, strict=True))
    axes = (*spatial, final_axis)
    loops = [(symbol(fresh(nest, f"{block.name}_{a.var.name}_c")), a) for a in axes]
    final: Node = Block(
        block.name, axes, tuple(v for v, _ in loops), (Update(update.monoid, update.targets, loads),),
        annotations=block.annotations,
    )  # fmt: skip
    for var, a in reversed(loops):
        final = Loop(var, a.extent, (final,))
    new_root = with_node(replace(nest, body=(root,)), block, partial).body[0]
    result = with_node(nest, root, new_root, final)
    return replace(result, locals=(*result.locals, *buffers)), [partial.name]


def _loops_around(root: Loop, block: Block) -> list[Loop]:
    chain: list[Loop] = []
    node: Node = root
    while isinstance(node, Loop):
        chain.append(node)
        node = node.body[0]
    assert node is block
    return chain
