"""set_scope."""

from __future__ import annotations

from dataclasses import replace

from ....ir.nest.loops import LoopNest, Scope
from ...error import ScheduleError


def set_scope(nest: LoopNest, buffer: str, scope: str) -> LoopNest:
    """Say where a buffer of the nest's own lives: "local" (registers, scratch of one iteration of the team or grid),
    "shared" (a program's shared memory), or "global" (a workspace that all iterations see).

    Rewrites::

        t0 = local(float32[n])     ->     t0 = global(float32[n])

    Requires: the buffer is no parameter.
    Raises: ScheduleError.    Source: TVM ``Schedule.set_scope``.
    """
    asked = f"set_scope({buffer}, {scope!r})"
    known = {s.value: s for s in Scope}
    if scope not in known:
        raise ScheduleError(asked, f"there is no scope {scope!r}; there are {', '.join(known)}", nest)
    if all(b.name != buffer for b in nest.locals):
        names = ", ".join(b.name for b in nest.locals) or "none"
        raise ScheduleError(asked, f"{buffer} is no buffer of the nest's own", nest, hint=f"its own are {names}")
    own = tuple(replace(b, scope=known[scope]) if b.name == buffer else b for b in nest.locals)
    return replace(nest, locals=own)
