"""Kernels of which one is known to be faster: the model puts them in that order.

Each pair is the same computation in two forms, as small texts of Triton. What is known is of the literature and of the
review of these kernels: fewer instructions where they bound a kernel, wide accesses, runs of whole lines, one visit.
"""

from __future__ import annotations

import pytest

from tests.runtime.model.pairs import BOTH, BYTE, FLOAT, HALF, MB, Text, faster
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.model.work import ArrayTraffic

pytest.importorskip("triton")

# --- norms ------------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 8192, 4096
PERSISTENT = f"""
row = tl.program_id(0) * {COLUMNS}
x = tl.load(p0_ptr + row + tl.arange(0, {COLUMNS})).to(tl.float32)
scale = libdevice.rsqrt(tl.sum(x * x, 0) / {COLUMNS} + 1e-6)
tl.store(p1_ptr + row + tl.arange(0, {COLUMNS}), (x * scale).to(tl.bfloat16))
"""
LOOPED = f"""
row = tl.program_id(0) * {COLUMNS}
acc = tl.zeros([1024], tl.float32)
for k in tl.range(0, {COLUMNS // 1024}):
    x = tl.load(p0_ptr + row + k * 1024 + tl.arange(0, 1024)).to(tl.float32)
    acc += x * x
scale = libdevice.rsqrt(tl.sum(acc, 0) / {COLUMNS} + 1e-6)
for k in tl.range(0, {COLUMNS // 1024}):
    x = tl.load(p0_ptr + row + k * 1024 + tl.arange(0, 1024)).to(tl.float32)
    tl.store(p1_ptr + row + k * 1024 + tl.arange(0, 1024), (x * scale).to(tl.bfloat16))
"""


@pytest.mark.parametrize("target", BOTH)
def test_norms_that_keep_a_row_against_those_that_read_it_twice(target: str) -> None:
    size = ROWS * COLUMNS * 2
    result = ArrayTraffic(size, 0, size, contiguous=512)
    once, twice = (
        Text(body, (HALF, HALF), ROWS, [ArrayTraffic(size, visits * size, 0, contiguous=512), result])
        for body, visits in ((PERSISTENT, 1), (LOOPED, 2))
    )
    assert faster(once, twice, target) < 2


# --- attention --------------------------------------------------------------------------------------------------------

HEADS, LENGTH, WIDTH = 64, 4096, 128


def attention(scores: str, weights: str, masked: bool, warps: int = 8, stages: int = 2) -> Text:
    mask = "s = tl.where((k + n)[None, :] <= m[:, None], s, float('-inf'))" if masked else "pass"
    body = f"""
n = tl.arange(0, 64)
d = tl.arange(0, {WIDTH})
m = tl.program_id(0) * 128 + tl.arange(0, 128)
head = tl.program_id(0) // {LENGTH // 128} * {LENGTH * WIDTH}
q = tl.load(p0_ptr + m[:, None] * {WIDTH} + d[None, :])
top = tl.full([128], float('-inf'), tl.float32)
total = tl.zeros([128], tl.float32)
acc = tl.zeros([128, {WIDTH}], tl.float32)
for k in tl.range(0, {LENGTH}, 64):
    keys = tl.load(p1_ptr + head + (k + n)[None, :] * {WIDTH} + d[:, None])
    s = tl.dot(q, keys)
    {scores}
    {mask}
    new = tl.maximum(top, tl.max(s, 1))
    {weights}
    total = total * old + tl.sum(w, 1)
    values = tl.load(p2_ptr + head + (k + n)[:, None] * {WIDTH} + d[None, :])
    acc = acc * old[:, None]
    acc = tl.dot(w.to(tl.bfloat16), values, acc)
    top = new
tl.store(p3_ptr + m[:, None] * {WIDTH} + d[None, :], (acc / total[:, None]).to(tl.bfloat16))
"""
    size = HEADS * LENGTH * WIDTH * 2
    shared = ArrayTraffic(size, size, 0, LENGTH // 128, 1.0, 256)
    arrays = [ArrayTraffic(size, size, 0, contiguous=256), shared, shared, ArrayTraffic(size, 0, size, contiguous=256)]
    return Text(body, (HALF,) * 4, HEADS * LENGTH // 128, arrays, warps, stages)


# A maximum of scores that are scaled later, within a power of two; exponentials to the base of e, and infinities kept.
FOLDED = ("pass", "w = tl.exp2(s * 0.12752 - new[:, None] * 0.12752); old = tl.exp2((top - new) * 0.12752)")
PLAIN = (
    "s = s * 0.08839",
    "w = tl.where(s == new[:, None], 1.0, tl.exp(s - new[:, None])); "
    "old = tl.where(top == new, 1.0, tl.exp(top - new))",
)


@pytest.mark.parametrize("target", BOTH)
def test_attention_with_scales_folded_into_powers_of_two(target: str) -> None:
    assert faster(attention(*FOLDED, masked=False), attention(*PLAIN, masked=False), target) > 1.05


@pytest.mark.slow
def test_attention_whose_main_loop_has_no_mask() -> None:
    assert faster(attention(*FOLDED, masked=False), attention(*FOLDED, masked=True), "cuda:sm_90") < 1.5


@pytest.mark.slow
def test_attention_by_products_of_groups_of_warps_against_those_of_warps() -> None:
    """FlashAttention 3 against 2: the same loop for Hopper, and for what came before it with Hopper's clock and memory
    scaled away. Products of single warps reach three fifths, and load their operands into registers."""
    text = attention(*FOLDED, masked=False)
    groups, warps = text.prediction("cuda:sm_90"), text.prediction("cuda:sm_80")
    clocks = [p.seconds * gpu_target(t).machine.clock * gpu_target(t).machine.cores for p, t in (
        (groups, "cuda:sm_90"), (warps, "cuda:sm_80"))]  # fmt: skip
    assert clocks[0] < 0.8 * clocks[1]


@pytest.mark.slow
def test_attention_that_waits_for_its_loads_against_one_that_does_not() -> None:
    """Loads of the next tile while this one is multiplied."""
    one, two = (attention(*FOLDED, masked=False, stages=n) for n in (1, 2))
    assert faster(two, one, "cuda:sm_80") > 1.02


# --- accesses ---------------------------------------------------------------------------------------------------------


def copy(elements: int, at: str = "k", mask: str = "") -> Text:
    body = f"""
k = tl.program_id(0) * {elements} + tl.arange(0, {elements})
x = tl.load(p0_ptr + {at}{mask})
tl.store(p1_ptr + k, x{mask})
"""
    size = 256 * MB
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]
    return Text(body, (BYTE, BYTE), size // elements, arrays)


@pytest.mark.parametrize("target", BOTH)
def test_wide_accesses_against_narrow_ones(target: str) -> None:
    """Sixteen bytes a lane against one; and one a lane where neighbours are not known to lie together."""
    assert faster(copy(2048), copy(128), target) > 1.5
    faster(copy(2048), copy(2048, "(k ^ 1)"), target)


ENTROPY = """
row = tl.program_id(0) * 131072
top = tl.load(p2_ptr + tl.program_id(0))
for k in tl.range(0, 131072, 4096):
    i = k + tl.arange(0, 4096)
    x = tl.load(p0_ptr + row + i{mask}).to(tl.float32)
    {weight}
    tl.store(p1_ptr + row + i, y.to(tl.bfloat16){mask})
"""
POWER, BASE = "y = tl.exp2(x * 1.442695 - top)", "y = tl.where(x == top, 1.0, tl.exp(x - top))"


@pytest.mark.parametrize(
    ("mask", "weight"), [(", mask=(i < 131071) & (x0 != i)", POWER), ("", BASE)], ids=["guards", "base"]
)
def test_no_guards_and_powers_of_two(mask: str, weight: str) -> None:
    """A backward of cross entropy: neither a comparison for each load, nor an exponential beside what it takes."""
    size = 2048 * 131072 * 2
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]

    def text(mask: str, weight: str) -> Text:
        body = ENTROPY.replace("{mask}", mask).replace("{weight}", weight)
        body = body.replace("top = tl", "x0 = tl.program_id(0)\ntop = tl")
        return Text(body, (HALF, HALF, FLOAT), 2048, arrays, warps=8)

    faster(text("", POWER), text(mask, weight), "cuda:sm_90")


def columns(many: int, rows: int) -> Text:
    body = f"""
i = tl.program_id(0) * {many} + tl.arange(0, {many})[None, :]
acc = tl.zeros([{rows}, {many}], tl.float32)
for k in tl.range(0, 2048, {rows}):
    r = k + tl.arange(0, {rows})[:, None]
    acc += tl.load(p0_ptr + r * 65536 + i).to(tl.float32)
tl.store(p1_ptr + i, tl.sum(acc, 0)[None, :])
"""
    size = 2048 * 65536 * 2
    arrays = [
        ArrayTraffic(size, size, 0, contiguous=2 * many),
        ArrayTraffic(65536 * 4, 0, 65536 * 4, contiguous=4 * many),
    ]
    return Text(body, (HALF, FLOAT), 65536 // many, arrays, warps=8)


@pytest.mark.parametrize("target", BOTH)
def test_tiles_of_64_columns_against_those_of_16(target: str) -> None:
    assert faster(columns(64, 64), columns(16, 256), target) > 1.3


# --- random numbers ---------------------------------------------------------------------------------------------------


def dropout(draws: str) -> Text:
    body = f"""
k = tl.program_id(0) * 4096
i = tl.arange(0, 1024)
{draws}
"""
    size = 128 * MB
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]
    return Text(body, (HALF, HALF), size // 2 // 4096, arrays)


ONE = """
for n in tl.static_range(4):
    at = k + n * 1024 + i
    x = tl.load(p0_ptr + at).to(tl.float32)
    tl.store(p1_ptr + at, tl.where(tl.rand(7, at) > 0.1, x * 1.111, 0.0).to(tl.bfloat16))
"""
FOUR = """
a, b, c, d = tl.rand4x(7, k // 4 + i)
for n in tl.static_range(4):
    at = k + n * 1024 + i
    x = tl.load(p0_ptr + at).to(tl.float32)
    r = a if n == 0 else b if n == 1 else c if n == 2 else d
    tl.store(p1_ptr + at, tl.where(r > 0.1, x * 1.111, 0.0).to(tl.bfloat16))
"""


@pytest.mark.parametrize("target", BOTH)
def test_one_draw_for_four_elements(target: str) -> None:
    assert faster(dropout(FOUR), dropout(ONE), target) > 1.3
