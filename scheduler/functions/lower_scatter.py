"""Lowering of scatters: a block that begins the result, unless it lies there already, and one that writes where data
say."""

from __future__ import annotations

from dataclasses import replace

import sympy

from ...ir.expr.index import is_within
from ...ir.expr.value import Expr, IndexValue, Load, cast, rewrite, symbol
from ...ir.function.function import Stage, TensorFunction
from ...ir.nest.hints import IN_PLACE
from ...ir.nest.loops import Access, AxisKind, Block, Buffer, Loop, LoopNest, Node, Statement, Store, Update


def lower_scatter(function: TensorFunction) -> LoopNest:
    """The loop nest of a function that scatters: loops over each result, then over what is scattered.

    A dimension that is an index of the result itself is a spatial axis: iterations of it never meet. What a stage that
    scatters nothing makes is computed again where another reads it.
    """
    outputs = {o.result: o for o in function.outputs}
    in_place = ",".join(o.buffer.name for o in function.outputs if o.buffer in function.inputs)
    blocks: list[Block] = []
    made: dict[str, Expr] = {}

    def leaf(e: Expr) -> Expr | None:
        return cast(made[e.buffer], e.dtype) if isinstance(e, Load) and e.buffer in made else None

    for stage in function.stages:
        if made:
            stage = replace(stage, values=tuple(rewrite(v, leaf) for v in stage.values))
        if not stage.into:
            if stage.results[0] not in outputs or outputs[stage.results[0]].buffer not in function.inputs:
                made[stage.results[0]] = stage.values[0]
            if stage.results[0] not in outputs:
                continue
        name, dims = f"b{len(blocks)}", function.axes_of(stage)
        output = outputs[stage.into or stage.results[0]]
        if stage.into:
            kinds, body = _scattered(function, stage, output.buffer)
        elif output.buffer in function.inputs:
            continue
        else:
            kinds = (AxisKind.SPATIAL,) * len(dims)
            body = Store(output.buffer.name, output.indices, cast(stage.values[0], output.buffer.dtype))
        axes = tuple(map(function.axis, dims, kinds))
        blocks.append(Block(name, axes, tuple(symbol(f"{name}_{d.var.name}") for d in dims), (body,)))
    annotations = ((IN_PLACE.name, in_place),) if in_place else ()
    results = tuple(o.buffer.name for o in function.outputs)
    return LoopNest(
        function.name, function.params, results, tuple(in_loops(b) for b in blocks), (),
        function.symbols, annotations,
    )  # fmt: skip


def _scattered(function: TensorFunction, stage: Stage, buffer: Buffer) -> tuple[tuple[AxisKind, ...], Statement]:
    value, *positions = stage.values
    extents = {d.var: d.extent for d in function.axes_of(stage)}
    # Positions that are known are checked all the same, where they may lie outside: nothing else would keep a store in.
    places = tuple(
        p.index if isinstance(p, IndexValue) and is_within(p.index, n, extents, function.symbols) else p
        for p, n in zip(positions, buffer.shape, strict=True)
    )
    value = cast(value, buffer.dtype)
    kinds = tuple(AxisKind.SPATIAL if d.var in places else AxisKind.SCATTER for d in function.axes_of(stage))
    if stage.monoid is None:
        return kinds, Store(buffer.name, places, value)
    if AxisKind.SCATTER not in kinds:  # no two iterations have the same place: there is nothing to combine in memory
        (value,) = stage.monoid.combine((Load(buffer.name, places, buffer.dtype),), (value,))
        return kinds, Store(buffer.name, places, cast(value, buffer.dtype))
    return kinds, Update(stage.monoid, (Access(buffer.name, places),), (value,), begins=False)


def in_loops(block: Block) -> Node:
    """A block inside of a loop for each of its axes, in their order."""
    node: Node = block
    for axis, binding in zip(reversed(block.axes), reversed(block.bindings), strict=True):
        assert isinstance(binding, sympy.Symbol)
        node = Loop(binding, axis.extent, (node,))
    return node
