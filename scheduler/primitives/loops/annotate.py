"""annotate."""

from __future__ import annotations

from dataclasses import replace

from ....ir.nest.loops import Annotations, Block, Loop, LoopNest, Node, walk_nodes
from ...error import ScheduleError
from ..analysis.tree import with_node

Value = bool | int | float | str


def annotate(nest: LoopNest, at: str, key: str, value: Value) -> LoopNest:
    """Attach a hint for the emitter to a loop, a block, or with an empty name to the whole nest; a later one
    replaces it.

    Rewrites::

        for i in range(n):     ->     for i in range(n):  # num_stages=3

    Raises: ScheduleError.    Source: TVM ``Schedule.annotate``.
    """
    if not at:
        return replace(nest, annotations=_with(nest.annotations, key, value))
    for node, _ in walk_nodes(nest.body):
        if _name(node) == at:
            return with_node(nest, node, replace(node, annotations=_with(node.annotations, key, value)))
    raise ScheduleError(f"annotate({at}, {key!r}, {value!r})", f"there is no loop or block {at}", nest)


def _name(node: Node) -> str:
    match node:
        case Loop():
            return node.var.name
        case Block():
            return node.name


def _with(annotations: Annotations, key: str, value: Value) -> Annotations:
    return (*(a for a in annotations if a[0] != key), (key, value))
