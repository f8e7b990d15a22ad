"""Bytes and operations of a kernel, counted from its loops: what the code asks for, whatever caches make of it.

Every pass of a block over an array counts, so an array that two loops read counts twice; the same element read by two
blocks of one innermost loop counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from ..ir.expr import Expr, Index, Load, flops, free_symbols, is_value, symbol
from ..ir.loops import Block, Buffer, LoopKind, LoopNest, Scope, Store, blocks


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one run of a kernel: bytes that its loops read and write, the least that it had to, and operations (FLOP).

    Sizes that are symbols count with their typical values.
    """

    moved: int
    least: int
    operations: int


def traffic_of(nest: LoopNest) -> Traffic:
    """Count a nest, scheduled or not."""
    passes: dict[tuple[object, str, object], tuple[Buffer, int]] = {}
    operations = 0
    for block, outer in blocks(nest):
        points = math.prod(_extents(nest, block).values())
        operations += points * sum(flops(v) for s in block.body for v in _values(s))
        for buffer, indices, touched in _accesses(nest, block):
            # Tile axes of equal depth are the same registers, whichever loop stands for them.
            threads = [lp.var for lp in outer if lp.kind is LoopKind.THREAD_X]
            tile = {var: symbol(f"tile{k}") for k, var in enumerate(threads)}
            place = tuple(loop.var for loop in outer if loop.var not in tile)
            bound = tuple(i if is_value(i) else _bound(i, block).xreplace(tile) for i in indices)
            passes[place, buffer.name, bound] = (buffer, touched)
    moved, most = 0, dict.fromkeys((b.name for b in nest.params), 0)
    for (_, name, _), (buffer, touched) in passes.items():
        moved += touched * buffer.dtype.itemsize
        most[name] = max(most[name], touched)
    sizes = {b.name: b.dtype.itemsize for b in nest.params}
    return Traffic(moved, sum(n * sizes[name] for name, n in most.items()), operations)


def _bound(index: sympy.Expr, block: Block) -> sympy.Expr:
    return index.xreplace({a.var: b for a, b in zip(block.axes, block.bindings, strict=True)})


def _extents(nest: LoopNest, block: Block) -> dict[sympy.Symbol, int]:
    return {a.var: nest.symbols.hint(a.extent) for a in block.axes}


def _values(statement: object) -> tuple[Expr, ...]:
    return (statement.value,) if isinstance(statement, Store) else statement.values  # type: ignore[attr-defined,no-any-return]


def _accesses(nest: LoopNest, block: Block) -> Iterable[tuple[Buffer, tuple[Index, ...], int]]:
    """Each array in memory that a block reads or writes, where, and how many of its elements the block touches."""
    extents, buffers = _extents(nest, block), nest.buffers
    places = [(ld.buffer, ld.indices) for ld in block.reads] + [(a.buffer, a.indices) for a in block.writes]
    for name, indices in places:
        buffer = buffers[name]
        if buffer.scope is not Scope.GLOBAL:
            continue
        touched = math.prod(extents[s] for s in _symbols(indices) if s in extents)
        yield buffer, indices, min(touched, nest.symbols.hint(buffer.numel))


def _symbols(indices: tuple[Index, ...]) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for i in indices:
        found |= free_symbols(Load("", (i,), i.dtype)) if is_value(i) else i.free_symbols  # type: ignore[union-attr]
    return found
