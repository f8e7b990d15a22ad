"""The graph that holds forward and backward: which of its nodes are of the backward."""

from __future__ import annotations

from torch import fx


def is_primal(node: fx.Node) -> bool:
    """Whether an argument is one of the model's: torch tells by its name."""
    return node.op == "placeholder" and node.name.startswith("primals")


def is_tangent(node: fx.Node) -> bool:
    """Whether an argument is a gradient that autograd gives: torch tells by its name."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def backward_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that what flows into the backward reaches."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def unread_in(graph: fx.Graph) -> set[str]:
    """What of the forward no gradient op reads, so that eager does not save it."""
    backward = {n for n in backward_of(graph) if n.op != "output"}
    return {n.name for n in graph.nodes if n not in backward and backward.isdisjoint(n.users)}
