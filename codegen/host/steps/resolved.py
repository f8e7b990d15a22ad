"""Steps in which it is decided what each name is, where memory lies, what is looked at, and which sizes are computed.

``resolve`` makes them; ``python/text.py`` and ``native/native.py`` write them down. Of the planned steps a resolved
program has ``BindSize``, ``Allocate`` (a tensor), ``CallLibrary``, ``CheckLayout``, ``MakeView`` (a tensor),
``LimitMemory``, ``Repeat`` and ``Return``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import sympy

from ....ir.expr.dtypes import DType
from ....ir.graph.graph import TensorType
from .kernel_use import KernelUse
from .step import Facts, HostStep


@dataclass(frozen=True, slots=True)
class Pointer:
    """The first element of a tensor, or an address that no tensor stands for."""

    name: str
    is_address: bool


@dataclass(frozen=True, slots=True)
class Take(HostStep):
    """Take over the caller's arguments: ``names``, which lie at ``places`` (None: all of them, in their order), and by
    name in steps that repeat, the ``lists`` of places from which those take one each time, the last one first.

    ``gpu`` is made the current device, where it is not "". Whoever looks at the memory of all arguments at once asks
    each of ``least`` for so many bytes.
    """

    names: tuple[str, ...]
    places: tuple[int, ...] | None
    lists: Mapping[str, tuple[int, ...]]
    gpu: str
    least: Mapping[str, int] = field(repr=False)

    def told(self) -> Facts:
        return Facts(makes=self.names)


@dataclass(frozen=True, slots=True)
class LookAt(HostStep):
    """Raise where an argument has fewer than so many bytes of memory. ``lists`` says of how many arguments a name is
    the list; with ``kernels`` a tensor that only says how large it is has none."""

    least: Mapping[str, int]
    lists: Mapping[str, int]
    kernels: bool

    def told(self) -> Facts:
        return Facts(reads=tuple(n for n in self.least if n not in self.lists))


@dataclass(frozen=True, slots=True)
class Let(HostStep):
    """A size that steps behind this one compute with, under a name. Machine code has it in the register in which it is
    first computed."""

    name: str
    value: sympy.Basic


@dataclass(frozen=True, slots=True)
class HoldArena(HostStep):
    """Memory of ``size`` bytes for what is placed in it; never more than ``bound``, where that is known."""

    size: sympy.Expr
    device: str
    bound: int | None

    @property
    def type(self) -> TensorType:
        return TensorType((self.size,), (sympy.S.One,), DType.UINT8, self.device)

    def told(self) -> Facts:
        return Facts(sizes=(self.size,), devices=(self.device,))


@dataclass(frozen=True, slots=True)
class DropArena(HostStep):
    """Nothing reads the arena from here on."""


@dataclass(frozen=True, slots=True)
class PointTo(HostStep):
    """``name`` is the address ``offset`` bytes behind another, or in the arena where ``base`` is ""."""

    name: str
    base: str
    offset: sympy.Expr

    def told(self) -> Facts:
        base = (self.base,) if self.base else ()
        return Facts(
            reads=base, makes=(self.name,), shares=tuple((self.name, b) for b in base), sizes=(self.offset,)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rename(HostStep):
    """``name`` is what ``source`` is: an address, or a tensor. ``takes_over`` says that ``source`` stands for nothing
    behind it; else the next launch writes over it."""

    name: str
    source: Pointer
    takes_over: bool

    def told(self) -> Facts:
        source = self.source.name
        frees = (source,) if self.takes_over else ()
        return Facts(reads=(source,), frees=frees, makes=(self.name,), shares=((self.name, source),))


@dataclass(frozen=True, slots=True)
class Row:
    """What one call of a kernel is about."""

    pointers: tuple[Pointer, ...]
    sizes: tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class RunKernel(HostStep):
    """Call the code of a kernel with ``rows``, one but for code over a table, which takes the ``count`` of its calls
    before them.

    Code takes pointers and sizes, or where ``use`` says so, tensors, all in one row. ``gpu`` is the index of the device
    that it takes before all that, if any; ``guard`` that of one that has to be made the current one for the call.
    """

    use: KernelUse
    rows: tuple[Row, ...]
    count: int
    gpu: str
    guard: str
    device: str
    comment: str

    @property
    def arguments(self) -> Iterator[Pointer | sympy.Expr | int]:
        """What code that goes by pointers takes, but for the device."""
        if self.use.table:
            yield self.count
        for row in self.rows:
            yield from row.pointers
            yield from row.sizes

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        return tuple(p for row in self.rows for p in row.pointers)

    @property
    def sizes(self) -> tuple[sympy.Expr, ...]:
        return tuple(s for row in self.rows for s in row.sizes)

    def at_addresses(self, addresses: Collection[str]) -> RunKernel:
        """The same where some of the names are addresses."""
        rows = (replace(r, pointers=tuple(Pointer(p.name, p.name in addresses) for p in r.pointers)) for r in self.rows)
        return replace(self, rows=tuple(rows))

    def told(self) -> Facts:
        names = tuple(p.name for p in self.pointers)
        return Facts(names, () if self.use.by_pointer else names, sizes=self.sizes, devices=(self.device,))


@dataclass(frozen=True, slots=True)
class Forget(HostStep):
    """Names that stand for nothing any more; memory goes with the last name for it."""

    pointers: tuple[Pointer, ...]

    def told(self) -> Facts:
        return Facts(frees=tuple(p.name for p in self.pointers))
