"""How programs of a contraction on a GPU get their operands and their tiles: what the tensor memory accelerator may
copy, and how many programs last over several tiles each."""

from __future__ import annotations

import sympy

from ...ir.expr import Load, is_value
from ...ir.loops import LoopNest
from ...ir.target import Target
from .contraction import Axes, Contraction, Operand

# Architectures with a tensor memory accelerator, the bytes to which it wants rows aligned, and the most dimensions.
ACCELERATED, ROW_BYTES, MOST_DIMENSIONS = ("sm_90", "sm_100"), 16, 5


def described_operands(nest: LoopNest, target: Target, c: Contraction) -> tuple[str, ...]:
    """The arrays whose tiles the tensor memory accelerator can copy: operands as they are in memory, crossed by one
    axis of the results and one that is summed, in rows of a multiple of 16 bytes."""
    if target.arch not in ACCELERATED or any(len(axes) != 1 for axes in (c.rows, c.columns, c.summed)):
        return ()
    sides = [(p.left, c.rows) for p in c.products] + [(p.right, c.columns) for p in c.products]
    names = [ld.buffer for o, own in sides if (ld := _copied(nest, o, own, c.summed)) is not None]
    return tuple(dict.fromkeys(names))


def _copied(nest: LoopNest, operand: Operand, own: Axes, summed: Axes) -> Load | None:
    """The load that an operand is, where it is of whole tiles."""
    if not operand.is_plain:
        return None
    (load,) = operand.factors
    assert isinstance(load, Load)
    buffer = nest.buffer(load.buffer)
    if buffer.name in nest.outputs or len(load.indices) > MOST_DIMENSIONS:
        return None
    axes = {v for v, _ in (*own, *summed)}
    crossing: list[int] = []
    for d, index in enumerate(load.indices):
        if is_value(index):
            return None
        assert isinstance(index, sympy.Expr)
        mine = index.free_symbols & axes
        if not mine:
            continue
        if len(mine) != 1 or any(sympy.expand(index - v).free_symbols & axes for v in mine):
            return None
        crossing.append(d)
    last = [d for d in crossing if buffer.strides[d] == 1]
    steps = [s * buffer.dtype.itemsize for d, s in enumerate(buffer.strides) if d not in last]
    aligned = all(s != 0 and nest.symbols.is_divisible(s, ROW_BYTES) for s in steps)
    return load if len(crossing) == 2 and len(last) == 1 and aligned else None


def lasting_programs(tiles: sympy.Expr, cores: int) -> int | None:
    """How many programs do all tiles in as many rounds as the machine needs, each the same number of them; None where
    one round is enough, or tiles do not divide so."""
    if not tiles.is_Integer or int(tiles) <= cores:
        return None
    count = int(tiles)
    rounds = -(-count // cores)
    return count // rounds if count % rounds == 0 else None
