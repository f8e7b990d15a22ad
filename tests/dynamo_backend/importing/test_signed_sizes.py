"""Integers that may be negative: arguments that vary, and numbers that data decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from torch_mlc.ir.expr.symbols import PositivePart
from torch_mlc.ir.expr.value import symbol

VALUES = (3, 2, -1, -2, -6, -3)
X = torch.arange(4)


def magnitude(x: Tensor, n: int) -> Tensor:
    return x * abs(n)


def bounds(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x * max(n, 0), x + min(n, 0)


def quotients(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return x + n // 4, x + n % 5, x + 17 // n, x + 17 % n, x + -(n // -3)


def bits(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return x >> abs(n), x + (n >> 1), x + n * n, x**2 * n


def sizes(x: Tensor, n: int) -> Tensor:
    return torch.zeros(abs(n) + 1) + n


def places(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return torch.roll(x, n), torch.ones(4, 4).triu(n) * x, torch.diag_embed(x, n), torch.arange(n, n + 4) * x


def slices(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return x[n:] * 2, x[:n] * 2, x[-abs(n) :] + 1, x[n if n >= 0 else n + 4 :] * 3, x.diff()[n:-1] * 2


def scattered(x: Tensor, n: int) -> Tensor:
    y = x.clone()
    y[n:] += 7
    return y


def values(x: Tensor, n: int) -> tuple[Tensor, ...]:
    return x.clamp(n, n + 3), torch.where(x > n, x, -x), x.new_full((3,), n), x // n, x % n, x.double() * n / 3


def padded(x: Tensor, n: int) -> Tensor:
    return torch.nn.functional.pad(x, (abs(n), n if n > -3 else 0)) + 1


PROGRAMS = [magnitude, bounds, quotients, bits, sizes, places, slices, scattered, values, padded]


@pytest.mark.parametrize("host", ["python", "native"])
@pytest.mark.parametrize("fn", PROGRAMS)
def test_arguments_that_change_their_sign(fn: Callable[..., Any], host: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=True, options={"host_program": host})
    for n in VALUES:
        torch.testing.assert_close(compiled(X, n), fn(X, n), msg=lambda text, n=n: f"{fn.__name__}({n}): {text}")


@pytest.mark.parametrize("fn", [magnitude, bounds, quotients, bits, values])
def test_numbers_that_data_decide(fn: Callable[..., Any]) -> None:
    def decided(x: Tensor, number: Tensor) -> Any:
        return fn(x, number.item())

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(decided, backend="mlc", fullgraph=fn is not quotients)
        for n in VALUES:
            torch.testing.assert_close(compiled(X, torch.tensor(n)), fn(X, n))


def test_gradients_with_a_number_of_either_sign() -> None:
    def fn(x: Tensor, n: int) -> Tensor:
        return (x * abs(n)).sin()[n:] * (n % 3)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=True)
    for n in VALUES:
        x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
        (want,) = torch.autograd.grad(fn(x, n).sum(), x)
        (got,) = torch.autograd.grad(compiled(x, n).sum(), x)
        torch.testing.assert_close(got, want)


def test_a_size_made_of_a_negative_number_reaches_the_backward() -> None:
    def fn(x: Tensor, number: Tensor) -> Tensor:
        n = number.item()
        torch._check(n + 3 >= 0)
        torch._check(n + 3 <= 8)
        return (x.exp().sum() * torch.ones(n + 3)) * n

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="mlc", fullgraph=True)
        for n in (4, -1, -3, 0):
            x = torch.randn(6, dtype=torch.float64, requires_grad=True)
            (want,) = torch.autograd.grad(fn(x, torch.tensor(n)).sum(), x)
            (got,) = torch.autograd.grad(compiled(x, torch.tensor(n)).sum(), x)
            torch.testing.assert_close(got, want)


def test_data_that_decide_otherwise_than_tracing_did_raise() -> None:
    """torch's own assertions of a number that tracing has replaced say True by then."""

    def expanded(x: Tensor) -> Tensor:
        return (torch.full((int(x.sum() % 3) + 1,), 2.0) * x.sum()).expand(3)

    def checked(x: Tensor) -> Tensor:
        n = x.sum().item() - 4
        torch._check(n == -2)
        return x * n

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for fn in (expanded, checked):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend="mlc", fullgraph=True)
            torch.testing.assert_close(compiled(torch.tensor([1, 1])), fn(torch.tensor([1, 1])))
            with pytest.raises(RuntimeError, match=r"gives another number than 2, which torch\._check"):
                compiled(torch.tensor([0, 1]))


def test_the_positive_part_of_a_symbol_stays() -> None:
    n = symbol("n")
    assert PositivePart(-n).free_symbols == {n} and PositivePart(n) != n
    assert PositivePart(sympy.Integer(-3)) == 0 and PositivePart(sympy.Integer(3)) == 3


def test_a_region_is_given_what_is_as_long_as_such_a_number_says() -> None:
    def fn(flag: Tensor, x: Tensor, n: int) -> Tensor:
        part = x.exp()[n % 3 :]
        return torch.cond(flag.sum() > 0, lambda p, q: p * q, lambda p, q: p - 0.5 - q, (part, part * 2))

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=True)
    for n in VALUES:
        x, flag = torch.randn(8), torch.tensor([n])
        torch.testing.assert_close(compiled(flag, x, n), fn(flag, x, n))
