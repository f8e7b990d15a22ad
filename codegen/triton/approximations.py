"""Device functions of float32 with an error (``ir.expr.ops.APPROXIMATIONS``), in few instructions of a target.

``tl.exp2`` and ``tl.sqrt`` are single instructions on GPUs of both vendors, as Triton has them, which take denormal
numbers for zero.
"""

from __future__ import annotations

from ...ir.target import Target

_TEXTS = {
    "mlc_exp2_approx": '''
@triton.jit
def mlc_exp2_approx(a):
    """A power of two."""
    return tl.exp2(a)
''',
    "mlc_sqrt_approx": '''
@triton.jit
def mlc_sqrt_approx(a):
    """A square root."""
    return tl.sqrt(a)
''',
    "mlc_div_approx": '''
@triton.jit
def mlc_div_approx(a, b):
    """A quotient, two units in the last place off at most."""
    return a / b
''',
    "mlc_reciprocal_approx": '''
@triton.jit
def mlc_reciprocal_approx(a):
    """A reciprocal in one instruction."""
    return libdevice.fast_dividef(1.0, a)
''',
    "mlc_tanh_approx": '''
@triton.jit
def mlc_tanh_approx(a):
    """A hyperbolic tangent; near zero it is its argument."""
    far = 1.0 - 2.0 * mlc_reciprocal_approx(1.0 + tl.exp2(a * 2.885390081777927))
    return tl.where(tl.abs(a) < 0.015625, a, far)
''',
    # erfc(x) = exp2(P(x)) for x above zero. P is fitted up to 4.4, where erfc is 2**-30, and falls beyond.
    "mlc_erfc_approx": '''
@triton.jit
def mlc_erfc_approx(a):
    """The complement of the error function, by a power of two: exact to 2**-17 of it, on both sides of zero."""
    x = tl.abs(a)
    p = tl.fma(x, -2.0317906210762774e-05, 0.00048609482097491214)
    p = tl.fma(p, x, -0.0052236521853399635)
    p = tl.fma(p, x, 0.03391034531759009)
    p = tl.fma(p, x, -0.15242983545941183)
    p = tl.fma(p, x, -0.9170815869697012)
    p = tl.fma(p, x, -1.6280632211679806)
    e = tl.exp2(p * x)
    return tl.where(a < 0.0, 2.0 - e, e)
''',
}
_PTX = {
    "mlc_reciprocal_approx": '''
@triton.jit
def mlc_reciprocal_approx(a):
    """A reciprocal in one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )
''',
}
_PTX_TANH = {
    "mlc_tanh_approx": '''
@triton.jit
def mlc_tanh_approx(a):
    """A hyperbolic tangent in one instruction."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1)
''',
}


def approximation_source(name: str, target: Target) -> str | None:
    """The text of a device function for a target; None where the name is none of these."""
    tables = (*((_PTX_TANH,) if target.has_tanh else ()), *((_PTX,) if target.has_ptx else ()), _TEXTS)
    return next((table[name] for table in tables if name in table), None)
