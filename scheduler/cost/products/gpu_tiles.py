"""Shapes of tiles for products on GPUs, and how long a product takes in them: what the rule ranks its tiles by, and
what decides whether a product leaves the library."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ....ir.machine import Machine

# The least that a tile of the tensor cores has along each axis.
LEAST = 16
# Rows or columns of a tile that one program combines: what the fastest tiles of products have. Columns are fewer where
# so many operations follow on each result, or a state has several components: those want registers too.
COMBINED_ROWS, FEWER_COLUMNS, HEAVY_EPILOGUE = 128, 128, 16
# Nanoseconds of work from which a program that lasts is worth its descriptors: it makes them, and waits for them, in
# about a twentieth of that.
LASTING_WORTH = 20e3
# Rows that a warp group multiplies at once.
GROUP_ROWS = 64
# Results of a tile that are so few that a step of it takes longer than its products.
FEW_RESULTS = 64 * 32
# Bytes of a word that is loaded in the place of single ones, and the least number of steps that a loop keeps.
WORD, SHORT = 2, 2
# Registers of a thread that hold no results: addresses, operands, conditions.
REGISTERS_BESIDE = 64


@dataclass(frozen=True, slots=True)
class TileShape:
    """A shape of tiles: rows, columns, and elements of the summed axis a step; ``warps`` of 32 threads, the steps in
    flight, and the share of the peak rate that it reaches."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    rate: float


# Of two-byte operands; wider ones take shorter steps.
SHAPES = (
    TileShape(128, 256, 64, 8, 3, 1.0),
    TileShape(128, 128, 64, 8, 4, 0.88),
    TileShape(64, 256, 64, 4, 4, 0.85),
    TileShape(128, 64, 64, 4, 5, 0.72),
    TileShape(64, 128, 64, 4, 5, 0.74),
    TileShape(64, 64, 64, 4, 6, 0.56),
    TileShape(64, 32, 128, 4, 5, 0.34),
    TileShape(64, 16, 128, 4, 6, 0.20),
    TileShape(32, 32, 64, 4, 5, 0.22),
    TileShape(16, 64, 64, 4, 5, 0.22),
    TileShape(32, 16, 128, 2, 5, 0.14),
    TileShape(16, 16, 128, 2, 5, 0.10),
)
# Without tensor cores each thread keeps a square of results in registers.
PLAIN_SHAPES = (
    TileShape(128, 64, 16, 8, 3, 1.0),
    TileShape(64, 64, 16, 4, 3, 0.9),
    TileShape(64, 32, 32, 4, 3, 0.6),
    TileShape(32, 32, 32, 4, 3, 0.4),
    TileShape(16, 64, 32, 4, 3, 0.4),
    TileShape(64, 16, 32, 4, 3, 0.4),
    TileShape(16, 16, 32, 2, 3, 0.2),
)
# Tiles of a packed matrix that is multiplied with a vector, the vector in all columns. The first has too few rows for
# tensor cores that multiply in groups of warps: those wait for each product, of which a step has many.
VECTOR_TILES = (
    TileShape(32, 16, 128, 2, 6, 0.1),
    TileShape(64, 16, 128, 4, 6, 0.2),
    TileShape(16, 16, 128, 1, 6, 0.05),
)
# A product with a vector is a reduction of rows, without tensor cores.
VECTOR_SHAPES = (TileShape(4, 1, 512, 4, 1, 0.05),)


def stages_of(machine: Machine, shape: TileShape, each: int, beside: int, products: int = 1) -> int:
    """The steps in flight of a tile whose steps take ``each`` bytes of shared memory, beside what it takes once: those
    of the shape, as far as a block may have that; 0 where it may not have one.

    Where a multiprocessor is slower than the one that the shapes were measured on, a step takes longer, and as long as
    it waits for memory fewer are enough: as many as let the most programs be there at a time.
    """
    most = min(shape.stages, machine.stages, (machine.block_shared - beside) // max(each, 1))
    least = min(most, 1 + math.ceil((shape.stages - 1) * _pace(machine)))

    def resident(stages: int) -> int:
        return resident_programs(machine, shape, stages * each + beside, products)

    return max(range(least, most + 1), key=lambda k: (resident(k), k), default=most)


def resident_programs(machine: Machine, shape: TileShape, shared: int, products: int = 1) -> int:
    """Programs that a multiprocessor holds at a time, which take ``shared`` bytes of shared memory each."""
    held = REGISTERS_BESIDE * shape.warps * 32 + products * shape.rows * shape.columns
    return min(machine.shared // (shared + machine.reserved), machine.registers // held)


def tile_time(machine: Machine, shape: TileShape, depth: int) -> float:
    """Nanoseconds that a multiprocessor multiplies for a tile of half types."""
    return 2.0 * shape.rows * shape.columns * depth * machine.cores / (machine.matmul * shape.rate)


def reach(machine: Machine) -> float:
    """How many times its share of the memory's rate a multiprocessor reads: what it takes from the L2 cache is much the
    same in all of them, and its share is not."""
    return MEASURED.reach * (MEASURED.bandwidth / MEASURED.cores) / (machine.bandwidth / machine.cores)


def _pace(machine: Machine) -> float:
    """How fast a multiprocessor takes up steps, whatever bounds them, beside one of those measured; at most as fast."""
    faster = max(machine.bandwidth / MEASURED.bandwidth, machine.matmul / MEASURED.rate)
    return min(faster * MEASURED.cores / machine.cores, 1.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """What the time of a product depends on: multiprocessors, bytes a nanosecond of memory, operations a nanosecond,
    and how many times its share of the memory's rate a multiprocessor reads."""

    cores: int
    bandwidth: float
    rate: float
    reach: float = 2.0


# The GPU on which the shapes were measured.
MEASURED = Rates(132, 4300.0, 790e3)


@dataclass(frozen=True, slots=True)
class Extent:
    """A product's sizes."""

    batch: int
    m: int
    n: int
    k: int


def multiplying_time(
    size: Extent, pieces: int, read: float, rates: Rates, shapes: Iterable[TileShape] = SHAPES, making: float = 0.0,
    wait: float = 0.0,
) -> float:  # fmt: skip
    """Nanoseconds of a product in the best of the shapes, whose programs read ``read`` bytes in all.

    Programs run in waves, one on each multiprocessor: where they are fewer than those, only so many multiply and read.
    Each adds up one of the ``pieces`` of the summed axis. ``making`` is what operands take to make by all
    multiprocessors, beside multiplying; ``wait`` how long a program does nothing for an element of the summed axis.
    """
    return min(_time_in(size, pieces, read, rates, s, making, wait) for s in shapes)


def dealt_time(size: Extent, read: float, rates: Rates, shape: TileShape, making: float = 0.0) -> float:
    """Nanoseconds of a product whose steps are dealt evenly to as many programs as there are multiprocessors: that of
    the steps of one, whatever number of tiles they are of (stream-K)."""
    steps = size.batch * -(-size.m // shape.rows) * -(-size.n // shape.columns) * -(-size.k // shape.step)
    share = min(1.0, steps / rates.cores)
    each = 2.0 * shape.rows * shape.columns * shape.step * rates.cores / (rates.rate * shape.rate)
    rate = rates.bandwidth * min(1.0, rates.reach * share)
    return max(-(-steps // rates.cores) * each + making / share, read / rate)


def _time_in(
    size: Extent, pieces: int, read: float, rates: Rates, shape: TileShape, making: float, wait: float
) -> float:  # fmt: skip
    # Rows and columns may change places.
    tiles = min(
        -(-size.m // a) * -(-size.n // b) for a, b in ((shape.rows, shape.columns), (shape.columns, shape.rows))
    )
    programs = pieces * size.batch * tiles
    waves = -(-programs // rates.cores)
    depth = size.k / pieces
    each = 2.0 * shape.rows * shape.columns * depth * rates.cores / (rates.rate * shape.rate)
    share = programs / rates.cores
    # Programs of other waves do something else while one waits.
    busy = waves * each + wait * depth + making / min(1.0, share)
    return max(busy, read / (rates.bandwidth * min(1.0, rates.reach * share)))
