"""What tiles of attention take of a GPU, told before anything is compiled: shared memory of a block, and the sums that
each thread holds.

The estimate follows what Triton does with tiles (as in versions 3.6 to 3.9): operands that stay are copied to shared
memory before the loop; those of the loop have as many copies there as steps are in flight, one more where groups of
warps read them from there, and for both orientations where those do; what a condition guards that it does not move with
travels as whole tiles; and what one product made passes through shared memory to become an operand of the next, but in
groups of warps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.value import Expr, Load, Select, children, free_symbols, is_value, symbol
from ....ir.nest.loops import Block, LoopNest, Scope, Update, blocks
from ....ir.target import Target
from ...cost.gpu_kernels import ATTENTION_WARPS, BESIDE_TILES, HELD_AMD, HELD_GROUPS, HELD_ONLINE, HELD_SUMS, HELD_WIDE
from ...cost.products.gpu_tiles import GROUP_ROWS, LEAST
from ..cpu.attention import Roles
from ..registry import Value
from .common import next_power

# Bytes of what one product made while it becomes an operand of the next.
WIDE, HALF = 4, 2


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """``queries`` are rows of a program and ``keys`` those of a step; ``warps`` are the target's own, ``stages`` the
    steps in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def shared_bytes(nest: LoopNest, target: Target, found: Roles, tile: AttentionTile, half: bool) -> int:
    """Shared memory of a program of attention, or of its backward; ``half``: tensor cores multiply half types."""
    sizes = _sizes(nest, found, tile)
    groups = multiplies_in_groups(target, tile, half)
    dots = (*found.products, *found.states)
    once = read_across(nest, found) if groups else ()
    moved = moved_bytes(nest, target, sizes, {found.keys}, dots, found.edits, tile.stages, groups, once)
    scores, width = tile.queries * tile.keys, HALF if half else WIDE
    if groups:
        between = 0
    elif not target.machine.matrix_float32:
        between = scores * (HALF if half else WIDE * len(found.states))
    else:
        between = scores * (width if found.online else WIDE)
    # Results take the place of the loop's tiles, to be stored in wide pieces.
    stored = max(tile.queries * math.prod(sizes[v] for v in own) for own in found.widths) * width
    return max(moved + between, stored)


def multiplies_in_groups(target: Target, tile: AttentionTile, half: bool) -> bool:
    """Whether groups of warps multiply a tile's rows, which they read from shared memory in either orientation. Single
    warps have operands in registers, and both orientations of a tile that is loaded once would be there together."""
    return target.has_group_products and half and tile.queries >= GROUP_ROWS


def one_load(
    nest: LoopNest, target: Target, found: Roles, tile: AttentionTile, half: bool
) -> dict[str, tuple[Value, ...]]:
    """Whether tiles that products read in both orientations are loaded once, the default first; nothing where there are
    none, or where threads multiply by themselves."""
    if by_threads(target, half) or not read_across(nest, found):
        return {}
    groups = multiplies_in_groups(target, tile, half)
    return {"one_load": (groups, not groups)}


def read_across(nest: LoopNest, found: Roles) -> tuple[str, ...]:
    """The arrays of which products read the same tiles in both orientations: of scores along the features, and of sums
    along the keys."""
    own, by_name = {*found.rows, found.keys}, {b.name: b for b, _ in blocks(nest)}
    along, across = ({_tile_of(b, ld, own) for b in map(by_name.get, names) if b is not None
                      for ld, _ in _loads(b) if found.keys in _moves(b, ld)}
                     for names in (found.products, found.states))  # fmt: skip
    both = {load.buffer for load in along & across}
    return tuple(b.name for b in nest.params if b.name in both)


def _tile_of(block: Block, load: Load, own: Collection[sympy.Symbol]) -> Load:
    """A load with each feature by the number of features: products have axes of their own for them, and ``own`` in
    common."""
    here = {a.var: symbol(f"features_{a.extent}") for a in block.axes if a.var not in own}
    return replace(load, indices=tuple(i.xreplace(here) if isinstance(i, sympy.Expr) else i for i in load.indices))


def moved_bytes(
    nest: LoopNest,
    target: Target,
    sizes: Mapping[sympy.Symbol, int],
    streamed: Collection[sympy.Symbol],
    dots: Collection[str],
    edits: Collection[str],
    stages: int,
    groups: bool,
    once: Collection[str] = (),
) -> int:
    """Bytes of shared memory through which a program's tiles come from memory, in a loop over ``streamed`` axes.

    ``sizes`` are the elements of a tile along the axes that it has. ``dots`` multiply matrices, by ``groups`` of warps
    or not, and ``edits`` are what else is computed in the loop. Streamed tiles of arrays in ``once`` are loaded once
    for all products.
    """
    by_name = {b.name: b for b, _ in blocks(nest)}
    # What comes through registers stays there, but for the operands of products in a loop.
    copied = not target.machine.through_registers
    kept = flying = most = 0
    seen: set[tuple[Load | str, frozenset[sympy.Symbol]]] = set()
    for name in (*dots, *edits):
        for load, guards in _loads(by_name[name]):
            if nest.buffer(load.buffer).scope is not Scope.GLOBAL:
                continue
            axes = frozenset(_moves(by_name[name], load) & sizes.keys())
            if not axes <= guards:  # else each row's number is read for the row, whatever a condition says
                axes |= guards & sizes.keys()
            shared = load.buffer in once and not axes.isdisjoint(streamed)
            key = (load.buffer, axes & {*streamed}) if shared else (load, axes)
            if key in seen:
                continue
            seen.add(key)
            size = math.prod(sizes[v] for v in axes) * nest.buffer(load.buffer).dtype.itemsize
            if axes.isdisjoint(streamed):
                kept += size if name in dots and copied else 0
            elif copied or name in dots:
                # Tensor memory's products take a tile across from a copy of it.
                more = 1 if shared and target.has_tcgen05 else 0
                flying += size * (max(stages - (0 if groups and name in dots else 1), 1) + more)
                most = max(most, size)
    return kept + (flying if stages > 1 else most) + (BESIDE_TILES if copied else 0)


def held(nest: LoopNest, target: Target, found: Roles, tile: AttentionTile) -> int:
    """Elements of sums that a thread holds; of an online state the old and the new, and its scores."""
    sizes = _sizes(nest, found, tile)
    sums = sum(tile.queries * math.prod(sizes[v] for v in own) for own in found.widths)
    elements = 2 * sums + tile.queries * tile.keys if found.online else sums
    return elements // (tile.warps * target.warp)


def fitting_tile(
    nest: LoopNest, target: Target, found: Roles, tile: AttentionTile, half: bool, warps_of: Callable[[int], int]
) -> AttentionTile:
    """The tile, or the largest smaller one that fits the target's shared memory, with the warps that ``warps_of`` gives
    for its queries, or more where a thread would hold too many sums. The least, where none fits."""
    at = tile
    for at in _smaller(tile):
        at = replace(at, warps=warps_of(at.queries))
        if shared_bytes(nest, target, found, at, half) <= target.shared_bytes:
            break
    most, limit = _most_held(target, found, half), ATTENTION_WARPS * 32 // target.warp
    if by_threads(target, half):
        limit *= 2
    while held(nest, target, found, at) > most and at.warps < limit:
        at = replace(at, warps=at.warps * 2)
    return at


def by_threads(target: Target, half: bool) -> bool:
    """Whether threads multiply by themselves, and not tensor (matrix) cores; ``half``: operands that those take."""
    return not half and not target.machine.matrix_float32


def _most_held(target: Target, found: Roles, half: bool) -> int:
    if not half:
        return HELD_WIDE
    if target.machine.thread_registers > 255:
        return HELD_AMD
    if target.has_wgmma or (target.has_tcgen05 and not found.online):
        return HELD_GROUPS
    return HELD_ONLINE if found.online else HELD_SUMS


def _smaller(tile: AttentionTile) -> Iterator[AttentionTile]:
    """The tile and all smaller ones: as many steps in flight, then one step at a time."""
    for stages in dict.fromkeys((tile.stages, 1)):
        yield from (replace(tile, queries=q, keys=k, stages=stages) for q, k in smaller_sides(tile.queries, tile.keys))


def smaller_sides(rows: int, columns: int) -> list[tuple[int, int]]:
    """The sides of a tile and of all smaller ones, those of most scores first, of as many the squarest first."""
    sides = [(r, c) for r in _halves(rows) for c in _halves(columns)]
    return sorted(sides, key=lambda s: (-s[0] * s[1], max(s) // min(s), -s[0]))


def _halves(size: int) -> list[int]:
    return [size >> k for k in range(size.bit_length()) if size >> k >= LEAST]


def _sizes(nest: LoopNest, found: Roles, tile: AttentionTile) -> dict[sympy.Symbol, int]:
    """The elements of a tile along each axis that it has: features whole, rows and keys in pieces."""
    whole = {a.var: a.extent for b, _ in blocks(nest) for a in b.axes}
    features = {v: next_power(max(int(e), LEAST)) for v, e in whole.items() if v not in found.rows and e.is_Integer}
    return {**features, found.queries: tile.queries, found.keys: tile.keys}


def _loads(block: Block) -> Iterator[tuple[Load, frozenset[sympy.Symbol]]]:
    """The loads of a block, each with the axes of the conditions under which it is done."""
    for statement in block.body:
        for value in statement.values if isinstance(statement, Update) else (statement.value,):
            yield from _guarded(value, frozenset())


def _guarded(value: Expr, guards: frozenset[sympy.Symbol]) -> Iterator[tuple[Load, frozenset[sympy.Symbol]]]:
    match value:
        case Load():
            yield value, guards
        case Select(condition=condition):
            yield from _guarded(condition, guards)
            inside = guards | free_symbols(condition)
            for b in (value.if_true, value.if_false):
                yield from _guarded(b, inside)
        case _:
            for e in children(value):
                yield from _guarded(e, guards)


def _moves(block: Block, load: Load) -> set[sympy.Symbol]:
    """The axes that a load moves along; all of the block's where an index is itself a value."""
    if any(is_value(i) for i in load.indices):
        return {a.var for a in block.axes}
    return {s for i in load.indices if isinstance(i, sympy.Expr) for s in i.free_symbols}
