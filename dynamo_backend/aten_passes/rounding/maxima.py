"""Which elements are the largest, asked in a backward of elements that it would make again.

The gradient of a maximum goes to the elements that equal it. A backward that makes the elements again and is given the
maximum finds none where a last bit differs, and divides by how many there are: results in memory are rounded that the
forward's kernel went on with as they were, and sums may be added up in another order. Maxima of rows are found again
with the elements; elements that a scatter or a library call has looked through are saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..context import AtenContext
from ..joint_graph import backward_of
from ..views.written_views import seen_through
from ..write import NodeWriter, tidy
from .rounding import keep_rounding

aten = torch.ops.aten

_SCATTERS = (aten.scatter_reduce.two, aten.index_reduce.default)
_LOOKS_UP = (aten.gather.default, aten.index_select.default, aten.index.Tensor)
_LARGEST = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)


def save_compared(graph: fx.Graph) -> int:
    """Save what a backward compares with results of scatters and library calls; how many values."""
    kept: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is aten.eq.Tensor:
            one, other = node.args[:2]
            for result, elements in ((one, other), (other, one)):
                if isinstance(result, fx.Node) and _is_scattered(result):
                    kept.update([elements] if isinstance(elements, fx.Node) else [])
        elif node.target is aten._cdist_backward.default and math.isinf(node.args[3]):  # type: ignore[arg-type]
            kept.update(n for n in node.args[1:3] if isinstance(n, fx.Node))
        elif node.target is aten._segment_reduce_backward.default:
            kept.update(n for n in node.args[2:3] if isinstance(n, fx.Node))
    backward = backward_of(graph) if kept else set()
    kept = {n for n in kept if n.op == "call_function" and n not in backward}
    for node in kept:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        keep_rounding(node)  # who reads it and who reads its copy in a wider type see the same
    return len(kept)


def _is_scattered(node: fx.Node) -> bool:
    """Whether a value is the maxima or minima of a scatter, or looked up in them."""
    while True:
        _, node = seen_through(node)
        if node.target not in _LOOKS_UP or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node.target in _SCATTERS and any(a in ("amax", "amin") for a in node.args)


def recompute_maxima(backward: fx.GraphModule, context: AtenContext) -> int:
    """Let the backward compare what it makes again with the maximum of just that; how many comparisons it has."""
    forward = context.forward
    assert forward is not None, "a backward alone"
    originals = {n.name: n for n in forward.graph.nodes}
    here = {n.name: n for n in backward.graph.nodes}
    made: dict[fx.Node, fx.Node] = {}
    changed = 0
    for node in backward.graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        for operand in dict.fromkeys(node.all_input_nodes):
            views, saved = seen_through(operand)
            if saved.op != "placeholder" or saved.name not in originals:
                continue
            largest = made.get(saved) or _again(originals[saved.name], here, node)
            if largest is None:
                continue
            made[saved] = largest
            with backward.graph.inserting_before(node):
                writer = NodeWriter(backward.graph, node)
                for view in views:
                    largest = writer.call(view.target, largest, *view.args[1:], **view.kwargs)
            node.replace_input_with(operand, largest)
            changed += 1
    if changed:
        tidy(backward.graph)
    return changed


def _again(original: fx.Node, here: dict[str, fx.Node], before: fx.Node) -> fx.Node | None:
    """A maximum of the forward, of elements that the backward makes itself; None where it is no such maximum."""
    views, root = seen_through(original)
    if not _is_largest(root) or not isinstance(root.args[0], fx.Node):
        return None
    parts, source = seen_through(root.args[0])
    known = here.get(source.name)
    if known is None or known.op == "placeholder" or not known < before:
        return None
    steps = [*parts, root, *views]
    sizes = {n: here.get(n.name) for s in steps for n in s.all_input_nodes if n is not s.args[0]}
    if not all(n is not None and n < before for n in sizes.values()):
        return None  # those that only the forward has
    result = known

    def given(value: Any) -> Any:
        return fx.map_arg(value, lambda n: sizes[n])

    with before.graph.inserting_before(before):
        writer = NodeWriter(before.graph, before)
        for step in steps:
            result = writer.call(step.target, result, *given(step.args[1:]), **given(step.kwargs))
    return result


def _is_largest(node: fx.Node) -> bool:
    if node.target is aten.linalg_vector_norm.default:
        order = node.args[1] if len(node.args) > 1 else 2
        return isinstance(order, (int, float)) and math.isinf(order)
    return node.target in _LARGEST
