"""Contractions on GPUs: the rule keeps their meaning, and what it makes of large ones uses the tensor cores well."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu.launch import GpuKernel
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.rules import default_schedule, design_space

sys.path.insert(0, str(Path(__file__).parents[1]))
from contractions import batched, byte_products, dequantised, integers, linear, normed, packed, row_softmax

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
F32, BF16, F16 = DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16
S0 = symbol("s0")
TABLE = SymbolTable((Size(S0, 2, 4096, 1, 40),))


def scheduled(nest, target=SM90):
    schedule = default_schedule(nest, target)
    assert schedule.rule == "gpu_contraction"
    return schedule.nest


SMALL = {
    "even": linear(32, 64, 64),
    "odd": linear(37, 51, 67),
    "float32": linear(33, 40, 50, F32),
    "float16": linear(20, 70, 40, F16),
    "left transposed": linear(40, 48, 36, a_strides=(1, 40)),
    "right transposed": linear(40, 48, 36, w_strides=(1, 48)),
    "strided": linear(40, 48, 36, a_strides=(40, 1), w_strides=(72, 2)),
    "few rows": linear(3, 80, 100),
    "left expanded along the sum": linear(17, 20, 17, F32, a_strides=(1, 0)),
    "both expanded along the sum": linear(17, 9, 17, F32, a_strides=(1, 0), w_strides=(1, 0)),
    "few columns": linear(80, 5, 100),
    "bias and gelu": linear(35, 40, 64, epilogue="gelu"),
    "residual": linear(70, 33, 40, epilogue="residual"),
    "residual in place": linear(70, 33, 40, epilogue="over"),
    "residual in place, in groups of tiles": linear(300, 330, 40, epilogue="over"),
    "gated": linear(35, 36, 40, epilogue="gated"),
    "batch": batched(3, 20, 33, 24),
    "batch float32": batched(2, 17, 16, 33, F32),
    "bytes by row": dequantised(20, 40, 70),
    "bytes by group": dequantised(5, 40, 128, group=32),
    "bytes, odd": dequantised(70, 40, 51, group=17),
    "bytes in words": dequantised(20, 72, 256),
    "bytes in words, by group": dequantised(5, 72, 256, group=64, dtype=F16),
    "bytes as they are": byte_products(17, 64, 128),
    "4 bits": packed(20, 40, 3, 32),
    "4 bits in words": packed(16, 72, 2, 128),
    "4 bits in words, gated": packed(3, 72, 2, 64, both=True),
    "2 bits": packed(20, 40, 2, 128, parts=4),
    "4 bits, gated": packed(5, 40, 2, 64, both=True),
    "integers": integers(20, 33, 70),
    "norm": normed(20, 33, 70),
    "softmax": row_softmax(20, 27, 40),
}


@pytest.mark.parametrize("name", SMALL)
def test_rule_keeps_the_meaning(agrees, name):
    source = agrees(scheduled(SMALL[name]), tolerance=2e-5 if "float32" in name else 2e-2)
    assert "tl.dot(" in source.text


@pytest.mark.parametrize("rows", [2, 16, 17, 70])
def test_symbolic_rows(agrees, rows):
    agrees(scheduled(linear(S0, 40, 36, epilogue="residual", table=TABLE)), {"s0": rows}, tolerance=2e-2)


@pytest.mark.slow
def test_every_candidate_keeps_the_meaning(agrees):
    found = [c for c in design_space(linear(20, 70, 40), SM90).candidates() if c.rule == "gpu_contraction"]
    assert len(found) > 4
    for candidate in found[::8]:
        agrees(candidate.schedule.nest, tolerance=2e-2)


def test_tuning_may_vary_all_that_matters():
    """Tiles, warps, stages, the order of programs, how tiles are copied, dealt out, and given to warps."""
    values = {}
    for rule in design_space(linear(4096, 4096, 4096), SM90).rules[:1]:
        values = rule.parameters(linear(4096, 4096, 4096), SM90)
    assert set(values) == {"tile", "group", "column_parts", "persistent", "descriptors", "specialized"}
    tiles = [re.split("[x/]", str(t)) for t in values["tile"]]
    for k, least in ((0, 2), (1, 2), (3, 2), (4, 3)):
        assert len({t[k] for t in tiles}) >= least


def test_operands_of_small_integers_are_not_widened(agrees):
    """Bytes without a scale are exact in the half type of the other operand."""
    source = agrees(scheduled(byte_products(20, 40, 70)), tolerance=2e-2)
    assert "input_precision" not in source.text


def test_parts_of_a_word_are_read_once():
    source = emit_triton(scheduled(packed(16, 256, 4, 128)), SM90)
    words = "tl.load(tl.cast(in1_ptr, tl.pointer_type(tl.uint16), bitcast=True)"
    # Four digits a word, and two steps of two groups, each written out twice.
    assert source.text.count(words) == 2 and source.text.count("tl.dot(") == 8
    assert source.text.count("tl.load(in0_ptr") == 2 and "tl.split(" in source.text
    assert "tl.where(m" not in source.text, "which part it is is known where it is written out"


def test_what_is_alike_for_a_group_is_loaded_once_for_it():
    source = emit_triton(scheduled(dequantised(64, 256, 512, group=128)), SM90)
    assert "// 128" not in source.text


def test_nests_that_are_no_contraction_are_left_to_other_rules():
    # A product of vectors, a product with a vector, too few columns on both sides.
    for nest in (linear(1, 64, 64), linear(64, 1, 64), linear(4, 4, 64)):
        assert default_schedule(nest, SM90).rule != "gpu_contraction"


LARGE = {
    "plain": linear(4096, 4096, 14336),
    "residual": linear(4096, 4096, 14336, epilogue="residual"),
    "bias and gelu": linear(4096, 4096, 4096, epilogue="gelu"),
    "gated": linear(4096, 14336, 4096, epilogue="gated"),
    "few rows": linear(16, 4096, 14336),
    "left transposed": linear(1024, 1024, 1024, a_strides=(1, 1024)),
    "right transposed": linear(1024, 1024, 1024, w_strides=(1, 1024)),
    "batch": batched(16, 1024, 1024, 128),
    "bytes, few rows": dequantised(16, 4096, 14336),
    "bytes by group": dequantised(2048, 4096, 4096, group=128),
    "bits, few rows": packed(16, 4096, 32, 128),
    "bits, gated": packed(16, 4096, 32, 128, both=True),
    "bits, many rows": packed(2048, 4096, 32, 128),
    "integers": integers(1024, 4096, 4096),
    "norm": normed(2048, 4096, 4096),
    "softmax": row_softmax(4096, 256, 512),
    "symbolic rows": linear(S0, 4096, 4096, table=SymbolTable((Size(S0, 1, 65536, 1, 2048),))),
}
# Where a row of scales or a bias is read beside the tiles, or bytes go to the tensor cores through registers: those
# are copied eight at a time.
NARROW = (
    "bias and gelu",
    "integers",
    "bits, few rows",
    "bits, gated",
    "bits, many rows",
    "bytes, few rows",
    "bytes by group",
    "norm",
)


# Each part of a word is a product by itself, for which a group of warps would wait: single warps multiply few rows.
BY_WARPS = ("bits, few rows",)


@pytest.mark.parametrize("name", LARGE)
def test_large_contractions_use_the_tensor_cores(name):
    binary = compile_triton(emit_triton(scheduled(LARGE[name]), SM90), SM90)
    report = resource_report(binary)
    assert ("mma.sync" if name in BY_WARPS else "wgmma.mma_async") in binary.assembly
    assert report.spills == 0 and report.shared <= SM90.shared_bytes
    assert report.wide_stores == 1.0
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (0x\w+)", binary.assembly)
    assert {int(c, 16) for c in copies} <= ({4, 8, 16} if name.startswith(("bits", "bytes")) else {16})
    if name not in NARROW:
        assert report.wide_loads >= 0.95


@pytest.mark.parametrize("name", ["bias and gelu", "bytes by group"])
def test_large_contractions_compile_for_amd(name):
    binary = compile_triton(emit_triton(scheduled(LARGE[name], GFX942), GFX942), GFX942)
    report = resource_report(binary)
    assert "v_mfma_f32" in binary.assembly
    assert report.spills == 0 and report.shared <= GFX942.shared_bytes


@pytest.mark.parametrize("target", ["cuda:sm_75", "cuda:sm_90"])
def test_whole_rows_of_any_width_are_multiplied_by_threads(target):
    """With a tile of as many results as others have, where the row is wider than theirs."""
    machine, nest = gpu_target(target), row_softmax(4096, 256, 512)
    assert "tl.dot(" in emit_triton(scheduled(nest, machine), machine).text


def test_float32_uses_tensor_cores_where_tf32_is_allowed():
    allowed = replace(SM90, features="+tf32")
    nest = linear(1024, 1024, 1024, F32)
    plain, fast = (emit_triton(scheduled(nest, t), SM90) for t in (SM90, allowed))
    assert 'input_precision="ieee"' in plain.text and 'input_precision="tf32"' in fast.text
    assert "wgmma.mma_async" in compile_triton(fast, SM90).assembly


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_rule_on_a_gpu(agrees_on_gpu, name):
    tolerance = 2e-5 if "float32" in name else 2e-2
    agrees_on_gpu(lambda target: scheduled(SMALL[name], target), tolerance=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "gated", "few rows", "bytes by group", "batch"])
def test_large_contractions_equal_torch_on_a_gpu(agrees_on_gpu, name):
    """Against the same nest under another tile, for the oracle would take hours."""
    target = gpu_target("cuda:sm_90")
    nest = LARGE[name]
    tiles = [c.schedule.nest for c in design_space(nest, target).candidates() if c.rule == "gpu_contraction"][:2]
    generator = torch.Generator(device="cuda").manual_seed(0)
    results = []
    given = [on_gpu(b, generator) for b in nest.params if b.name not in nest.outputs]
    for scheduled_nest in tiles:
        outputs = [on_gpu(nest.buffer(o), generator) for o in nest.outputs]
        GpuKernel(emit_triton(scheduled_nest, target), target)([*given, *outputs], [])
        results.append(outputs)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-1)


def on_gpu(buffer, generator):
    shape, strides = [int(e) for e in buffer.shape], [int(e) for e in buffer.strides]
    found = torch.empty_strided(shape, strides, dtype=buffer.dtype.torch, device="cuda")
    if buffer.dtype.is_float:
        return found.copy_(torch.randn(shape, device="cuda", generator=generator))
    return found.copy_(torch.randint(-8, 8, shape, device="cuda", generator=generator))
