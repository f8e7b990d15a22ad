"""rfactor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.index import simplify
from ....ir.expr.value import IndexValue, Load, Select, call, rewrite, symbol
from ....ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    Loop,
    LoopNest,
    Node,
    Scope,
    Update,
    blocks,
    contiguous_strides,
    walk_nodes,
)
from ...error import ScheduleError
from ..analysis.dependence import carried, mixed, refuse_scatter
from ..analysis.tree import blocks_under, dims_of_loops, find_block, find_loop, fresh, replace_node

Symbols = Mapping[sympy.Symbol, sympy.Expr]


def rfactor(nest: LoopNest, loop: str) -> tuple[LoopNest, list[str]]:
    """Make a reduction loop carry partial results, to be combined afterwards; returns the name of the partial block.

    Rewrites::

        for ko in range(8):                   for ko in range(8):
            for ki in range(128):                 for ki in range(128):
                B += A[ko * 128 + ki]   ->            B_rf[ko] += A[ko * 128 + ki]
                                              for ko in range(8):
                                                  B += B_rf[ko]

    The partial block keeps the loops; the combining block, under the old name and under copies of the spatial loops,
    stands behind the outermost loop in which nothing else is computed. A tail becomes part of the value: elements
    beyond it are identities, so that every partial result is begun.

    Requires: exactly one block, a reduction, is inside the loop; the loop carries its reduction and no other axis.
    Raises: ScheduleError.    Source: TVM ``Schedule.rfactor``, Suriana et al. 2017.
    """
    asked = f"rfactor({loop})"
    target, _ = find_loop(nest, loop, asked)
    inside = blocks_under(target)
    if len(inside) != 1 or len(inside[0].body) != 1 or not isinstance(inside[0].body[0], Update):
        raise ScheduleError(asked, "exactly one reduction must be inside the loop", nest, loop)
    block, update = inside[0], inside[0].body[0]
    refuse_scatter(nest, block, asked)
    over = carried(block)
    if target.var not in over:
        raise ScheduleError(asked, f"{block.name} does not reduce over it", nest, loop)
    if mixed(block):
        raise ScheduleError(asked, "a loop carries the reduction and another axis at once", nest, block.name)
    around = find_block(nest, block.name, asked)[1]
    top = next(lp for lp in around if lp.var in over or len(blocks_under(lp)) == 1)
    names = _fresh_names(nest, update)
    spatial = tuple(a for a in block.axes if a.kind is AxisKind.SPATIAL)
    at = (symbol(names[0]), *(a.var for a in spatial))
    partial = _partial(nest, block, update, target, around, names, asked)
    shape = (target.extent, *(a.extent for a in spatial))
    buffers = tuple(
        Buffer(n, shape, contiguous_strides(shape), v.dtype, Scope.LOCAL)
        for n, v in zip(names[1:], update.values, strict=True)
    )
    loads = tuple(Load(b.name, at, b.dtype) for b in buffers)
    final = _final(nest, block, replace(update, values=loads), target, around[around.index(top) :], at[0])
    body = replace_node(nest.body, block, lambda _: (partial,))
    new_top = next(n for n, _ in walk_nodes(body) if isinstance(n, Loop) and n.var == top.var)
    body = replace_node(body, new_top, lambda n: (n, final))
    return replace(nest, body=body, locals=(*nest.locals, *buffers)), [partial.name]


def _fresh_names(nest: LoopNest, update: Update) -> list[str]:
    """Names of the new axis and of the buffers of partial results; axes of one name are one dimension."""
    taken = set(nest.buffers) | {a.var.name for b, _ in blocks(nest) for a in b.axes}
    result: list[str] = []
    for base in ("rf", *(f"{t.buffer}_rf" for t in update.targets)):
        name, k = base, 1
        while name in taken:
            name, k = f"{base}_{k}", k + 1
        taken.add(name)
        result.append(name)
    return result


def _partial(
    nest: LoopNest, block: Block, update: Update, target: Loop, around: tuple[Loop, ...], names: list[str],
    asked: str,
) -> Block:  # fmt: skip
    """The block over partial results: every reduction loop is an axis of its own, the target a spatial one."""
    over = carried(block)
    binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    spatial = [a for a in block.axes if a.kind is AxisKind.SPATIAL]
    dims = dims_of_loops(block)
    axis = Axis(symbol(names[0]), target.extent, dim=dims[target.var])
    rest = [lp for lp in around if lp.var in over and lp is not target]
    axes = [
        Axis(symbol(f"{axis.var.name}_{k}"), lp.extent, AxisKind.REDUCTION, dims[lp.var]) for k, lp in enumerate(rest)
    ]
    as_axes: Symbols = {target.var: axis.var, **{lp.var: a.var for lp, a in zip(rest, axes, strict=True)}}
    if not axes:  # every element is a partial result: a reduction over one element still begins it
        axes = [replace(axis, var=symbol(f"{axis.var.name}_0"), extent=sympy.S.One, kind=AxisKind.REDUCTION)]
    extents = {axis.var: axis.extent, **{a.var: a.extent for a in axes}, **{a.var: a.extent for a in spatial}}
    mapping = {
        a.var: simplify(binding[a.var].xreplace(as_axes), extents, nest.symbols)
        for a in block.axes
        if a.kind is not AxisKind.SPATIAL
    }
    values = tuple(
        rewrite(v, lambda _: None, lambda i: simplify(sympy.expand(i.xreplace(mapping)), extents, nest.symbols))
        for v in update.values
    )
    # The tail becomes part of the value: the new axes have elements beyond it, and a partial result that has no other
    # is still begun.
    predicate = [b for b in block.predicate if not b.lhs.free_symbols & over]
    for bound in block.predicate:
        if not bound.lhs.free_symbols & over:
            continue
        lhs = bound.lhs.xreplace(as_axes)
        if lhs.free_symbols & {lp.var for lp in around}:
            raise ScheduleError(asked, f"its bound {bound.lhs} < {bound.rhs} is over other loops too", nest, block.name)
        inside = call("lt", IndexValue(lhs, DType.INT64), IndexValue(bound.rhs, DType.INT64))
        identity = update.monoid.identity(tuple(v.dtype for v in values))
        values = tuple(Select(inside, v, i) for v, i in zip(values, identity, strict=True))
    targets = tuple(Access(n, (axis.var, *(a.var for a in spatial))) for n in names[1:])
    bindings = (target.var, *(binding[a.var] for a in spatial), *(lp.var for lp in rest))
    bindings += (sympy.S.Zero,) * (1 + len(spatial) + len(axes) - len(bindings))
    taken = {b.name for n in nest.body for b in blocks_under(n)}
    name = f"{block.name}_rf"
    while name in taken:
        name += "_rf"
    return replace(
        block,
        name=name,
        role=None,
        axes=(axis, *spatial, *axes),
        bindings=bindings,
        body=(Update(update.monoid, targets, values),),
        predicate=tuple(predicate),
    )


def _final(
    nest: LoopNest, block: Block, update: Update, target: Loop, inside: tuple[Loop, ...], partial: sympy.Symbol
) -> Node:
    """The block that combines the partial results, under copies of the spatial loops that stand in the reduction."""
    over = carried(block)
    taken: set[str] = set()
    renamed: dict[sympy.Symbol, sympy.Expr] = {}
    loops: list[tuple[sympy.Symbol, Loop]] = []
    for lp in (*(lp for lp in inside if lp.var not in over), target):
        var = symbol(fresh(nest, f"{lp.var.name}_c", taken))
        taken.add(var.name)
        renamed[lp.var] = var
        loops.append((var, lp))
    axes = [(a, b) for a, b in zip(block.axes, block.bindings, strict=True) if a.kind is AxisKind.SPATIAL]
    node: Node = Block(
        block.name,
        (*(a for a, _ in axes), Axis(partial, target.extent, AxisKind.REDUCTION, dims_of_loops(block)[target.var])),
        (*(b.xreplace(renamed) for _, b in axes), loops[-1][0]),
        (update,),
        tuple(Bound(b.lhs.xreplace(renamed), b.rhs) for b in block.predicate if not b.lhs.free_symbols & over),
        block.annotations,
    )
    for var, lp in reversed(loops):
        node = Loop(var, lp.extent, (node,))
    return node
