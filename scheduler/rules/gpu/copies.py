"""How programs of a contraction on a GPU get their operands and their tiles: what the tensor memory accelerator may
copy, and how many programs last over several tiles each."""

from __future__ import annotations

import sympy

from ....ir.expr.value import Load, is_value, loads
from ....ir.nest.loops import LoopNest, Scope
from ....ir.target import Target
from ..contraction import ContractionNest, part_axes

# The bytes to which the tensor memory accelerator wants rows aligned, and the most dimensions.
ROW_BYTES, MOST_DIMENSIONS = 16, 5


def described_operands(nest: LoopNest, target: Target, c: ContractionNest) -> tuple[str, ...]:
    """The arrays whose tiles the tensor memory accelerator may copy: what operands load along an axis of the results
    and one that is summed, in rows of a multiple of 16 bytes. Which loads of them are of whole tiles, the emitter sees.
    """
    if not target.has_tma:
        return ()
    found = [ld.buffer for ld, own in tile_loads(c) if in_aligned_rows(nest, ld, own | {v for v, _ in c.summed})]
    return tuple(dict.fromkeys(found))


def tile_loads(c: ContractionNest) -> list[tuple[Load, set[sympy.Symbol]]]:
    """The loads of operands that differ along axes of the results, and along the innermost of those that are summed
    (parts of a word aside, which one load gives); with the former."""
    parts = {v for v, _ in part_axes(c)}
    lanes = [v for v, _ in c.summed if v not in parts][-1]
    found: list[tuple[Load, set[sympy.Symbol]]] = []
    for p in c.products:
        for operand, axes in ((p.left, c.rows), (p.right, c.columns)):
            own = {v for v, _ in axes}
            for ld in (ld for f in operand.factors for ld in loads(f)):
                free = {s for i in ld.indices if not is_value(i) for s in i.free_symbols}
                if free & own and lanes in free:
                    found.append((ld, own))
    return found


def in_aligned_rows(nest: LoopNest, load: Load, moving: set[sympy.Symbol]) -> bool:
    """Whether a load reads an array of memory along one dimension of neighbours, with axes of ``moving``, in rows that
    descriptors take."""
    buffer = nest.buffer(load.buffer)
    if buffer.scope is not Scope.GLOBAL or buffer.name in nest.outputs or len(load.indices) > MOST_DIMENSIONS:
        return False
    if any(is_value(i) for i in load.indices):
        return False
    last = [
        d
        for d, (i, s) in enumerate(zip(load.indices, buffer.strides, strict=True))
        if s == 1 and i.free_symbols & moving
    ]
    steps = [s * buffer.dtype.itemsize for d, s in enumerate(buffer.strides) if d not in last]
    return len(last) == 1 and all(s != 0 and nest.symbols.is_divisible(s, ROW_BYTES) for s in steps)


def lasting_programs(tiles: sympy.Expr, resident: int) -> int | None:
    """How many programs do all tiles in as many rounds as the machine needs, where ``resident`` run at a time: as few
    as those rounds want, so that the last one is as full as the others. None where one round is enough; ``resident``
    where the number of tiles is not known."""
    if not tiles.is_Integer:
        return resident
    count = int(tiles)
    if count <= resident:
        return None
    return -(-count // -(-count // resident))
