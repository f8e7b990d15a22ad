"""What the rules for GPUs fit to registers, warps and memory: elements of tiles, and what threads hold of them.

They are of a thread, a warp or a program, and not of a whole GPU. A thread has as many registers on all of NVIDIA's; on
AMD's it has twice as many, of which only attention's sums are known to take more (``HELD_AMD``). How the others depend
on a machine's figures is not known.
"""

from __future__ import annotations

# What the compiler wants beside the tiles: barriers, and what reductions of rows exchange.
BESIDE_TILES = 1 << 10
# Elements that a thread may hold beside the operands of a product: where it multiplies by itself (float32), on matrix
# cores of AMD's, where groups of warps multiply what stays in shared memory, and on other tensor cores, of an online
# state and of sums.
HELD_WIDE, HELD_AMD, HELD_GROUPS, HELD_ONLINE, HELD_SUMS = 40, 160, 288, 160, 16
ATTENTION_WARPS = 8
# Elements of an online state that a thread holds from which it has no registers for the addresses of what it copies.
COPIED_FROM = 128

# How many elements a whole row may have to stay in one program.
PRODUCT_WHOLE_ROW = 256
# Elements of results that a thread has in registers, and operations on each from which it has room for half of them.
PRODUCT_HELD, PRODUCT_HEAVY = 128, 16
# Programs in a group along the shorter way through the L2 cache.
PRODUCT_GROUP = 8
# Warps of a program that can be given parts of its work.
WARP_GROUP = 4
# Shared memory that the compiler wants beside the tiles: barriers, and what it exchanges between layouts.
PRODUCT_RESERVED = 2048

# Elements of a tile of scores that a thread has in registers, of each product and of the sum.
BIAS_SCORES = 32

# Elements of sums that a thread has in registers beside a tile of scores and one of their gradients; steps in flight.
GRADIENT_SUMS = 64
# The same where groups of warps multiply, each for rows of its own: at most.
PAIR_SUMS = 128
# Elements of a head from which float32 takes shorter steps.
LONG_HEADS = 128
# Steps from which those without a mask get a loop of their own: less would not make up for twice the code.
FULL_TILES_FROM = 8
# Rows at a time whose numbers say what tiles that are left out would add.
LEFT_OUT_ROWS = 1024

# Elements of a program's tile.
COLUMN_TILE = 4096

# Elements of a tile of several short rows.
CROSS_SHORT = 2048
# Bytes of shared memory through which the warps of a program exchange their sums of a row.
ROW_EXCHANGED = 8 << 10
MOST_WARPS = 16

ROW_SHORT = 1024

# Threads of the largest program, and the tile of a row that such a program goes over at a time: larger ones spill.
MOST_THREADS, WIDE_TILE = 1024, 8192
# Threads of a program that goes over elements.
POINTWISE_THREADS = 128
# Elements of a program's tile of each of several things that have a launch in common.
SMALL_TILE = 256

# Bytes of the widest load of a lane.
LOAD_BYTES = 16
# Elements of a tile of a log-sum-exp at least, and at most; those of a lane, which share what is done once for a state,
# and the loads by which they come.
ONLINE_LEAST, ONLINE_TILE, ONLINE_EACH, ONLINE_LOADS = 256, 8192, 32, 8

# Elements of a tile, times tensors that are kept for all of it: a scan holds several states of each.
SCAN_TILE = 2048

# The most copies of a result; terms that are written out, in all of them; results that a thread sums at a time.
STENCIL_COPIES, STENCIL_TERMS, STENCIL_SUMS = 8, 72, 32
# Lanes of a tile at least, and at most.
STENCIL_FEWEST_LANES, STENCIL_MOST_LANES = 32, 64
STENCIL_WARPS = 4

# Sums that a thread keeps, terms that are written out, and neighbours that share what they load.
FILTER_SUMS, FILTER_TERMS, FILTER_COPIES = 80, 72, 4
FILTER_MOST_LANES, FILTER_WARPS = 64, 4
# Registers that a thread may have where parts of words become products of few results. Left alone, the assembler keeps
# threads of such small programs to 96, and has the rest in memory.
PARTS_REGISTERS = 128
