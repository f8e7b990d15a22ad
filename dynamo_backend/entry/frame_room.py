"""Room for Python's frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Slots of eight bytes: half a MiB of addresses, of which only what frames write takes memory.
ROOM = 1 << 16


def with_frame_room(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with room for the frames of a few thousand calls inside of it.

    CPython keeps frames in chunks of 16 KiB. It maps a chunk when a call needs it and unmaps it when that call returns,
    so a short function that is called again and again at the end of a chunk costs 5 microseconds a call instead of
    0.1. Where chunks end depends on how deep the caller is: the same scheduling took 30 ms or 230 ms. A frame that asks
    for ``ROOM`` gets a chunk of twice that, and what it calls runs in the other half.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    code = call.__code__  # type: ignore[attr-defined]
    call.__code__ = code.replace(co_stacksize=ROOM)  # type: ignore[attr-defined]
    return call
