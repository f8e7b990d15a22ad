"""More kernels of which one is known to be faster: divisions, exponentials, copies that run ahead, pieces, digits."""

from __future__ import annotations

import pytest

from tests.runtime.model.pairs import BOTH, BYTE, FLOAT, HALF, MB, Text, faster
from torch_mlc.runtime.model.work import ArrayTraffic

pytest.importorskip("triton")

# --- divisions and functions ------------------------------------------------------------------------------------------

SOFTMAX = """
i = tl.program_id(0) * {columns} + tl.arange(0, {columns})
x = tl.load(p0_ptr + i).to(tl.float32)
e = tl.exp2((x - tl.max(x, 0)) * 1.442695)
total = tl.sum(e, 0)
{divided}
tl.store(p1_ptr + i, y.to(tl.bfloat16))
"""
EACH = "y = tl.div_rn(e, total)"
ONCE = "r = 1.0 / total\nq = e * r\ny = tl.fma(tl.fma(-q, total, e), r, q)"


@pytest.mark.parametrize("columns", [4096, pytest.param(32768, marks=pytest.mark.slow)])
def test_one_reciprocal_of_a_row_against_divisions_of_its_elements(columns: int) -> None:
    rows = 8192
    size = rows * columns * 2
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]

    def text(divided: str) -> Text:
        return Text(SOFTMAX.format(columns=columns, divided=divided), (HALF, HALF), rows, arrays, columns // 1024)

    faster(text(ONCE), text(EACH), "cuda:sm_90")


POINTWISE = """
i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
x = tl.load(p0_ptr + i).to(tl.float32)
{value}
tl.store(p1_ptr + i, (y * x).to(tl.bfloat16))
"""
TANH = (
    'y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)',
    "y = libdevice.tanh(x)",
)
EXP = ("y = tl.exp2(x * 1.442695)", "y = libdevice.exp(x)")


@pytest.mark.parametrize("values", [TANH, EXP], ids=["tanh", "exp"])
def test_approximate_functions_where_the_result_is_rounded_to_halves(values: tuple[str, str]) -> None:
    size = 128 * MB
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]
    approximate, exact = (Text(POINTWISE.format(value=value), (HALF, HALF), size // 2048, arrays) for value in values)
    faster(approximate, exact, "cuda:sm_90")


SIZES = """
at = tl.program_id(0).to(tl.{index}) * 1024 + tl.arange(0, 1024).to(tl.{index})
a = at % 96
b = at // 96 % 112
c = at // 10752 % 72
d = at // 774144
x = tl.load(p0_ptr + (((d * 72 + c) * 112 + b) * 104 + a))
tl.store(p1_ptr + at, x)
"""


def test_places_of_32_bits_against_those_of_64() -> None:
    size = 774144 * 128 * 2
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]
    narrow, wide = (Text(SIZES.format(index=index), (HALF, HALF), size // 2048, arrays) for index in ("int32", "int64"))
    faster(narrow, wide, "cuda:sm_90")


# --- cross entropy ----------------------------------------------------------------------------------------------------

LANES = """
row = tl.program_id(0) * 131072
top = tl.full([2048], float('-inf'), tl.float32)
total = tl.zeros([2048], tl.float32)
for k in tl.range(0, 131072, 2048):
    x = tl.load(p0_ptr + row + k + tl.arange(0, 2048)).to(tl.float32)
    new = tl.maximum(top, x)
    total = total * tl.exp(top - new) + tl.exp(x - new)
    top = new
most = tl.max(top, 0)
tl.store(p1_ptr + tl.program_id(0), tl.log(tl.sum(total * tl.exp(top - most), 0)) + most)
"""
TILES = """
row = tl.program_id(0) * 131072
top = float('-inf')
total = 0.0
for k in tl.range(0, 131072, 8192):
    x = tl.load(p0_ptr + row + k + tl.arange(0, 8192)).to(tl.float32)
    new = tl.maximum(top, tl.max(x, 0))
    total = total * tl.exp2((top - new) * 1.442695) + tl.sum(tl.exp2((x - new) * 1.442695), 0)
    top = new
tl.store(p1_ptr + tl.program_id(0), tl.log(total) + top)
"""


def test_one_maximum_of_a_tile_against_one_of_each_lane() -> None:
    size = 8192 * 131072 * 2
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(8192 * 4, 0, 8192 * 4, contiguous=4)]
    tiles, lanes = (Text(body, (HALF, FLOAT), 8192, arrays, warps=8) for body in (TILES, LANES))
    assert faster(tiles, lanes, "cuda:sm_90") > 1.3


# --- loops over rows --------------------------------------------------------------------------------------------------

COLUMNS = """
i = tl.program_id(0) * 64 + tl.arange(0, 64)[None, :]
first = tl.program_id(1) * {rows}
acc = tl.zeros([32, 64], tl.float32)
for k in tl.range(0, {rows}, 32, num_stages={stages}):
    acc += tl.load(p0_ptr + (first + k + tl.arange(0, 32)[:, None]) * 4096 + i).to(tl.float32)
tl.store(p1_ptr + tl.program_id(1) * 4096 + i, tl.sum(acc, 0)[None, :])
"""


def column_sums(pieces: int, stages: int = 1) -> Text:
    size, parts = 16384 * 4096 * 2, pieces * 4096 * 4
    body = COLUMNS.format(rows=16384 // pieces, stages=stages).replace(
        "tl.program_id(1)", f"(tl.program_id(0) % {pieces})").replace(
        "tl.program_id(0) * 64", f"tl.program_id(0) // {pieces} * 64")  # fmt: skip
    arrays = [ArrayTraffic(size, size, 0, contiguous=128), ArrayTraffic(parts, 0, parts, contiguous=256)]
    return Text(body, (HALF, FLOAT), 64 * pieces, arrays)


def test_copies_that_run_ahead_in_loops_without_products() -> None:
    """Few programs, each of which waits for memory. On sm_80 as many fill its slower memory either way."""
    assert faster(column_sums(8, stages=4), column_sums(8), "cuda:sm_90") > 1.1


@pytest.mark.parametrize("target", BOTH)
def test_rows_in_pieces_against_one_program_for_all_rows(target: str) -> None:
    assert faster(column_sums(32), column_sums(1), target) > 1.5


NORM_BACKWARD = """
j = tl.arange(0, 4096)
acc = tl.zeros([4096], tl.float32)
weight = tl.load(p2_ptr + j).to(tl.float32)
for k in tl.range(0, 32, num_stages={stages}):
    at = (tl.program_id(0) * 32 + k) * 4096 + j
    x = tl.load(p0_ptr + at).to(tl.float32)
    g = tl.load(p1_ptr + at).to(tl.float32)
    scale = libdevice.rsqrt(tl.sum(x * x, 0) / 4096 + 1e-6)
    n = x * scale
    acc += g * n
    s = g * weight
    tl.store(p3_ptr + at, ((s - n * (tl.sum(s * n, 0) / 4096)) * scale).to(tl.bfloat16))
tl.store(p4_ptr + tl.program_id(0) * 4096 + j, acc)
"""


def test_a_norms_backward_that_copies_the_next_row_meanwhile() -> None:
    size, parts = 16384 * 4096 * 2, 512 * 4096 * 4
    row = ArrayTraffic(size, size, 0, contiguous=512)
    arrays = [
        row, row, ArrayTraffic(8192, 8192, 0, 512, 1.0, 512), ArrayTraffic(size, 0, size, contiguous=512),
        ArrayTraffic(parts, 0, parts, contiguous=512),
    ]  # fmt: skip
    ahead, after = (
        Text(NORM_BACKWARD.format(stages=n), (HALF, HALF, HALF, HALF, FLOAT), 512, arrays, warps=8) for n in (3, 1)
    )
    faster(ahead, after, "cuda:sm_90")


TWICE = """
row = tl.program_id(0) * 131072
acc = tl.zeros([8192], tl.float32)
for k in tl.range(0, 131072, 8192):
    x = tl.load(p0_ptr + row + k + tl.arange(0, 8192)).to(tl.float32)
    acc += x * x
scale = libdevice.rsqrt(tl.sum(acc, 0) / 131072 + 1e-6)
for k in tl.range(0, 131072, 8192):
    x = tl.load(p0_ptr + row + k + tl.arange(0, 8192)).to(tl.float32)
    tl.store(p1_ptr + row + k + tl.arange(0, 8192), (x * scale).to(tl.bfloat16))
"""


def test_long_rows_by_so_few_programs_that_the_second_visit_finds_them_in_the_cache() -> None:
    size = 2112 * 131072 * 2
    arrays = [ArrayTraffic(size, 2 * size, 0, contiguous=512), ArrayTraffic(size, 0, size, contiguous=512)]
    few, many = (Text(TWICE, (HALF, HALF), 2112, arrays, warps=warps) for warps in (32, 8))
    faster(few, many, "cuda:sm_90")


# --- digits -----------------------------------------------------------------------------------------------------------

TWICE_A_BYTE = """
k = tl.arange(0, 4096)
w = tl.load(p0_ptr + tl.program_id(0) * 2048 + k // 2).to(tl.int32)
x = ((w >> (k % 2 * 4)) & 15).to(tl.float32)
tl.store(p1_ptr + tl.program_id(0), tl.sum(x * x, 0))
"""
ONCE_A_BYTE = """
w = tl.load(p0_ptr + tl.program_id(0) * 2048 + tl.arange(0, 2048)).to(tl.int32)
x = (w & 15).to(tl.float32)
y = (w >> 4).to(tl.float32)
tl.store(p1_ptr + tl.program_id(0), tl.sum(x * x + y * y, 0))
"""


def test_digits_of_bytes_that_are_loaded_once_and_wide() -> None:
    size = 65536 * 2048
    arrays = [ArrayTraffic(size, size, 0, contiguous=512), ArrayTraffic(65536 * 4, 0, 65536 * 4, contiguous=4)]
    once, twice = (Text(body, (BYTE, FLOAT), 65536, arrays) for body in (ONCE_A_BYTE, TWICE_A_BYTE))
    assert faster(once, twice, "cuda:sm_90") > 1.2
