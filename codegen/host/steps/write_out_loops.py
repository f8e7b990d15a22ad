"""Steps that repeat written out, under names of their own each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from .program import HostProgram
from .step import Free, HostStep, Repeat, Return


def write_out_loops(program: HostProgram) -> HostProgram:
    """The program with steps that repeat as often as they run, under names of their own each time."""
    if not any(isinstance(s, Repeat) for s in program.steps):
        return program
    arena = program.arena
    writer = _LoopWriter({} if arena is None else dict(arena.offsets))
    begin, end = 0, None
    for numbers, step in program.numbered():
        if arena is not None and arena.begin in numbers:
            begin = len(writer.steps)
        writer.step(step)
        if arena is not None and arena.end in numbers:
            end = len(writer.steps) - 1
    unused, left = _not_freed(program, writer.steps)
    steps = (*unused, *writer.steps[:-1], *left, *writer.steps[-1:])
    if arena is not None:
        last = len(steps) if end is None else end + len(unused)  # some is held to the end
        arena = replace(arena, offsets=writer.offsets, begin=begin + len(unused), end=last)
    return replace(program, steps=steps, arena=arena)


class _LoopWriter:
    def __init__(self, offsets: dict[str, sympy.Expr]) -> None:
        self.steps: list[HostStep] = []
        # Places in the arena.
        self.offsets = offsets
        # What names stand for now, what leaves the program, and what is still needed under another name.
        self.now: dict[str, str] = {}
        self.leaving: dict[str, str] = {}
        self.held: set[str] = set()

    def name(self, name: str) -> str:
        return self.now.get(name, name)

    def step(self, step: HostStep) -> None:
        match step:
            case Repeat():
                self.repeat(step)
            case Free(names):
                # What leaves the program, or is needed behind a loop that carries it, has one name where it had two.
                forgotten = tuple(n for n in map(self.name, names) if n not in self.held)
                self.steps += [Free(forgotten)] if forgotten else []
            case Return():
                self.steps.append(step.renamed(lambda name: self.leaving.get(name) or self.name(name)))
            case _:
                self.steps.append(step.renamed(self.name))

    def repeat(self, loop: Repeat) -> None:
        for _, following, initial in reversed(loop.carried):
            self.now[following] = self.name(initial)
        begun = {self.name(initial) for name, _, initial in loop.carried if name != initial} - self.held
        self.held |= begun
        for time in range(loop.times):
            for name, following, _ in loop.carried:
                self.now[name] = self.name(following)
            self.now |= {name: each[time] for name, each in loop.taken.items()}
            for step in loop.steps:
                for name in step.facts.makes:
                    self.now[name] = f"{name}.{time}"
                    if name in self.offsets:
                        self.offsets[self.now[name]] = self.offsets[name]
                self.step(step)
            self.leaving |= {each[time]: self.name(name) for name, each in loop.kept.items()}
            self.held.update(self.leaving.values())
        self.held -= begun
        for name in {n for step in loop.steps for n in step.facts.makes}:
            self.offsets.pop(name, None)


def _not_freed(program: HostProgram, steps: Sequence[HostStep]) -> tuple[list[Free], list[Free]]:
    """Steps that forget at the beginning what nobody reads, and at the end what is left."""
    read = {name for step in steps for name in step.facts.needs}
    left = dict.fromkeys(n for n in program.inputs if n in read)
    for step in steps:
        left.update(dict.fromkeys(step.facts.makes))
        for name in step.facts.reads if isinstance(step, Return) else step.facts.frees:
            left.pop(name, None)
    unused = tuple(n for n in program.inputs if n not in read)
    begin, end = ([Free(tuple(names))] if names else [] for names in (unused, left))
    return begin, end
