"""Tiles of attention are chosen by what the target holds, told before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from tests.scheduler import attention_functions as plain
from tests.scheduler import attention_gradients as backward
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule, design_space
from torch_mlc.scheduler.rules.cpu.attention import roles
from torch_mlc.scheduler.rules.gpu.fit import AttentionTile, shared_bytes, smaller_sides
from torch_mlc.scheduler.rules.registry import Value

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
TARGETS = ("cuda:sm_75", "cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_103", "cuda:sm_120",
           "hip:gfx90a", "hip:gfx942")  # fmt: skip


@cache
def nest(kind: str, width: int, dtype: DType) -> LoopNest:
    """Attention of many heads of 2,048 rows, causal, or a part of its backward."""
    if kind == "forward":
        sizes = plain.Sizes(b=4, h=16, m=2048, n=2048, e=width, d=width, dtype=dtype)
        return lower_to_loops(plain.attention(plain.CAUSAL, sizes))
    some = backward.Sizes(b=64, m=2048, n=2048, e=width, d=width, dtype=dtype)
    if kind == "bias":
        return lower_to_loops(backward.bias_gradient(some))
    return lower_to_loops(backward.gradients(some, kind == "keys"))


def defaults(of: LoopNest, target: str) -> Mapping[str, Value]:
    rule = design_space(of, gpu_target(target)).rules[0]
    return {k: v[0] for k, v in rule.parameters(of, gpu_target(target)).items()}


def tile(of: LoopNest, target: str) -> AttentionTile:
    return AttentionTile(*(int(defaults(of, target)[k]) for k in ("queries", "keys", "warps", "stages")))


def estimate(of: LoopNest, target: str, at: AttentionTile, half: bool) -> int:
    found = roles(of)
    assert found is not None
    return shared_bytes(of, gpu_target(target), found, at, half)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_defaults_fit_shared_memory_and_threads(target: str, dtype: DType) -> None:
    machine = gpu_target(target)
    for kind in ("forward", "queries", "keys"):
        for width in (64, 128, 256):
            of = nest(kind, width, dtype)
            at = tile(of, target)
            assert estimate(of, target, at, dtype is BF16) <= machine.shared_bytes, (kind, width, at)
            assert at.warps * machine.warp <= 512 and min(at.queries, at.keys) >= 16
            assert default_schedule(of, machine).rule.startswith("gpu_attention")


# What the compiler took (Triton 3.9): bytes of shared memory.
COMPILED = [
    ("forward", 128, BF16, "cuda:sm_90", AttentionTile(128, 64, 8, 2), 98304),
    ("forward", 256, BF16, "cuda:sm_90", AttentionTile(64, 64, 4, 2), 163840),
    ("forward", 256, BF16, "cuda:sm_120", AttentionTile(64, 64, 4, 2), 106496),
    ("forward", 256, F32, "cuda:sm_89", AttentionTile(32, 32, 4, 2), 102528),
    ("forward", 128, F32, "cuda:sm_90", AttentionTile(32, 32, 8, 1), 36864),
    ("forward", 128, BF16, "hip:gfx942", AttentionTile(64, 64, 4, 2), 40960),
    ("queries", 128, BF16, "cuda:sm_90", AttentionTile(64, 64, 4, 2), 98304),
    ("queries", 256, BF16, "cuda:sm_90", AttentionTile(64, 64, 8, 2), 196608),
    ("queries", 256, BF16, "cuda:sm_90", AttentionTile(128, 32, 8, 2), 196608),
    ("queries", 128, BF16, "cuda:sm_89", AttentionTile(64, 64, 4, 2), 90112),
    ("queries", 128, BF16, "hip:gfx90a", AttentionTile(64, 64, 4, 2), 65536),
    ("keys", 128, BF16, "cuda:sm_90", AttentionTile(128, 32, 8, 2), 98688),
    ("keys", 128, BF16, "cuda:sm_100", AttentionTile(64, 64, 8, 2), 132096),
    ("keys", 256, BF16, "cuda:sm_90", AttentionTile(64, 64, 8, 2), 197632),
    ("keys", 128, BF16, "cuda:sm_120", AttentionTile(64, 64, 8, 2), 107008),
    ("keys", 128, BF16, "hip:gfx942", AttentionTile(64, 64, 4, 2), 81920),
    ("keys", 256, F32, "cuda:sm_90", AttentionTile(32, 32, 8, 2), 205056),
    ("forward", 128, F32, "cuda:sm_75", AttentionTile(32, 32, 8, 1), 36864),
    ("queries", 128, F32, "cuda:sm_75", AttentionTile(16, 16, 8, 1), 25600),
    ("keys", 64, F32, "cuda:sm_75", AttentionTile(32, 32, 8, 1), 32768),
]


@pytest.mark.parametrize(("kind", "width", "dtype", "target", "at", "took"), COMPILED)
def test_the_estimate_is_what_the_compiler_takes(
    kind: str, width: int, dtype: DType, target: str, at: AttentionTile, took: int
) -> None:
    assert took <= estimate(nest(kind, width, dtype), target, at, dtype is BF16) <= took * 1.1 + 2048


@pytest.mark.parametrize(
    ("kind", "width", "dtype", "expected"),
    [
        ("forward", 64, BF16, AttentionTile(128, 64, 8, 2)), ("forward", 128, BF16, AttentionTile(128, 64, 8, 2)),
        ("forward", 256, BF16, AttentionTile(64, 64, 4, 2)), ("queries", 64, BF16, AttentionTile(64, 64, 4, 2)),
        ("queries", 128, BF16, AttentionTile(64, 64, 4, 2)), ("keys", 64, BF16, AttentionTile(64, 64, 4, 2)),
        ("keys", 128, BF16, AttentionTile(128, 32, 8, 2)), ("keys", 256, BF16, AttentionTile(64, 64, 8, 2)),
        ("queries", 256, BF16, AttentionTile(128, 32, 8, 2)), ("forward", 64, F32, AttentionTile(32, 32, 4, 2)),
        ("queries", 64, F32, AttentionTile(32, 32, 4, 2)), ("keys", 64, F32, AttentionTile(32, 32, 4, 2)),
    ],
)  # fmt: skip
def test_what_fits_a_large_gpu_is_as_large_as_ever(
    kind: str, width: int, dtype: DType, expected: AttentionTile
) -> None:
    assert tile(nest(kind, width, dtype), "cuda:sm_90") == expected


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_turing_holds_what_it_copies_in_registers_too(dtype: DType) -> None:
    """Its threads multiply by themselves, whatever the type, and one step at a time."""
    found = [tile(nest(kind, width, dtype), "cuda:sm_75") for kind in ("queries", "keys") for width in (64, 128)]
    assert found == [AttentionTile(32, 32, 8, 1), AttentionTile(16, 16, 8, 1)] * 2


@pytest.mark.parametrize("target", [t for t in TARGETS if t not in ("cuda:sm_75", "cuda:sm_80")])
def test_the_gradient_of_a_bias_takes_smaller_tiles_where_heads_are_wide(target: str) -> None:
    found = [defaults(nest("bias", width, BF16), target) for width in (64, 256)]
    areas = [int(p["rows"]) * int(p["columns"]) * int(p["stages"]) for p in found]
    assert areas[0] == 64 * 64 * 2 and areas[1] < areas[0]


def test_a_tile_is_loaded_once_where_groups_of_warps_multiply() -> None:
    """They read either orientation from shared memory; single warps would have both in registers."""
    found = {t: [defaults(nest(kind, 128, BF16), t)["one_load"] for kind in ("queries", "keys")] for t in TARGETS[1:]}
    assert [t for t, once in found.items() if all(once)] == ["cuda:sm_90", "cuda:sm_100", "cuda:sm_103"]
    assert not any(once for t, both in found.items() for once in both if "sm_90" not in t and "sm_10" not in t)
    assert "one_load" not in defaults(nest("forward", 128, BF16), "cuda:sm_90")
    assert "one_load" not in defaults(nest("keys", 128, F32), "cuda:sm_90")


def test_wide_heads_are_copied_by_descriptors() -> None:
    """Of narrow ones a thread has registers for addresses; without an accelerator there is no choice."""
    found = {w: defaults(nest("forward", w, BF16), "cuda:sm_90")["descriptors"] for w in (64, 128, 256)}
    assert found == {64: False, 128: True, 256: True}
    assert "descriptors" not in defaults(nest("forward", 128, BF16), "cuda:sm_80")
    assert "descriptors" not in defaults(nest("forward", 128, F32), "cuda:sm_90")


def test_smaller_tiles_are_squares_first() -> None:
    assert smaller_sides(64, 32) == [(64, 32), (32, 32), (64, 16), (32, 16), (16, 32), (16, 16)]
