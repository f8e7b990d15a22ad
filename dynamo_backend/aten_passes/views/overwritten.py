"""What a forward writes over, kept for its backward."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..joint_graph import backward_of
from ..write import NodeWriter
from .written_views import is_view

aten = torch.ops.aten


def keep_overwritten(joint: fx.GraphModule) -> int:
    """Let what is made of inputs that the forward writes be made of copies of them; how many copies there are.

    AOTAutograd writes at the end of the forward what is copied over an input, and partitioners take inputs for
    constants: they let the backward read one, or make of it again what the forward made of it. A copy may be saved and
    is not made again; where it is not saved, the kernels of the forward read through it.
    """
    backward = backward_of(joint.graph)
    writes = [
        n
        for n in joint.graph.find_nodes(op="call_function", target=aten.copy_.default)
        if n not in backward and isinstance(n.args[0], fx.Node) and n.args[0].op == "placeholder"
    ]
    if not writes:
        return 0
    behind = _reaching(joint.graph, backward)
    written = dict.fromkeys(w.args[0] for w in writes)
    last = joint.graph.find_nodes(op="placeholder")[-1]
    copies = 0
    for source in _views(n for n in written if n in behind):
        readers = [u for u in source.users if u.op == "call_function" and u not in writes and not is_view(u)]
        if behind.isdisjoint(readers) and backward.isdisjoint(readers):
            continue
        with joint.graph.inserting_after(last if source.op == "placeholder" else source):
            copy = NodeWriter(joint.graph, source).call(aten.clone.default, source)
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for reader in readers:
            reader.replace_input_with(source, copy)
        copies += 1
    if copies:
        joint.graph.lint()
        joint.recompile()
    return copies


def _reaching(graph: fx.Graph, backward: Set[fx.Node]) -> set[fx.Node]:
    """The nodes of the forward that the backward is made of."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in backward and any(u in backward or u in found for u in node.users):
            found.add(node)
    return found


def _views(inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Inputs, and their views that have no more elements than they."""
    found = list(inputs)
    for node in found:  # which grows
        found += [u for u in node.users if is_view(u)]
    return found
