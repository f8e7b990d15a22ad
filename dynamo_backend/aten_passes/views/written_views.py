"""Results that are views of inputs which the graph writes over."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..context import AtenContext
from ..write import NodeWriter, give_results

aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is in the memory of its first operand, and has no more elements."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target is aten.expand.default:
        return False
    first = node.target._schema.arguments[:1]
    return any(a.alias_info is not None and not a.alias_info.is_write for a in first)


def return_written_inputs(gm: fx.GraphModule, context: AtenContext) -> int:
    """Let results that AOTAutograd makes views of a written input again be views of it in the graph too; how many are.

    The graph has views of the value that is copied over the input, at its end or, where autograd is to know of it, by
    AOTAutograd. Where sizes are symbols, AOTAutograd takes the strides and the offset in memory of such a result for
    those of the view that it makes of the caller's tensor, and nothing else of it. They are the caller's only where
    that value lies in memory as the caller's tensor does: eager's ``copy`` sees to it, one of ours has an offset of
    its own.
    """
    (end,) = gm.graph.find_nodes(op="output")
    metadata, results = context.metadata, list(end.args[0])  # type: ignore[arg-type]
    written = _written(gm.graph, results, metadata)
    if not written:
        return 0
    first = len(metadata.tokens) + metadata.num_mutated_inp_runtime_indices
    changed = 0
    for k, info in enumerate(metadata.output_info, first):
        if info.output_type.name != "alias_of_input" or not isinstance(results[k], fx.Node):
            continue
        views, root = seen_through(results[k])
        inputs = written.get(root, ())
        if views and len(inputs) == 1:
            made = _of_input(gm.graph, views, inputs[0], end)
            if made is not None:
                results[k] = made
                changed += 1
    if changed:
        give_results(gm, results)
    return changed


def _written(graph: fx.Graph, results: list[Any], metadata: Any) -> dict[fx.Node, list[fx.Node]]:
    """Values that inputs are written over with -> those inputs."""
    written: dict[fx.Node, list[fx.Node]] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = copy.args[:2]
        if isinstance(target, fx.Node) and target.op == "placeholder" and isinstance(value, fx.Node):
            written.setdefault(value, []).append(target)
    tokens = len(metadata.tokens)
    places = graph.find_nodes(op="placeholder")
    if len(places) == tokens + len(metadata.input_info):  # no flattened subclasses among them, no states of generators
        for k, index in enumerate(metadata.mutated_inp_runtime_indices, tokens):
            if isinstance(results[k], fx.Node):
                written.setdefault(results[k], []).append(places[tokens + index])
    return written


def seen_through(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The views that a node is, the first of them first, and what they are views of."""
    views = []
    while node.op == "call_function" and (is_view(node) or node.target is aten.expand.default):
        if not isinstance(node.args[0], fx.Node):
            break
        views.append(node)
        node = node.args[0]
    return views[::-1], node


def _of_input(graph: fx.Graph, views: list[fx.Node], written: fx.Node, end: fx.Node) -> fx.Node | None:
    """The same views of the input that is written over; None where it lies in memory so that they cannot be made."""
    made: Any = written
    writer = NodeWriter(graph, made)
    with graph.inserting_before(end):
        for view in views:
            try:
                made = writer.call(view.target, made, *view.args[1:], **view.kwargs)
            except RuntimeError:  # no such view of these strides
                return None
    return made  # type: ignore[no-any-return]
