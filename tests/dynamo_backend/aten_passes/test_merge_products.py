"""Sums of products over shared weights: one product where that touches less memory, and eager's gradients always."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_mlc.dynamo_backend.aten_passes.context import AtenContext
from torch_mlc.dynamo_backend.aten_passes.merge_products import merge_products
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.runtime.settings.options import Options
from torch_mlc.scheduler.numerics import parse_places

pytestmark = pytest.mark.usefixtures("fresh_compiler")

STEPS, BATCH, WIDTH = 5, 3, 24
# With eager's rounding products are summed one by one.
APART = Options(numerics="eager")
FAST = AtenContext(Options())


class Recurrent(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.input = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(STEPS):
            h = torch.tanh(self.input(x[:, t]) + self.hidden(h))
        return h


def products(gm: torch.fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))


def gradients(fn: Any, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    loss = fn(x).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_shared_weights(dtype: torch.dtype, dynamic: bool) -> None:
    model = Recurrent(dtype)
    compiled = torch.compile(model, backend="mlc", dynamic=dynamic)
    for batch in (BATCH, 7) if dynamic else (BATCH,):
        x = torch.randn(batch, STEPS, WIDTH, dtype=dtype)
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-1}[dtype]
        for a, e in zip(gradients(compiled, model, x), gradients(model, model, x), strict=True):
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
            assert a.stride() == e.stride()


def test_the_steps_of_a_network_become_one_product_a_weight() -> None:
    model = Recurrent()
    _, backward = capture(lambda x: model(x).sum(), (torch.randn(BATCH, STEPS, WIDTH),), training=True, options=APART)
    before = products(backward)
    assert merge_products(backward, FAST) == 2 * STEPS
    assert products(backward) == before - 2 * STEPS + 2


def test_sums_in_either_order_and_with_other_terms() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        products = [a[k] @ b[k] for k in range(3)] + [(b[k].t() @ a[k].t()).t() for k in range(3)]
        mixed = products[0] + c + products[3] + products[1] + (products[4] + products[2]) + products[5]
        turned = (a[3] @ b[3]).t() + (a[4] @ b[4]).t() + c.t()
        return mixed, turned

    a, b, c = torch.randn(5, 40, 2), torch.randn(5, 2, 33), torch.randn(40, 33)
    (gm,) = capture(fn, (a, b, c), options=APART)
    expected = gm(a, b, c)
    assert merge_products(gm, FAST) == 8 and products(gm) == 2
    for got, want in zip(gm(a, b, c), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride()


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda a, b: a[0] @ b[0] + a[1] @ b[1], id="deep products, where the operands are larger"),
        pytest.param(lambda a, b: (a[0, :, :1] @ b[0, :1] + 1) * (a[1, :, :1] @ b[1, :1]), id="no sum of two"),
        pytest.param(lambda a, b: (p := a[0, :, :1] @ b[0, :1]) + a[1, :, :1] @ b[1, :1] * p, id="read elsewhere"),
    ],
)
def test_what_gains_nothing_stays(fn: Any) -> None:
    (gm,) = capture(fn, (torch.randn(2, 8, 64), torch.randn(2, 64, 8)), options=APART)
    assert merge_products(gm, FAST) == 0


@pytest.mark.parametrize(
    ("named", "merged"), [("aten.add", 0), ("aten.mm", 0), ("aten.tanh", 2 * STEPS), ("aten.mul", 2 * STEPS)]
)
def test_what_is_to_be_rounded_as_eager_rounds_stays(named: str, merged: int) -> None:
    model = Recurrent(torch.bfloat16)
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.bfloat16)
    _, backward = capture(lambda x: model(x).sum(), (x,), training=True, options=APART)
    assert merge_products(backward, AtenContext(Options(numerics=parse_places({named: "eager"})))) == merged


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [1, 3])
def test_products_of_nothing(rows: int, columns: int) -> None:
    a, b = torch.randn(2, rows, 0), torch.randn(2, 0, columns)
    for fn in (lambda: a[0] @ b[0] + a[1] @ b[1], lambda: ((b[0].t() @ a[0].t()) + (b[1].t() @ a[1].t())).t()):
        torch._dynamo.reset()
        found, expected = torch.compile(fn, backend="mlc")(), fn()
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
