"""What the parts of the emitter share while they write one function."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Expr, Index
from ....ir.nest.loops import Block, Bound, LoopNest
from ....ir.target import Target
from .builder import Builder, Val

# Bytes behind each buffer of the nest's own that a vector may reach over its end.
SLACK = 256
# The name, among a kernel's places, of the four numbers behind its arguments in which it tells of an index that is out
# of range; no buffer has a dot in its name.
STATUS = "status."


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where a buffer lies: element (i, j) is at ``pointer + (i - shift[0]) * strides[0] + …``.

    ``fixed`` if never written. ``SLACK`` bytes past the end of what is ``own`` memory may be read.
    """

    pointer: str
    dtype: DType
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    shift: tuple[sympy.Expr, ...] = ()
    fixed: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Mask:
    """Which lanes are live.

    ``count`` is the number of leading live lanes (an i64) where the live lanes are a prefix.
    """

    live: Val
    count: str | None = None


@dataclass(slots=True)
class Context:
    """State of the emitter at one point of the function that it writes.

    ``indices`` maps loop variables and size symbols to int64 scalars, outermost first. ``vector`` is the loop variable
    that runs over lanes, and how many; ``unrolled`` the extents of the unrolled loops around. ``block_mask`` is what
    the block's predicate leaves, ``mask`` what branches leave of it. ``axes`` are the bindings of the block at hand,
    ``assumed`` what is known to hold there, ``stored`` what it has written and may read again.
    """

    nest: LoopNest
    target: Target
    b: Builder
    places: dict[str, BufferPlace]
    indices: dict[sympy.Symbol, Val]
    extents: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    vector: tuple[sympy.Symbol, int] | None = None
    unrolled: dict[sympy.Symbol, int] = field(default_factory=dict)
    mask: Mask | None = None
    block_mask: Mask | None = None
    axes: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    block: Block | None = None
    assumed: frozenset[Bound] = frozenset()
    # How many copies of an unrolled loop are made here, where the others would do nothing.
    copies: dict[sympy.Symbol, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    values: dict[int, tuple[Expr, Val]] = field(default_factory=dict)
    stored: dict[tuple[str, tuple[Index, ...]], Val] = field(default_factory=dict)
    tiles: dict[tuple[str, sympy.Expr, int], list[str]] = field(default_factory=dict)
    # Buffers whose stores wait for the last copy of an unrolled loop, and the vectors that do, by where they belong.
    weaving: frozenset[str] = frozenset()
    woven: dict[tuple[str, sympy.Expr], list[str]] = field(default_factory=dict)
    accumulators: dict[tuple[str, int], Any] = field(default_factory=dict)
    # Runs of equal parts of joins by the choice that begins them, and tables of the addresses of parts.
    runs: dict[int, tuple[Expr, Any]] = field(default_factory=dict)
    tables: dict[tuple[str, ...], str] = field(default_factory=dict)
    # Offsets of accesses in loop variables, by indices, layout and the bindings of axes: copies of a loop ask again.
    offsets: dict[Hashable, sympy.Expr] = field(default_factory=dict)
    # How many bytes ahead of a load of neighbours its lines are fetched; 0: not at all.
    ahead: int = 0
    # The same for stores.
    ahead_of_stores: int = 0
    # Where this function keeps wrong indices, by bound, dimension and the number of lanes.
    faults: dict[tuple[str, str, str, int], str] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        return self.vector[1] if self.vector else 0

    def touch(self, names: frozenset[str] | None = None) -> None:
        """Forget what these buffers (or all that are written) hold: control flow joins here."""
        for name, place in self.places.items():
            if not place.fixed and (names is None or name in names):
                self.versions[name] = self.versions.get(name, 0) + 1
        self.values, self.tiles = {}, {}

    @contextmanager
    def inside(self, is_loop: bool = False, written: frozenset[str] | None = None) -> Iterator[None]:
        """A loop body or branch: what is computed inside is unknown after it.

        ``written`` are the buffers that it writes.
        """
        names = written if written is not None else frozenset(n for n, p in self.places.items() if not p.fixed)
        self.touch(names)
        with self.b.frame(is_loop, names):
            yield
        self.touch(names)

    @contextmanager
    def masked(self, condition: Val) -> Iterator[None]:
        """Lanes (or the whole) where ``condition`` holds as well as the mask around."""
        old, values = self.mask, self.values
        self.values = dict(values)  # what is known of more lanes is known of these
        live = condition if old is None else conjunction(self.b, old.live, condition)
        self.mask = Mask(live)
        try:
            yield
        finally:
            self.mask, self.values = old, values


def conjunction(b: Builder, x: Val, y: Val) -> Val:
    """Both hold; ``true`` literals vanish."""
    if x.name == "true":
        return y
    if y.name == "true":
        return x
    return b.binary("and", x, y)
