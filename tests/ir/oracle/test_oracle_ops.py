"""The oracle's scalar functions are torch's."""

import math

import numpy as np
import pytest
import torch

from torch_mlc.ir.errors import DivisionByZeroError, IRError, OutOfRangeError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.iterations import ITERATIONS
from torch_mlc.ir.expr.ops import APPROXIMATIONS, OPS
from torch_mlc.ir.oracle.ops import FUNCTIONS, converter, function, philox, scalar

FLOATS = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.0,
    -1.0,
    1.5,
    2.5,
    -2.5,
    3.7,
    -3.7,
    88.0,
    -100.0,
    1e-30,
    math.inf,
    -math.inf,
    math.nan,
]
INTEGERS = [0, 1, -1, 2, -2, 7, -7, 63, 100, -100]
TORCH = {
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "bit_and": torch.bitwise_and, "bit_or": torch.bitwise_or, "bit_xor": torch.bitwise_xor,
    "bit_not": torch.bitwise_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
}  # fmt: skip
RANDOM = ("rand", "randn", "randbits")
OF_INTEGERS = (
    "add sub mul maximum minimum floordiv remainder truncdiv fmod pow neg abs sign eq ne lt le gt ge bit_and bit_or "
    "bit_xor bit_not shl shr logical_and logical_or logical_xor logical_not"
)


def test_every_function_of_the_table_has_a_meaning() -> None:
    assert set(OPS) == FUNCTIONS


def reference(fn: str):
    fn = APPROXIMATIONS[fn].of if fn in APPROXIMATIONS else fn
    return TORCH.get(fn) or getattr(torch, fn)


def compare(fn: str, dtype: DType, points: list[tuple[float, ...]], rtol: float) -> None:
    mine = function(fn, dtype, dtype)
    tensors = [torch.tensor(column, dtype=dtype.torch) for column in zip(*points)]
    wanted = reference(fn)(*tensors)
    with np.errstate(all="ignore"):
        got = [mine(*(scalar(x, dtype) for x in p)) for p in points]
    for p, g, w in zip(points, got, wanted.tolist()):
        np.testing.assert_allclose(float(g), w, rtol=rtol, atol=rtol * 1e-3, err_msg=f"{fn}{p}")
        if (
            w == 0
            and dtype.is_float
            and fn not in ("pow", "remainder", "digamma", "fmod", "maximum", "minimum", "fmax", "fmin")
        ):
            assert np.signbit(float(g)) == (math.copysign(1, w) < 0), f"the sign of {fn}{p}"


FLOAT_FUNCTIONS = [
    n
    for n, i in OPS.items()
    if n not in (*RANDOM, *ITERATIONS, "bitcast", "fma") and not n.startswith(("bit_", "sh", "check_"))
]


@pytest.mark.parametrize("fn", FLOAT_FUNCTIONS)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16], ids=repr)
def test_floats(fn: str, dtype: DType) -> None:
    points = [(x,) for x in FLOATS] if OPS[fn].arity == 1 else [(x, y) for x in FLOATS for y in FLOATS]
    if dtype is DType.BFLOAT16:
        if fn in ("nextafter", "floordiv", "remainder", "fmod", "truncdiv"):
            pytest.skip("torch computes these of halves in its own way; kernels cast to float32 first")
        points = [p for p in points if all(abs(x) >= 1e-3 or x == 0 for x in p)]
    compare(fn, dtype, points, {DType.FLOAT32: 3e-6, DType.FLOAT64: 1e-12, DType.BFLOAT16: 1.6e-2}[dtype])


@pytest.mark.parametrize("fn", OF_INTEGERS.split())
@pytest.mark.parametrize("dtype", [DType.INT64, DType.INT32, DType.INT8], ids=repr)
def test_integers(fn: str, dtype: DType) -> None:
    points = [(x,) for x in INTEGERS] if OPS[fn].arity == 1 else [(x, y) for x in INTEGERS for y in INTEGERS]
    if fn in ("floordiv", "truncdiv", "remainder", "fmod"):
        points = [p for p in points if p[1] != 0]
    compare(fn, dtype, points, 0)


def test_shifts_past_the_width() -> None:
    by = [(1, 40), (-1, 40), (-8, 1), (1, 31)]
    compare("shl", DType.INT32, by, 0)
    compare("shr", DType.INT32, by, 0)


@pytest.mark.parametrize("dtype", [DType.INT64, DType.INT8], ids=repr)
def test_greatest_common_divisors(dtype: DType) -> None:
    least = -(1 << dtype.bits - 1)
    compare("gcd", dtype, [(x, y) for x in (*INTEGERS, least) for y in (*INTEGERS, 18, least)], 0)


@pytest.mark.parametrize("name", ["hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
                                  "legendre_polynomial_p"])  # fmt: skip
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=repr)
def test_polynomials(name: str, dtype: DType) -> None:
    family, _, suffix = name.split("_")
    mine = function(f"{family}_{suffix}" if family == "hermite" else family, dtype, dtype)
    for x in (0.3, -0.8, 1.7):
        for n in (1, 2, 3, 8):
            of = torch.tensor([x, n], dtype=dtype.torch)
            want = float(getattr(torch.special, name)(of[:1], of[1:]))
            got = float(mine(*(scalar(v, dtype) for v in (x, n))))
            np.testing.assert_allclose(got, want, rtol=1e-5 if dtype is DType.FLOAT32 else 1e-12)


@pytest.mark.parametrize(("a", "x"), [(0.3, 0.2), (2.0, 1.5), (5.0, 9.0), (0.1, 1.2), (1.2, 0.7)])
def test_parts_of_the_incomplete_gamma_functions(a: float, x: float) -> None:
    series, fraction, difference = (
        float(function(f"gamma_{fn}", DType.FLOAT64, DType.FLOAT64)(np.float64(a), np.float64(x)))
        for fn in ("series", "fraction", "difference")
    )
    power = math.exp(a * math.log(x) - x - math.lgamma(a + 1))
    lower, upper = (float(f(*torch.tensor([[a], [x]], dtype=torch.float64))) for f in (torch.igamma, torch.igammac))
    assert power * series == pytest.approx(lower, rel=1e-12)
    if x > a:
        assert power * a * fraction == pytest.approx(upper, rel=1e-12)
    if x < 2:
        assert -math.expm1(a * math.log(x) - math.lgamma(a + 1)) - power * math.exp(x) * a * difference == (
            pytest.approx(upper, rel=1e-11)
        )


def test_every_iteration_ends() -> None:
    places = (0.0, -1.0, 1.0, 1e300, math.inf, math.nan)
    with np.errstate(all="ignore"):
        for fn in ITERATIONS.keys() - {"gcd"}:
            mine = function(fn, DType.FLOAT64, DType.FLOAT64)
            for a in places:
                for x in places if fn.startswith("gamma") else (-1.0, 0.0, 5.0, math.nan):
                    mine(np.float64(a), np.float64(x))


def test_an_iteration_of_another_type_is_refused() -> None:
    with pytest.raises(IRError, match="gcd of float32: cast to an integer type first"):
        function("gcd", DType.FLOAT32, DType.FLOAT32)
    with pytest.raises(IRError, match="legendre of int64: cast to float32 or float64 first"):
        function("legendre", DType.INT64, DType.INT64)


def test_bounds() -> None:
    check = function("check_bounds", DType.INT64, DType.INT64)
    assert [check(i, -3, 3, 1) for i in range(-3, 3)] == list(range(-3, 3))
    for index in (-4, 3):
        with pytest.raises(OutOfRangeError, match=f"index {index} is out of bounds for dimension 1 with size 3"):
            check(index, -3, 3, 1)


def test_divisors() -> None:
    check = function("check_divisor", DType.INT32, DType.INT32)
    assert [check(x) for x in (-1, 1, 7)] == [-1, 1, 7]
    with pytest.raises(DivisionByZeroError, match="ZeroDivisionError"):
        check(0)


def test_fma_rounds_once() -> None:
    x = np.float64(1 + 2.0**-30)
    assert function("fma", DType.FLOAT64, DType.FLOAT64)(x, x, np.float64(-1 - 2.0**-29)) == 2.0**-60


@pytest.mark.parametrize("target", [d for d in DType if not d.is_carried], ids=repr)
@pytest.mark.parametrize("source", [DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.INT32, DType.BOOL], ids=repr)
def test_casts(source: DType, target: DType) -> None:
    values = [0.0, 1.0, -1.0, 1.7, -1.7, 2.5, 100.0, 1.0 + 2**-9, 0.1]
    if not target.is_signed:
        values = [abs(v) for v in values]
    wanted = torch.tensor(values, dtype=torch.float64).to(source.torch).to(target.torch).to(torch.float64).tolist()
    inputs = torch.tensor(values, dtype=torch.float64).to(source.torch).to(torch.float64).tolist()
    got = [float(converter(source, target)(scalar(v, source))) for v in inputs]
    assert got == wanted


def test_double_to_half_goes_by_way_of_float() -> None:
    value = 1 + 2.0**-8 + 2.0**-40  # rounds up directly, to even by way of float32
    got = converter(DType.FLOAT64, DType.BFLOAT16)(np.float64(value))
    assert float(got) == torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).item()


def test_bitcast_is_view() -> None:
    assert function("bitcast", DType.FLOAT32, DType.INT32)(np.float32(1.0)) == 0x3F800000
    assert float(function("bitcast", DType.INT16, DType.BFLOAT16)(np.int16(0x3F80))) == 1.0


def test_philox_known_answers() -> None:
    """The vectors of Random123's kat_vectors for philox4x32-10."""
    assert philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def test_random_numbers_are_made_of_neighbouring_words() -> None:
    rand, randn, bits = (
        function(fn, DType.INT64, dtype)
        for fn, dtype in (("rand", DType.FLOAT32), ("randn", DType.FLOAT32), ("randbits", DType.INT64))
    )
    seed = -(1 << 40) - 3
    words = [word for k in range(3) for word in philox(seed, k)]
    for k in range(12):
        assert rand(np.int64(seed), np.int64(k)) == np.float32((words[k] >> 8) * 2.0**-24)
    for k in range(6):
        first, second = words[2 * k : 2 * k + 2]
        assert int(bits(np.int64(seed), np.int64(k))) & (1 << 64) - 1 == second << 32 | first
        size, turn = ((first >> 8) + 1) * 2.0**-24, (second >> 8) * 2.0**-24
        normal = math.sqrt(-2 * math.log(size)) * math.cos(2 * math.pi * turn)
        assert float(randn(np.int64(seed), np.int64(k))) == pytest.approx(normal, rel=1e-6)


def test_random_numbers_fill_their_range() -> None:
    rand = function("rand", DType.INT64, DType.FLOAT32)
    randn = function("randn", DType.INT64, DType.FLOAT32)
    u = np.array([rand(np.int64(7), np.int64(k)) for k in range(4000)])
    n = np.array([randn(np.int64(-7), np.int64(k)) for k in range(4000)])
    assert u.dtype == n.dtype == np.float32
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.02
    assert abs(n.mean()) < 0.06 and abs(n.std() - 1) < 0.05
