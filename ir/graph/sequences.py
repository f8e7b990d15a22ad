"""Calls whose order is part of what they do: collectives, and draws from a generator of random numbers."""

from __future__ import annotations

from functools import cache

import torch

from .collectives import is_collective
from .graph import Library, Node


def sequence_of(node: Node) -> str | None:
    """Which sequence of calls a node belongs to, whose order is that of the graph; None for most."""
    if is_collective(node):
        return "collectives"
    return "random" if isinstance(node, Library) and _is_random(node.target) else None


@cache
def _is_random(target: str) -> bool:
    """Whether an op draws from a generator; bodies of control flow may."""
    namespace, _, rest = target.partition("::")
    if namespace == "hop":
        return True
    op = getattr(torch.ops, namespace, None)
    for part in rest.split("."):
        op = getattr(op, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
