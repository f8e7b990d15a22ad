"""Where a loop begins and ends by the hints of the blocks in it: numbers that local buffers hold."""

from __future__ import annotations

from collections.abc import Collection

from ..expr.value import Index
from .hints import LIVE_FROM, LIVE_TO, Hint
from .loops import Block, Loop, LoopNest, blocks, walk_nodes


def live_limits(nest: LoopNest, loop: Loop) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The local buffers that say from where on, and up to where, any block in the loop does anything."""
    inside = [n for n, _ in walk_nodes(loop.body) if isinstance(n, Block)]
    return _common(inside, LIVE_FROM, loop), _common(inside, LIVE_TO, loop)


def _common(inside: list[Block], hint: Hint[str], loop: Loop) -> tuple[str, ...]:
    if not inside or not hint.of(inside[0]):
        return ()
    first, *rest = (_told(b, hint, loop.var.name) for b in inside)
    return tuple(name for name in first if all(name in others for others in rest))


def _told(block: Block, hint: Hint[str], loop: str) -> Collection[str]:
    pairs = (pair.partition(":") for pair in hint.of(block).split(","))
    return [buffer for name, _, buffer in pairs if name == loop]


def place_of(nest: LoopNest, buffer: str) -> tuple[Index, ...]:
    """The indices, in loops, at which the one block that writes a local buffer does so."""
    for block, _ in blocks(nest):
        for access in block.writes:
            if access.buffer == buffer:
                axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
                return tuple(i.xreplace(axes) for i in access.indices)  # type: ignore[union-attr]
    raise KeyError(buffer)
