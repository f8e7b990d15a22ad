"""Functions where they overflow, vanish, have poles or are not defined: eager's values, or those of double precision
where eager's are off."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ONE = [
    "abs", "acosh", "acos", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "deg2rad", "digamma", "erf",
    "erfc", "exp", "exp2", "expm1", "floor", "frac", "i0", "lgamma", "log", "log10", "log1p", "log2", "logit", "neg",
    "rad2deg", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "sin", "sinc", "sinh",
    "sqrt", "square", "tan", "tanh", "trunc", "isnan", "isinf", "isfinite", "isposinf", "isneginf", "nan_to_num",
    "logical_not", "special.entr", "special.i0e", "special.i1", "special.i1e", "special.log_ndtr", "special.ndtri",
    "special.erfcx", "special.bessel_j0", "special.bessel_j1", "special.bessel_y0", "special.bessel_y1",
    "special.modified_bessel_i0", "special.modified_bessel_i1", "special.modified_bessel_k0",
    "special.modified_bessel_k1", "special.scaled_modified_bessel_k0", "special.scaled_modified_bessel_k1",
    "special.spherical_bessel_j0", "special.airy_ai", "F.silu", "F.mish", "F.softplus", "F.softsign", "F.tanhshrink",
    "F.hardswish", "F.hardsigmoid", "F.elu", "F.selu", "F.celu", "F.logsigmoid", "F.relu6", "F.leaky_relu",
    "F.softshrink", "F.hardshrink",
]  # fmt: skip
# Left out: remainders, of which eager's vectors and tails differ where the quotient is infinite, and logaddexp2, which
# cancels near zero.
TWO = [
    "add", "sub", "mul", "div", "pow", "atan2", "hypot", "nextafter", "xlogy", "special.xlog1py", "logaddexp",
    "copysign", "float_power", "heaviside", "maximum", "minimum", "fmax", "fmin", "floor_divide", "ldexp",
    "true_divide", "eq", "lt",
]  # fmt: skip
EDGES = [
    0.0, 1e-45, 1e-40, 1e-38, 2.0**-126, 1e-30, 1e-20, 1e-10, 1e-7, 1e-4, 0.1, 0.25, 0.5, 0.75, 0.999999, 1.0, 1.000001,
    1.5, 2.0, 2.5, 3.0, 3.5, 4.5, 5.0, 7.3, 10.0, 12.5, 16.0, 33.3, 40.0, 60.0, 80.0, 87.0, 88.7, 88.8, 89.3, 103.0,
    104.0, 105.0, 128.0, 149.0, 150.0, 300.0, 512.3, 709.0, 710.0, 710.4, 745.0, 1000.7, 1e4, 65504.0, 65520.0, 1e5,
    1e6 + 0.5, 2.0**23 + 0.5, 2.0**24, 1e9, 2.0**31, 2.0**53, 1e15, 1e20, 1e30, 3.4e38, 1e155, 1e300, math.inf,
    math.nan, math.pi, math.pi / 2, 1e3 * math.pi,
]  # fmt: skip
TOGETHER = 25


def _apply(name: str, *args: Tensor) -> Tensor:
    if name.startswith("F."):
        return getattr(F, name[2:])(*args)  # type: ignore[no-any-return]
    return reduce(getattr, name.split("."), torch)(*args)  # type: ignore[operator]


def _known(name: str, args: tuple[Tensor, ...]) -> bool:
    try:
        _apply(name, *args)
    except RuntimeError:  # not for this type
        return False
    return True


def _off(name: str, found: Tensor, expected: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """Where a result is neither eager's nor that of double precision."""
    assert found.dtype is expected.dtype
    if not expected.is_floating_point():
        return found != expected
    info = torch.finfo(expected.dtype)
    relative = (64 if expected.dtype.itemsize > 2 else 3) * info.eps
    off = torch.ones_like(found, dtype=torch.bool)
    for right in (expected.double(), _apply(name, *(a.double() for a in args)).to(expected.dtype).double()):
        mine = found.double()
        near = (mine - right).abs() <= relative * right.abs() + info.tiny
        off &= ~(near | (mine == right) | (mine.isnan() & right.isnan()))
    return off


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [ONE, TWO], ids=["one operand", "two operands"])
def test_functions_at_the_ends(names: list[str], dtype: torch.dtype) -> None:
    values = torch.tensor(EDGES + [-x for x in EDGES], dtype=torch.float64).to(dtype)
    args: tuple[Tensor, ...] = (values,)
    if names is TWO:
        args = tuple(x.flatten() for x in torch.meshgrid(values[::2], values[1::2], indexing="ij"))
    names = [n for n in names if _known(n, args)]
    wrong = []
    for start in range(0, len(names), TOGETHER):
        part = names[start : start + TOGETHER]

        def fn(*xs: Tensor, part: list[str] = part) -> tuple[Tensor, ...]:
            return tuple(_apply(n, *xs) for n in part)

        torch._dynamo.reset()
        for name, found, expected in zip(part, torch.compile(fn, backend="mlc")(*args), fn(*args), strict=True):
            off = _off(name, found, expected, args)
            if off.any():
                k = int(off.nonzero()[0])
                wrong.append((name, [float(a[k]) for a in args], float(found[k]), float(expected[k])))
    assert not wrong
