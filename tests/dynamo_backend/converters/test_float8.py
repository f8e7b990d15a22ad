"""Casts to and from floats of eight bits: eager's, past the largest number too, where versions of torch differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SPECIAL = [
    0.0, -0.0, float("nan"), float("inf"), -float("inf"), 447, 448, 449, 455, 456, 463, 464, 465, 479, 480, -512, 57344,
    61439, 61440, 65504, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 2.0**-16, 2.0**-17, 3 * 2.0**-18, 1e-45,
]  # fmt: skip


def _equal(found: Tensor, expected: Tensor) -> None:
    """The same numbers, NaN where there is NaN, and the same signs of zeros."""
    a, b = found.float(), expected.float()
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    number = ~b.isnan()
    assert torch.equal(a.signbit()[number], b.signbit()[number])


@pytest.mark.parametrize("target", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    def there(x: Tensor) -> Tensor:
        return (x * 1).to(target)

    def back(q: Tensor) -> Tensor:
        return q.to(source) * 1

    torch.manual_seed(0)
    spread = torch.randn(2000, dtype=torch.float64) * 10.0 ** torch.randint(-8, 6, (2000,))
    x = torch.cat([spread, torch.tensor(SPECIAL, dtype=torch.float64)]).to(source)
    x = x.abs() if target is torch.float8_e8m0fnu else x
    _equal(torch.compile(there, backend="mlc")(x), there(x))
    everything = torch.arange(256, dtype=torch.uint8).view(target)
    _equal(torch.compile(back, backend="mlc")(everything), back(everything))


@pytest.mark.parametrize("target", FLOAT8[:2], ids=str)
def test_numbers_that_are_known(target: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.full((), 1e6), torch.full((), 300.0)).to(target).float() + x

    x = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(torch.compile(fn, backend="mlc")(x), fn(x), equal_nan=True)


@pytest.mark.parametrize("target", FLOAT8[:2], ids=str)
def test_quantised_by_the_largest(target: torch.dtype) -> None:
    """Scaled so that the largest number is the type's: the last bit of the scale decides which side of it that is."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.finfo(target).max / x.abs().amax(-1, keepdim=True)
        return (x * scale).to(target), scale

    x = torch.randn(40, 300)
    found, expected = torch.compile(fn, backend="mlc")(x), fn(x)
    torch.testing.assert_close(found[1], expected[1])
    _equal(found[0], expected[0])
