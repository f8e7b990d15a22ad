"""How a case ends that does not pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


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
    thread.join(seconds)
    expect(not thread.is_alive(), f"{what} did not end in {seconds:g} s")
    if raised:
        raise raised[0]
    return result[0]
