"""How long the kit waits: until something ends, or nothing moves any more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROCESSES = Path("/proc")
# What may be used in the time that nothing moves, in the processor's seconds: some threads wake up to look around.
IDLE = 0.1


def ended(done: Callable[[float], bool], patience: float) -> str:
    """Waits until ``done``, which may take the seconds that it is given to find out. Returns "", or why there is no
    more use in waiting: ``patience`` seconds are over, or for a sixth of them, at least one, this process and all that
    it started took no processor. The latter can be told on Linux alone.
    """
    begun = time.monotonic()
    stillness = Stillness()
    while not done(0.05):
        if time.monotonic() - begun > patience:
            return f"did not end in {patience:g} s"
        if stillness.seconds() > max(1.0, patience / 6):
            return f"did not end, and nothing moves any more after {time.monotonic() - begun:.0f} s"
    return ""


@dataclass
class Stillness:
    """For how long the threads of this process, but for the one that asks, and of all that it started have done
    nothing, and did not wait for a processor either."""

    used: float = -1.0
    since: float = field(default_factory=time.monotonic)
    asked: float = 0.0

    def seconds(self) -> float:
        """Looks around at most five times a second. 0 where this system does not tell what threads do."""
        now = time.monotonic()
        if now - self.asked < 0.2:
            return now - self.since if self.used >= 0 else 0.0
        self.asked, found = now, list(_threads())
        used = sum(seconds for seconds, _ in found)
        if not found or any(busy for _, busy in found) or abs(used - self.used) > IDLE:
            self.used, self.since = used if found else -1.0, now
        return now - self.since


def processor_seconds() -> float:
    """What this process and all that it started have taken so far. Those that others ended for it, and that live, are
    counted on Linux alone."""
    ended_ones, me = os.times(), str(os.getpid())
    stats = [_stat(PROCESSES / process) for process in _family() if process != me]
    others = sum(int(word) for words in stats for word in words[11:15]) / _ticks()
    return time.process_time() + ended_ones.children_user + ended_ones.children_system + others


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _threads() -> Iterator[tuple[float, bool]]:
    """Of each thread: the processor's seconds that it took, and whether it runs, or would if there were a processor."""
    me, ticks = str(threading.get_native_id()), _ticks()
    for process in _family():
        for thread in _entries(PROCESSES / process / "task"):
            words = _stat(PROCESSES / process / "task" / thread)
            if words and thread != me:
                yield (int(words[11]) + int(words[12])) / ticks, words[0] in "RD"


def _family() -> list[str]:
    """This process and those that it, or one of them, started and that live."""
    parents: dict[str, list[str]] = {}
    for process in _entries(PROCESSES):
        if process.isdigit() and (words := _stat(PROCESSES / process)):
            parents.setdefault(words[1], []).append(process)
    found = [str(os.getpid())]
    for process in found:
        found += parents.get(process, [])
    return found


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # it ended, or this is no Linux


def _stat(folder: Path) -> list[str]:
    """What Linux says of a process or a thread behind its name: state, parent, …; [] where it has ended."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
