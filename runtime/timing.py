"""Where compile time goes: seconds per phase, each phase counted without the phases inside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PHASES = (
    "key",
    "import",
    "passes",
    "fuse",
    "lower",
    "schedule",
    "tune",
    "emit",
    "compile",
    "cache",
    "host",
    "load",
    "lock",
)


class PhaseTimer:
    """Accumulates seconds by phase over one compilation. A phase entered inside another stops the outer one's clock."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the ``with`` body under ``name``, one of ``PHASES``."""
        assert name in self._seconds, f"no phase {name!r}; there are {', '.join(PHASES)}"
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._since
        self._since = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase that took any, in the order of the path."""
        return {name: s for name, s in self._seconds.items() if s > 0}

    @property
    def total(self) -> float:
        """Seconds of all phases together."""
        return sum(self._seconds.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in self.seconds.items()) or "nothing timed"


class ProcessTimes:
    """Seconds of all compilations of a process by kind of graph and phase. They observe and never decide anything, so
    there is one instance, ``process_times``. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, kind: str, seconds: Mapping[str, float]) -> None:
        """Add the phases of one graph: a forward, a backward, an inference graph."""
        with self._lock:
            for phase, s in seconds.items():
                name = f"{kind}: {phase}"
                self._seconds[name] = self._seconds.get(name, 0.0) + s

    def snapshot(self) -> dict[str, float]:
        """Seconds under ``"<kind>: <phase>"``."""
        with self._lock:
            return dict(self._seconds)

    @property
    def total(self) -> float:
        """Seconds of everything so far."""
        with self._lock:
            return sum(self._seconds.values())


process_times = ProcessTimes()
"""Where this process's compile time went."""


def process_seconds() -> dict[str, float]:
    """Seconds of this process's compilations so far, under ``"forward: fuse"`` and the like."""
    return process_times.snapshot()
