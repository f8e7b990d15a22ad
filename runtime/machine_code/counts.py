"""How often the instructions of a kernel run, and the slots of the vector units that a launch takes.

A multiprocessor issues an instruction for a warp in one slot a lane, so that code that moves few bytes a slot is bound
by its instructions, not by memory, however its accesses look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from .code import Blocks, Code, MachineLoop
from .counter import constant_runs
from .text_loops import TextLoop, text_loops


@dataclass(frozen=True, slots=True)
class Counted:
    """``runs`` by instruction: how often a thread of an average program executes it. ``guessed`` are the lines of the
    loops for which neither the text nor the code says how often they run (once is taken)."""

    code: Code
    runs: tuple[float, ...]
    guessed: tuple[int, ...] = ()

    @property
    def slots(self) -> float:
        """Slots that each thread of a program takes, on average."""
        return sum(r for r, i in zip(self.runs, self.code.instructions, strict=True) if i.issues)


def count_runs(code: Code, text: str, name: str, sizes: Mapping[str, int], grid: Sequence[int]) -> Counted:
    """Count a kernel's instructions for a call of given sizes; ``text`` is what it was compiled from."""
    blocks = Blocks.of(code)
    written = text_loops(text, name, sizes, grid)
    runs = [0.0] * len(code.instructions)
    for start in blocks.next:
        for k in blocks.within(start):
            runs[k] = 1.0
    guessed: list[int] = []
    loops = blocks.loops()
    for loop in loops:  # outer ones first, so that inner ones overwrite what is theirs
        around = runs[loop.first]
        constant = constant_runs(code, loop)
        text_loop = _written(code, loop, loops, written)
        if constant is not None:
            times = around * constant
        elif text_loop is not None and text_loop.runs is not None:
            times = text_loop.runs
        else:
            times = around
            guessed.append(text_loop.first if text_loop is not None else 0)
        for k in loop.body:
            if runs[k]:
                runs[k] = times
        for start in blocks.passed_over(loop, loops):
            # Of loops that the compiler made one, what the outer one has of its own; and branches of the text.
            part = frozenset(blocks.within(start))
            own = _holding(code, part, written)
            if own is not None and own.runs is not None and own.runs < times:
                for k in part:
                    runs[k] = own.runs
    for k in blocks.rare():
        runs[k] = 0.0
    return Counted(code, tuple(runs), tuple(guessed))


def _written(
    code: Code, loop: MachineLoop, loops: Sequence[MachineLoop], written: Sequence[TextLoop]
) -> TextLoop | None:
    """The loop of the text that a loop of the code was made from: the innermost of those that hold most of its lines,
    those of inner loops aside. Of loops that the compiler made one it is the inner one, however few lines that has."""
    inner = {k for other in loops if other is not loop and other.body < loop.body for k in other.body}
    own = loop.body - inner
    found = _holding(code, own, written)
    joined = (t for t in written if found is not None and t.within == found.first)
    return next((t for t in joined if _lines_of(code, own, t) > _lines_of(code, inner, t)), found)


def _lines_of(code: Code, part: Set[int], loop: TextLoop) -> int:
    return sum(loop.first <= (code.instructions[k].line or 0) <= loop.last for k in part)


def _holding(code: Code, part: Set[int], written: Sequence[TextLoop]) -> TextLoop | None:
    """The innermost loop or branch of the text that has most of the lines of instructions."""
    lines = [i for k in part if (i := code.instructions[k].line)]
    if not lines:
        return None
    holding = [(sum(t.first <= n <= t.last for n in lines), t) for t in written]
    most = [(n, t) for n, t in holding if 2 * n > len(lines)]
    return max(most, key=lambda found: found[1].first)[1] if most else None
