"""A service whose programs are words: what they do to the process that runs them is known."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch_mlc.dynamo_backend.searching.program_service import ProgramService


def load(data: bytes) -> Callable[[list[Any]], Sequence[Any]]:
    """``double``, ``slow``, ``wrong``, ``raise``, ``crash`` and ``add``, which writes to its input."""
    word = data.decode()

    def call(arguments: list[Any]) -> Sequence[Any]:
        x, size = arguments
        arguments.clear()
        match word:
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise RuntimeError("it is refused")
            case "slow":
                time.sleep(0.01)
            case "wrong":
                return (x * 3, size)
            case "add":
                x.add_(1)
                return (x.clone(), size)
        return (x * 2, size)

    return call


def service() -> ProgramService:
    """What answers the requests of one process."""
    return ProgramService(load)
