"""Where a native host program keeps its tensors: as tensors of torch's, or as addresses.

A result that only kernels of ours read and write needs no tensor, just memory: in the arena of the program
(``plan_memory.py``), or of its own as long as it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy

from ....ir.graph.graph import ArgumentRef, Ref, TensorType
from .program import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostProgram,
    Launch,
    LimitMemory,
    MakeView,
    Return,
    Reuse,
    Step,
    WriteOver,
)


@dataclass(frozen=True, slots=True)
class Frame:
    """``roots`` gives each name the one that its memory or tensor was made under (views are their own); ``tensors`` are
    the roots that ops, callers or views of torch's see; ``dying`` the inputs that are forgotten before the program
    ends; ``end`` the first step after which nothing runs."""

    roots: Mapping[str, str]
    tensors: frozenset[str]
    dying: frozenset[str] = frozenset()
    end: int = 0


def plan_frame(program: HostProgram) -> Frame:
    """The frame of a program."""
    roots = _roots(program)
    tensors = _tensors(program, roots)
    runs = [k for k, s in enumerate(program.steps) if isinstance(s, (Launch, CallLibrary, Allocate, CheckLayout))]
    end = runs[-1] + 1 if runs else 0
    freed = {n for s in program.steps[:end] if isinstance(s, Free) for n in s.names}
    return Frame(roots, tensors, frozenset(freed & program.inputs.keys()), end)


def reads(step: Step) -> tuple[str, ...]:
    """The names of tensors and other values that a step reads, sizes apart."""
    match step:
        case BindSize(_, source):
            return (source,)
        case Reuse(_, source) | MakeView(_, _, source, _):
            return (source,)
        case WriteOver(_, target):
            return (target,)
        case Launch():
            return step.tensors
        case CallLibrary(node, _, over):
            found = [*mentioned((node.args, tuple(v for _, v in node.kwargs))), over]
            return tuple(dict.fromkeys(n for n in found if n))
        case CheckLayout(name):
            return (name,)
        case Return(values):
            return tuple(v for v in values if isinstance(v, str))
    return ()


def mentioned(arg: object) -> Iterator[str]:
    """The values that an argument of a library call names."""
    match arg:
        case Ref(name) | ArgumentRef(name):
            yield name
        case tuple() | list():
            for a in arg:
                yield from mentioned(a)
        case dict():
            for a in arg.values():
                yield from mentioned(a)
        case slice():
            yield from mentioned((arg.start, arg.stop, arg.step))


def step_sizes(step: Step) -> set[sympy.Symbol]:
    """The size symbols that a step computes with."""
    match step:
        case Allocate(_, kind) | CheckLayout(_, kind):
            return sizes_in(kind)
        case MakeView(_, kind, _, offset):
            return sizes_in((kind, offset))
        case Launch():
            return sizes_in(step.sizes)
        case CallLibrary(node):
            return sizes_in((node.args, tuple(v for _, v in node.kwargs)))
        case LimitMemory(peaks):
            return sizes_in(peaks)
        case Return(values):
            return sizes_in(tuple(v for v in values if not isinstance(v, str)))
    return set()


def sizes_in(arg: object) -> set[sympy.Symbol]:
    """The size symbols in an argument of a library call, or in whatever holds expressions."""
    match arg:
        case sympy.Basic():
            if arg.is_Integer:
                return set()
            return {s for s in arg.free_symbols if isinstance(s, sympy.Symbol)}
        case tuple() | list():
            return set().union(*(sizes_in(a) for a in arg))
        case dict():
            return set().union(*(sizes_in(a) for a in arg.values()))
        case slice():
            return sizes_in((arg.start, arg.stop, arg.step))
        case TensorType():
            return sizes_in((arg.shape, arg.strides))
    return set()


def _roots(program: HostProgram) -> dict[str, str]:
    roots = {name: name for name in program.arguments}
    for step in program.steps:
        match step:
            case Allocate(name) | MakeView(name):
                roots[name] = name
            case Reuse(name, source) | WriteOver(name, source):
                roots[name] = roots[source]
            case CallLibrary(node, _, over):
                roots.update({n: roots[over] if over else n for n in node.names})
    return roots


def _tensors(program: HostProgram, roots: Mapping[str, str]) -> frozenset[str]:
    found = {roots[n] for n in program.inputs}
    views: dict[str, str] = {}
    for step in program.steps:
        match step:
            case CallLibrary(node):
                found.update(roots[n] for n in (*reads(step), *node.names))
            case Return() | CheckLayout() | BindSize():
                found.update(roots[n] for n in reads(step))
            case Launch(use) if not use.by_pointer:
                found.update(roots[n] for n in step.tensors)
            case MakeView(name, _, source):
                views[roots[name]] = roots[source]
    for view in reversed(views):
        if view in found:
            found.add(views[view])
    return frozenset(found)
