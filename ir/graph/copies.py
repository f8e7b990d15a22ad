"""Copies over a tensor that is there: what AOTAutograd leaves of writes to inputs."""

from __future__ import annotations

from .graph import Library, Node, Ref

COPY = "aten::copy_.default"


def is_copy(node: Node) -> bool:
    """Whether a node writes a tensor over another."""
    return isinstance(node, Library) and node.target == COPY and all(isinstance(a, Ref) for a in node.args[:2])
