"""Machine code as a list of instructions, whatever the vendor, and its loops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Flow(Enum):
    """Where control goes behind an instruction: on; to a label too, or there alone; nowhere; or on where lanes are
    left."""

    ON = "on"
    BRANCH = "branch"
    JUMP = "jump"
    END = "end"
    PARTIAL_END = "partial end"
    # A call of a function of the kernel's own code: compilers leave what happens rarely there.
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Control:
    """What the assembler tells the scheduler of a warp: ``stall`` are clocks until its next instruction; ``sets`` and
    ``frees`` the counters (0 to 5, -1 for none) that rise until its result is there, and until its operands are read;
    ``waits`` those that have to be zero before it."""

    stall: int = 1
    sets: int = -1
    frees: int = -1
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Instruction:
    """``opcode`` has its modifiers ("LDG.E.128"), ``line`` that of the kernel's text, 0 where it is of
    another file; ``target`` is the label that control may go to, and ``issues`` whether it takes a slot of the vector
    units. ``control`` is what only NVIDIA's machine code has."""

    opcode: str
    operands: tuple[str, ...] = ()
    predicate: str = ""
    line: int = 0
    flow: Flow = Flow.ON
    target: str = ""
    issues: bool = True
    control: Control = Control()


@dataclass(frozen=True, slots=True)
class Code:
    """The instructions of a kernel in order; ``labels`` are the places of those that labels stand before."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class MachineLoop:
    """A natural loop: ``first`` is the instruction where it is entered, ``latches`` those that go back there, ``body``
    all of it. Inner loops are part of the body."""

    first: int
    latches: tuple[int, ...]
    body: frozenset[int]


@dataclass(slots=True)
class Blocks:
    """The basic blocks of code that control reaches, by the places of their first instructions."""

    code: Code
    ends: dict[int, int] = field(default_factory=dict)
    next: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _known: dict[int, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, code: Code) -> Blocks:
        made, many = cls(code), len(code.instructions)
        starts = {0, *code.labels.values()}
        starts |= {k + 1 for k, i in enumerate(code.instructions) if i.flow not in (Flow.ON, Flow.CALL)}
        order = sorted(s for s in starts if s < many)
        ends = dict(zip(order, [*order[1:], many], strict=True))
        waiting = [0] if many else []
        while waiting:
            start = waiting.pop()
            if start not in made.next:
                made.ends[start] = ends[start]
                made.next[start] = made._after(ends[start] - 1)
                waiting += made.next[start]
        return made

    def _after(self, last: int) -> tuple[int, ...]:
        i = self.code.instructions[last]
        on = (last + 1,) if last + 1 < len(self.code.instructions) and i.flow not in (Flow.JUMP, Flow.END) else ()
        there = (self.code.labels[i.target],) if i.target and i.flow in (Flow.BRANCH, Flow.JUMP) else ()
        return tuple(dict.fromkeys((*on, *there)))

    def within(self, start: int) -> range:
        return range(start, self.ends[start])

    def loops(self) -> tuple[MachineLoop, ...]:
        """The natural loops, outer ones first."""
        dominators, before = self._dominators(), self._before()
        latches: dict[int, list[int]] = defaultdict(list)
        for start, following in self.next.items():
            for there in following:
                if there in dominators[start]:
                    latches[there].append(start)
        found = []
        for header, sources in latches.items():
            inside, waiting = {header}, list(sources)
            while waiting:
                block = waiting.pop()
                if block not in inside:
                    inside.add(block)
                    waiting += before[block]
            body = frozenset(k for b in inside for k in self.within(b))
            found.append(MachineLoop(header, tuple(self.ends[b] - 1 for b in sources), body))
        return tuple(sorted(found, key=lambda lp: (-len(lp.body), lp.first)))

    def _before(self) -> Mapping[int, Sequence[int]]:
        before: dict[int, list[int]] = defaultdict(list)
        for start, following in self.next.items():
            for there in following:
                before[there].append(start)
        return before

    def _dominators(self) -> Mapping[int, frozenset[int]]:
        if self._known:
            return self._known
        before, order = self._before(), sorted(self.next)
        everything = frozenset(order)
        found = {b: frozenset({b}) if b == 0 else everything for b in order}
        changed = True
        while changed:
            changed = False
            for b in order[1:]:
                met = frozenset.intersection(*(found[p] for p in before[b])) if before[b] else frozenset()
                if (new := met | {b}) != found[b]:
                    found[b], changed = new, True
        self._known = found
        return found

    def passed_over(self, loop: MachineLoop | None, loops: Sequence[MachineLoop]) -> Iterator[int]:
        """The blocks of one of all ``loops``, inner ones aside, that an iteration may leave out; of None, those outside
        loops that a program may leave out."""
        dominators = self._dominators()
        if loop is None:
            lasts = [b for b, following in self.next.items() if not following]
            inner = {k for other in loops for k in other.body}
        else:
            lasts = [b for b in self.next if self.ends[b] - 1 in loop.latches]
            inner = {k for other in loops if other.body < loop.body for k in other.body}
        for start in self.next:
            own = (loop is None or start in loop.body) and start not in inner
            if own and not all(start in dominators[b] for b in lasts):
                yield start

    def rare(self) -> Iterator[int]:
        """Instructions of blocks that call a function: what compilers leave for numbers that hardly occur."""
        for start in self.next:
            if any(self.code.instructions[k].flow is Flow.CALL for k in self.within(start)):
                yield from self.within(start)
