"""Convolve sequences that have their channels innermost in memory as images of one row.

Tokens ``[batch, time, channels]`` are convolved as ``[batch, channels, time]``. ATen copies such a view, and its
library brings the copy into a layout of its own, which is that in which the tokens lay. Images have a name for that
layout, so with a dimension of one element the library reads tokens as they are, and makes tokens. A copy behind it has
the layout of eager's result; who reads it moves each element once, and often reads tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Load
from ....ir.graph.facts import names_in
from ....ir.graph.graph import Compute, Graph, Node, Ref, TensorType, View
from ....ir.nest.loops import contiguous_strides
from ....ir.target import TargetOf
from ...context import USUAL, PassContext
from ...cost.layouts import are_measured
from ...facts.convolution import Convolution, axes_of, convolution
from ..canonical.names import fresh_name
from .convert_layouts import channels_last

_REASON = "sequences with channels innermost are images of one row"


def lift_sequences(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Replace convolutions of tokens along time, in place of the library's copies, by those of images of one row."""
    types = graph.types()
    found = {n.names[0]: c for n in graph.nodes if (c := _of_tokens(n, types, context.target_of)) is not None}
    if not found:
        return graph
    taken, nodes = set(names_in(graph)), list[Node]()
    for node in graph.nodes:
        c = found.get(node.names[0])
        nodes += (node,) if c is None else _lifted(c, taken)
    return replace(graph, nodes=tuple(nodes))


def _of_tokens(node: Node, types: Mapping[str, TensorType], target_of: TargetOf) -> Convolution | None:
    """The node as a convolution of tokens along time that oneDNN makes."""
    c = convolution(node, types)
    if c is None or c.is_backward or c.transposed or c.rank != 1 or c.input.dtype is not DType.FLOAT32:
        return None
    if not are_measured(target_of(c.input.device).machine) or c.weight.strides != contiguous_strides(c.weight.shape):
        return None
    # Of one channel, or one element, layouts are the same.
    if 1 in (c.input.shape[1], c.input.shape[2], c.output.shape[1], c.output.shape[2]):
        return None
    plain = contiguous_strides(c.output.shape), channels_last(c.output.shape)
    return c if c.input.strides == channels_last(c.input.shape) and c.output.strides in plain else None


def _lifted(c: Convolution, taken: set[str]) -> list[Node]:
    """Views of sequence and filters, the call, and its result as a sequence in the layout that it had."""
    result, origins = c.node.names[0], c.node.origins
    image, filters, made, turned = (fresh_name(f"{result}_{n}", taken) for n in ("row", "filters", "made", "turned"))
    first, channel, _, place = axes_of(4)

    def of_one_row(kind: TensorType, last: bool) -> TensorType:
        shape = (*kind.shape[:2], sympy.S.One, kind.shape[2])
        return replace(kind, shape=shape, strides=channels_last(shape) if last else contiguous_strides(shape))

    def view(name: str, kind: TensorType, source: str, at: Sequence[sympy.Expr]) -> View:
        return View(name, kind, source, axes_of(len(kind.shape)), tuple(at), sympy.S.Zero, origins)

    bias = Ref(c.names["bias"]) if "bias" in c.names else None
    zero, one = 0, 1
    geometry = ((one, *c.stride), (zero, *c.padding), (one, *c.dilation), False, (zero, zero), c.groups)
    reason = f"{c.node.reason}; {_REASON}" if c.node.reason else _REASON
    call = replace(
        c.node, names=(made,), types=(of_one_row(c.output, True),), reason=reason,
        args=(Ref(image), Ref(filters), bias, *geometry),
    )  # fmt: skip
    nodes: list[Node] = [
        view(image, of_one_row(c.input, True), c.names["input"], (first, channel, place)),
        view(filters, of_one_row(c.weight, False), c.names["weight"], (first, channel, place)),
        call,
    ]
    at, sequence = axes_of(3), replace(c.output, strides=channels_last(c.output.shape))
    source = (at[0], at[1], sympy.S.Zero, at[2])
    if c.output.strides == sequence.strides:
        return [*nodes, view(result, c.output, made, source)]
    copy = Compute(result, c.output, at, Load(turned, at, c.output.dtype), origins)
    return [*nodes, view(turned, sequence, made, source), copy]


__all__ = ["lift_sequences"]
