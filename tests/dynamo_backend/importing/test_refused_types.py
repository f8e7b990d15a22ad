"""Element types that eager's kernels refuse: what is compiled raises eager's own error, and computes what eager does.

``python -m tests.opinfo --modes refused`` asks it of every operator of torch's database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_mlc.dynamo_backend.converters import CONVERTERS
from torch_mlc.dynamo_backend.converters.refused_types import refused_types
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table

pytestmark = pytest.mark.usefixtures("fresh_compiler")

INTS = torch.arange(-108, 108).reshape(2, 3, 6, 6)
BOOLS = INTS % 3 > 0

# Converters of ours, decompositions of torch's, and ops that others are made of.
REFUSED: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), INTS),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), INTS),
    "interpolate": (lambda x: F.interpolate(x, size=(3, 3), mode="area"), INTS),
    "softmax": (lambda x: x.softmax(-1), BOOLS),
    "log_softmax": (lambda x: x.log_softmax(-1), INTS),
    "silu": (F.silu, INTS),
    "hardswish": (F.hardswish, INTS),
    "celu": (F.celu, INTS),
    "logaddexp": (lambda x: torch.logaddexp(x, x), INTS),
    "frac": (torch.frac, INTS),
    "ceil": (torch.ceil, BOOLS),
    "relu": (torch.relu, BOOLS),
    "gcd": (lambda x: torch.gcd(x, x), BOOLS),
    "median": (torch.median, BOOLS),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), BOOLS),
    "addcmul": (lambda x: torch.addcmul(x, x, x), BOOLS),
    "cdist": (lambda x: torch.cdist(x[0].half(), x[0].half()), INTS),
    "a difference": (lambda x: x.float() - x, BOOLS),
    "cumsum": (lambda x: x.cumsum(0, dtype=torch.bool), BOOLS),
    "in place": (lambda x: x.clone().ceil_(), BOOLS),
    "what has another name in graphs": (lambda x: F.rrelu(x.half(), training=True), INTS),
    "what eager calls by another name": (lambda x: F.batch_norm(x, x[0, :, 0, 0], x[1, :, 0, 0]), INTS),
    "what nobody reads": (F.softsign, BOOLS[:0]),
    "one_hot": (lambda x: F.one_hot(x, 3), BOOLS),
    "places of a sorter": (lambda x: torch.searchsorted(x[0, 0, 0], x, sorter=x[0, 0, 0].int()), INTS),
    "complex numbers": (lambda x: F.mse_loss(x.to(torch.complex64), x.to(torch.complex64)), INTS),
}
# The same ops and parts of others, with types that eager takes.
TAKEN: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "clamp": (lambda x: x.clamp(0, 3), INTS),
    "clamp of truth values": (lambda x: x.clamp(0, 3), BOOLS),
    "mean": (lambda x: x.mean(dtype=torch.float32), INTS),
    "softmax": (lambda x: x.softmax(-1, dtype=torch.float32), INTS),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), INTS),
    "one_hot": (lambda x: F.one_hot(x % 4, 4), INTS),
    "where": (lambda x: torch.where(x, x, ~x).amax(0), BOOLS),
    "isin": (lambda x: torch.isin(x, x[0]), INTS),
    "floor": (torch.floor, INTS),
    "remainder": (lambda x: x % 5, INTS),
    "cumsum": (lambda x: x.cumsum(0) + x.cumprod(1), BOOLS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_eager_s_own_error(name: str) -> None:
    fn, x = REFUSED[name]
    with pytest.raises(RuntimeError) as eager:
        fn(x)
    with pytest.raises(RuntimeError) as ours:
        torch.compile(fn, backend="mlc")(x)
    # Of one_hot torch's tracing knows only the parts, and one of them raises.
    if name == "one_hot":
        assert "not implemented for 'Bool'" in str(ours.value) or "one_hot is only applicable" in str(ours.value)
    else:
        assert (type(ours.value), str(ours.value)) == (type(eager.value), str(eager.value))


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes(name: str) -> None:
    fn, x = TAKEN[name]
    torch.testing.assert_close(torch.compile(fn, backend="mlc")(x), fn(x))


def test_the_table_names_ops_that_there_are() -> None:
    known = CONVERTERS.keys() | {str(op) for op in decomposition_table()}
    assert refused_types().keys() <= known
    assert torch.float32 not in refused_types()["aten._softmax.default"]
