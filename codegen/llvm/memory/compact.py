"""Storage of a nest's own buffers: of LOCAL ones only what one iteration of the loops around all their uses touches.

A LOCAL buffer keeps its full logical shape through scheduling. Here each dimension that every use indexes with the same
expression of the common loops becomes one element wide, or as wide as the inner loops run.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ....ir.errors import IRError
from ....ir.expr.value import Index, Load, is_value
from ....ir.nest.loops import Block, Buffer, Loop, LoopKind, LoopNest, Scope, blocks, contiguous_strides

# Elements of a buffer that is as long as its extent may be, rather than as it is in a call.
SMALL = 4096


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """Where a buffer of the nest's own lives.

    ``shape`` is what is allocated, ``shift`` (in loop variables) what indices begin at.

    ``region`` is the variable of the parallel loop that it is private to, None where all threads share it.
    """

    buffer: Buffer
    shape: tuple[sympy.Expr, ...]
    shift: tuple[sympy.Expr, ...]
    region: sympy.Symbol | None

    @property
    def strides(self) -> tuple[sympy.Expr, ...]:
        return contiguous_strides(self.shape)

    @property
    def numel(self) -> sympy.Expr:
        return sympy.Mul(*self.shape)


def storage_of(nest: LoopNest) -> dict[str, LocalStorage]:
    """The storage of every buffer of the nest that is no parameter and that some block uses."""
    uses: dict[str, list[tuple[tuple[Index, ...], tuple[Loop, ...]]]] = {}
    local = {b.name for b in nest.locals}
    for block, outer in blocks(nest):
        for name, indices in _accesses(block):
            if name in local:
                axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
                bound = tuple(i if is_value(i) else i.xreplace(axes) for i in indices)  # type: ignore[union-attr]
                uses.setdefault(name, []).append((bound, outer))
    return {b.name: _storage(nest, b, uses[b.name]) for b in nest.locals if b.name in uses}


def _accesses(block: Block) -> list[tuple[str, tuple[Index, ...]]]:
    reads: tuple[Load, ...] = block.reads
    return [(r.buffer, r.indices) for r in reads] + [(w.buffer, w.indices) for w in block.writes]


def _storage(nest: LoopNest, buffer: Buffer, uses: list[tuple[tuple[Index, ...], tuple[Loop, ...]]]) -> LocalStorage:
    if buffer.scope is Scope.GLOBAL:  # the whole of it, for all threads
        return LocalStorage(buffer, buffer.shape, tuple(sympy.S.Zero for _ in buffer.shape), None)
    common = _common([outer for _, outer in uses])
    region = next((lp.var for lp in common if lp.kind is LoopKind.PARALLEL), None)
    # Lanes are side by side in memory, whoever else runs over them.
    known = {lp.var for lp in common if lp.kind is not LoopKind.VECTORIZED}
    shape, shift = [], []
    for k, extent in enumerate(buffer.shape):
        dimension = [(indices[k], outer) for indices, outer in uses]
        start, width = _narrowed(nest, dimension, known, extent)
        shape.append(width)
        shift.append(start)
    return LocalStorage(buffer, tuple(shape), tuple(shift), region)


def _common(paths: list[tuple[Loop, ...]]) -> tuple[Loop, ...]:
    first, *rest = paths
    length = len(first)
    for path in rest:
        length = min(length, len(path))
        while first[:length] != path[:length]:
            length -= 1
    return first[:length]


def _narrowed(
    nest: LoopNest, uses: list[tuple[Index, tuple[Loop, ...]]], known: set[sympy.Symbol], extent: sympy.Expr
) -> tuple[sympy.Expr, sympy.Expr]:
    """Where the touched range of one dimension begins, and how wide it is."""
    whole = (sympy.S.Zero, extent)
    start: sympy.Expr | None = None
    widest: int | None = 1
    for index, outer in uses:
        if is_value(index):
            return whole
        fixed: list[sympy.Expr] = []
        moving: list[sympy.Expr] = []
        for term in sympy.Add.make_args(sympy.expand(index)):
            names = {s for s in term.free_symbols if any(s == lp.var for lp in outer)}
            (fixed if names <= known else moving).append(term)
        base = sympy.Add(*fixed)
        if start is not None and base != start:
            return whole
        start = base
        try:
            low, high = nest.symbols.bounds(sympy.Add(*moving), {lp.var: lp.extent for lp in outer})
        except IRError:
            return whole
        if low < 0:
            return whole
        widest = None if high is None or widest is None else max(widest, high + 1)
    assert start is not None
    if widest is None or _says_nothing(nest, extent, widest):  # as far as the buffer goes, which the predicates keep to
        return (start, extent) if start == 0 else whole
    if extent.is_Integer and int(extent) <= widest:
        return (start, sympy.Integer(widest)) if start.free_symbols else (start, extent if start == 0 else whole[1])
    return start, sympy.Integer(widest)


def _says_nothing(nest: LoopNest, extent: sympy.Expr, widest: int) -> bool:
    """Whether a width is only what a symbolic extent is at most (torch says 2^24 where an op takes no more), and more
    than a stack has room for."""
    if extent.is_Integer or widest <= SMALL:
        return False
    upper = nest.symbols.bounds(extent)[1]
    return upper is None or widest >= upper
