"""What is in a lock file, as tables: of each graph its calls, what makes most bytes first, and what was decided."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.filesize import decimal

from ...runtime.plain_text import counted
from .lock_text import CALLS, DECISIONS, PROGRAMS, SAVED, SCHEDULES, SETTINGS, LockLine, LockText, Section

_TYPE = re.compile(r"(?P<dtype>[a-z]\w+)\[(?P<shape>[^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Stake:
    """Bytes of results, and the sizes that vary which they are times, at most."""

    bytes: int
    sizes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " x ".join((decimal(self.bytes) if self.bytes else "?", *self.sizes))


def shown(text: LockText) -> Iterator[str]:
    """The lines that tell of a file. Raises LockFileError."""
    for k, section in enumerate(text.sections.values()):
        if k:
            yield ""
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    parts = section.tree()
    settings = ", ".join(line.text for line in parts.get(SETTINGS, ()))
    yield f"graph {section.name}"
    if programs := parts.get(PROGRAMS):
        yield f"{counted(len(programs), 'program')}: {', '.join(line.text for line in programs)}; {settings}"
        yield from (f"{line.text}: {_told(line.below)}" for line in parts.get(DECISIONS, ()))
        return
    decided = {line.text: line.below for line in parts.get(DECISIONS, ())}
    rows: list[tuple[Stake, str, str, str]] = []
    for call in parts.get(CALLS, ()):
        _, _, place = call.text.partition(" ")
        runs = next((b.text.removeprefix("runs ") for b in call.below if b.text.startswith("runs ")), "")
        rows.append((stake_of(call), call.text, runs, _told(decided.pop(place, ()))))
    calls = len(rows)
    rows += [(Stake(0), place, "", _told(below)) for place, below in decided.items()]
    rows.sort(key=lambda row: -row[0].bytes)
    kernels = sum(call.text.startswith("kernel ") for call in parts.get(CALLS, ()))
    saved = f", {counted(len(parts[SAVED]), 'result')} saved for the backward" if SAVED in parts else ""
    told = f"{counted(kernels, 'kernel')}, {counted(calls - kernels, 'library call')}"
    told += f", {counted(len(parts.get(SCHEDULES, ())), 'schedule')}{saved}"
    yield f"{told}; {settings}"
    yield from _table(("bytes", "place", "runs", "decided"), [(str(a), b, c, d) for a, b, c, d in rows])


def stake_of(call: LockLine) -> Stake:
    """What a call makes."""
    total, sizes = 0, dict[str, None]()
    for line in call.below:
        if line.text.startswith("gives ") and (found := list(_TYPE.finditer(line.text.partition(", over ")[0]))):
            dtype = getattr(torch, found[-1]["dtype"], None)
            nbytes = dtype.itemsize if isinstance(dtype, torch.dtype) else 1
            for size in filter(None, found[-1]["shape"].split(", ")):
                if size.isdecimal():
                    nbytes *= int(size)
                else:
                    sizes[size] = None
            total += nbytes
    return Stake(total, tuple(sizes))


def _told(below: Sequence[LockLine]) -> str:
    return ", ".join(line.text for line in below)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head) - 1)]
    for row in (head, *rows):
        yield "  ".join([row[0].rjust(widths[0]), *(c.ljust(w) for c, w in zip(row[1:], widths[1:])), row[-1]]).rstrip()
