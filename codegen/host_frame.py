"""Where a native host program keeps its tensors: as tensors of torch's, as addresses, or in one arena.

A result that only kernels of ours read and write needs no tensor, just memory. What is small and of known size lies in
one arena, at an offset that no two share while both are wanted; the rest has memory of its own, as long as it is
wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sympy

from ..ir.graph import ArgumentRef, Ref, TensorType
from .host import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostProgram,
    Launch,
    MakeView,
    Return,
    Reuse,
    Step,
    WriteOver,
)

# What has more bytes is allocated by itself: that costs less than the kernel that fills it, and ends with its last use.
ARENA_MEMBER = 256 << 10
# What an arena may have in all; those that find no room are allocated by themselves.
ARENA_BYTES = 4 << 20
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """``roots`` gives each name the one that its memory or tensor was made under (views are their own); ``tensors`` are
    the roots that ops, callers or views of torch's see; ``arena`` the offsets in bytes of roots in it; ``dying`` the
    inputs that are forgotten before the program ends; ``end`` the first step after which nothing runs."""

    roots: Mapping[str, str]
    tensors: frozenset[str]
    arena: Mapping[str, int] = field(default_factory=dict)
    arena_bytes: int = 0
    dying: frozenset[str] = frozenset()
    end: int = 0


def plan_frame(program: HostProgram) -> Frame:
    """The frame of a program."""
    roots = _roots(program)
    tensors = _tensors(program, roots)
    runs = [k for k, s in enumerate(program.steps) if isinstance(s, (Launch, CallLibrary, Allocate, CheckLayout))]
    end = runs[-1] + 1 if runs else 0
    freed = {n for s in program.steps[:end] if isinstance(s, Free) for n in s.names}
    arena, size = _arena(program, roots, tensors)
    return Frame(roots, tensors, arena, size, frozenset(freed & program.inputs.keys()), end)


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
        case Return(values):
            return sizes_in(tuple(v for v in values if not isinstance(v, str)))
    return set()


def sizes_in(arg: object) -> set[sympy.Symbol]:
    """The size symbols in an argument of a library call, or in whatever holds expressions."""
    match arg:
        case sympy.Basic():
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


def storage_bytes(kind: TensorType) -> int | None:
    """The bytes between the first element and the end of the last one; None where sizes decide it."""
    if not all(e.is_Integer for e in (*kind.shape, *kind.strides)):
        return None
    if any(n == 0 for n in kind.shape):
        return 0
    last = sum((int(n) - 1) * int(s) for n, s in zip(kind.shape, kind.strides, strict=True))
    return (last + 1) * kind.dtype.itemsize


@dataclass(slots=True)
class _Member:
    name: str
    size: int
    first: int
    last: int
    offset: int = 0

    def meets(self, other: _Member) -> bool:
        return self.first <= other.last and other.first <= self.last


def _arena(program: HostProgram, roots: Mapping[str, str], tensors: frozenset[str]) -> tuple[dict[str, int], int]:
    """Offsets of the members, the largest placed first, each at the lowest place that is free while it is wanted."""
    base = dict(roots)
    members: dict[str, _Member] = {}
    for k, step in enumerate(program.steps):
        match step:
            case Allocate(name, kind):
                size = storage_bytes(kind)
                if name not in tensors and size is not None and size <= ARENA_MEMBER:
                    members[name] = _Member(name, -(-size // _ALIGN) * _ALIGN, k, k)
            case MakeView(name, _, source):
                base[name] = base[source]
            case Reuse(name, source) | WriteOver(name, source):
                base[name] = base[source]
        for name in reads(step):
            member = members.get(base.get(name, name))
            if member is not None:
                member.last = k
    placed: list[_Member] = []
    for member in sorted(members.values(), key=lambda m: (-m.size, m.first)):
        around = sorted((m for m in placed if m.meets(member)), key=lambda m: m.offset)
        for other in around:
            if member.offset + member.size <= other.offset:
                break
            member.offset = max(member.offset, other.offset + other.size)
        if member.offset + member.size <= ARENA_BYTES:
            placed.append(member)
    return {m.name: m.offset for m in placed}, max((m.offset + m.size for m in placed), default=0)
