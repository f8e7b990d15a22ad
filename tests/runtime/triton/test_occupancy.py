"""Occupancy against figures of the vendor's own calculator, each with the limit that binds."""

import pytest

from torch_mlc.runtime.triton.occupancy import occupancy

KB = 1 << 10


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "expected"),
    [
        ("sm_90", 32, 0, 1024, 1.0),
        ("sm_90", 33, 0, 1024, 0.5),  # registers: 40 a thread are given
        ("sm_90", 128, 0, 128, 0.25),  # registers: 16 warps
        ("sm_90", 255, 0, 256, 0.125),
        ("sm_90", 16, 0, 32, 0.5),  # 32 blocks
        ("sm_90", 32, 227 * KB, 256, 0.125),  # shared memory: one block
        ("sm_90", 32, 113 * KB, 256, 0.25),  # two, a reserved KB with each
        ("sm_90", 32, 114 * KB, 256, 0.125),
        ("sm_86", 16, 0, 1024, 1024 / 1536),  # threads: a second block does not fit
        ("gfx942", 64, 0, 256, 1.0),
        ("gfx942", 65, 0, 256, 7 / 8),
        ("gfx942", 128, 32 * KB, 256, 0.25),
    ],
)
def test_the_scarcest_resource_decides(arch: str, registers: int, shared: int, threads: int, expected: float) -> None:
    assert occupancy(arch, registers, shared, threads) == expected


def test_unknown_architectures_have_no_estimate() -> None:
    assert occupancy("sm_1", 32, 0, 128) is None
