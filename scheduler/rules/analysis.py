"""What rules need to know of a nest: its rows and inner dimensions, and how each access moves along them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy

from ...ir.expr.index import expanded
from ...ir.expr.value import IndexValue, Load, is_value, walk
from ...ir.nest.loops import AxisKind, Block, Buffer, DimKind, LoopNest, Scope, blocks
from ..primitives.analysis.tree import linear_part


@dataclass(frozen=True, slots=True)
class Reach:
    """One access: the buffer, whether it is written, and its step in elements along each dimension (None:
    irregular)."""

    buffer: Buffer
    block: str
    is_write: bool
    steps: tuple[tuple[sympy.Symbol, sympy.Expr | None], ...]
    is_gather: bool

    def step(self, var: sympy.Symbol) -> sympy.Expr | None:
        """Elements between neighbours along a dimension; zero where the access does not move."""
        return dict(self.steps).get(var, sympy.S.Zero)


@dataclass(frozen=True, slots=True)
class NestShape:
    """A nest as lowering left it.

    ``rows`` and ``inner`` are (axis variable, extent), outermost first; ``numel`` and the rest are typical values
    where sizes are symbolic. ``reads`` and ``writes`` cover parameters alone.
    """

    nest: LoopNest
    rows: tuple[tuple[sympy.Symbol, sympy.Expr], ...]
    inner: tuple[tuple[sympy.Symbol, sympy.Expr], ...]
    blocks: tuple[Block, ...]
    accesses: tuple[Reach, ...]
    row_count: int
    inner_count: int

    @property
    def reductions(self) -> tuple[Block, ...]:
        return tuple(b for b in self.blocks if b.is_reduction)

    @property
    def cross(self) -> tuple[Block, ...]:
        """Reductions over the rows beside others along them, and what is made of those."""
        return tuple(b for b in self.blocks if self.is_cross(b))

    def is_cross(self, block: Block) -> bool:
        """Whether a block's results have the inner dimensions, and no row."""
        kept = {a.var for a in block.axes if a.kind is AxisKind.SPATIAL}
        rows = {v for v, _ in self.rows}
        return _crosses(block) or (bool(kept) and not kept & rows and any(_crosses(b) for b in self.blocks))

    @property
    def has_reduction(self) -> bool:
        return any(b.is_reduction for b in self.blocks)

    @property
    def numel(self) -> int:
        return self.row_count * self.inner_count

    def contiguous(self, var: sympy.Symbol) -> int:
        """Bytes an element of the accesses that move by one along a dimension, a measure of how well it vectorises."""
        return sum(a.buffer.dtype.itemsize for a in self.accesses if a.step(var) == 1)

    @property
    def needs_transpose(self) -> bool:
        """Point-wise accesses that are contiguous along different dimensions."""
        if self.has_reduction:
            return False
        unit = {v for v, e in self.rows if e != 1 and self.contiguous(v)}
        return len(unit) > 1


@dataclass(frozen=True, slots=True, eq=False)
class SameNest:
    """A nest, known by identity: each rule that looks at it asks the same."""

    nest: LoopNest

    def __hash__(self) -> int:
        return id(self.nest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameNest) and self.nest is other.nest


def analyse(nest: LoopNest) -> NestShape:
    """Look at a nest that has not been scheduled yet."""
    return _analyse(SameNest(nest))


@lru_cache(maxsize=32)
def _analyse(same: SameNest) -> NestShape:
    nest = same.nest
    found = [b for b, _ in blocks(nest)]
    plain = [b for b in found if not _crosses(b)] or found
    widest = max(plain, key=lambda b: len(b.axes), default=None)
    inner_vars = {a.var for b in plain for a in b.axes if a.kind is AxisKind.REDUCTION}
    if widest is not None:
        inner_vars |= {a.var for b in found for a in b.axes if a.dim is DimKind.INNER}
    axes = {a.var: a.extent for b in sorted(plain, key=lambda b: -len(b.axes)) for a in b.axes}
    rows = tuple((v, e) for v, e in axes.items() if v not in inner_vars)
    inner = tuple((v, e) for v, e in axes.items() if v in inner_vars)
    accesses = tuple(r for b in found for r in _reaches(nest, b))
    hint = nest.symbols.hint
    return NestShape(
        nest, rows, inner, tuple(found), accesses,
        hint(sympy.Mul(*(e for _, e in rows))), hint(sympy.Mul(*(e for _, e in inner))),
    )  # fmt: skip


def reads_results(shape: NestShape) -> bool:
    """Whether a stage over elements needs what another reduces, so that the elements are visited more than once.

    What is made of results for each row alone, such as their rounding, visits none. It may pass results on.
    """
    reduced = {w.buffer for b in shape.reductions for w in b.writes}
    inner = {v for v, _ in shape.inner}
    for block in shape.blocks:
        if not any(ld.buffer in reduced for ld in block.reads):
            continue
        if any(a.var in inner for a in block.axes):
            return True
        reduced |= {w.buffer for w in block.writes}
    return False


def _crosses(block: Block) -> bool:
    """Whether a block reduces over rows, or pieces of them, for each of the inner dimensions."""
    kept = {a.dim for a in block.axes if a.kind is AxisKind.SPATIAL}
    return block.is_reduction and DimKind.INNER in kept and DimKind.ROW not in kept


def _reaches(nest: LoopNest, block: Block) -> list[Reach]:
    buffers = nest.buffers
    result = []
    for is_write, sites in ((False, block.reads), (True, block.writes)):
        for site in sites:
            buffer = buffers[site.buffer]
            if buffer.scope is Scope.GLOBAL:
                result.append(_reach(buffer, block, site.indices, is_write))
    return result


def _reach(buffer: Buffer, block: Block, indices: tuple[object, ...], is_write: bool) -> Reach:
    plain = [i for i in indices if not is_value(i)]
    strides = [s for i, s in zip(indices, buffer.strides, strict=True) if not is_value(i)]
    offset = expanded(sympy.Add(*(i * s for i, s in zip(plain, strides, strict=True))))
    gathered = {s for i in indices if is_value(i) for e in walk(i) for s in _symbols_of(e)}
    steps: list[tuple[sympy.Symbol, sympy.Expr | None]] = []
    for a in block.axes:
        if a.var in gathered:
            steps.append((a.var, None))
            continue
        part = linear_part(offset, a.var)
        steps.append((a.var, None if part is None else part[0]))
    return Reach(buffer, block.name, is_write, tuple(steps), bool(len(plain) != len(indices)))


def _symbols_of(e: object) -> set[sympy.Symbol]:
    match e:
        case Load():
            return {s for i in e.indices if not is_value(i) for s in i.free_symbols}
        case IndexValue():
            return set(e.index.free_symbols)
    return set()
