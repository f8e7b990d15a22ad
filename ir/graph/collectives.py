"""Functional collectives of ``torch.distributed``: calls that go on reading what they are given, and writing what they
return, until somebody waits for them."""

from __future__ import annotations

from .graph import Library, Node

_NAMESPACES = ("_c10d_functional::", "c10d_functional::")
_WAITS = tuple(f"{n}wait_tensor." for n in _NAMESPACES)


def is_collectives_wait(node: Node) -> bool:
    """Whether a node waits for the result of a collective. What it returns is that very tensor."""
    return isinstance(node, Library) and node.target.startswith(_WAITS)


def is_collective(node: Node) -> bool:
    """Whether all processes of a group have to make this call, in the same order."""
    return isinstance(node, Library) and node.target.startswith(_NAMESPACES) and not is_collectives_wait(node)
