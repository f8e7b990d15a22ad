"""The bytes of loads that a thread has in flight while it waits for memory.

A memory of some latency gives, in that time, as many bytes as were asked for before anybody waited (Little's law). So
the code is gone through with a clock that loads alone advance: a load comes one latency after it was issued, and what
uses it waits until then. All bytes over all the time is what is in flight, on average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..triton.report import access_bytes as amd_bytes
from .code import Code
from .sass import access_bytes as sass_bytes
from .walk import walk

_SASS_REGISTER = re.compile(r"(?<![\w.])R(\d+)(\.64)?")
_AMD_WAIT = re.compile(r"\bvmcnt\((\d+)\)")
# Copies whose size is in a descriptor, so that instructions do not tell it.
_DESCRIBED = ("UTMALDG", "UBLKCP", "UTMAPF")


@dataclass(slots=True, eq=False)
class _Load:
    """Bytes on their way: ``due`` is when they come, ``registers`` where to, ``group`` that of copies to shared memory
    that are waited for together."""

    due: float
    registers: frozenset[int]
    group: int = -1


@dataclass(slots=True)
class _Thread:
    code: Code
    clock: float = 0.0
    asked: float = 0.0
    group: int = 0
    under_way: list[_Load] = field(default_factory=list)

    def wait(self, loads: Sequence[_Load]) -> None:
        for load in loads:
            self.clock = max(self.clock, load.due)
            self.under_way.remove(load)

    def issue(self, size: int, registers: frozenset[int], group: int = -1) -> None:
        self.asked += size
        self.under_way.append(_Load(self.clock + 1.0, registers, group))

    def mark(self) -> tuple[float, ...]:
        return self.clock, self.asked

    def later(self, sums: tuple[float, ...]) -> None:
        clock, asked = sums
        self.clock, self.asked = self.clock + clock, self.asked + asked
        for load in self.under_way:
            load.due += clock

    def step(self, k: int) -> None:
        opcode, operands = self.code.instructions[k].opcode, self.code.instructions[k].operands
        if opcode[0].isupper():
            _sass(opcode, operands, self)
        else:
            _amdgcn(opcode, operands, self)


def bytes_in_flight(code: Code, runs: Sequence[float]) -> float | None:
    """Bytes that each thread has in flight, on average over the time in which it waits; 0.0 where nothing is loaded.

    ``runs`` is how often each instruction runs (``Counted.runs``). None where copies are made whose size the code does
    not tell (tiles by descriptors).
    """
    if any(n > 0 and i.opcode.startswith(_DESCRIBED) for n, i in zip(runs, code.instructions, strict=True)):
        return None
    thread = _Thread(code)
    walk(code, runs, thread)
    return thread.asked / max(thread.clock, 1.0)


def _sass(opcode: str, operands: Sequence[str], thread: _Thread) -> None:
    parts = opcode.split(".")
    stem = parts[0]
    used = frozenset(n for o in operands for n in _named(o))
    thread.wait([w for w in thread.under_way if w.registers & used])
    thread.under_way = [w for w in thread.under_way if w.due > thread.clock]
    if stem in ("LDG", "LDGSTS"):
        size = sass_bytes(opcode)
        if stem == "LDGSTS":
            thread.issue(size, frozenset(), thread.group)
            return
        first = [n for o in operands if "[" not in o for n in _named(o)]
        each = math.ceil(size / 4 / max(len(first), 1))
        thread.issue(size, frozenset(n + j for n in first for j in range(each)))
    elif stem == "LDGDEPBAR":
        thread.group += 1
    elif stem == "DEPBAR" and len(operands) > 1:
        left = int(operands[1], 0)
        thread.wait([w for w in thread.under_way if 0 <= w.group < thread.group - left])


def _named(operand: str) -> Iterator[int]:
    for match in _SASS_REGISTER.finditer(operand):
        yield int(match[1])
        if match[2]:
            yield int(match[1]) + 1


def _amdgcn(opcode: str, operands: Sequence[str], thread: _Thread) -> None:
    if opcode == "s_waitcnt":
        if match := _AMD_WAIT.search(" ".join(operands)):
            left = int(match[1])
            thread.wait(thread.under_way[: len(thread.under_way) - left] if left else list(thread.under_way))
    elif opcode.startswith(("global_store", "buffer_store")):
        # Stores are waited for in the same order, and are done by then.
        thread.under_way.append(_Load(thread.clock, frozenset()))
    elif opcode.startswith(("global_load", "buffer_load")):
        thread.issue(amd_bytes(opcode.split("_", 2)[2]), frozenset())
