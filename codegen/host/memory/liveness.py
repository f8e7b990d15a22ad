"""The memory that a host program takes: what was allocated when, who looks at it and until when, and the peak as an
expression of sizes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, ge, sub
from typing import TypeAlias, TypeVar

import sympy

from ....ir.graph.begun import passed_on
from ....ir.graph.graph import TensorType
from ..steps.program import Arena, HostProgram
from ..steps.step import Allocate, CallLibrary, HostStep, Repeat

# A sum of sizes: coefficients by monomial in size symbols; and the same as a row, for monomials that are agreed on.
Polynomial: TypeAlias = Mapping[sympy.Expr, int]
Row: TypeAlias = tuple[int, ...]
K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Storage:
    """One piece of memory of ``nbytes`` beyond the inputs, held from step ``begin`` on and through step ``end``.

    ``names`` look at it. ``ours`` says that the program allocates it, and not an op; ``by_address``, that launches are
    all that look at it, and take its address, so that no tensor has to stand for it.
    """

    name: str
    type: TensorType
    nbytes: sympy.Expr
    begin: int
    end: int
    ours: bool
    by_address: bool
    names: list[str] = field(default_factory=list)


def storages(program: HostProgram, given: Collection[str] = ()) -> list[Storage]:
    """Every piece of memory that the steps allocate, in order; what ops return counts as memory of its own, and what
    leaves a loop each time as one for all times.

    Inputs that are ``given`` to the program, which is the last to hold them, are among them, from step -1 on.
    """
    found = _Found()
    for name in given:
        found.add(-1, name, program.inputs[name], ours=False)
    end = 0
    for numbers, step in program.numbered():
        if isinstance(step, Repeat):
            found.repeat(numbers, step)
        else:
            found.step(numbers.start, step)
        end = numbers.stop
    for storage in found.of.values():
        storage.end = end
    return found.all


def storage_bytes(kind: TensorType) -> sympy.Expr:
    """The bytes from the first element to the end of the last one, which strides may put further than their number."""
    if _is_dense(kind):
        return kind.nbytes
    if any(n == 0 for n in kind.shape):
        return sympy.S.Zero
    last = sympy.Add(*((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True)))
    return sympy.expand((last + 1) * kind.dtype.itemsize)


def _is_dense(kind: TensorType) -> bool:
    """Whether the strides of dimensions are, in some order, the products of the extents inside of them."""
    left = [(n, s) for n, s in zip(kind.shape, kind.strides, strict=True) if n != 1]
    if all(n.is_Integer and s.is_Integer for n, s in left):
        left.sort(key=lambda d: int(d[1]), reverse=True)
    inside: sympy.Expr = sympy.S.One
    while left:
        at = next((k for k in reversed(range(len(left))) if left[k][1] == inside), None)
        if at is None:
            return False
        inside = inside * left.pop(at)[0]
    return True


# --- sums of sizes ----------------------------------------------------------------------------------------------------


def polynomial(nbytes: sympy.Expr) -> Polynomial:
    """The coefficients of a sum of sizes; what has no whole coefficient is a monomial of its own."""
    if nbytes.is_Integer:
        return {sympy.S.One: int(nbytes)}
    terms = sympy.expand(nbytes).as_coefficients_dict()
    return {m if c.is_Integer else c * m: int(c) if c.is_Integer else 1 for m, c in terms.items()}


def as_rows(sums: Mapping[K, Polynomial]) -> tuple[tuple[sympy.Expr, ...], dict[K, Row]]:
    """The monomials of some sums, and each sum as the row of its coefficients."""
    monomials = tuple(dict.fromkeys(m for s in sums.values() for m in s))
    return monomials, {key: tuple(s.get(m, 0) for m in monomials) for key, s in sums.items()}


def expression(row: Row, monomials: Iterable[sympy.Expr]) -> sympy.Expr:
    """The sum of a row."""
    return sympy.Add(*(c * m for c, m in zip(row, monomials, strict=True)))


def plus(a: Row, b: Row) -> Row:
    return tuple(map(add, a, b))


def covers(a: Row, b: Row) -> bool:
    """Whether a sum is no less than another for all sizes: no monomial is negative."""
    return all(map(ge, a, b))


def peaks_of(held: Sequence[Storage], arena: Arena | None = None) -> tuple[sympy.Expr, ...]:
    """Sums of bytes held at a time, of which the greatest is the peak; those that no other outgrows for all sizes."""
    spans = [(s.begin, s.end, s.nbytes) for s in held]
    if arena is not None:
        spans.append((arena.begin, arena.end, arena.size))
    monomials, rows = as_rows({e: polynomial(e) for e in dict.fromkeys(nbytes for *_, nbytes in spans)})
    ends = sorted(spans, key=lambda s: s[1], reverse=True)
    now: Row = (0,) * len(monomials)
    kept: list[Row] = []
    for begin, _, nbytes in sorted(spans, key=lambda s: s[0]):
        while ends[-1][1] < begin:
            now = tuple(map(sub, now, rows[ends.pop()[2]]))
        now = plus(now, rows[nbytes])
        if not any(covers(other, now) for other in kept):
            kept = [other for other in kept if not covers(now, other)]
            kept.append(now)
    return tuple(expression(row, monomials) for row in kept)


# --- what the steps hold ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    all: list[Storage] = field(default_factory=list)
    # Of each name that is bound, and how many are bound to each.
    of: dict[str, Storage] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    nbytes: dict[TensorType, sympy.Expr] = field(default_factory=dict)

    def repeat(self, numbers: range, loop: Repeat) -> None:
        """A loop once; what goes from one time to the next, or out of it, is held as a tensor."""
        for name, _, initial in loop.carried:
            self.look((initial,))
            if name != initial:
                self.share(name, initial)
        for at, step in zip(numbers, loop.steps, strict=True):
            self.step(at, step)
        self.look(following for _, following, _ in loop.carried)
        self.look(loop.kept)
        kept = {id(s): s for name in loop.kept if (s := self.of.get(name)) is not None}
        for storage in kept.values():
            if storage.begin in numbers:
                storage.nbytes = storage.nbytes * loop.times

    def step(self, at: int, step: HostStep) -> None:
        facts = step.facts
        self.look(facts.wants)
        passed = passed_on(step.node) if isinstance(step, CallLibrary) else {}
        for name, kind in facts.allocates:
            if name not in passed:
                self.add(at, name, kind, ours=isinstance(step, Allocate))
        for name, source in (*facts.shares, *passed.items()):
            self.share(name, source)
        for name in facts.frees:
            self.drop(at, name)

    def add(self, at: int, name: str, kind: TensorType, ours: bool) -> None:
        nbytes = self.nbytes.get(kind)
        if nbytes is None:
            nbytes = self.nbytes[kind] = storage_bytes(kind)
        self.all.append(Storage(name, kind, nbytes, at, at, ours, ours, [name]))
        self.of[name] = self.all[-1]
        self.count[id(self.all[-1])] = 1

    def share(self, name: str, source: str) -> None:
        storage = self.of.get(source)
        if storage is not None:
            storage.names.append(name)
            self.of[name] = storage
            self.count[id(storage)] += 1

    def look(self, names: Iterable[str]) -> None:
        """Something takes these as tensors."""
        for name in names:
            if name in self.of:
                self.of[name].by_address = False

    def drop(self, at: int, name: str) -> None:
        storage = self.of.pop(name, None)
        if storage is None:
            return
        self.count[id(storage)] -= 1
        if self.count[id(storage)] == 0:
            storage.end = at
