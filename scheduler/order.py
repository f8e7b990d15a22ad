"""Nodes in topological order."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import Node, uses


def in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes such that each stands after what it reads, otherwise in the order given."""
    makers = {name: node for node in nodes for name in node.names}
    done: dict[int, Node] = {}
    stack = list(reversed(nodes))
    while stack:
        node = stack[-1]
        before = [m for u in uses(node) if (m := makers.get(u)) is not None and id(m) not in done and m is not node]
        stack += before
        if not before:
            done.setdefault(id(stack.pop()), node)
    return tuple(done.values())
