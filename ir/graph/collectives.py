"""Functional collectives of ``torch.distributed``: calls that go on reading what they are given, and writing what they
return, until somebody waits for them."""

from __future__ import annotations

from .graph import Graph, Library, Node, uses

_NAMESPACES = ("_c10d_functional::", "c10d_functional::")
_WAITS = tuple(f"{n}wait_tensor." for n in _NAMESPACES)


def is_wait(node: Node) -> bool:
    """Whether a node waits for the result of a collective. What it returns is that very tensor."""
    return isinstance(node, Library) and node.target.startswith(_WAITS)


def is_collective(node: Node) -> bool:
    """Whether all processes of a group have to make this call, in the same order."""
    return isinstance(node, Library) and node.target.startswith(_NAMESPACES) and not is_wait(node)


def in_flight(graph: Graph) -> dict[int, tuple[str, ...]]:
    """By the position of each wait, the operands of the collective that it is for: until then they are read.

    Operands of a collective for which the graph does not wait stand under the number of its nodes.
    """
    issued: dict[str, tuple[str, ...]] = {}
    waiting: dict[str, tuple[str, ...]] = {}
    found: dict[int, tuple[str, ...]] = {}
    for k, node in enumerate(graph.nodes):
        if not isinstance(node, Library) or not node.target.startswith(_NAMESPACES):
            continue
        if is_collective(node):
            issued.update(dict.fromkeys(node.names, uses(node)))
            waiting.update(dict.fromkeys(node.names, uses(node)))
        else:
            found[k] = tuple(operand for name in uses(node) for operand in issued.get(name, ()))
            for name in uses(node):
                waiting.pop(name, None)
    if waiting:
        found[len(graph.nodes)] = tuple(dict.fromkeys(operand for operands in waiting.values() for operand in operands))
    return found
