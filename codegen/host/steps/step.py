"""The steps of host programs, and what passes and printers ask of each.

A program is made of planned steps; those that only ``resolve`` makes are in ``resolved.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from ....ir.graph.graph import ArgumentRef, GraphOutput, Library, Ref, TensorType
from ....ir.graph.rename import Naming, renamed_call
from .kernel_use import KernelUse


@dataclass(frozen=True, slots=True)
class Facts:
    """What a step does with names, memory and sizes.

    It ``reads`` tensors and other values, of which it ``wants`` some as tensors, where an address would not do, and of
    which it has no use for the memory where it only ``looks`` at their layout. It ``makes`` names: some ``allocates``
    memory of their own, of a type; each that ``shares`` looks at the memory of another. Names that it ``frees`` stand
    for nothing behind it. ``sizes`` are the expressions that it computes, in the order in which a text has them;
    ``devices`` where it runs a kernel or makes tensors.
    """

    reads: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    looks: bool = False
    makes: tuple[str, ...] = ()
    allocates: tuple[tuple[str, TensorType], ...] = ()
    shares: tuple[tuple[str, str], ...] = ()
    frees: tuple[str, ...] = ()
    sizes: tuple[sympy.Basic, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """The names that have to stand for something."""
        return self.reads or self.frees

    @property
    def touches(self) -> tuple[str, ...]:
        """What has to have memory."""
        return () if self.looks else self.reads

    @property
    def symbols(self) -> set[sympy.Symbol]:
        return symbols_in(self.sizes)


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step of a host program. Each kind tells of itself, so that nobody else has to know them all."""

    _facts: Facts | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            object.__setattr__(self, "_facts", self.told())
        assert self._facts is not None
        return self._facts

    def told(self) -> Facts:
        return Facts()

    def renamed(self, name: Naming) -> HostStep:
        """The step with its tensors and other values under other names."""
        return self


@dataclass(frozen=True, slots=True)
class Item:
    """What lies at ``position`` of the list ``name``."""

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class BindSize(HostStep):
    """``symbol`` is dimension ``dim`` of the tensor ``source``, or its stride where ``stride``; or the integer
    ``source``."""

    symbol: sympy.Symbol
    source: str | Item
    dim: int | None = None
    stride: bool = False
    # The value read is ``scale * symbol + shift``.
    scale: int = 1
    shift: int = 0

    def told(self) -> Facts:
        reads = _names((self.source,))
        return Facts(reads, reads, looks=True)

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, source=_renamed(self.source, name))


@dataclass(frozen=True, slots=True)
class Allocate(HostStep):
    """Memory for a result, not initialised; ``rounded`` where its storage may be longer than the result."""

    name: str
    type: TensorType
    rounded: bool = False

    def told(self) -> Facts:
        name, kind = self.name, self.type
        return Facts(makes=(name,), allocates=((name, kind),), sizes=_layout(kind), devices=(kind.device,))

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name))


@dataclass(frozen=True, slots=True)
class Reuse(HostStep):
    """``name`` takes over the memory of ``source``, which nobody reads any more and whose type is the same."""

    name: str
    source: str

    def told(self) -> Facts:
        name, source = self.name, self.source
        return Facts(reads=(source,), frees=(source,), makes=(name,), shares=((name, source),))

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name), source=name(self.source))


@dataclass(frozen=True, slots=True)
class WriteOver(HostStep):
    """``name`` is the memory of ``target``, an input or what dies here, that the launch after this one writes over."""

    name: str
    target: str

    def told(self) -> Facts:
        return Facts(reads=(self.target,), makes=(self.name,), shares=((self.name, self.target),))

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name), target=name(self.target))


@dataclass(frozen=True, slots=True)
class Launch(HostStep):
    """Run a kernel: ``tensors`` are inputs then outputs, those that are inputs once.

    A kernel over a table does the work of ``count`` calls: tensors and sizes are those of one call after the other.
    """

    use: KernelUse
    tensors: tuple[str, ...]
    sizes: tuple[sympy.Expr, ...]
    device: str
    comment: str = ""
    count: int = 1

    def told(self) -> Facts:
        wants = () if self.use.by_pointer else self.tensors
        return Facts(reads=self.tensors, wants=wants, sizes=self.sizes, devices=(self.device,))

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, tensors=tuple(map(name, self.tensors)))


@dataclass(frozen=True, slots=True)
class CallLibrary(HostStep):
    """Call an op (``target`` as in ``Library``) and bind its results.

    ``over`` is the operand, or other memory, in which the one result is made, "" for none. ``blocks`` are the types of
    results that lie in blocks of the CPU's pool where they are large, those that are ``rounded`` in longer ones.
    """

    node: Library
    comment: str = ""
    over: str = ""
    blocks: tuple[TensorType, ...] = ()
    rounded: tuple[str, ...] = ()

    def told(self) -> Facts:
        names, types = self.node.names, self.node.types
        given = tuple(leaves((self.node.args, tuple(v for _, v in self.node.kwargs))))
        named = [a.name for a in given if isinstance(a, (Ref, ArgumentRef))]
        reads = tuple(dict.fromkeys([*named, self.over] if self.over else named))
        made = tuple((n, t) for n, t in zip(names, types, strict=True) if t is not None)
        return Facts(
            reads, reads, makes=names, allocates=() if self.over else made,
            shares=tuple((n, self.over) for n in names) if self.over else (),
            sizes=(*_computed(given), *self.block_sizes),
            devices=tuple(t.device for _, t in made),
        )  # fmt: skip

    def renamed(self, name: Naming) -> HostStep:
        over, rounded = name(self.over) if self.over else "", tuple(map(name, self.rounded))
        return CallLibrary(renamed_call(self.node, name), self.comment, over, self.blocks, rounded)

    @property
    def block_sizes(self) -> tuple[sympy.Basic, ...]:
        """Layouts of all results, and the bytes of those that may be large."""
        if not self.blocks:
            return ()
        layouts = (_layout(t) for t in self.node.types if t is not None)
        return (*(s for layout in layouts for s in layout), *(t.nbytes for t in self.blocks))


@dataclass(frozen=True, slots=True)
class CheckLayout(HostStep):
    """Bring a library's result, or an argument, into the layout that the graph was compiled for, should it have
    another. ``op`` is the user's own op that gives it, whose fake kernel may have promised something else."""

    name: str
    type: TensorType
    op: str = ""

    def told(self) -> Facts:
        return Facts(reads=(self.name,), wants=(self.name,), looks=True, sizes=_layout(self.type))

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name))


@dataclass(frozen=True, slots=True)
class MakeView(HostStep):
    """``name`` looks at the memory of ``source`` from ``offset`` elements in; to autograd as well where ``tracked``."""

    name: str
    type: TensorType
    source: str
    offset: sympy.Expr
    tracked: bool = False

    def told(self) -> Facts:
        return Facts(
            reads=(self.source,), makes=(self.name,), shares=((self.name, self.source),),
            sizes=(*_layout(self.type), self.offset), devices=(self.type.device,),
        )  # fmt: skip

    def renamed(self, name: Naming) -> HostStep:
        return replace(self, name=name(self.name), source=name(self.source))


@dataclass(frozen=True, slots=True)
class LimitMemory(HostStep):
    """Refuse to go on, with ``message``, where what the program is to hold at once, the greatest of ``peaks`` in bytes,
    is above ``limit``."""

    peaks: tuple[sympy.Expr, ...]
    limit: int
    message: str

    def told(self) -> Facts:
        return Facts(sizes=self.peaks)


@dataclass(frozen=True, slots=True)
class Free(HostStep):
    """Forget tensors; their memory goes with the last name for it."""

    names: tuple[str, ...]

    def told(self) -> Facts:
        return Facts(frees=self.names)

    def renamed(self, name: Naming) -> HostStep:
        return Free(tuple(map(name, self.names)))


@dataclass(frozen=True, slots=True)
class Return(HostStep):
    """The results."""

    values: tuple[GraphOutput | Item, ...]

    def told(self) -> Facts:
        reads = _names(self.values)
        return Facts(reads, reads, looks=True, sizes=_computed(self.values))

    def renamed(self, name: Naming) -> HostStep:
        return Return(tuple(_renamed(v, name) for v in self.values))


@dataclass(frozen=True, slots=True)
class Repeat(HostStep):
    """``steps`` again and again: those of one of the layers that are alike, under the names that it has there.

    ``taken`` are inputs of the program by their names in the steps, and ``kept`` what leaves it: what each is called
    outside, time by time. What is ``carried`` has three names: before each time the first becomes what the second was,
    which the steps or the next of these pairs set anew, and before all of them the second becomes what the third is.
    """

    steps: tuple[HostStep, ...]
    times: int
    taken: Mapping[str, tuple[str, ...]]
    kept: Mapping[str, tuple[str, ...]]
    carried: tuple[tuple[str, str, str], ...]


# --- what steps are made of -------------------------------------------------------------------------------------------


def leaves(arg: Any) -> Iterator[Any]:
    """What an argument of a library call is made of, in order."""
    match arg:
        case tuple() | list():
            for a in arg:
                yield from leaves(a)
        case dict():
            yield from leaves(tuple(arg.values()))
        case slice():
            yield from leaves((arg.start, arg.stop, arg.step))
        case _:
            yield arg


def symbols_in(sizes: tuple[sympy.Basic, ...]) -> set[sympy.Symbol]:
    """The size symbols of expressions."""
    found = (e.free_symbols for e in sizes if isinstance(e, sympy.Basic) and not e.is_Integer)
    return {s for symbols in found for s in symbols if isinstance(s, sympy.Symbol)}


def _names(values: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(v for v in values if isinstance(v, str))


def _renamed(value: Any, name: Naming) -> Any:
    return name(value) if isinstance(value, str) else value


def _layout(kind: TensorType) -> tuple[sympy.Basic, ...]:
    return (*kind.shape, *kind.strides)


def _computed(values: tuple[Any, ...]) -> tuple[sympy.Basic, ...]:
    """The sizes among values that are no numbers."""
    return tuple(v for v in values if isinstance(v, sympy.Basic) and v.free_symbols)
