"""What a library's call is taken to need: convolutions of groups that have no tiles for tensor cores."""

import pytest
import torch

from torch_mlc.dynamo_backend.reports.library_time import call_seconds, has_narrow_groups
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import gpu_target


@pytest.mark.parametrize(
    ("weight", "transposed", "groups", "narrow"),
    [
        ((64, 1, 7, 7), False, 64, True),
        ((64, 64, 7, 7), False, 1, False),
        ((64, 16, 3, 3), False, 4, False),
        ((8, 64, 3, 3), False, 1, False),  # one group: padded, but a product
        ((64, 1, 3, 3), True, 64, True),
        ((64, 16, 3, 3), True, 4, False),
    ],
)
def test_which_convolutions_lanes_multiply(
    weight: tuple[int, ...], transposed: bool, groups: int, narrow: bool
) -> None:
    x, w = torch.empty(1, 64, 8, 8, device="meta"), torch.empty(weight, device="meta")
    args = (x, w, None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    assert has_narrow_groups("aten::convolution.default", args) is narrow
    assert not has_narrow_groups("aten::mm.default", (x, w))


def test_they_take_the_rate_of_lanes() -> None:
    target = gpu_target("cuda:sm_90")
    many = 10**12
    wide, narrow = (call_seconds(many, DType.BFLOAT16, 1, target, narrow=n) for n in (False, True))
    assert narrow > 5 * wide
    # Where bytes take longer nothing changes.
    moved = [call_seconds(1, DType.BFLOAT16, 10**9, target, narrow=n) for n in (False, True)]
    assert moved[0] == moved[1]
