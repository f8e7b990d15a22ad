"""Products and convolutions of half types on CPUs that do not multiply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_mlc
from torch_mlc.dynamo_backend.converters.linear import products

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _without_half_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_STRICT", "1")
    monkeypatch.setattr(products, "multiplies", lambda dtype: False)
    torch._dynamo.reset()
    torch.manual_seed(0)


def agree(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = None) -> None:
    """Types, strides and values of what ``fn`` returns, against float64."""
    result = torch.compile(fn, backend="mlc", dynamic=dynamic, fullgraph=True)(*inputs)
    plain, exact = fn(*inputs), fn(*(t.double() for t in inputs))
    assert result.dtype == plain.dtype and result.stride() == plain.stride()
    torch.testing.assert_close(result.double(), exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((19, 33), (33, 21))),
    "mm of a transpose": (lambda a, b: a @ b.t(), ((19, 33), (21, 33))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), ((21,), (19, 33), (33, 21))),
    "bmm": (torch.bmm, ((3, 9, 17), (3, 17, 5))),
    "bmm of a broadcast": (lambda a, b: a.expand(3, 9, 17) @ b, ((1, 9, 17), (3, 17, 5))),
    "baddbmm": (torch.baddbmm, ((3, 9, 5), (3, 9, 17), (3, 17, 5))),
    "mv": (torch.mv, ((19, 33), (33,))),
    "convolution": (lambda x, w: F.conv2d(x, w, None, 2, 1), ((2, 8, 9, 11), (5, 8, 3, 3))),
    "convolution of points": (F.conv2d, ((2, 8, 9, 11), (5, 8, 1, 1))),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, 1, 1, 1, 2), ((2, 8, 9, 11), (6, 4, 3, 3), (6,))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, None, 2), ((2, 8, 5, 6), (8, 5, 3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_in_float32_and_back(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.float16 and name not in ("addmm", "convolution"):
        pytest.skip("as in bfloat16")
    fn, shapes = PRODUCTS[name]
    agree(fn, *(torch.randn(s).to(dtype) for s in shapes))


def test_layouts_stay_and_sizes_vary() -> None:
    w = torch.randn(5, 8, 3, 3).bfloat16()
    agree(
        lambda x, w: F.conv2d(x, w, None, 1, 1).relu(),
        torch.randn(2, 8, 9, 11).bfloat16().to(memory_format=torch.channels_last),
        w,
    )
    agree(lambda a, b: a @ b, torch.randn(7, 9).half(), torch.randn(9, 5).half(), dynamic=True)


def test_no_rounding_between_the_product_and_what_follows() -> None:
    x, w = (torch.randn(s).bfloat16() for s in ((512, 256), (256, 256)))
    (graph,) = torch_mlc.explain(lambda x, w: F.gelu(x @ w), x, w).graphs
    (call,) = graph.libraries
    assert products.WIDENED in call.reason
    (after,) = (k for k in graph.kernels if "gelu" in k.name)
    assert after.nest is not None and [p.dtype.value for p in after.nest.params] == ["float32", "bfloat16"]


def test_few_rows_read_the_narrow_operands() -> None:
    x, w = (torch.randn(s).bfloat16() for s in ((1, 512), (512, 512)))
    (graph,) = torch_mlc.explain(torch.mm, x, w).graphs
    assert not graph.libraries and len(graph.kernels) == 1


def test_gradients() -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1).bfloat16()
    x = torch.randn(2, 4, 7, 9).bfloat16().requires_grad_()
    torch.compile(layer, backend="mlc")(x).float().square().sum().backward()
    got = [x.grad, *(p.grad for p in layer.parameters())]
    wide = x.detach().double().requires_grad_()
    exact = nn.Conv2d(4, 6, 3, padding=1).double()
    exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    exact(wide).square().sum().backward()
    for result, wanted in zip(got, [wide.grad, *(p.grad for p in exact.parameters())], strict=True):
        assert result is not None and wanted is not None and result.dtype is torch.bfloat16
        torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=1e-2 * float(wanted.abs().max()))


def test_eager_numbers_and_machines_with_half_types_keep_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(16, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    (graph,) = torch_mlc.explain(torch.mm, x, w, options={"numerics": "eager"}).graphs
    assert [c.op for c in graph.libraries] == ["aten::mm.default"] and not graph.kernels
    torch._dynamo.reset()
    monkeypatch.setattr(products, "multiplies", lambda dtype: True)
    (graph,) = torch_mlc.explain(torch.mm, x, w).graphs
    assert not graph.kernels


def test_a_product_of_three(check: Callable[..., Any]) -> None:
    bilinear = torch.nn.functional.bilinear
    for rows in (1, 4, 0):
        a, b, w, c = torch.randn(rows, 3), torch.randn(rows, 5), torch.randn(2, 3, 5), torch.randn(2)
        check(lambda a, b, w, c: bilinear(a, b, w, c), a, b, w, c)
    check(lambda a, b, w: bilinear(a, b, w), torch.randn(2, 2, 3), torch.randn(2, 2, 4), torch.randn(5, 3, 4))
    ints = [torch.randint(-9, 9, s) for s in ((4, 3), (4, 5), (2, 3, 5))]
    check(lambda a, b, w: bilinear(a, b, w), *ints)


def test_the_gradient_of_a_product_of_three() -> None:
    given = [torch.randn(s, requires_grad=True) for s in ((4, 3), (4, 5), (2, 3, 5), (2,))]
    bilinear = torch.nn.functional.bilinear
    wanted = torch.autograd.grad(bilinear(*given).square().sum(), given)
    found = torch.autograd.grad(torch.compile(bilinear, backend="mlc")(*given).square().sum(), given)
    torch.testing.assert_close(found, wanted)


def test_a_product_that_is_summed_over_its_batch() -> None:
    def f(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addbmm(c, a, b, beta=2, alpha=3)

    for shapes in (((3, 4), (2, 3, 5), (2, 5, 4)), ((4,), (6, 3, 1), (6, 1, 4)), ((3, 4), (0, 3, 5), (0, 5, 4))):
        given = [torch.randn(s) for s in shapes]
        torch.testing.assert_close(torch.compile(f, backend="mlc", dynamic=False)(*given), f(*given))
    ints = [torch.randint(-9, 9, s) for s in ((3, 4), (2, 3, 5), (2, 5, 4))]
    torch.testing.assert_close(torch.compile(f, backend="mlc", dynamic=False)(*ints), f(*ints))
