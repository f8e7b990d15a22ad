"""Bytes and operations of a kernel, counted from its loops.

Every visit of an array counts: one that two loops read counts twice, one whose values stay in the registers or the
local buffer of the first visit once. Where a cache is named, so does one that finds them there: what the loops around
both visits go through in one step is then no more than the cache holds. What caches are asked to keep stays there if
all of that fits, whatever else goes through. Of a gathered array the elements named count, of an output each element
once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

import sympy

from ...ir.expr.value import Expr, Index, Load, call, const, flops, free_symbols, is_value, symbol
from ...ir.machine import Machine
from ...ir.nest.data_ends import data_end
from ...ir.nest.hints import EVICT, NARROW_ROWS, NUM_WARPS, RESIDENT
from ...ir.nest.kept import changed_where
from ...ir.nest.loops import Block, Buffer, Loop, LoopKind, LoopNest, Scope, Store, blocks
from ...runtime.triton.occupancy import resident_programs
from ...runtime.triton.report import ResourceReport

_Place: TypeAlias = tuple[sympy.Symbol, ...]


@dataclass(frozen=True, slots=True)
class Visits:
    """Of one array: the bytes that are touched at all, and the bytes that reads and writes add up to."""

    touched: int
    read: int
    written: int

    @property
    def times(self) -> float:
        """How often the array is read: 1 where each byte that is needed is asked for once."""
        return self.read / self.touched if self.touched else 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one run of a kernel: bytes that its loops read and write, the least that it had to, and operations (FLOP).

    ``arrays`` tells them apart by parameter. Sizes that are symbols count with their typical values.
    """

    moved: int
    least: int
    operations: int
    arrays: Mapping[str, Visits] = field(default_factory=dict)


def cache_of(machine: Machine, nest: LoopNest, resident: int | None = None) -> int:
    """Bytes that stay in a cache while one program of a scheduled nest goes on: a core's own second level, or a
    program's part of the level that all multiprocessors share, of which each runs ``resident``; None where machine code
    does not tell, and as many run as threads have room for."""
    if not machine.is_gpu:
        return machine.l2_bytes
    programs = min(machine.blocks, machine.threads // (NUM_WARPS.of(nest) * machine.warp))
    programs = min(programs, RESIDENT.of(nest) or programs, resident or programs)
    return machine.l2_bytes // (machine.cores * max(programs, 1))


def kept_near(nest: LoopNest) -> frozenset[str]:
    """The parameters that caches are asked to keep until they are visited again."""
    params = [b.name for b in nest.params]
    return frozenset(n for block, _ in blocks(nest) for n in params if EVICT.of(block, n) == "evict_last")


def traffic_of(nest: LoopNest, cache: int = 0) -> Traffic:
    """Count a nest, scheduled or not; what a cache of so many bytes still holds is not read from memory again."""
    counter, operations = _Counter(nest, cache), 0
    for block, outer in blocks(nest):
        extents = _extents(nest, block)
        points = math.prod(extents.values())
        if (ended := data_end(block)) is not None:  # how many count, data say: of a list that is shared out one each
            points //= max(extents[ended[0]], 1)
        operations += points * sum(flops(v) for s in block.body for v in _values(s))
        counter.enter(block, outer)
    arrays = {b.name: counter.visits(b) for b in nest.params}
    moved = sum(v.read + v.written for v in arrays.values())
    return Traffic(moved, sum(counter.least(b) for b in nest.params), operations, arrays)


def traffic_by(nest: LoopNest, machine: Machine, resources: ResourceReport | None) -> Traffic:
    """The same of a scheduled nest on a machine with its cache, which as many programs share as registers and shared
    memory have room for, where machine code tells what it takes."""
    resident = None
    if resources is not None:
        resident = resident_programs(machine, resources.registers, resources.shared, resources.threads)
    return traffic_of(nest, cache_of(machine, nest, resident))


class _Counter:
    """The visits of the arrays in memory while the blocks of a nest are gone through in order."""

    def __init__(self, nest: LoopNest, cache: int) -> None:
        self.nest, self.cache, self.kept = nest, cache, kept_near(nest)
        self.buffers = nest.buffers
        # By the condition that a sum has terms, which data decide: the axes that it speaks of, and how many terms all
        # of those sums have together.
        self.ends: dict[Expr, tuple[set[sympy.Symbol], int]] = {}
        for block, _ in blocks(nest):
            if (ended := data_end(block)) is not None:
                axis, end = ended
                some = call("lt", const(0, end.dtype), end)
                self.ends[some] = free_symbols(end), _extents(nest, block)[axis]
        # Elements by array and by the loops that visit it, for each place in it that is named there.
        self.read: dict[str, dict[_Place, dict[object, int]]] = {}
        self.written: dict[str, dict[_Place, dict[object, int]]] = {}
        # How often each loop runs; the places of each array in the order of their first visits.
        self.runs: dict[sympy.Symbol, int] = {}
        self.places: dict[str, list[_Place]] = {}

    def enter(self, block: Block, outer: tuple[Loop, ...]) -> None:
        # Tile axes of equal depth are the same registers, whichever loop stands for them, and so are parts of a row
        # that stay there; a loop that runs once is no loop.
        held = (LoopKind.THREAD_X, LoopKind.UNROLLED) if NARROW_ROWS.of(self.nest) else (LoopKind.THREAD_X,)
        threads = [lp.var for lp in outer if lp.kind in held]
        once = {lp.var: sympy.S.Zero for lp in outer if lp.extent == 1}
        same = {**{var: symbol(f"tile{k}") for k, var in enumerate(threads)}, **once}
        place = tuple(lp.var for lp in outer if lp.var not in same)
        self.runs |= {lp.var: self.nest.symbols.hint(lp.extent) for lp in outer}
        bindings = {a.var: b.xreplace(same) for a, b in zip(block.axes, block.bindings, strict=True)}
        extents = _extents(self.nest, block)
        few = self._few(block)
        for kind, name, indices in _accesses(block):
            if self.buffers[name].scope is not Scope.GLOBAL:
                continue
            bound = tuple(_bound(i, bindings) for i in indices)
            if not self._known(name, place, bound, kind):
                known = self.read if kind == "read" else self.written
                touched = math.prod(extents[s] for s in _symbols(indices) if s in extents)
                if name in few:
                    touched = min(touched, few[name])
                known.setdefault(name, {}).setdefault(place, {})[bound] = touched
                places = self.places.setdefault(name, [])
                if place not in places:
                    places.append(place)

    def _few(self, block: Block) -> dict[str, int]:
        """Of arrays whose elements a block leaves as they are where a sum has no terms: how many it changes at most,
        where each term of a list that is shared out is in another sum."""
        found: dict[str, int] = {}
        for store in block.body:
            if not isinstance(store, Store):
                continue
            changed = changed_where(store, self.buffers[store.buffer].dtype)
            if changed is not None and changed[0] in self.ends:
                axes, terms = self.ends[changed[0]]
                steps = zip(store.indices, self.buffers[store.buffer].strides, strict=True)
                # Elements that lie side by side are stored together, or not at all.
                if not any(stride == 1 and axes & _symbols((i,)) for i, stride in steps):
                    others = math.prod(n for a, n in _extents(self.nest, block).items() if a not in axes)
                    found[store.buffer] = terms * others
        return found

    def _known(self, name: str, place: _Place, bound: object, kind: str) -> bool:
        """Whether the values are at hand: read or written before, in these loops or in loops around them."""
        for visits in (self.read, self.written) if kind == "read" else (self.written,):
            for where, indices in visits.get(name, {}).items():
                if place[: len(where)] == where and bound in indices:
                    return True
        return False

    def visits(self, buffer: Buffer) -> Visits:
        """Bytes of one parameter. Places of one visit overlap where together they are more than the array has."""
        size, most = buffer.dtype.itemsize, self._numel(buffer)
        read, written = (
            {at: min(most, sum(places.values())) for at, places in visits.get(buffer.name, {}).items()}
            for visits in (self.read, self.written)
        )
        touched = max([*read.values(), *written.values()], default=0)
        # What is written for a second time while it is in the cache leaves that once.
        from_memory = sum(n for at, n in read.items() if not self._cached(buffer.name, at, self.places[buffer.name]))
        to_memory = sum(n for at, n in written.items() if not self._cached(buffer.name, at, list(written)))
        return Visits(touched * size, from_memory * size, to_memory * size)

    def _cached(self, name: str, place: _Place, places: list[_Place]) -> bool:
        """Whether a cache still holds what a visit asks for, from a visit before it."""
        if not self.cache:
            return False
        for before in places[: places.index(place)]:
            common = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(before, place, strict=False)))
            among = self.kept if name in self.kept else self.places
            if self._footprint(place[:common], among) <= self.cache:
                return True
        return False

    def _footprint(self, around: _Place, among: Collection[str]) -> int:
        """Bytes of some arrays that one step of some loops, each around the next, goes through."""
        found = 0
        for name in among:
            buffer, most = self.buffers[name], 0
            for visits in (self.read, self.written):
                for place, indices in visits.get(name, {}).items():
                    if place[: len(around)] == around:
                        most = max(most, sum(n // self._steps(bound, around) for bound, n in indices.items()))
            found += min(most, self._numel(buffer)) * buffer.dtype.itemsize
        return found

    def _steps(self, bound: object, around: _Place) -> int:
        """In how many steps of some loops other elements are visited; what data decide may be anywhere in each."""
        indices = [i for i in bound if not is_value(i)]  # type: ignore[attr-defined]
        moving = set[sympy.Symbol]().union(*(i.free_symbols for i in indices))
        return math.prod(self.runs[lp] for lp in around if lp in moving)

    def least(self, buffer: Buffer) -> int:
        """Bytes of one parameter that no order of loops saves."""
        of = self.visits(buffer)
        given = any(b.name == buffer.name for b in self.nest.given)
        return min(of.read, of.touched) * given + min(of.written, of.touched)

    def _numel(self, buffer: Buffer) -> int:
        """Elements in memory: of those along a dimension of stride zero there is one."""
        held = (n for n, stride in zip(buffer.shape, buffer.strides, strict=True) if stride != 0)
        return int(self.nest.symbols.hint(sympy.Mul(*held)))


def _accesses(block: Block) -> Iterator[tuple[str, str, tuple[Index, ...]]]:
    for load in block.reads:
        yield "read", load.buffer, load.indices
    for access in block.writes:
        yield "write", access.buffer, access.indices


def _bound(index: Index, bindings: dict[sympy.Symbol, sympy.Expr]) -> object:
    """An index in terms of loops; one that the data decide stays as it is."""
    return index if is_value(index) else index.xreplace(bindings)  # type: ignore[union-attr]


def _extents(nest: LoopNest, block: Block) -> dict[sympy.Symbol, int]:
    return {a.var: nest.symbols.hint(a.extent) for a in block.axes}


def _values(statement: object) -> tuple[Expr, ...]:
    return (statement.value,) if isinstance(statement, Store) else statement.values  # type: ignore[attr-defined,no-any-return]


def _symbols(indices: tuple[Index, ...]) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for i in indices:
        found |= free_symbols(Load("", (i,), i.dtype)) if is_value(i) else i.free_symbols  # type: ignore[union-attr]
    return found
