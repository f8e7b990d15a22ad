"""What the rules for CPUs fit to caches, pages and registers: measured on Zen 3 and Sapphire Rapids.

Functions follow a machine's registers and caches. Names in capitals are the same on all: lines, pages and the size of a
register's sums are, and of the others (operations from which mathematics sets the pace, rows and keys of tiles, what a
team is worth) the same serves both processors, so that no relation to their figures is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ...ir.machine import Machine

# Operations on an element from which mathematics, not memory, sets the pace.
HEAVY_FLOPS = 24
# Registers that a reduction of little work keeps in flight at least, so that it does not wait for its own results.
LEAST_IN_FLIGHT = 4
# So many times as long as its vectors is a loop at least that takes longer ones for a tail. Rows of 400 to 1552
# elements that a register divides, and four do not, are summed 1.2 times as fast so, moments 1.3 to 2.2 times (Zen 5,
# registers of 64 and of 32 bytes); rows of 112 would be slower in 32 lanes of which a register has 8.
WORTH_A_TAIL = 4
# A tile of a transposition: a cache line of the side that is read across, by half a line of the other, or by a whole
# one where lines begin alike in all rows and a register is as long. Elsewhere stores of whole registers would each
# begin a line that nobody has asked for, in as many rows.
TRANSPOSED_TILE = 16
TRANSPOSED_LANES = 8
LINE = 64

# Sides of a tile of scores. Queries, scores, weights and results of a tile together stay in the second-level cache.
TILE_QUERIES = (64, 128, 32)
TILE_KEYS = (64, 128, 32)
# More rows than these fill tiles of queries.
ROWS_MOST = 7
# Keys of a tile, and those whose scores are summed at a time. What a mask hides is left out by whole tiles: 16 rows at
# the front of a cache tiles of 128 take 1.7 times as long, and where all keys are seen no less (Zen 4).
ROWS_KEYS, ROWS_TOGETHER = (64, 128, 256), (4, 2, 8)
# Registers for sums of weighted values; the least keys of a piece; shares of the work for each of a team.
ROWS_SUMS, ROWS_PIECE, ROWS_SHARES = 8, 512, 2

# Rows that are added to accumulators while these are in registers.
COLUMN_ROWS_HELD = 4

# Operations of a part for which a team is called, as the one loop would have called it.
PART_TEAM = 1 << 15

# Rows of a weight that meet a panel of sums at a time, the part of the first-level cache that the sums of a panel take,
# and the rows of the other operand. A core reads a weight of 4096 columns in panels of 4 KiB of sums at three quarters
# of the rate at which it reads it in panels of 16 KiB, and at less in panels that leave no room (Zen 4, 32 KiB).
PANEL_ROWS, PANEL_PART, PANEL_TILE = 4, 2, 4
# Rows from which a tile of results stays in registers for a whole sum; terms that one accumulator takes before they
# join the others, and the least that are worth it; the widest panel that is copied by vectors alone.
TILE_ROWS, TILE_TERMS, TILE_LEAST, TILE_PANELS = 5, 256, 32, 128
# Rows and vectors of such tiles, the best first, with 32 registers and with 16. Loads for a term are as many as both.
TILES = ((8, 3), (6, 4), (7, 3), (12, 2), (10, 2), (11, 2), (9, 2), (5, 4), (16, 1), (14, 1), (24, 1))
SMALL_TILES = ((4, 3), (6, 2), (3, 4), (5, 2), (4, 2), (7, 1), (10, 1))
# How many tiles are choices; bytes of the sums of all rows of a panel at most, where these wait for the next terms; the
# part of the second-level cache that a panel of a weight has.
MOST_TILES, MOST_SUMS, PANEL_PART_L2 = 12, 3 << 14, 2
# Multiplications under way until the first one's sum is there.
LATENCY = 8
# Rows of a tile of sums that an instruction adds to, and the registers of its columns, at most; and those of one row.
DOT_ROWS, DOT_VECTORS, DOT_ALONE = 6, 4, 8
# Words of such a product that are summed by themselves, so that errors stay small, where terms have no groups.
DOT_RUN = 64
# Rows that a panel meets from which it is copied.
PACKED_ROWS = 32

# Elements of a tile, so many that its maximum is next to nothing of the work, and the part of the first-level cache
# that they take at most.
ONLINE_TILE, ONLINE_PART = 2048, 4

# Tiles of such rows are visited in blocks of that many elements a side: rows lie in pages of their own, of which no
# core remembers many, and at the same places of its cache.
VISITED_BLOCK = 64

# What lies a page ahead is never on its way by itself.
PAGE = 4096
# How many jumps ahead.
JUMPS = 8
# Bytes of an array that no second-level cache holds together with others.
LARGE_ARRAY = 1 << 20

# A thread's part of a row is at least so many bytes: whole cache lines, so that two threads seldom share one.
SCATTERED_PART = 256
# Fewer elements side by side than a register holds are no lanes.
SCATTERED_SHORT = 4

# Rows of a tile: as many as lanes of the widest registers, and a tile of some arrays stays in the first-level cache.
SHORT_ROWS_TOGETHER = 16
# Tiles for each of the cores, or there are not enough of them.
SHORT_ROWS_TILES = 16

# Bytes of the scratch at most, and the part of the second-level cache that it takes.
STENCIL_SCRATCH, STENCIL_PART = 1 << 16, 8


def has_more_registers(machine: Machine) -> bool:
    """Whether there are 32 vector registers, which go with vectors of 64 bytes, and not 16."""
    return machine.vector_bytes >= 64


def keys_in_registers(machine: Machine) -> tuple[int, ...]:
    """Keys (queries in the second product) that one step of an attention's products has in registers, by two vectors of
    the other: what is tried, the default first."""
    return (8, 4, 6) if has_more_registers(machine) else (4, 6, 2)


def online_tile(machine: Machine) -> int:
    """Elements of float32 that a first-level cache has between two visits."""
    return min(ONLINE_TILE, machine.l1_bytes // ONLINE_PART // 4)


def stencil_scratch(machine: Machine) -> int:
    """Bytes of what the windows of a stencil read, filled at a time."""
    return min(STENCIL_SCRATCH, machine.l2_bytes // STENCIL_PART)


# Operations on a result of a product from which on they are done in lanes: an exponential has about so many.
DEAR_RESULT = 12


def sums_in_registers(machine: Machine) -> int:
    """Accumulators of a product."""
    return 24 if has_more_registers(machine) else 12


def panel_vectors(machine: Machine) -> int:
    """Pairs of registers of sums in a panel, of all rows together."""
    return machine.l1_bytes // PANEL_PART // (2 * machine.vector_bytes)


def dear_columns(machine: Machine) -> int:
    """Columns whose results are made in lanes, where that is dear and a product's weight lies along the sum."""
    return 8 if has_more_registers(machine) else 4


def product_tile(machine: Machine) -> tuple[int, int]:
    """Rows and columns whose sums are in registers at a time, where a product's weight lies along the sum. One vector
    of a column is in a register beside them, and those of the rows."""
    return (4, 6) if has_more_registers(machine) else (2, 5)


def register_tiles(
    machine: Machine, rows: Sequence[int | None], vectors: int
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Tiles of the results of a product, the best first: how far one goes along each dimension of the ``rows``, whose
    extents are None where they are not known, and its vectors of a row of results, of which there are ``vectors``.
    Those are best that leave least of their last ones empty. Where the last dimension is short, as in small images, a
    tile goes on in the others."""
    tiles = TILES if has_more_registers(machine) else SMALL_TILES
    *others, last = rows
    found = {((*(1 for _ in others), high), wide): _tile_cost((high,), wide, (last,), vectors) for high, wide in tiles}
    if others and last is not None and last < max(high for high, _ in tiles):
        for wide in {wide for _, wide in tiles}:
            most = max(high for high, w in tiles if w == wide)
            for sides in _sides(rows, most):
                found.setdefault((sides, wide), _tile_cost(sides, wide, rows, vectors))
    best = sorted(found, key=lambda tile: (found[tile], tuple(-n for n in reversed(tile[0]))))
    return tuple(best[:MOST_TILES])


def tile_sides(rows: Sequence[int | None], count: int) -> tuple[int, ...]:
    """How far a tile of ``count`` rows goes along each dimension of the rows: so that the last ones are full."""
    alone = *(1 for _ in rows[1:]), count
    found = [alone, *(s for s in _sides(rows, count) if math.prod(s) == count)]
    return min(found, key=lambda s: (_tile_cost(s, 1, rows, 1), tuple(-n for n in reversed(s))))


def _sides(rows: Sequence[int | None], most: int) -> Iterator[tuple[int, ...]]:
    """Sides of tiles of at most so many rows."""
    if not rows:
        yield ()
        return
    *others, last = rows
    for side in range(1, min(last or 1, most) + 1):
        for more in _sides(others, most // side):
            yield (*more, side)


def _tile_cost(sides: Sequence[int], wide: int, rows: Sequence[int | None], vectors: int) -> float:
    """What a term of a sum costs in a tile of results, in multiplications."""
    high, filled = math.prod(sides), vectors / (-(-vectors // wide) * wide)
    for side, extent in zip(sides, rows, strict=True):
        filled *= 1.0 if extent is None else extent / (-(-extent // side) * side)
    waits = max(1.0, LATENCY / (high * wide))  # for the sum that the next term is added to
    return waits * (1.0 + 0.25 * (high + wide) / (high * wide)) / filled


def in_blocks(machine: Machine, sums: int, panel: int) -> bool:
    """Whether all rows meet some terms of a panel of the weight before its next ones, where their sums, and the panel,
    have so many bytes: a panel that does not stay in the second-level cache would be read from a slower one for each
    tile of rows."""
    return sums <= MOST_SUMS and panel * PANEL_PART_L2 > machine.l2_bytes


def packs_panels(rows: int, panels: int, machine: Machine) -> bool:
    """Whether panels of a weight are copied before so many rows meet them: where there are panels for all cores."""
    return rows >= PACKED_ROWS and panels >= machine.cores


def stencil_sums(machine: Machine) -> tuple[int, ...]:
    """Sums of a stencil in flight, the default first: as many as two units with a latency of four ask for, where there
    are registers for them."""
    return (8, 4, 2, 6, 1) if has_more_registers(machine) else (4, 2, 6, 8, 1)


def dot_tile(machine: Machine, rows: int, panels: int) -> tuple[int, int]:
    """Rows and registers of columns whose sums an instruction adds to at a time. One row has as many columns as hide
    how long a sum waits for the one before."""
    sums = 30 if has_more_registers(machine) else 14
    if rows == 1:
        return 1, max(1, min(DOT_ALONE, sums // 3, panels // machine.cores))
    wide = max(1, min(DOT_VECTORS, panels // machine.cores))
    tall = min(rows, DOT_ROWS, max(1, sums // (wide + 1)))
    return min((tall, tall - 1, tall - 2), key=lambda r: (-rows % r if r > 0 else rows, -r)), wide
