"""The backward of attention on GPUs: kernels of plain sums over tiles, interpreted, and compiled."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.rules.gpu.attention_gradients import GPU_ATTENTION_GRADIENTS
from torch_mlc.scheduler.schedule.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parents[3] / "scheduler"))
import attention_gradients as plain

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def scheduled(of_keys, target=SM90, **sizes):
    schedule = default_schedule(lower_to_loops(plain.gradients(plain.Sizes(**sizes), of_keys)), target)
    assert schedule.rule == "gpu_attention_gradients"
    return schedule.nest


def inputs(b, m, n, e, d, dtype, dropout=False, packed=1):
    """Values of which weights are no more than one."""
    rng = np.random.default_rng(0)
    shapes = {"q": (b, m, e), "k": (b, n, e), "v": (b, n, d), "g": (b, m, d), "delta": (b, m)}
    shapes |= {name: (*shapes[name][:2], shapes[name][2] * packed) for name in plain.PACKED}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    given = {name: a.astype(dtype.numpy) if a.ndim == 3 else a for name, a in given.items()}
    return {**given, "lse": np.full((b, m), 5.0, np.float32)}


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 2, "m": 70, "n": 37, "e": 16, "d": 24, "dtype": BF16},
        {"b": 1, "m": 64, "n": 128, "e": 16, "d": 16, "dtype": BF16},
        {"b": 1, "m": 19, "n": 40, "e": 20, "d": 16, "dtype": F32},
        {"b": 1, "m": 7, "n": 18, "e": 16, "d": 16, "dtype": BF16, "dropout": True},
    ],
    ids=["odd", "even", "float32", "dropout"],
)
def test_rule_keeps_the_meaning(agrees, of_keys, sizes):
    source = agrees(
        scheduled(of_keys, **sizes), {}, inputs(**sizes), tolerance=3e-2 if sizes["dtype"] is BF16 else 2e-5
    )
    assert source.text.count("tl.dot(") == (4 if of_keys else 3)


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 2, "m": 70, "n": 137, "e": 16, "d": 24, "dtype": BF16},
        {"b": 1, "m": 19, "n": 136, "e": 20, "d": 16, "dtype": F32},
    ],
    ids=["odd", "float32"],
)
def test_rows_that_make_what_they_are_told(agrees, sizes):
    """A sum over the tile's rows before the loop, which the loop takes from registers, and others from memory."""
    given = {**inputs(**sizes), "o": inputs(**sizes)["g"][::-1].copy()}
    source = agrees(scheduled(False, **sizes, told=True), {}, given, tolerance=3e-2 if sizes["dtype"] is BF16 else 2e-5)
    before, loop, after = source.text.partition("in tl.range")
    assert before.count("tl.sum(") == 1 and before.count("tl.store(") == 1 and loop
    assert "tl.sum(" not in after and after.count("tl.store(") == 1


def test_a_product_takes_what_the_sum_before_it_has_widened(agrees):
    """The same tile has lanes along the width for the one and along what is summed for the other."""
    sizes = {"b": 1, "m": 33, "n": 70, "e": 16, "d": 16}
    given = inputs(**sizes, dtype=F32)
    given |= {"o": given["g"][:, ::-1].copy(), "g": given["g"].astype(BF16.numpy)}
    agrees(scheduled(False, **sizes, dtype=F32, told=True, narrow=("g",)), {}, given, tolerance=2e-5)


def test_rows_that_make_what_they_are_told_of_symbolic_lengths(agrees):
    nest = scheduled(False, b=1, m=symbol("s0"), n=symbol("s1"), e=16, d=16, dtype=BF16, told=True)
    given = inputs(1, 33, 90, 16, 16, BF16)
    agrees(nest, {"s0": 33, "s1": 90}, {**given, "o": given["g"][:, ::-1].copy()}, tolerance=3e-2)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 2, "m": 4, "n": 4, "e": 32, "d": 32, "dtype": F32, "packed": 3},
        {"b": 1, "m": 49, "n": 49, "e": 17, "d": 17, "dtype": F32, "packed": 3},
        {"b": 1, "m": 64, "n": 64, "e": 32, "d": 32, "dtype": BF16, "packed": 2},
        {"b": 1, "m": 20, "n": 7, "e": 16, "d": 33, "dtype": BF16, "packed": 5},
    ],
    ids=["few", "odd", "half", "uneven"],
)
def test_rows_that_are_the_first_part_of_longer_ones(agrees, of_keys, sizes):
    """A projection made queries, keys and values of a head beside one another: the tile of the first holds no more."""
    nest = scheduled(of_keys, **sizes)
    source = agrees(nest, {}, inputs(**sizes), tolerance=3e-2 if sizes["dtype"] is BF16 else 2e-5)
    assert source.text.count("tl.dot(") == (4 if of_keys else 3)


@pytest.mark.parametrize("of_keys", [False, True])
def test_symbolic_lengths(agrees, of_keys):
    s0, s1 = symbol("s0"), symbol("s1")
    nest = scheduled(of_keys, b=1, m=s0, n=s1, e=16, d=16, dtype=BF16)
    agrees(nest, {"s0": 33, "s1": 90}, inputs(1, 33, 90, 16, 16, BF16), tolerance=3e-2)


@pytest.mark.parametrize("of_keys", [False, pytest.param(True, marks=[pytest.mark.slow])])
def test_empty_tiles_are_not_read(agrees, of_keys):
    """The loop begins or ends where the causal mask does."""
    sizes = {"b": 1, "m": 136, "n": 136, "e": 16, "d": 16, "dtype": BF16}
    source = agrees(scheduled(of_keys, **sizes), {}, inputs(**sizes), tolerance=3e-2)
    (loop,) = [line for line in source.text.splitlines() if "in tl.range" in line]
    assert ("low0" if of_keys else "high0") in loop


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "mask"),
    [
        (90, 90, {}),
        (70, 137, {"ahead": 5}),
        (137, 90, {"ahead": -70}),
        (150, 150, {"window": 30}),
        (150, 70, {"ahead": -20, "window": 40}),
        (300, 290, {}),
        (290, 300, {"ahead": -100}),
        (300, 300, {"window": 150}),
    ],
    ids=["causal", "ahead", "rows that see nothing", "window", "window behind", "long", "long behind", "long window"],
)
def test_what_masks_leave_out(interpreter, monkeypatch, of_keys, m, n, mask):
    """Gradients of float64, NaN where those are: a row that sees nothing gives all values of its batch none, also those
    of tiles that it does not visit."""
    torch.manual_seed(0)
    # As if tensor cores multiplied float32, so that tiles without a mask have a loop of their own.
    monkeypatch.setattr("torch_mlc.scheduler.rules.gpu.attention_gradients.by_threads", lambda *_: False)
    sizes = plain.Sizes(b=2, m=m, n=n, e=16, d=16, apart=True, **mask)
    given, expected = plain.tensors(sizes, m, n)
    nest = scheduled(of_keys, **{f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes)})
    source = emit_triton(nest, SM90)
    starts = [line for line in source.text.splitlines() if "low0 = " in line or "high0 = " in line]
    assert len(starts) >= (2 if sizes.window else 1)
    *_, full, edges = source.text.split("in tl.range(")
    if m > 256 and n > 256:
        assert " < " not in full.partition("for ")[0] and " < " in edges
    found = interpreter.run(source, nest.outputs, {name: t.numpy() for name, t in given.items()}, {})
    for name, got in zip(("v", "k") if of_keys else ("q",), found.values(), strict=True):
        np.testing.assert_allclose(got, expected[name].numpy(), rtol=2e-5, atol=2e-5, err_msg=name)
    assert bool(expected["v"].isnan().any()) == (sizes.ahead < 0)


@pytest.mark.parametrize("of_keys", [False, True])
def test_two_loops_of_half_types(interpreter, of_keys):
    """By the rule's own choice, for a row of tiles or more: with and without comparisons."""
    torch.manual_seed(0)
    m, n = (530, 140) if of_keys else (140, 530)
    sizes = plain.Sizes(b=1, m=m, n=n, e=16, d=16, apart=True, ahead=n - m, dtype=BF16)
    given, expected = plain.tensors(sizes, m, n)
    nest = scheduled(of_keys, **{f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes)})
    source = emit_triton(nest, SM90)
    assert source.text.count("num_stages=") == 2
    arrays = {k: t.float().numpy().astype((BF16 if t.dtype is torch.bfloat16 else F32).numpy) for k, t in given.items()}
    found = interpreter.run(source, nest.outputs, arrays, {})
    for name, got in zip(("v", "k") if of_keys else ("q",), found.values(), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), expected[name].numpy(), rtol=3e-2, atol=3e-2, err_msg=name)


def turned(of_keys, **sizes):
    """Whether tiles are loaded once or twice for both orientations, by the rule's parameter, whatever its default."""
    nest = lower_to_loops(plain.gradients(plain.Sizes(**sizes), of_keys))
    params = {k: v[0] for k, v in GPU_ATTENTION_GRADIENTS.parameters(nest, SM90).items()}
    for once in (False, True):
        schedule = Schedule(nest)
        GPU_ATTENTION_GRADIENTS.apply(schedule, SM90, {**params, "one_load": once})
        yield schedule.nest


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{"m": 70, "n": 37, "e": 16, "d": 24}, {"m": 64, "n": 128, "e": 16, "d": 32, "packed": 2},
     {"m": 33, "n": 90, "e": 20, "d": 20}],
    ids=["tails", "even", "features that end in a tile"],
)  # fmt: skip
def test_a_tile_of_both_orientations_is_loaded_once(agrees, of_keys, sizes):
    """For the second product it is transposed, with what its tail has masked: where products end in a tile too, the
    masks are of the same elements."""
    twice, once = turned(of_keys, b=2, **sizes, dtype=BF16)
    given = inputs(2, sizes["m"], sizes["n"], sizes["e"], sizes["d"], BF16, packed=sizes.get("packed", 1))
    source = agrees(once, {}, given, tolerance=3e-2)
    names = ("q", "g") if of_keys else ("k",)
    *_, body = source.text.split("for k")
    for name in names:
        assert len(re.findall(rf"tl\.load\({name}_ptr", body)) == 1 == body.count(f"tl.trans({name}_")
    before = emit_triton(twice, SM90).text
    assert "tl.trans" not in before and before.count("tl.load(") == source.text.count("tl.load(") + len(names)


@pytest.mark.parametrize("of_keys", [False, True])
def test_numbers_of_rows_are_loaded_for_rows(of_keys):
    """A mask of scores, under which they are read, would make whole tiles of them."""
    source = emit_triton(scheduled(of_keys, b=2, m=128, n=192, e=16, d=16, dtype=BF16, apart=True), SM90)
    loads = [line for line in source.text.splitlines() if re.search(r"tl\.load\((top|log_total|delta)_ptr", line)]
    *_, body = source.text.split("num_stages=")
    assert len(loads) >= 3 and not any("mask=" in line for line in loads if line in body)


def scheduled_bias(**sizes):
    schedule = default_schedule(lower_to_loops(plain.bias_gradient(plain.Sizes(**sizes))), SM90)
    assert schedule.rule == "gpu_attention_bias"
    return schedule.nest


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 3, "m": 70, "n": 37, "e": 16, "d": 24, "dtype": BF16},
        {"b": 1, "m": 64, "n": 16, "e": 16, "d": 16, "dtype": BF16},
        {"b": 2, "m": 19, "n": 40, "e": 20, "d": 16, "dtype": F32},
    ],
    ids=["odd", "single", "float32"],
)
def test_gradient_of_a_bias(agrees, sizes):
    source = agrees(scheduled_bias(**sizes), {}, inputs(**sizes), tolerance=3e-2 if sizes["dtype"] is BF16 else 2e-5)
    assert source.text.count("tl.dot(") == 2 and source.text.count("tl.store(") == 1


def test_gradient_of_a_bias_with_symbolic_lengths(agrees):
    nest = scheduled_bias(b=2, m=symbol("s0"), n=symbol("s1"), e=16, d=16, dtype=BF16)
    agrees(nest, {"s0": 33, "s1": 90}, inputs(2, 33, 90, 16, 16, BF16), tolerance=3e-2)


def test_gradient_of_a_bias_compiled():
    nest = scheduled_bias(b=32, m=2048, n=2048, e=64, d=64, dtype=BF16)
    report = resource_report(compile_triton(emit_triton(nest, SM90), SM90))
    assert report.spills == 0 and report.group_products > 0
    assert report.shared <= SM90.shared_bytes


@pytest.mark.parametrize(("target", "width"), [("cuda:sm_80", 64), ("cuda:sm_80", 128), ("cuda:sm_120", 64)])
def test_gradient_of_a_bias_where_single_warps_multiply(target, width):
    at = gpu_target(target)
    nest = lower_to_loops(plain.bias_gradient(plain.Sizes(b=4, m=2048, n=2048, e=width, d=width, dtype=BF16)))
    report = resource_report(compile_triton(emit_triton(default_schedule(nest, at).nest, at), at))
    assert report.spills == 0 and report.shared <= at.shared_bytes


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("of_keys", "told"), [(False, False), (False, True), (True, False)])
def test_compiled(of_keys, told, width):
    nest = scheduled(of_keys, b=32, m=2048, n=2048, e=width, d=width, dtype=BF16, told=told)
    report = resource_report(compile_triton(emit_triton(nest, SM90), SM90))
    assert report.spills == 0 and report.group_products > 0
    assert report.shared <= SM90.shared_bytes
