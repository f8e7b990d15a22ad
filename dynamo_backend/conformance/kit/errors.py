"""How a case ends that does not pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .waiting import ended


class Violation(AssertionError):
    """The backend does not do what eager does."""


class NotApplicable(Exception):
    """The case says nothing about this backend, or cannot run here. The text says why."""


def expect(holds: bool, told: str) -> None:
    """Raises Violation with ``told`` where something does not hold."""
    if not holds:
        raise Violation(told)


def within(seconds: float, what: str, run: Callable[[], Any]) -> Any:
    """What ``run`` returns, or raises, on a thread of its own. Raises Violation where it does not end in time."""
    result: list[Any] = []
    raised: list[BaseException] = []

    def body() -> None:
        try:
            result.append(run())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def done(pause: float) -> bool:
        thread.join(pause)
        return not thread.is_alive()

    if told := ended(done, seconds):
        _leave_fullgraph()
        raise Violation(f"{what} {told}")
    if raised:
        raise raised[0]
    return result[0]


def _leave_fullgraph() -> None:
    """Torch counts the frames of a call with ``fullgraph=True`` for all threads together, and compiles none behind a
    graph break until the call ends. One that never ends would change what later cases see."""
    stop = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if stop is not None:
        stop(-1)
