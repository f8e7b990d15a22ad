"""Where a part of the IR comes from in the user's model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: the ATen op, and the user's line ("model.py:12 in forward: x = self.norm(x)").

    ``note`` is what reports are to say of it: why a product is computed by loops of ours. ``place`` is the node's
    number in the ATen graph, by which programs name its line, -1 for none. ``keeps`` is what the node keeps of eager's
    numerics where others do not.
    """

    op: str
    source: str = ""
    note: str = ""
    place: int = field(default=-1, compare=False)
    keeps: tuple[str, ...] = ()
