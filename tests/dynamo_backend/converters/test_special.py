"""Special functions equal eager, at their seams, poles and infinities too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

UNARY = (
    *("i0", "i0e", "i1", "i1e", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai", "erfcx", "ndtri"),
    *("modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1"),
    *("scaled_modified_bessel_k0", "scaled_modified_bessel_k1", "spherical_bessel_j0", "log_ndtr", "entr", "digamma"),
)
INF, NAN = float("inf"), float("nan")
# Both sides of every seam, zeros, and what lies far out.
PLACES = [
    *(0.0, -0.0, 1e-7, 1e-3, 0.13, 0.14, 0.3, 0.5, 0.86, 0.87, 0.999, 1.0, 1.7, 2.0, 2.05, 2.09, 2.4, 3.83, 5.0, 5.1),
    *(7.9, 8.1, 12.3, 26.0, 60.0, 104.0, -1e-3, -0.4, -1.0, -1.5, -2.05, -2.2, -3.3, -7.0, -8.5, -20.0, INF, -INF, NAN),
]


@pytest.mark.parametrize("name", UNARY)
def test_of_one_argument(check: Callable[..., Any], name: str) -> None:
    fn = getattr(torch.special, name)
    check(fn, torch.tensor(PLACES, dtype=torch.float64), rtol=1e-9, atol=1e-12, fast=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_of_other_types(check: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.tensor([0.5, 1.0, 2.0, 3.5, 9.0]).to(dtype)
    narrow = dtype is torch.bfloat16
    tolerance = 1e-2 if narrow else 1e-4
    names = ["i0", "i1e"] if narrow else ["i0", "bessel_j1", "modified_bessel_k0", "airy_ai"]
    check(lambda v: [getattr(torch.special, n)(v) for n in names], x, rtol=tolerance, atol=tolerance, fast=True)


@pytest.mark.parametrize("order", [0, 1, 2, 5])
def test_polygamma(check: Callable[..., Any], order: int) -> None:
    x = torch.tensor([0.0, 1e-3, 0.3, 1.0, 4.5, 12.0, 80.0, -0.3, -1.7, -7.25, -20.4, NAN], dtype=torch.float64)
    check(lambda v: torch.polygamma(order, v), x, rtol=1e-9, atol=1e-11, fast=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
def test_polygamma_at_poles(check: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.tensor([0, -1, -2, -5, -8, -117, 3]).to(dtype)
    check(lambda v: torch.polygamma(1, v), x, rtol=1e-5, atol=0, fast=True)


def test_zeta(check: Callable[..., Any]) -> None:
    x = torch.tensor([1.0, 0.5, 1.0 + 1e-3, 1.5, 2.0, 3.0, 7.5, 40.0, 400.0, NAN], dtype=torch.float64)
    q = torch.tensor([-2.0, -1.3, 0.0, 1e-2, 0.7, 1.0, 5.0, 33.3, 1e4, NAN], dtype=torch.float64)
    check(torch.special.zeta, x[:, None], q, rtol=1e-9, atol=1e-12, fast=True)


@pytest.mark.parametrize("kind", "tuvw")
@pytest.mark.parametrize("shifted", ["", "shifted_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_chebyshev_polynomials(check: Callable[..., Any], kind: str, shifted: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 8
    x = torch.tensor([-2.3, -1.0, -0.7, 0.0, 0.2, 0.5, 0.93, 1.0, 1.4, 2.0, -0.0, tiny, -tiny, INF, -INF], dtype=dtype)
    n = torch.tensor([-1.0, -0.5, 0.0, 1.0, 2.0, 3.7, 6.0, 7.0, 12.0], dtype=dtype)
    fn = getattr(torch.special, f"{shifted}chebyshev_polynomial_{kind}")
    rtol, atol = (1e-4, 1e-4) if dtype is torch.float32 else (1e-9, 1e-11)
    check(fn, x[:, None], n, rtol=rtol, atol=atol, fast=True)


@pytest.mark.parametrize("name", [f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"]
                         + ["laguerre_polynomial_l", "legendre_polynomial_p"])  # fmt: skip
def test_polynomials_of_no_number(fresh_compiler: None, name: str) -> None:
    """Torch returns what it has never set there: nothing to compare with."""
    x, n = torch.full((12,), NAN), torch.arange(-1.0, 11.0)
    y = torch.compile(getattr(torch.special, name), backend="mlc")(x, n)
    assert y[:2].tolist() == [0.0, 1.0] and bool(y[2:].isnan().all())


@pytest.mark.parametrize("name", ["hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
                                  "legendre_polynomial_p"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_polynomials_by_recurrence(check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 0.3, -0.5, 1.0, -1.0, 1.5, -2.0, 7.0, INF, -INF, NAN], dtype=dtype)
    n = torch.tensor([-2.0, -0.5, 0.0, 0.7, 1.0, 2.0, 3.0, 5.5, 20.0, INF, -INF, NAN], dtype=dtype)
    if name.startswith("hermite"):
        n = torch.cat([n, torch.tensor([129.0, 600.0], dtype=dtype)])
    else:  # torch returns what it has never set
        x = x[:-1]
    tolerance = 2e-4 if dtype is torch.float32 else 1e-10
    fn = getattr(torch.special, name)
    check(fn, x[:, None], n, rtol=tolerance, atol=tolerance, fast=True)
    check(lambda v: [fn(v, 3), fn(0.3, v)], n, rtol=tolerance, atol=tolerance, fast=True)


# Both sides of every seam between forms.
SHAPES = [0.0, 1e-10, 1e-3, 0.3, 0.9, 1.24, 1.26, 3.0, 11.9, 12.0, 50.0, 199.0, 201.0, 1000.0, 1e6, INF, -1.0, NAN]
RATIOS = [0.0, 1e-5, 0.3, 0.69, 0.71, 0.97, 0.985, 1.0, 1.001, 1.05, 1.29, 1.31, 2.0, 10.0, INF, -1.0]


@pytest.mark.parametrize("name", ["gammainc", "gammaincc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_incomplete_gamma(check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    a = torch.tensor(SHAPES, dtype=dtype)[:, None]
    beside = a * torch.tensor(RATIOS, dtype=dtype)
    alone = torch.tensor([0.0, 1e-30, 1e-6, 0.3, 0.49, 0.51, 1.0, 1.09, 1.11, 1.5, 5.0, 100.0, INF, NAN], dtype=dtype)
    tolerance = 3e-5 if dtype is torch.float32 else 1e-9
    fn = getattr(torch.special, name)
    check(lambda s, x, y: (fn(s, x), fn(s, y)), a, beside, alone, rtol=tolerance, atol=tolerance, fast=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_divisors_and_multiples(check: Callable[..., Any], dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.tensor([0, 1, 6, 12, 90, limits.max, limits.min, limits.min + 1], dtype=dtype)
    # To multiply the least integer is no matter of C's.
    y = x if dtype not in (torch.int32, torch.int64) else x[:-2]
    check(lambda a, b: (torch.gcd(a[:, None], a), torch.lcm(b[:, None], b)), x, y, fast=True)


def test_frexp(check: Callable[..., Any]) -> None:
    values = [0.0, -0.0, 1.0, -3.5, 1e-40, 5e-324, 1e300, -0.1, INF, -INF, NAN]
    for dtype in (torch.float32, torch.float64):
        check(lambda x: tuple(torch.frexp(x)), torch.tensor(values, dtype=dtype))


def test_of_no_elements(fresh_compiler: None) -> None:
    x = torch.empty(3, 0, 2)
    assert torch.compile(lambda v: torch.special.erfcx(v), backend="mlc")(x).shape == x.shape


def test_compiled(fresh_compiler: None) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = torch.special
        return (
            s.bessel_y1(x) + s.i0e(x), s.polygamma(2, x), s.modified_bessel_k1(x) * s.airy_ai(-x), s.erfcx(x),
            s.chebyshev_polynomial_v(x, n), torch.frexp(x).mantissa,
        )  # fmt: skip

    x, n = torch.linspace(-3, 12, 37), torch.arange(37.0) % 9
    expected = [t.float() for t in fn(x.double(), n.double())]
    for a, e in zip(torch.compile(fn, backend="mlc")(x, n), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3), (4, 2, 6), (1, 1)])
def test_a_factorisation_taken_apart(check: Callable[..., Any], shape: tuple[int, ...]) -> None:
    data, pivots = torch.linalg.lu_factor(torch.randn(shape))
    check(lambda d, p: list(torch.lu_unpack(d, p)), data, pivots)
    check(lambda d, p: torch.lu_unpack(d, p, unpack_data=False)[0], data, pivots)
    check(lambda d, p: list(torch.lu_unpack(d, p, unpack_pivots=False))[1:], data.double(), pivots)
