"""pad."""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Const, Expr, Index, IndexValue, Select, call, const
from ....ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Loop,
    LoopKind,
    LoopNest,
    Node,
    Statement,
    Store,
    Update,
    contiguous_strides,
    map_nodes,
)
from ...error import ScheduleError
from ..analysis.dependence import refuse_scatter
from ..analysis.tree import blocks_under, find_loop, with_node

Grown = dict[tuple[str, int], sympy.Expr]


def pad(nest: LoopNest, loop: str, multiple: int) -> LoopNest:
    """Run a loop on to a multiple of a number of iterations, over elements that change nothing.

    Rewrites::

        T = local(float32[n])                       T = local(float32[ceildiv(n, 8) * 8])
        for i in range(n):                ->        for i in range(ceildiv(n, 8) * 8):
            T[i] = exp(A[i])                            T[i] = exp(A[i]) if i < n else 0
        for k in range(n):                          for k in range(n):
            S += T[k]                                   S += T[k]

    A reduction over the loop meets its identity beyond the end; buffers that are written along the loop grow, and hold
    zero there (a reduction's identity where a reduction writes them). A split by the multiple then leaves no tail.

    Requires: a serial loop that no split has given bounds; in each block inside it is one whole axis by itself, and
    where that axis is spatial the block writes only buffers of the nest's own, each at that axis in one dimension.
    Raises: ScheduleError.    Source: TVM ``Schedule.pad_einsum``, Halide ``Func.align_bounds``.
    """
    asked = f"pad({loop}, {multiple})"
    node, _ = find_loop(nest, loop, asked)
    if multiple < 1:
        raise ScheduleError(asked, f"{multiple} is no number of iterations to round up to", nest, loop)
    if node.kind is not LoopKind.SERIAL:
        raise ScheduleError(asked, f"the loop is {node.kind.value} already", nest, loop, "pad it before")
    if nest.symbols.is_divisible(node.extent, multiple):
        return nest
    extent = FloorDiv(node.extent + multiple - 1, multiple) * multiple
    grown: Grown = {}
    axes = {b.name: _axis(nest, b, node, asked) for b in blocks_under(node)}
    for b in blocks_under(node):
        refuse_scatter(nest, b, asked)
        if axes[b.name].kind is AxisKind.SPATIAL:
            for w in b.writes:
                grown[w.buffer, _dimension(nest, b, axes[b.name], w, asked)] = extent

    def visit(n: Node) -> Node | None:
        return _padded(n, axes[n.name], extent) if isinstance(n, Block) else None

    changed = with_node(nest, node, replace(node, extent=extent, body=map_nodes(node.body, visit)))
    own = []
    for buffer in nest.locals:
        shape = tuple(grown.get((buffer.name, k), e) for k, e in enumerate(buffer.shape))
        same = shape == buffer.shape
        own.append(buffer if same else replace(buffer, shape=shape, strides=contiguous_strides(shape)))
    return replace(changed, locals=tuple(own))


def _axis(nest: LoopNest, block: Block, loop: Loop, asked: str) -> Axis:
    """The axis that the loop is in a block."""
    mine = [(a, b) for a, b in zip(block.axes, block.bindings, strict=True) if loop.var in b.free_symbols]
    if len(mine) != 1 or mine[0][1] != loop.var or mine[0][0].extent != loop.extent:
        raise ScheduleError(
            asked, f"it is not one whole axis of {block.name}", nest, block.name, "pad before split and fuse"
        )
    axis = mine[0][0]
    if axis.kind is AxisKind.SCAN:
        raise ScheduleError(asked, f"{block.name} scans along it", nest, block.name)
    if any(loop.var in p.lhs.free_symbols | p.rhs.free_symbols for p in block.predicate):
        raise ScheduleError(asked, f"{block.name} runs under a bound of it", nest, block.name, "pad before split")
    return axis


def _dimension(nest: LoopNest, block: Block, axis: Axis, write: Access, asked: str) -> int:
    """The dimension of a buffer that a spatial axis writes along, and that can grow."""
    if all(b.name != write.buffer for b in nest.locals):
        raise ScheduleError(
            asked, f"{block.name} writes {write.buffer}, which is no buffer of the nest's own", nest, block.name,
            "cache_write gives it one",
        )  # fmt: skip
    at: list[Index] = [i for i in write.indices if i == axis.var]
    if len(at) != 1 or nest.buffer(write.buffer).shape[write.indices.index(axis.var)] != axis.extent:
        raise ScheduleError(
            asked, f"{block.name} does not write {write.buffer} at its axis {axis.var} in one dimension", nest,
            block.name,
        )  # fmt: skip
    return write.indices.index(axis.var)


def _padded(block: Block, axis: Axis, extent: sympy.Expr) -> Block:
    """The block with a longer axis, whose values beyond the old end are neutral."""
    inside = call("lt", IndexValue(axis.var, DType.INT64), IndexValue(axis.extent, DType.INT64))

    def kept(value: Expr, neutral: Const) -> Expr:
        return Select(inside, value, neutral)

    body: list[Statement] = []
    for s in block.body:
        match s:
            case Store():
                body.append(replace(s, value=kept(s.value, const(0, s.value.dtype))))
            case Update():
                identity = s.monoid.identity(tuple(v.dtype for v in s.values))
                body.append(replace(s, values=tuple(map(kept, s.values, identity))))
    axes = tuple(replace(a, extent=extent) if a is axis else a for a in block.axes)
    return replace(block, axes=axes, body=tuple(body))
