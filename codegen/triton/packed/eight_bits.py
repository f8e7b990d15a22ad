"""Floats of eight bits by integer arithmetic on their bits, as device functions: where Triton has no such type for a
target, kernels hold their bytes, and where it converts otherwise than torch does, bytes are what is converted to.
"""

from __future__ import annotations

from ....ir.expr.dtypes import DType

_FROM_E4M3 = '''
@triton.jit
def mlc_from_float8_e4m3fn(byte):
    """The float16 that a byte is: its exponent is eight too small, in numbers below the least normal one too."""
    moved = (byte.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385
    value = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((byte & 127) == 127, float("nan"), value)
'''
_FROM_E5M2 = '''
@triton.jit
def mlc_from_float8_e5m2(byte):
    """The float16 that a byte is: its upper half."""
    return (byte.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
'''
_TO = '''
@triton.jit
def mlc_to_{name}(x):
    """The byte of the nearest number, of two the even one; past the largest as torch has it."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
{limit}    odd = (size >> {shift}) & 1
    normal = (size + odd + {carry}) >> {shift}
    # The sum with a power of two has the rounded multiple of the least number in its low bits.
    small = (size.to(tl.float32, bitcast=True) + {power}).to(tl.int32, bitcast=True) - {power_bits}
    byte = tl.where(size < {least}, small, normal)
    byte = tl.where(size >= {end}, {beyond}, byte)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)
'''
# Bits of float32: those of its mantissa, and what its exponent has added.
_MANTISSA, _BIAS = 23, 127


def _to(dtype: DType, mantissa: int, bias: int, end: float, beyond: int) -> str:
    """The conversion of a float32 to a type with so many bits of a mantissa, whose exponent has ``bias`` added. From
    ``end`` on all numbers are ``beyond``, unless the largest takes their place."""
    shift = _MANTISSA - mantissa
    carry = (1 << (shift - 1)) - 1 - ((_BIAS - bias) << _MANTISSA)
    # The least number is 2 ** (1 - bias - mantissa), the step of float32 at this power of two.
    exponent = 1 - bias - mantissa + _MANTISSA
    limit = ""
    if dtype.limit is not None:
        most = _bits(dtype.limit)
        limit = f"    size = tl.where(size > 0x7F800000, size, tl.minimum(size, {most}))\n"
    return _TO.format(
        name=dtype.value, limit=limit, shift=shift, carry=carry, power=2.0**exponent,
        power_bits=(exponent + _BIAS) << _MANTISSA, least=(1 - bias + _BIAS) << _MANTISSA, end=_bits(end),
        beyond=beyond,
    )  # fmt: skip


def _bits(number: float) -> int:
    return int(DType.FLOAT32.numpy.type(number).view("u4"))


CONVERSIONS: dict[str, str] = {
    "mlc_from_float8_e4m3fn": _FROM_E4M3,
    "mlc_from_float8_e5m2": _FROM_E5M2,
    "mlc_to_float8_e4m3fn": _to(DType.FLOAT8_E4M3FN, 3, 7, 480.0, 0x7F),
    "mlc_to_float8_e5m2": _to(DType.FLOAT8_E5M2, 2, 15, 65536.0, 0x7C),
}
