"""The suite predicted: Inductor's kernels are had without a GPU, and their visits are told from their text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton")

from benchmarks.cli import main
from benchmarks.static.beside import call_time
from benchmarks.static.inductor.calls import Array, Call, Calls, Libraries
from benchmarks.static.inductor.visits import arrays_of
from torch_mlc.ir.target import gpu_target

TEXT = """import triton.language as tl


def f(in_ptr0, in_ptr1, in_ptr2, out_ptr0, xnumel, r0_numel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    xnumel = 64
    r0_numel = 1000
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        tmp0 = tl.load(in_ptr0 + (r0_index + 1000 * xindex), r0_mask & xmask, other=0.0).to(tl.float32)
        tmp1 = tl.sum(tmp0, 1)[:, None]
    tmp2 = tl.load(in_ptr2 + xindex, None)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_mask = r0_index < r0_numel
        tmp3 = tl.load(in_ptr0 + (r0_index + 1000 * xindex), r0_mask & xmask)
        tmp4 = tl.load(in_ptr1 + r0_index, r0_mask, eviction_policy="evict_last")
        tmp4 = tl.broadcast_to(tmp4, tmp3.shape)
        tl.store(out_ptr0 + tl.broadcast_to(r0_index + 1000 * tmp2, tmp3.shape), tmp3 * tmp4 - tmp1, r0_mask & xmask)
"""


def test_a_loop_that_reads_again_counts_again_and_what_programs_share_is_shared() -> None:
    arrays = {
        "in_ptr0": Array(64000, 2),
        "in_ptr1": Array(1000, 4),
        "in_ptr2": Array(64, 8),
        "out_ptr0": Array(64000, 2),
    }
    values = {"xnumel": 64, "r0_numel": 1000, "XBLOCK": 2, "R0_BLOCK": 256}
    x, weight, rows, out = arrays_of(TEXT, "f", values, arrays, (32,), 8)
    assert (x.touched, x.read, x.written, x.sharing) == (128000, 256000, 0, 1)
    assert (weight.touched, weight.read, weight.sharing, weight.rounds) == (4000, 4000, 32, 4.0)
    assert (rows.touched, rows.read, rows.contiguous) == (512, 512, 16)
    # Where data say the row, a tile's elements count, those of switched-off lanes among them.
    assert out.touched == 128000 and out.written == 131072 and out.contiguous is None


def test_a_last_program_with_a_tail_counts_as_one() -> None:
    text = """import triton.language as tl


def f(in_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tmp0 = tl.load(in_ptr0 + xindex, xindex < xnumel)
"""
    (found,) = arrays_of(text, "f", {"xnumel": 4097, "XBLOCK": 64}, {"in_ptr0": Array(4097, 2)}, (65,), 8)
    assert (found.read, found.touched) == (4097 * 2, 4097 * 2)


def test_neighbours_that_visit_different_arrays_visit_all_of_both() -> None:
    text = """import triton.language as tl


def f(in_ptr0, in_ptr1, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    x0 = xindex % 512
    x1 = xindex // 512
    tmp0 = tl.load(in_ptr0 + x0 + 256 * x1, x0 < 256)
    tmp1 = tl.load(in_ptr1 + x0 - 256 + 256 * x1, x0 >= 256)
"""
    arrays = {name: Array(131072 * 32, 2) for name in ("in_ptr0", "in_ptr1")}
    for found in arrays_of(text, "f", {"XBLOCK": 64}, arrays, (131072,), 8):
        assert (found.read, found.touched) == pytest.approx((131072 * 64, 131072 * 64), rel=0.01)


def test_both_compilers_are_predicted_without_a_gpu(tmp_path: Path) -> None:
    arguments = ["--suite", "predicted", "--size", "tiny", "--out", str(tmp_path)]
    arguments += ["--filter", "column sums", "--filter", "int8-weight"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("predicted_sm90_*.json")
    body = json.loads(written.read_text())
    assert body["schema"] == "torch-mlc-predicted" and not body["failed"]
    product, sums = body["pairs"]
    for pair in (product, sums):
        ours, theirs = pair["ours"], pair["theirs"]
        assert pair["ratio"] == theirs["seconds"] / ours["seconds"]
        for side in (ours, theirs):
            assert side["kernels"] and side["moved"] > 0
            assert all(k["seconds"] > 0 and k["registers"] > 0 for k in side["kernels"])
            assert all(k["slots"] is None or k["slots"] > 0 for k in side["kernels"])
    # Both read 64 x 64 halves and write 64; the weights of int8 are written out as halves by Inductor alone.
    assert sums["ours"]["moved"] == sums["theirs"]["moved"] == 65 * 64 * 2
    assert all(k["slots"] > 0 for side in ("ours", "theirs") for k in sums[side]["kernels"])
    assert not product["ours"]["libraries"] and [op for op, *_ in product["theirs"]["libraries"]] == ["mm"]


@pytest.mark.parametrize(
    ("rows", "columns", "summed", "even", "copied"),
    [
        (64, 64, 64, (True, True), ()), (64, 65, 64, (True, False), (64 * 65 * 2,)),
        (64, 64, 65, (False, True), (64 * 65 * 2, 65 * 64 * 2)), (65, 64, 64, (True, True), ()),
    ],
)  # fmt: skip
def test_inductors_products_say_whether_their_rows_are_even(
    rows: int, columns: int, summed: int, even: tuple[bool, bool], copied: tuple[int, ...]
) -> None:
    found = Calls()
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, summed), (columns, summed)))
    with Libraries(found):
        torch.mm(a, b.t())
    (call,) = found.libraries
    assert (call.even_operands, call.even_result) == even and call.padded == copied


def test_products_of_both_compilers_have_the_same_rates() -> None:
    target = gpu_target("cuda:sm_90")
    even = Call("mm", 1 << 40, torch.bfloat16, 1 << 20)
    # Copies that cost more than they gain are left out.
    odd = replace(even, even_result=False, padded=(1 << 40,))
    assert call_time(odd, target)[0] == pytest.approx(call_time(even, target)[0] / 0.6, rel=0.01)
    padded = replace(even, even_operands=False, padded=(1 << 20,))
    seconds, moved = call_time(padded, target)
    assert seconds == pytest.approx(call_time(even, target)[0], rel=0.01) and moved == 3 << 20
    assert call_time(replace(odd, dtype=torch.float32), target) == call_time(replace(even, dtype=torch.float32), target)


def test_kernels_of_the_kernel_suite_are_compared(tmp_path: Path) -> None:
    arguments = ["--suite", "predicted", "--size", "tiny", "--out", str(tmp_path), "--filter", "kernels, rms_norm, odd"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("predicted_sm90_*.json")
    (pair,) = json.loads(written.read_text())["pairs"]
    assert pair["workload"] == "kernels, rms_norm, odd" and pair["ours"]["launches"] == 1


def test_amds_gpus_are_refused(tmp_path: Path) -> None:
    arguments = ["--suite", "predicted", "--target", "hip:gfx942", "--filter", "column sums", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "CUDA alone" in result.output
