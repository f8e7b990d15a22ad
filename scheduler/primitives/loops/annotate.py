"""annotate."""

from __future__ import annotations

from ....ir.nest.hints import HINTS, Place, Value, misfits
from ....ir.nest.loops import Loop, LoopNest
from ...error import ScheduleError
from ..analysis.tree import find_place, with_annotation


def annotate(nest: LoopNest, at: str, key: str, value: Value) -> LoopNest:
    """Attach a hint for the emitter to a loop, a block, or with an empty name to the whole nest; a later one
    replaces it.

    Rewrites::

        for i in range(n):     ->     for i in range(n):  # num_stages=3

    Requires: a hint of the table below, in a place, on a kind of loop, and of a value that it has there; it is not one
    that a primitive of its own gives.
    Raises: ScheduleError.    Source: TVM ``Schedule.annotate``.
    """
    asked = f"annotate({at}, {key!r}, {value!r})"
    node = find_place(nest, at, asked)
    place = Place.NEST if node is nest else Place.LOOP if isinstance(node, Loop) else Place.BLOCK
    kind = node.kind if isinstance(node, Loop) else None
    for says, mend in misfits(((key, value),), place, [b.name for b in nest.params], nest.outputs, kind):
        raise ScheduleError(asked, says, nest, at, mend)
    giver = HINTS[key.partition(":")[0]].given_by
    if giver != annotate.__name__:
        raise ScheduleError(asked, f"{key!r} is given by {giver}, which proves that it may be", nest, at)
    return with_annotation(nest, node, key, value)
