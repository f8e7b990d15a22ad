"""Loop nests: a tree of loops and blocks over buffers, the form that schedules rewrite and emitters read.

A ``Block`` is the unit of computation. It has its own axes; ``bindings`` say what value each axis takes in terms of
the loops around it, so that splitting or fusing loops changes bindings and never the body. Reads and writes are
derived from the body. Everything is immutable: a rewrite builds a new tree and keeps every object in which nothing
changed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from ..expr.dtypes import DType
from ..expr.monoid import Monoid
from ..expr.role import Role
from ..expr.symbols import SymbolTable
from ..expr.value import Expr, Index, Load, is_value, loads
from .hints import IN_PLACE, TABLE, Annotations
from .kinds import BLOCK_KINDS as BLOCK_KINDS
from .kinds import LoopKind as LoopKind


class Scope(enum.Enum):
    """Where a buffer lives: in memory that the caller gives, or inside one iteration of the bound or parallel loops."""

    GLOBAL = "global"
    SHARED = "shared"
    LOCAL = "local"


class AxisKind(enum.Enum):
    SPATIAL = "spatial"
    REDUCTION = "reduction"
    SCAN = "scan"
    SCATTER = "scatter"


class DimKind(enum.Enum):
    """Of which dimensions of its function an axis is one.

    Stages have a result for each point of the rows, or of rows and inner dimensions; extra dimensions are of single
    stages. An axis that a schedule made of memory alone is a row.
    """

    ROW = "row"
    INNER = "inner"
    EXTRA = "extra"


for _enum in (Scope, AxisKind, DimKind):
    _enum.__hash__ = object.__hash__  # type: ignore[method-assign]


# Bytes to which the allocators of torch align memory at least; callers check what comes from outside.
PARAM_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Buffer:
    """A typed array: ``shape`` and ``strides`` in elements; ``align`` is the known alignment of its first element in
    bytes."""

    name: str
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    dtype: DType
    scope: Scope = Scope.GLOBAL
    align: int = 0

    def offset(self, indices: tuple[sympy.Expr, ...]) -> sympy.Expr:
        """Linear element offset of an access whose indices are all sympy expressions."""
        return sympy.Add(*(i * s for i, s in zip(indices, self.strides, strict=True)))

    @property
    def numel(self) -> sympy.Expr:
        return sympy.Mul(*self.shape)


def contiguous_strides(shape: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """Row-major strides in elements."""
    strides: list[sympy.Expr] = []
    step: sympy.Expr = sympy.S.One
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Axis:
    """One iteration axis of a block: ``var`` runs over ``range(extent)``.

    ``kind`` is what the block does along it, ``dim`` what it is in the function that was lowered.
    """

    var: sympy.Symbol
    extent: sympy.Expr
    kind: AxisKind = AxisKind.SPATIAL
    dim: DimKind = DimKind.ROW


@dataclass(frozen=True, slots=True)
class Access:
    """A place that a block writes."""

    buffer: str
    indices: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[indices] = value``. An index that is a value is checked: out of range nothing is written, and whoever
    runs the nest says so. So it is for the targets of an update."""

    buffer: str
    indices: tuple[Index, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Update:
    """``targets = monoid.combine(targets, values)``, begun from the identity where the block's reduction and scan axes
    are all zero; an update that does not ``begins`` goes on from what the targets hold.

    Over scan axes iterations run in order, and statements after the update read the state so far: a store of it makes
    a prefix scan. Over scatter axes they run in order too, and any of them may write any element that differs in what
    the spatial axes say: a block that scatters goes on from what is there.

    ``values`` are lifted states, one per component of the monoid, as ``targets`` are.
    """

    monoid: Monoid
    targets: tuple[Access, ...]
    values: tuple[Expr, ...]
    begins: bool = True


Statement: TypeAlias = Store | Update


@dataclass(frozen=True, slots=True)
class Bound:
    """``lhs < rhs``, in loop variables: one conjunct of a block's predicate (a split's tail)."""

    lhs: sympy.Expr
    rhs: sympy.Expr


@dataclass(frozen=True, slots=True)
class Block:
    """Statements over ``axes``; ``bindings[k]`` is the value of ``axes[k]`` in the loops around the block.

    The body speaks of axis variables and size symbols only, never of loop variables. ``role`` is that of the stage that
    lowering made the block of.
    """

    name: str
    axes: tuple[Axis, ...]
    bindings: tuple[sympy.Expr, ...]
    body: tuple[Statement, ...]
    predicate: tuple[Bound, ...] = ()
    annotations: Annotations = ()
    role: Role | None = None

    @property
    def is_reduction(self) -> bool:
        return any(isinstance(s, Update) for s in self.body)

    @property
    def is_scan(self) -> bool:
        """Whether it updates a state along scan axes."""
        return self.is_reduction and any(a.kind is AxisKind.SCAN for a in self.axes)

    @property
    def is_scatter(self) -> bool:
        """Whether it writes where data say, or in places that iterations may share without being a reduction."""
        if any(a.kind is AxisKind.SCATTER for a in self.axes):
            return True
        return any(is_value(i) for w in self.writes for i in w.indices)

    @property
    def writes(self) -> tuple[Access, ...]:
        return tuple(
            a for s in self.body for a in (s.targets if isinstance(s, Update) else (Access(s.buffer, s.indices),))
        )

    @property
    def reads(self) -> tuple[Load, ...]:
        """Every load of the body, each once. An update that begins by itself does not count as reading its targets."""
        seen: dict[Load, None] = {}
        for s in self.body:
            for value in s.values if isinstance(s, Update) else (s.value,):
                seen.update(dict.fromkeys(loads(value)))
            if isinstance(s, Update) and not s.begins:
                own = (Load(t.buffer, t.indices, v.dtype) for t, v in zip(s.targets, s.values, strict=True))
                seen.update(dict.fromkeys(own))
            for access in s.targets if isinstance(s, Update) else (Access(s.buffer, s.indices),):
                for i in access.indices:
                    if is_value(i):
                        seen.update(dict.fromkeys(loads(i)))  # type: ignore[arg-type]
        return tuple(seen)

    def axes_of(self, kind: AxisKind) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is kind)


@dataclass(frozen=True, slots=True)
class Loop:
    """``for var in range(extent)`` of a given kind over statements in order."""

    var: sympy.Symbol
    extent: sympy.Expr
    body: tuple[Node, ...]
    kind: LoopKind = LoopKind.SERIAL
    annotations: Annotations = ()


Node: TypeAlias = Loop | Block


@dataclass(frozen=True, slots=True)
class LoopNest:
    """One kernel: parameters in call order (inputs, then outputs), sizes passed as integers, buffers of its own, and
    the loops.

    ``outputs`` names the parameters that the nest writes, the hint ``IN_PLACE`` those of them whose old elements it
    reads; ``symbols`` holds the sizes that are passed as integers, in order.
    """

    name: str
    params: tuple[Buffer, ...]
    outputs: tuple[str, ...]
    body: tuple[Node, ...]
    locals: tuple[Buffer, ...] = ()
    symbols: SymbolTable = SymbolTable()
    annotations: Annotations = ()

    def buffer(self, name: str) -> Buffer:
        for b in (*self.params, *self.locals):
            if b.name == name:
                return b
        raise KeyError(name)

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {b.name: b for b in (*self.params, *self.locals)}

    @property
    def given(self) -> tuple[Buffer, ...]:
        """The parameters that come with content: those that are not written, and those that are written in place."""
        in_place = IN_PLACE.of(self).split(",")
        return tuple(b for b in self.params if b.name not in self.outputs or b.name in in_place)

    @property
    def table(self) -> bool:
        """Whether one launch does the work of a call for each row of a table of arguments."""
        return TABLE.of(self)


# --- traversal --------------------------------------------------------------------------------------------------------


def walk_nodes(body: tuple[Node, ...]) -> Iterator[tuple[Node, tuple[Loop, ...]]]:
    """Every loop and block in order, with the loops around it, outermost first."""
    waiting: list[tuple[Node, tuple[Loop, ...]]] = [(n, ()) for n in reversed(body)]
    while waiting:
        node, outer = waiting.pop()
        yield node, outer
        if isinstance(node, Loop):
            inside = (*outer, node)
            for n in reversed(node.body):
                waiting.append((n, inside))


def blocks(nest: LoopNest) -> Iterator[tuple[Block, tuple[Loop, ...]]]:
    """Every block with the loops around it, outermost first."""
    return ((n, outer) for n, outer in walk_nodes(nest.body) if isinstance(n, Block))


def map_nodes(body: tuple[Node, ...], fn: Callable[[Node], Node | tuple[Node, ...] | None]) -> tuple[Node, ...]:
    """Rebuild bottom up: ``fn`` sees each rebuilt node and gives None to keep it, a node, or a tuple to put in its
    place.

    A loop left without a body disappears. Returns the same objects where nothing changed.
    """
    out: list[Node] = []
    changed = False
    for n in body:
        new = n
        if isinstance(n, Loop):
            inner = map_nodes(n.body, fn)
            if not inner:
                changed = True
                continue
            if inner is not n.body:
                new = replace(n, body=inner)
        result = fn(new)
        match result:
            case None:
                out.append(new)
                changed |= new is not n
            case tuple():
                out.extend(result)
                changed = True
            case _:
                out.append(result)
                changed |= result is not n
    return tuple(out) if changed else body
