"""Keys of graphs hold all that importing looks at: two graphs that need different programs have different keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.settings import default_dtype
from torch_mlc.dynamo_backend.aten_passes.rounding.rounding import keep_rounding
from torch_mlc.dynamo_backend.aten_passes.views.negations import BIT
from torch_mlc.dynamo_backend.importing.graph_key import graph_key


def test_sizes_that_a_guard_makes_one() -> None:
    """What is taken of four rows is one row, of seven two: by expressions, bounds and typical sizes they are alike."""

    def fn(x: Tensor) -> Tensor:
        return x[: (x.shape[0] + 2) // 4].sum(0) * 2

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=True)
    for rows in (4, 5, 6, 7, 10, 4):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), fn(x))


def test_the_type_in_which_whole_numbers_meet_floats() -> None:
    x = torch.tensor([16777216, 16777217, 16777218])
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch._dynamo.reset()
        with default_dtype(dtype):
            assert torch.compile(lambda x: x > 16777216.5, backend="mlc")(x).tolist() == (x > 16777216.5).tolist()


def test_what_earlier_passes_noted() -> None:
    """A forward whose backward looks for the largest rounds what another one, of the same nodes, need not."""
    gm = make_fx(lambda x: (x * 3).exp(), tracing_mode="fake")(torch.ones(4, dtype=torch.bfloat16))
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)

    def key() -> str:
        found = graph_key(gm, (), (), {})
        assert found is not None
        return found.text

    keys = [key()]
    keep_rounding(product)
    keys.append(key())
    product.meta[BIT] = True
    keys.append(key())
    assert len(set(keys)) == 3
