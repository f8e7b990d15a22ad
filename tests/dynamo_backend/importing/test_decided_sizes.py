"""Sizes and places that data decide, and element types that graphs only carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import config

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def from_place(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    start = at[0].item()
    torch._check(start >= 0)
    torch._check(start + 2 <= x.shape[0])
    return x[start : start + 2] * 2


def pieces(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.exp() + 1 for t in torch.tensor_split(x, at))


def rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > 0].sum(0) + at.sum()


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("fn", [from_place, pieces, rows])
def test_places_and_sizes_of_data(fn: Callable[..., Any], trained: bool) -> None:
    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="mlc", fullgraph=True)
        for at in ([1, 3], [2, 2], [0, 5]):
            x = torch.randn(7, 4, requires_grad=trained)
            place = torch.tensor(at)
            results = [torch.utils._pytree.tree_leaves(f(x, place)) for f in (compiled, fn)]
            for got, want in zip(*results, strict=True):
                torch.testing.assert_close(got, want)
            if trained:
                grads = [torch.autograd.grad(sum(t.square().sum() for t in found), x) for found in results]
                torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_types_that_no_kernel_computes_with(dtype: torch.dtype) -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        back = (x * 2).to(dtype).to(wide)
        return torch.view_as_real(back) + 1 if dtype.is_complex else back + 1

    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.compile(there_and_back, backend="mlc")(x), there_and_back(x))


@pytest.mark.parametrize("x", [torch.tensor(2.5), torch.tensor([True]), torch.tensor(False), torch.tensor([[-3]])])
def test_numbers_of_data(x: torch.Tensor) -> None:
    def number(x: torch.Tensor) -> Any:
        value = x.item()
        return value, torch.full((2, 3), value), x.double() * value

    with config.patch(capture_scalar_outputs=True):
        value, full, scaled = torch.compile(number, backend="mlc", fullgraph=True)(x)
    want = number(x)
    assert value == want[0] and type(value) is type(want[0])
    assert torch.equal(full, want[1]) and full.dtype == want[1].dtype
    assert torch.equal(scaled, want[2]) and scaled.dtype == want[2].dtype


def test_products_beside_what_is_asserted_of_data() -> None:
    """An assertion is a call without a result, among those that are looked at for products."""

    def fn(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
        size = int(n.sum() % 3) + 2
        return F.softmax(x @ a, -1) @ b, F.gelu(x @ a) @ b + 1, torch.arange(size) + torch.arange(2)

    x, a, b, n = torch.randn(7, 16), torch.randn(16, 24), torch.randn(24, 16), torch.tensor([4, 5])
    with config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="mlc", fullgraph=True)
        torch.testing.assert_close(compiled(x, a, b, n), fn(x, a, b, n))
        with pytest.raises(RuntimeError):  # two sizes that do not fit
            compiled(x, a, b, n + 1)


def any_true(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return x.sin() * bool(data.any()) + (x * x.cos()).sum()


def several_truths(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    some, large = bool(data.any()), bool((data > 1).all())
    return (x.sin() * some).exp() * (not some) + x * (some and large) + x.cos() * int(large)


def equal_sum(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return x.sin() * (data.sum().item() == 3) + (x * x.cos()).sum()


def beyond(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    count = data.sum().int().item()
    return x.sin() * (count > 3) + (x * x.cos()).sum() * count


@pytest.mark.parametrize("host", ["python", "native"])
@pytest.mark.parametrize("fn", [any_true, several_truths, equal_sum, beyond])
def test_truth_values_of_data_are_saved_for_the_backward(fn: Callable[..., torch.Tensor], host: str) -> None:
    """Nobody gives the backward what they were decided by."""
    with config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="mlc", options={"host_program": host})
        for size, level in ((4, 0.0), (4, 1.0), (7, 2.0), (7, 0.0)):
            data, x = torch.full((3,), level), torch.randn(size, requires_grad=True)
            got, want = compiled(x, data), fn(x, data)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (got, want)))
