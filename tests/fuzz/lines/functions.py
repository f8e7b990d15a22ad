"""Functions that are called rarely: special functions, bits, types of eight bits, and random orders."""

from __future__ import annotations

import torch

from .maker import Draft, Info, Maker, NoFit

SMOOTH = (
    "torch.special.i0({a} * 0.5)",
    "torch.special.i1({a} * 0.5)",
    "torch.special.i1e({a})",
    "torch.special.erfinv(torch.tanh({a}) * 0.9)",
    "torch.special.ndtri(torch.sigmoid({a}))",
    "torch.polygamma(1, {a}.abs() + 1)",
    "torch.polygamma(2, {a}.abs() + 1)",
    "torch.mvlgamma({a}.abs() + 2, 2)",
    "torch.special.gammaln({a}.abs() + 1)",
    "torch.special.psi({a}.abs() + 1)",
    "torch.special.expit({a})",
    "torch.logit(torch.sigmoid({a}), eps=0.1)",
    "torch.asin(torch.tanh({a}) * 0.5)",
    "torch.tan(torch.tanh({a}))",
    "F.softplus({a}, beta=2.0, threshold=3.0)",
    "F.hardtanh({a}, -0.7, 0.3)",
    "F.elu({a}, 0.5)",
    "F.rrelu({a})",
    "torch.special.logsumexp({a}, -1)",
    "torch.special.log_softmax({a}, -1)",
    "torch.hypot({a}, {a} + 3)",
    "torch.rad2deg({a})",
    "torch.log2({a}.abs() + 0.5)",
    "torch.log10({a}.abs() + 0.5)",
    "torch.nan_to_num({a} / 3)",
    "torch.clip({a} * 0.7, -0.4, 0.9)",
    "torch.float_power({a}.abs() + 0.5, 1.5)",
    "torch.addcdiv({a}, {a}, {a}.abs() + 1, value=0.3)",
    "F.glu(torch.cat([{a}, {a} * 0.3], -1))",
)
# Of these nobody asks a gradient.
PLAIN = (
    "torch.special.bessel_j0({a})",
    "torch.special.bessel_j1({a})",
    "torch.special.bessel_y0({a}.abs() + 0.5)",
    "torch.special.bessel_y1({a}.abs() + 0.5)",
    "torch.special.modified_bessel_i0({a})",
    "torch.special.modified_bessel_i1({a})",
    "torch.special.modified_bessel_k0({a}.abs() + 0.5)",
    "torch.special.modified_bessel_k1({a}.abs() + 0.5)",
    "torch.special.scaled_modified_bessel_k0({a}.abs() + 0.5)",
    "torch.special.spherical_bessel_j0({a})",
    "torch.special.airy_ai({a})",
    "torch.special.zeta({a}.abs() + 1.5, {a}.abs() + 1)",
    "torch.igamma({a}.abs() + 0.5, {a}.abs() + 1)",
    "torch.igammac({a}.abs() + 0.5, {a}.abs() + 1)",
    # Of what is no number torch returns what it has never set.
    "torch.special.chebyshev_polynomial_t(torch.nan_to_num(torch.tanh({a})), 3)",
    "torch.special.chebyshev_polynomial_u(torch.nan_to_num(torch.tanh({a})), 4)",
    "torch.special.hermite_polynomial_h(torch.tanh({a}), 3)",
    "torch.special.hermite_polynomial_he(torch.tanh({a}), 4)",
    "torch.special.laguerre_polynomial_l(torch.nan_to_num(torch.tanh({a})), 3)",
    "torch.special.legendre_polynomial_p(torch.nan_to_num(torch.tanh({a})), 4)",
    "torch.nextafter({a}, {a} + 1)",
)
SUDDEN = (
    "torch.isposinf({a})",
    "torch.isneginf({a})",
    "torch.isreal({a})",
    "torch.round({a}, decimals=1)",
    "{a}.fix()",
    "torch.floor_divide({a}, 2)",
    "torch.true_divide({a}, 4).ceil()",
    "torch.equal({a}, {a}) * {a}",
    "torch.isin({a}, {a}.flatten()[:3])",
    "{a}.bool().logical_not()",
    "torch.greater({a}, 0.5) ^ ({a} < -0.5)",
    "torch.copysign({a}, {a} + 0.0625)",
    "torch.allclose({a}, {a}) + {a}",
    "{a}.ge(0).to(torch.int8) * 3",
)
INTEGRAL = (
    "torch.lcm({a} & 15, ({a} & 7) + 1)",
    "{a}.bitwise_and(12).bitwise_or({a} >> 1)",
    "torch.bitwise_xor({a}, {a} << 1)",
    "torch.floor_divide({a}, 4)",
    "{a}.sign() * ({a} & 6)",
    "torch.remainder({a}, 7) - 3",
    "{a}.clamp(max=5).pow(2)",
    "torch.isin({a}, {a}.flatten()[:2])",
    "torch.bitwise_right_shift({a}, 1)",
    "({a} * {a}).sum(-1)",
    "torch.fmod({a}, 5)",
    "{a}.float().sigmoid()",
    "{a}.logical_xor({a} > 2)",
    "{a}.square() + ~{a}",
)
BITS = {
    torch.int64: ("int32", "int16", "uint8"),
    torch.int32: ("int16", "uint8"),
    torch.int16: ("int8",),
    torch.int8: ("uint8",),
    torch.uint8: ("int8", "bool"),
    torch.bool: ("uint8", "int8"),
}


def function(m: Maker) -> Draft:
    a = m.pick(lambda i: i.is_float and i.within(-20, 20), lambda i: i.ndim >= 1)
    if a.sure and m.chance(0.3):
        return m.choose(SUDDEN, exact=True, a=a)
    if m.chance(0.35) and not m.gradient and a.dtype in (torch.float32, torch.float64):
        return m.choose(PLAIN, a=a)
    return m.choose(SMOOTH, a=a)


def integral(m: Maker) -> Draft:
    a = m.pick(lambda i: i.is_integer)
    return m.choose(INTEGRAL, exact=True, a=a)


def bits(m: Maker) -> Draft:
    """The memory of integers, read as that of narrower ones."""
    a = m.pick(lambda i: i.dtype in BITS and i.ndim >= 1 and i.has(-1))
    kind = m.rng.choice(BITS[a.dtype])
    if kind == "bool" and not a.within(0, 1):
        raise NoFit
    return m.draft(f"{a.name}.view(torch.{kind})", kind="view")


def narrow(m: Maker) -> Draft:
    """Floats that pass through types of eight bits, or lose their last bits."""
    a = m.pick(lambda i: i.is_float and i.exact and i.within(-5000, 5000) and i.dtype is not torch.float64)
    kind = m.rng.choice(("float8_e4m3fn", "float8_e5m2"))
    return m.draft(f"{a.name}.to(torch.{kind}).to({a.dtype}) * 0.5", exact=True)


def halves(m: Maker) -> Draft:
    """Arithmetic of half types that meet wider ones."""
    a = m.pick(lambda i: i.is_float and i.dtype.itemsize == 2 and i.within(-50, 50) and i.ndim >= 1)
    options = (
        "{a} * 0.3 + {a}.to(torch.float32)",
        "({a} * {a}).sum(-1, dtype=torch.float32)",
        "{a}.mean(-1, keepdim=True) * {a}",
        "torch.cumsum({a} * 0.1, -1)",
        "({a} / 3).exp().log1p()",
        "torch.softmax({a}, -1, dtype=torch.float32)",
        "({a} - {a}.amax(-1, keepdim=True)).exp().sum(-1)",
        "{a}.to(torch.float32).var(-1)",
        "{a}.var(-1)",
        "{a}.std(0)",
        "{a} @ {a}.transpose(-1, -2)",
        "F.gelu({a} * 1.7) * {a}",
        "({a} + 1e-3) * 1.001",
        "torch.sum({a}) * {a}",
    )
    return m.choose(options, a=a)


def two(m: Maker) -> Draft:
    """Functions of two results, and of one that sorts what comes once."""
    a = m.pick(lambda i: i.is_float and i.sure and i.ndim >= 1 and i.dtype is not torch.bfloat16)
    return m.draft(f"torch.frexp({a.name})", results=2, exact=True)


def unique(a: Info) -> str:
    """Text of a tensor in the order of another, of which no two elements are equal."""
    return f"({a.name} * 8192 + torch.arange({a.name}.numel()).view({a.name}.shape))"


def ordered(m: Maker) -> Draft:
    """What reads positions that sorting gives."""
    a = m.pick(
        lambda i: i.exact and i.dtype in (torch.float32, torch.float64, torch.int64) and i.ndim >= 1,
        lambda i: i.within(-16, 16) and i.elements <= 1000,
    )
    d, n, u = m.dim(a, least=2), a.name, unique(a)
    options = [
        f"torch.topk({u}, 2, {d})[1]",
        f"torch.sort({u}, {d})[1]",
        f"{n}.gather({d}, {u}.argsort({d}))",
        f"torch.argsort(torch.argsort({u}, {d}), {d})",
        f"{n}.gather({d}, torch.topk({u}, 2, {d}).indices)",
        f"torch.zeros_like({n}).scatter({d}, {u}.topk(2, {d}).indices, 1)",
        f"torch.sort({u}, {d}, descending=True)[0]",
        f"torch.zeros_like({n}).scatter_add({d}, {u}.argsort({d}), {n})",
        f"{u}.kthvalue(2, {d}).indices",
        f"{n}.take_along_dim({u}.argmax({d}, keepdim=True), {d})",
        f"torch.msort({u})",
        f"{u}.argmax({d})",
        f"torch.cumsum({n}.gather({d}, {u}.argsort({d})), {d})",
        f"{u}.topk(2, {d}, largest=False).values.sum({d})",
        f"torch.where({u} >= {u}.topk(2, {d}).values.amin({d}, keepdim=True), {n}, 0)",
        f"torch.mode({n}, {d})[0]",
        f"{n}[torch.randperm({n}.shape[0])]",
        f"torch.unique_consecutive({n}.flatten())",
        f"torch.unique({n}, return_inverse=True)[1]",
        f"F.one_hot({u}.argmax(-1) % 4, 4)",
    ]
    return m.choose(options, exact=True)


FUNCTIONS = (
    (3.0, function),
    (1.0, integral),
    (0.7, bits),
    (0.5, narrow),
    (1.0, halves),
    (0.3, two),
    (1.5, ordered),
)
