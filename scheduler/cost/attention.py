"""Whether an attention that torch's own CPU kernel could do is generated instead, by a model of time.

Torch's kernel blocks over queries and keys too and multiplies the blocks by BLAS: a little faster for wide heads and
many queries, while it pays for each call, for each score, and for what a causal mask hides within its larger blocks.
With few queries it fills no block. Measured on one core of Zen 3, in process time, for 1 to 2048 queries and heads of
32 to 256. Both are bound by the same arithmetic, so that a faster core or another vector changes both alike, unless
BLAS has narrower vectors than the processor: measured on one core of Zen 4, with masks too. With more cores a call
would weigh more, which was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.expr.dtypes import DType
from ...ir.machine import Machine

# Nanoseconds: of a score and a feature in our loops; the same in the library, with many queries and with fewer, where
# its blocks are smaller; of a score there besides; of a call; of an element of a half type that it converts for few
# queries.
OURS, MANY, FEWER, SCORE, CALL, CONVERTED = 0.060, 0.049, 0.057, 0.7, 20e3, 1.0
# Queries from which the library has large blocks; those below which ours has no tiles of them; a tile, and a register.
LARGE, FEW, TILE, LANES = 768, 8, 64, 16
# How many times as long the library's features take where BLAS has vectors half as wide as the processor's.
NARROW = 1.25
# Nanoseconds of a score that a mask is added to: of one in memory, in our loops and in the library; computed in ours.
MASKED, MASKED_LIBRARY, MASK_MADE = 1.6, 0.5, 1.0
# The share of causal scores that the library makes beyond what is seen, and that of scores which a mask of positions
# typically leaves our loops; what has to be saved, for a model is a model.
HIDDEN, LEFT, WORTH = 0.25, 0.5, 0.08


# The most nodes of a mask that is computed for each score, steps back to what it is made of, and operations of one of
# its functions; the most nodes of a key, and tensors that it is made of: those of masks, pages and scales as seen.
MASK_NODES, MASK_STEPS, MASK_OPERATIONS = 32, 8, 4
OPERAND_NODES, OPERAND_LOADS = 48, 6

# Fewer elements than this fill no operand of the tensor cores; wider operands stand whole in no tile.
LEAST_WIDTH, WIDEST = 16, 256


def widths(machine: Machine) -> range:
    """The widths of operands that stand whole beside a tile: of heads, and of what scores are summed over."""
    return range(LEAST_WIDTH if machine.is_gpu else 1, WIDEST + 1)


def head_widths(machine: Machine) -> range | None:
    """The widths of heads of attention, whose results stand whole in a tile too; None where any do."""
    return widths(machine) if machine.is_gpu else None


def multiplies(machine: Machine, dtype: DType) -> bool:
    """Whether a machine has instructions for tiles of a type: tensor cores have none for float64."""
    return not machine.is_gpu or dtype is not DType.FLOAT64


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """Typical sizes of an attention on a CPU; ``width`` of a head. ``masked`` where a mask is added, which ``hides``
    whole tiles of keys by their positions from loops that compute it."""

    heads: int
    queries: int
    keys: int
    width: int
    is_half: bool = False
    causal: bool = False
    masked: bool = False
    hides: bool = False


def inlined_readers(machine: Machine) -> int:
    """How many rows may read a key for it to be computed anew for each tile of them rather than written out: those of
    one tile, which on a CPU are those of decoding, since tiles of more rows would pack it."""
    return TILE if machine.is_gpu else FEW - 1


def decide_attention_cpu(size: AttentionSize, machine: Machine) -> tuple[bool, str]:
    """Whether our loops are clearly faster than torch's kernel, and why."""
    ours, library = ours_time(size), library_time(size, machine)
    return ours < library * (1 - WORTH), _told(size, ours, library)


def decide_library_cpu(size: AttentionSize, machine: Machine) -> tuple[bool, str]:
    """Whether torch's kernel is clearly faster than our loops, as with large blocks of wide heads, and why; it is not
    where it converts its operands."""
    ours, library = ours_time(size), library_time(size, machine)
    large = size.queries >= LARGE and not size.is_half
    return large and library < ours * (1 - WORTH), _told(size, ours, library)


def _told(size: AttentionSize, ours: float, library: float) -> str:
    shape = f"{size.heads} x {size.queries} x {size.keys} x {size.width}"
    shape += ", causal" if size.causal else ", a mask of positions" if size.hides else ", a mask" if size.masked else ""
    return f"{ours / 1e3:.0f} us in our loops, {library / 1e3:.0f} us in torch's: {shape}"


def ours_time(size: AttentionSize) -> float:
    """Nanoseconds; the last tile of queries costs a whole one, or the registers that it fills."""
    rows = size.queries
    if rows >= FEW:
        unit = TILE if rows > TILE else LANES
        rows = -(-rows // unit) * unit
    seen = min((size.queries + TILE) / (2 * size.keys), 1.0) if size.causal else 1.0
    if size.causal and size.queries > size.keys:
        seen = 1.0
    mask = MASK_MADE if size.hides else MASKED if size.masked else 0.0
    return size.heads * rows * size.keys * (LEFT if size.hides else seen) * (OURS * size.width + mask)


def library_time(size: AttentionSize, machine: Machine) -> float:
    """Nanoseconds."""
    scores = size.heads * size.queries * size.keys
    seen = min(size.queries / (2 * size.keys) + HIDDEN, 1.0) if size.causal else 1.0
    feature = (MANY if size.queries >= LARGE else FEWER) * (NARROW if machine.blas < 1.0 else 1.0)
    mask = MASKED_LIBRARY if size.masked else 0.0
    time = CALL + scores * seen * (SCORE + mask + feature * size.width)
    if size.queries < FEW:
        time += size.heads * size.keys * size.width * 2 * (CONVERTED if size.is_half else OURS / 2)
    return time
