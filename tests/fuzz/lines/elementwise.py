"""Operations element by element: functions of one and two operands, comparisons, selections, conversions.

Left out because eager leaves them undefined: conversion of floats that an integer type cannot hold, shifts by more than
a type's bits, integer division by zero and of the least number by -1.
"""

from __future__ import annotations

import torch

from .maker import FLOATS, INTEGERS, Draft, Info, Maker, NoFit

# Smooth enough for anything: a rounding of the operand moves the result about as much.
SMOOTH = (
    "torch.tanh({a})", "torch.sigmoid({a})", "torch.sin({a})", "torch.cos({a})", "torch.erf({a})", "torch.atan({a})",
    "torch.asinh({a})", "F.gelu({a})", 'F.gelu({a}, approximate="tanh")', "F.silu({a})", "F.softplus({a})",
    "F.elu({a})", "F.selu({a})", "F.celu({a}, 0.5)", "F.hardswish({a})", "F.mish({a})", "F.logsigmoid({a})",
    "F.leaky_relu({a}, 0.1)", "F.hardsigmoid({a})", "F.softsign({a})", "torch.erfc({a})", "F.tanhshrink({a})",
    "torch.rsqrt({a}.abs() + 0.5)", "torch.sqrt({a}.abs() + 0.25)", "torch.log({a}.abs() + 0.5)",
    "torch.log1p({a}.abs())", "torch.reciprocal({a}.abs() + 1)", "1 / ({a} * {a} + 1)", "torch.sinc({a})",
    "torch.lgamma({a}.abs() + 1)", "torch.digamma({a}.abs() + 1)", "torch.logit(torch.sigmoid({a}))",
    "torch.atan2({a}, {a} * {a} + 1)", "{a} / 3", "{a} * 0.3", "{a} - 0.1", "torch.special.i0e({a})",
    "torch.special.erfcx({a}.abs())", "torch.special.ndtr({a})", "torch.special.log_ndtr({a})",
    "torch.acosh({a}.abs() + 1.5)", "torch.acos(torch.tanh({a}) * 0.5)", "torch.atanh(torch.tanh({a}) * 0.5)",
    "torch.pow({a}.abs() + 0.5, 0.5)", "torch.pow({a}.abs() + 0.5, -1.5)", "torch.cumsum({a}, -1).tanh()",
)  # fmt: skip
BOUNDED = (
    "torch.exp({a})", "torch.exp2({a})", "torch.expm1({a})", "torch.sinh({a})", "torch.cosh({a})", "2.0 ** {a}",
    "{a} ** 3", "torch.float_power({a}, 2)", "torch.exp(-{a}.abs())", "torch.special.entr({a}.abs() + 0.5)",
    "torch.deg2rad({a})", "torch.special.xlog1py({a}, {a}.abs())", "torch.xlogy({a}, {a}.abs() + 0.5)",
)  # fmt: skip
# May leave the real line: for programs with infinities and NaN.
WILD = (
    "torch.log({a})", "torch.sqrt({a})", "torch.rsqrt({a})", "torch.reciprocal({a})", "torch.exp({a})",
    "torch.tan({a})", "torch.nan_to_num({a})", "torch.nan_to_num({a}, nan=1.0, posinf=2.0, neginf=-3.0)",
    "torch.isnan({a})", "torch.isinf({a})", "torch.isfinite({a})", "torch.log1p({a})", "torch.acos({a})",
    "torch.logsumexp({a}, -1)", "{a} - {a}", "{a} * 0",
)  # fmt: skip
EXACT = (
    "torch.neg({a})", "torch.abs({a})", "F.relu({a})", "{a}.clamp(-1, 1)", "{a}.clamp(min=0)", "{a}.clamp(max=0.5)",
    "{a} * 2", "{a} + 1", "{a} - 0.5", "1 - {a}", "{a} * {a}", "torch.square({a})", "F.relu6({a})", "F.hardtanh({a})",
    "{a} / 2", "{a} + {a}", "-{a}", "{a}.clone()", "torch.zeros_like({a})", "torch.ones_like({a})",
    "torch.full_like({a}, 3)", "{a} ** 2", "torch.positive({a})", "torch.ldexp({a}, {a} * 0)",
    "F.leaky_relu({a}, 0.5)", "{a} * {a}.shape[0]", "torch.rsub({a}, 2)", "torch.where({a} > 0, {a}, 0.0)",
    "{a} * ({a} > 0)", "torch.addcmul({a}, {a}, {a}, value=2)", "torch.lerp({a}, {a} + 1, 0.5)",
)  # fmt: skip
# A last bit of the operand decides.
SUDDEN = (
    "torch.floor({a})", "torch.ceil({a})", "torch.round({a})", "torch.trunc({a})", "torch.frac({a})", "torch.sign({a})",
    "{a} % 3", "{a} // 2", "torch.fmod({a}, 3)", "torch.remainder({a}, -2)", "{a} > 0", "{a} <= 0.5", "{a} == 1",
    "{a} != {a}.flip(0)", "torch.logical_not({a})", 'torch.div({a}, 0.5, rounding_mode="floor")',
    'torch.div({a}, 3, rounding_mode="trunc")', "torch.heaviside({a}, {a} * 0 + 1)", "F.hardshrink({a}, 0.25)",
    "F.threshold({a}, 0.5, 0.25)",
    "torch.isclose({a}, {a} * 1)", "torch.sgn({a})", "F.softshrink({a}, 0.5)", "torch.signbit({a} + 0.0625)",
)  # fmt: skip
INTEGRAL = (
    "~{a}", "{a} & 5", "{a} | 3", "{a} ^ 6", "{a} << 2", "{a} >> 1", "{a} * 7", "{a} + 100", "{a} // 3", "{a} % 5",
    "{a} % -3",
    'torch.div({a}, 3, rounding_mode="trunc")', "torch.div({a}, 3)", "torch.abs({a})", "torch.sign({a})", "-{a}",
    "torch.clamp({a}, -2, 3)", "{a} ** 2", "{a} ** 3", "torch.bitwise_right_shift({a}, {a} & 3)",
    "torch.bitwise_left_shift({a}, {a} & 3)", "torch.fmod({a}, 3)", "torch.gcd({a}, {a} + 2)", "{a} * 0.5",
)  # fmt: skip
LOGICAL = (
    "~{a}", "torch.logical_not({a})", "{a} * 2", "{a} + 1", "{a}.float() * 0.5", "torch.where({a}, 1.0, -1.0)",
    "{a} & {a}.flip(0)", "{a} ^ True", "{a}.long() - 1",
)  # fmt: skip

BINARY_EXACT = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "torch.fmax({a}, {b})",
    "torch.fmin({a}, {b})", "torch.add({a}, {b}, alpha=2)", "torch.sub({a}, {b}, alpha=3)", "torch.rsub({a}, {b})",
    "torch.clamp({a}, max={b})", "torch.clamp({a}, min={b})",
    "torch.addcmul({a}, {a}, {b}, value=0.5)", "torch.lerp({a}, {b}, 0.25)",
)  # fmt: skip
BINARY_SMOOTH = (
    "{a} / ({b}.abs() + 0.5)", "torch.atan2({a}, {b}.abs() + 1)", "torch.hypot({a}, {b} + 3)",
    "torch.logaddexp({a}, {b})",
    "torch.logaddexp2({a}, {b})", "torch.xlogy({a}, {b}.abs() + 1)", "torch.lerp({a}, {b}, 0.3)",
    "torch.addcdiv({a}, {b}, {b} * {b} + 1)", "torch.pow({a}.abs() + 0.5, torch.tanh({b}))", "torch.tanh({a}) * {b}",
    "torch.sigmoid({b}) * {a}", "F.silu({a}) * {b}", "F.prelu({a}, {b}.reshape(-1)[:1])", "torch.dist({a}, {b})",
    "F.mse_loss({a} + 0 * {b}, {b} + 0 * {a})",
    'F.smooth_l1_loss({a}.expand_as({a} + {b}), {b}.expand_as({a} + {b}), reduction="none")',
)  # fmt: skip
BINARY_SUDDEN = (
    "{a} > {b}", "{a} <= {b}", "{a} == {b}", "{a} != {b}", "{a} >= {b}", "torch.where({a} < {b}, {b}, {a})",
    "torch.where({a} > 0, {a}, {b})",
    "torch.logical_and({a}, {b})", "torch.logical_xor({a}, {b})", "torch.logical_or({a} > 0, {b} > 0)",
    'torch.div({a}, {b}.abs() + 1, rounding_mode="floor")', "torch.remainder({a}, {b}.abs() + 1)",
    'torch.div({a}, {b}.abs() + 1, rounding_mode="trunc")', "torch.fmod({a}, {b}.abs() + 1)",
    "torch.eq({a}, {b}).long()",
)  # fmt: skip
BINARY_INTEGRAL = (
    "{a} & {b}", "{a} | {b}", "{a} ^ {b}", "{a} // (({b} & 3) + 1)", "{a} % (({b} & 7) + 1)", "{a} << ({b} & 3)",
    "{a} >> ({b} & 3)", "torch.gcd({a}, {b})", "{a} * {b} + {a}", "{a} ** ({b} & 3)", "{a} / (({b} & 3) + 1)",
    'torch.div({a}, ({b} & 3) + 1, rounding_mode="trunc")', "torch.fmod({a}, ({b} & 3) + 1)",
)  # fmt: skip


def small(a: Info) -> bool:
    """Whether nothing goes wild."""
    return a.within(-40, 40)


def unary(m: Maker) -> Draft:
    a = m.pick(lambda i: i.dtype is not torch.complex64)
    if a.is_bool:
        return m.choose(LOGICAL, exact=True, a=a)
    tables: list[tuple[tuple[str, ...], bool]] = [(EXACT, True)]
    if a.is_integer:
        tables += [(INTEGRAL, True)] * 3
    if small(a):
        tables += [(SMOOTH, False)] * 2
    if a.within(-5, 5):
        tables.append((BOUNDED, False))
    if a.sure:
        tables.append((SUDDEN, True))
    if m.special and a.is_float:
        tables += [(WILD, False)] * 2
    table, exact = m.rng.choice(tables)
    text = m.rng.choice(table)
    if a.dtype is torch.float64 and text.startswith(("F.hardsigmoid", "F.hardswish")):
        raise NoFit  # eager's sixth is a float32
    if m.special and text.startswith(("F.hardtanh", "F.relu6")):
        raise NoFit  # eager's gradient at NaN is zero in its vectors and the result's behind them
    return Draft(text.format(a=a.name), (a.name,), exact=exact)


def partner(m: Maker, a: Info, *, dtype: torch.dtype | None = None) -> Info:
    """A value that may be broadcast with another: one that is there, or a new input."""

    def fits(b: Info) -> bool:
        if b.name == a.name or (dtype is not None and b.dtype is not dtype):
            return False
        return all(_broadcast(x, y) for x, y in zip(a.shapes, b.shapes, strict=True))

    if m.chance(0.75):
        try:
            return m.pick(fits)
        except NoFit:
            pass
    form = m.rng.random()
    shapes = a.shapes
    if form < 0.35 and a.ndim:
        ones = [m.chance(0.5) for _ in range(a.ndim)]
        shapes = tuple(tuple(1 if one else n for n, one in zip(s, ones, strict=True)) for s in shapes)
    elif form < 0.6 and a.ndim:
        k = m.rng.randrange(a.ndim + 1)
        shapes = tuple(s[k:] for s in shapes)
    kind = a.dtype if m.chance(0.7) else m.rng.choice((*FLOATS, *INTEGERS, torch.bool))
    return m.fresh(shapes, dtype or kind)


def _broadcast(x: tuple[int, ...], y: tuple[int, ...]) -> bool:
    return all(p == q or 1 in (p, q) for p, q in zip(reversed(x), reversed(y)))


def binary(m: Maker) -> Draft:
    a = m.pick(lambda i: i.dtype is not torch.complex64)
    b = partner(m, a)
    if m.chance(0.3):
        a, b = b, a
    tables: list[tuple[tuple[str, ...], bool]] = [(BINARY_EXACT, True)] * 2
    if small(a) and small(b) and not (a.is_bool and b.is_bool):
        tables.append((BINARY_SMOOTH, False))
    if a.sure and b.sure:
        tables.append((BINARY_SUDDEN, True))
    if a.is_integer and b.is_integer:
        tables += [(BINARY_INTEGRAL, True)] * 3
    if m.special and a.is_float:
        tables.append((("{a} / {b}", "{a} - {b}", "torch.pow({a}, {b})", "torch.copysign({a}, {b} + 0.0625)"), False))
    table, exact = m.rng.choice(tables)
    text = m.rng.choice(table)
    if table is BINARY_EXACT and not text.startswith(("{a}", "torch.add", "torch.sub")) and not (a.sure and b.sure):
        # Which of two is taken may turn with a rounding, but then they are close.
        exact = False
    return Draft(text.format(a=a.name, b=b.name), (a.name, b.name), exact=exact)


def select(m: Maker) -> Draft:
    a = m.pick(lambda i: True)
    b = partner(m, a)
    condition = partner(m, a, dtype=torch.bool)
    text = m.rng.choice(
        (
            "torch.where({c}, {a}, {b})",
            "torch.where({c}, {a}, 0)",
            "{a}.masked_fill({c}, 1)",
            "torch.where({c}, {b}, {a})",
        )
    ).format(a=a.name, b=b.name, c=condition.name)
    return Draft(text, tuple(n for n in (a.name, b.name, condition.name) if n in text), exact=True)


def convert(m: Maker) -> Draft:
    a = m.pick(lambda i: True)
    kinds: list[torch.dtype] = []
    if a.within(-30000, 30000) or m.special:
        kinds += FLOATS
    if a.is_integer or a.is_bool:
        kinds += INTEGERS
    elif a.sure and a.is_float:
        kinds += [k for k in INTEGERS if a.within(torch.iinfo(k).min, torch.iinfo(k).max)]
    if a.sure:
        kinds.append(torch.bool)
    kinds = [k for k in kinds if k is not a.dtype]
    if not kinds:
        raise NoFit
    # In double precision all floats are one type, where a conversion would be no copy.
    return Draft(f"{a.name}.to({m.rng.choice(kinds)}, copy=True)", (a.name,), exact=True)


def random_numbers(m: Maker) -> Draft:
    a = m.pick(lambda i: i.is_float)
    text = m.rng.choice(("{a} * rand({a})", "rand({a}) + {a}", "torch.where(rand({a}) < 0.5, {a}, 0.0)", "rand({a})"))
    return Draft(text.format(a=a.name), (a.name,))


def complex_numbers(m: Maker) -> Draft:
    a = m.pick(lambda i: i.dtype in (torch.complex64, torch.float32))
    if a.dtype is torch.float32:
        b = m.pick(lambda i: i.dtype is a.dtype and i.shapes == a.shapes)
        text = m.rng.choice(("torch.complex({a}, {b})", "torch.polar({a}.abs(), {b})"))
        return Draft(text.format(a=a.name, b=b.name), tuple(dict.fromkeys((a.name, b.name))), exact="polar" not in text)
    text = m.rng.choice(("{a} * {a}", "{a}.conj() + 1", "torch.view_as_real({a})", "{a}.real", "{a}.imag * 2",
                         "{a} * 1j", "{a}.abs()", "{a} + {a}.flip(0)", "torch.angle({a} + 3)", "{a}.sum(0)",
                         "{a} / 2", "torch.exp({a} * 0.1)", "({a} * {a}.conj()).real", "-{a}"))  # fmt: skip
    return Draft(text.format(a=a.name), (a.name,), exact=not any(w in text for w in ("abs", "angle", "exp")))


def mixed(m: Maker) -> Draft:
    """Types that meet: numbers of Python, scalar tensors, integers with floats, booleans."""
    a = m.pick(lambda i: i.dtype is not torch.complex64 and i.within(-100, 100))
    b = partner(m, a, dtype=m.rng.choice((*FLOATS, *INTEGERS, torch.bool)))
    if not b.within(-100, 100):
        raise NoFit
    text = m.rng.choice(("{a} + {b}", "{a} * {b}", "{a} + {b} * 2.0", "torch.where({a} > 0, {a}, {b})", "{a} - {b} * 1",
                         "torch.maximum({a}, {b})", "{a} * True + {b}", "({a} > 0) * {b}", "{b} + ({a} == 1) + 0.5",
                         "torch.add({a}, {b}, alpha=3)", "{a} * torch.tensor(0.5) + {b}", "({a} >= 0) & ({b} != 0)",
                         "{a} + torch.tensor(2)", "{a}.type_as({b}) * 2 + {a}"))  # fmt: skip
    if (">" in text or "==" in text) and not (a.sure and b.sure):
        raise NoFit
    if "type_as" in text and not (a.sure and b.is_float):
        raise NoFit
    return Draft(text.format(a=a.name, b=b.name), (a.name, b.name), exact=True)


ELEMENTWISE = (
    (6.0, unary),
    (6.0, binary),
    (1.5, select),
    (1.5, convert),
    (0.3, random_numbers),
    (0.3, complex_numbers),
    (2.0, mixed),
)
