"""Steps of a host program under other names, and those that repeat written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy

from ....ir.graph.graph import Library, Ref
from .frame import reads
from .program import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostProgram,
    Launch,
    MakeView,
    Repeat,
    Return,
    Reuse,
    Step,
    WriteOver,
)


def names_of(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors and other values that a step reads or forgets, and the tensors that it binds."""
    match step:
        case Free(names):
            return names, ()
        case Allocate(name) | Reuse(name) | WriteOver(name) | MakeView(name):
            return reads(step), (name,)
        case CallLibrary(node):
            return reads(step), node.names
    return reads(step), ()


def renamed_step(step: Step, name: Callable[[str], str]) -> Step:
    """A step with its tensors under other names."""
    match step:
        case Allocate(made, kind):
            return Allocate(name(made), kind)
        case Reuse(made, source):
            return Reuse(name(made), name(source))
        case WriteOver(made, target):
            return WriteOver(name(made), name(target))
        case Launch(tensors=tensors):
            return replace(step, tensors=tuple(map(name, tensors)))
        case CallLibrary(node, comment, over):
            return CallLibrary(renamed_call(node, name), comment, name(over) if over else "")
        case CheckLayout(made, kind, op):
            return CheckLayout(name(made), kind, op)
        case MakeView(made, kind, source, offset, tracked):
            return MakeView(name(made), kind, name(source), offset, tracked)
        case BindSize(source=source):
            return replace(step, source=name(source))
        case Free(names):
            return Free(tuple(map(name, names)))
        case Return(values):
            return Return(tuple(name(v) if isinstance(v, str) else v for v in values))
    return step


def renamed_call(node: Library, name: Callable[[str], str]) -> Library:
    """A library call with its tensors under other names."""
    args = tuple(_argument(a, name) for a in node.args)
    kwargs = tuple((k, _argument(v, name)) for k, v in node.kwargs)
    return replace(node, names=tuple(map(name, node.names)), args=args, kwargs=kwargs)


def _argument(arg: Any, name: Callable[[str], str]) -> Any:
    match arg:
        case Ref(old):
            return Ref(name(old))
        case tuple():
            return tuple(_argument(a, name) for a in arg)
        case list():
            return [_argument(a, name) for a in arg]
        case dict():
            return {k: _argument(v, name) for k, v in arg.items()}
    return arg


def written_out(program: HostProgram) -> HostProgram:
    """The program with steps that repeat as often as they run, under names of their own each time."""
    if not any(isinstance(s, Repeat) for s in program.steps):
        return program
    arena = program.arena
    writer = _LoopWriter({} if arena is None else dict(arena.offsets))
    begin = end = 0
    for numbers, step in program.numbered():
        if arena is not None and arena.begin in numbers:
            begin = len(writer.steps)
        writer.step(step)
        if arena is not None and arena.end in numbers:
            end = len(writer.steps) - 1
    unused, left = _not_freed(program, writer.steps)
    steps = (*unused, *writer.steps[:-1], *left, *writer.steps[-1:])
    if arena is not None:
        arena = replace(arena, offsets=writer.offsets, begin=begin + len(unused), end=end + len(unused))
    return replace(program, steps=steps, arena=arena)


class _LoopWriter:
    def __init__(self, offsets: dict[str, sympy.Expr]) -> None:
        self.steps: list[Step] = []
        # Places in the arena.
        self.offsets = offsets
        # What names stand for now, and what leaves the program.
        self.now: dict[str, str] = {}
        self.leaving: dict[str, str] = {}

    def name(self, name: str) -> str:
        return self.now.get(name, name)

    def step(self, step: Step) -> None:
        match step:
            case Repeat():
                self.repeat(step)
            case Return():
                self.steps.append(renamed_step(step, lambda name: self.leaving.get(name) or self.name(name)))
            case _:
                self.steps.append(renamed_step(step, self.name))

    def repeat(self, loop: Repeat) -> None:
        for _, following, initial in reversed(loop.carried):
            self.now[following] = self.name(initial)
        for time in range(loop.times):
            for name, following, _ in loop.carried:
                self.now[name] = self.name(following)
            self.now |= {name: each[time] for name, each in loop.taken.items()}
            for step in loop.steps:
                for name in names_of(step)[1]:
                    self.now[name] = f"{name}.{time}"
                    if name in self.offsets:
                        self.offsets[self.now[name]] = self.offsets[name]
                self.steps.append(renamed_step(step, self.name))
            self.leaving |= {each[time]: self.name(name) for name, each in loop.kept.items()}
        for name in {n for step in loop.steps for n in names_of(step)[1]}:
            self.offsets.pop(name, None)


def _not_freed(program: HostProgram, steps: Sequence[Step]) -> tuple[list[Free], list[Free]]:
    """Steps that forget at the beginning what nobody reads, and at the end what is left."""
    read = {name for step in steps for name in names_of(step)[0]}
    left = dict.fromkeys(n for n in program.inputs if n in read)
    for step in steps:
        used, made = names_of(step)
        left.update(dict.fromkeys(made))
        if isinstance(step, (Free, Reuse, Return)):
            for name in used:
                left.pop(name, None)
    unused = tuple(n for n in program.inputs if n not in read)
    begin, end = ([Free(tuple(names))] if names else [] for names in (unused, left))
    return begin, end
