"""The choice between our loops and torch's attention on CPUs, at sizes that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_mlc.ir.target import usual_target
from torch_mlc.scheduler.cost.attention import AttentionSize, decide_attention_cpu, decide_library_cpu

# Sizes, and the library's time over ours as it was measured.
MEASURED = {
    AttentionSize(8, 1, 2048, 64): 1.49,
    AttentionSize(8, 1, 2048, 64, is_half=True): 11.0,
    AttentionSize(2, 32, 32, 64): 1.5,
    AttentionSize(128, 32, 32, 64): 1.59,
    AttentionSize(2, 128, 128, 64): 1.07,
    AttentionSize(2, 512, 512, 64): 1.12,
    AttentionSize(64, 512, 512, 64, causal=True): 1.74,
    AttentionSize(2, 1024, 1024, 128, causal=True): 1.32,
    AttentionSize(2, 1024, 1024, 128): 0.79,
    AttentionSize(2, 1024, 1024, 256): 0.82,
    AttentionSize(2, 200, 200, 64): 0.80,
    AttentionSize(2, 200, 200, 64, causal=True): 0.87,
    AttentionSize(24, 197, 197, 64): 0.86,
}

ZEN3 = usual_target("cpu").machine
# The same on Zen 4, where BLAS has vectors of half the width, with masks that are in memory or computed.
NARROW = replace(ZEN3, blas=0.5, vector_bytes=64)
MEASURED_NARROW = {
    AttentionSize(4, 2048, 2048, 64): 1.22,
    AttentionSize(4, 1024, 2048, 128): 1.23,
    AttentionSize(8, 8, 1024, 64): 0.55,
    AttentionSize(4, 1024, 2048, 64, masked=True): 0.86,
    AttentionSize(4, 512, 1024, 64, masked=True): 0.84,
    AttentionSize(16, 1024, 2048, 64, masked=True, hides=True): 3.4,
    AttentionSize(8, 8, 4096, 32, masked=True, hides=True): 4.0,
}


@pytest.mark.parametrize("size", MEASURED, ids=str)
def test_the_faster_one(size: AttentionSize) -> None:
    generated, told = decide_attention_cpu(size, ZEN3)
    assert generated == (MEASURED[size] > 1), told
    assert f"{size.heads} x {size.queries} x {size.keys} x {size.width}" in told


@pytest.mark.parametrize("size", MEASURED_NARROW, ids=str)
def test_the_faster_one_where_blas_has_narrow_vectors(size: AttentionSize) -> None:
    generated, told = decide_attention_cpu(size, NARROW)
    assert generated == (MEASURED_NARROW[size] > 1), told


@pytest.mark.parametrize("size", MEASURED, ids=str)
def test_the_library_is_called_for_plain_operations_where_its_blocks_are_large(size: AttentionSize) -> None:
    """Ours are kept where they are about as fast, since what follows joins them."""
    called, told = decide_library_cpu(size, ZEN3)
    assert called == (MEASURED[size] < 0.9 and size.queries >= 768), told
