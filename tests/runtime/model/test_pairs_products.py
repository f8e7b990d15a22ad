"""Products of matrices of which one form is known to be faster: persistent ones, joint ones, causal ones."""

from __future__ import annotations

import pytest

from tests.runtime.model.pairs import FLOAT, HALF, Text, faster
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.model.work import ArrayTraffic

pytest.importorskip("triton")

N = 4096
MATRIX = N * N * 2


def matrices(*tiles: tuple[int, int], results: int = 1) -> list[ArrayTraffic]:
    """Operands of products of 4096 x 4096, each with how many programs share a tile and the bytes of a row's run."""
    operands = [ArrayTraffic(MATRIX, MATRIX, 0, sharing, 1.5, run) for sharing, run in tiles]
    return [*operands, *[ArrayTraffic(MATRIX, 0, MATRIX, contiguous=512)] * results]


LOADS = f"""
m = tl.program_id(0) % 32 * 128 + tl.arange(0, 128)[:, None]
n = tl.program_id(0) // 32 * 128 + tl.arange(0, 128)[None, :]
acc = tl.zeros([128, 128], tl.float32)
for k in tl.range(0, {N}, 32):
    a = tl.load(p0_ptr + m * {N} + k + tl.arange(0, 32)[None, :])
    b = tl.load(p1_ptr + n * {N} + k + tl.arange(0, 32)[:, None])
    acc = tl.dot(a, b, acc)
tl.store(p2_ptr + m * {N} + n, acc.to(tl.bfloat16))
"""
PERSISTENT = f"""
left = tl.make_tensor_descriptor(p0_ptr, [{N}, {N}], [{N}, 1], [128, 64])
right = tl.make_tensor_descriptor(p1_ptr, [{N}, {N}], [{N}, 1], [256, 64])
for tile in tl.range(tl.program_id(0), 512, 132, flatten=True):
    acc = tl.zeros([128, 256], tl.float32)
    for k in tl.range(0, {N}, 64, num_stages=3):
        a = left.load([tile % 32 * 128, k])
        b = tl.trans(right.load([tile // 32 * 256, k]))
        acc = tl.dot(a, b, acc)
    m = tile % 32 * 128 + tl.arange(0, 128)[:, None]
    n = tile // 32 * 256 + tl.arange(0, 128)[None, :]
    {{before}}
    one, two = tl.split(tl.permute(tl.reshape(acc, [128, 2, 128]), (0, 2, 1)))
    tl.store(p2_ptr + m * {N} + n, one.to(tl.bfloat16))
    tl.store(p2_ptr + m * {N} + n + 128, two.to(tl.bfloat16))
"""


def test_persistent_products_by_descriptors_against_a_program_for_each_tile() -> None:
    by_descriptors = Text(
        PERSISTENT.format(before="pass"), (HALF,) * 3, 132, matrices((16, 128), (32, 128)), warps=8, stages=3
    )
    by_tiles = Text(LOADS, (HALF,) * 3, 1024, matrices((32, 64), (32, 64)), warps=4, stages=3)
    assert faster(by_descriptors, by_tiles, "cuda:sm_90") > 1.1


@pytest.mark.parametrize("lines", [1, 12])
def test_no_product_is_faster_than_its_tensor_cores(lines: int) -> None:
    """However long the text behind the inner loop is, where the compiler makes one loop of two."""
    before = "\n    ".join(f"acc = tl.maximum(acc, {k}.5)" for k in range(lines))
    text = Text(PERSISTENT.format(before=before), (HALF,) * 3, 132, matrices((16, 128), (32, 128)), warps=8, stages=3)
    machine = gpu_target("cuda:sm_90").machine
    assert machine.pipes is not None
    least = N**3 / (machine.cores * machine.pipes.product * machine.clock * 1e9)
    assert text.prediction("cuda:sm_90").bounds["tensor cores"] == pytest.approx(least * 512 / 528 * 33 / 32, rel=0.1)


GATED = f"""
m = tl.program_id(0) % 32 * 128 + tl.arange(0, 128)[:, None]
n = tl.program_id(0) // 32 * 128 + tl.arange(0, 128)[None, :]
gate = tl.zeros([128, 128], tl.float32)
up = tl.zeros([128, 128], tl.float32)
for k in tl.range(0, {N}, 64):
    x = tl.load(p0_ptr + m * {N} + k + tl.arange(0, 64)[None, :])
    gate = tl.dot(x, tl.load(p1_ptr + n * {N} + k + tl.arange(0, 64)[:, None]), gate)
    up = tl.dot(x, tl.load(p2_ptr + n * {N} + k + tl.arange(0, 64)[:, None]), up)
tl.store(p3_ptr + m * {N} + n, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16))
"""
MULTIPLIED = """
i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
gate = tl.load(p0_ptr + i).to(tl.float32)
up = tl.load(p1_ptr + i).to(tl.float32)
tl.store(p2_ptr + i, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16))
"""


def test_gate_and_up_in_one_kernel_against_two_products_and_what_joins_them() -> None:
    target = "cuda:sm_90"
    joint = Text(GATED, (HALF,) * 4, 1024, matrices(*[(32, 128)] * 3), warps=8, stages=3).prediction(target)
    one = LOADS.replace(", 32)", ", 64)")
    product = Text(one, (HALF,) * 3, 1024, matrices(*[(32, 128)] * 2), warps=8, stages=3).prediction(target)
    flat = [ArrayTraffic(MATRIX, MATRIX, 0, contiguous=512)] * 2 + [ArrayTraffic(MATRIX, 0, MATRIX, contiguous=512)]
    joined = Text(MULTIPLIED, (HALF,) * 3, N * N // 1024, flat).prediction(target)
    assert joint.seconds < 2 * product.seconds + joined.seconds


# --- attention's gradients --------------------------------------------------------------------------------------------

LENGTH, WIDTH, HEADS = 4096, 128, 64
GRADIENTS = f"""
n = tl.program_id(0) % {LENGTH // 128} * 128 + tl.arange(0, 128)
head = tl.program_id(0) // {LENGTH // 128} * {LENGTH * WIDTH}
d = tl.arange(0, {WIDTH})
keys = tl.load(p0_ptr + head + n[:, None] * {WIDTH} + d[None, :])
values = tl.load(p1_ptr + head + n[:, None] * {WIDTH} + d[None, :])
dk = tl.zeros([128, {WIDTH}], tl.float32)
dv = tl.zeros([128, {WIDTH}], tl.float32)
for k in tl.range({{first}}, {LENGTH}, 64):
    m = k + tl.arange(0, 64)
    q = tl.load(p2_ptr + head + m[:, None] * {WIDTH} + d[None, :])
    do = tl.load(p3_ptr + head + m[:, None] * {WIDTH} + d[None, :])
    qt = {{qt}}
    dot = {{dot}}
    p = tl.exp2(tl.dot(keys, qt) - tl.load(p4_ptr + m)[None, :])
    dv = tl.dot(p.to(tl.bfloat16), do, dv)
    ds = p * (tl.dot(values, dot) - tl.load(p5_ptr + m)[None, :])
    dk = tl.dot(ds.to(tl.bfloat16), q, dk)
tl.store(p6_ptr + head + n[:, None] * {WIDTH} + d[None, :], dk.to(tl.bfloat16))
tl.store(p7_ptr + head + n[:, None] * {WIDTH} + d[None, :], dv.to(tl.bfloat16))
"""
TURNED = {"qt": "tl.trans(q)", "dot": "tl.trans(do)"}
AGAIN = {
    "qt": f"tl.load(p2_ptr + head + m[None, :] * {WIDTH} + d[:, None])",
    "dot": f"tl.load(p3_ptr + head + m[None, :] * {WIDTH} + d[:, None])",
}


def gradients(turned: dict[str, str], first: str = "0", visits: int = 1) -> Text:
    size, rows = HEADS * LENGTH * WIDTH * 2, HEADS * LENGTH * 4
    own, result = ArrayTraffic(size, size, 0, contiguous=256), ArrayTraffic(size, 0, size, contiguous=256)
    shared = ArrayTraffic(size, visits * size, 0, LENGTH // 128, 1.0, 256)
    row = ArrayTraffic(rows, rows, 0, LENGTH // 128, 1.0, 256)
    arrays = [own, own, shared, shared, row, row, result, result]
    types = (*(HALF,) * 4, FLOAT, FLOAT, HALF, HALF)
    return Text(GRADIENTS.format(first=first, **turned), types, HEADS * LENGTH // 128, arrays, warps=8, stages=2)


@pytest.mark.slow
def test_gradients_that_turn_what_they_have_against_those_that_load_it_again() -> None:
    faster(gradients(TURNED), gradients(AGAIN, visits=2), "cuda:sm_90")


@pytest.mark.slow
def test_gradients_of_keys_that_begin_at_the_diagonal() -> None:
    begun = gradients(TURNED, first=f"tl.program_id(0) % {LENGTH // 128} * 128")
    assert faster(begun, gradients(TURNED), "cuda:sm_90") > 1.6
