"""What a mask of positions leaves of a loop's work is in its price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.cost.chains import ChainSize, decide_chain_gpu, seen_share


def test_a_causal_mask_leaves_half_of_the_tiles() -> None:
    def above(row: int, last_row: int, column: int, last_column: int) -> bool:
        return column > last_row

    assert seen_share(4096, 4096, above) == pytest.approx(0.5, abs=0.05)
    assert seen_share(4096, 4096, lambda *_: False) == 1.0
    assert seen_share(40, 30, above) == 1.0


def test_half_the_tiles_cost_half() -> None:
    machine = gpu_target("cuda:sm_90").machine
    size = ChainSize(32, 1024, 1024, 512, 1, 2)
    assert not decide_chain_gpu(size, machine)[0]
    assert decide_chain_gpu(replace(size, seen=0.53), machine)[0]
