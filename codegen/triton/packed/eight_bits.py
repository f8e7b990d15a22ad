"""Floats of eight bits by integer arithmetic on their bits, as device functions: where Triton has no such type for a
target, kernels hold their bytes, and where it converts otherwise than torch does, bytes are what is converted to.
"""

from __future__ import annotations

from ....ir.expr.dtypes import DType
from ....ir.target import Target
from .assembly import MANTISSA, SHORT, asm_source, bits_of, twice

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
_AS_BFLOAT16 = '''
@triton.jit
def mlc_from_{name}_bfloat16(byte):
    """The bfloat16 that a byte is, which has fewer bits: the upper half of the float32."""
    bits = mlc_from_{name}(byte).to(tl.float32).to(tl.uint32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
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


# Bits of a mantissa of e4m3, what its exponent has added, its largest number, and what the code above it would be.
_E4M3_MANTISSA, _E4M3_BIAS, _E4M3_MOST, _E4M3_NAN = 3, 7, 448.0, 480.0


def _from_e4m3_pairs(name: str, half: DType) -> str:
    """Four bytes at a time, as two registers of two.

    Exponent and mantissa of a byte are moved to those of the half type, and its sign to the half type's. A power of two
    is what the exponent then lacks, of numbers below the least normal one too. The code that is no number would be a
    greater one than all others: a factor makes an infinity of it and of nothing else, and zero times that is no number.
    """
    kind, shift = SHORT[half], MANTISSA[half] - _E4M3_MANTISSA
    ends = 1 << (14 - MANTISSA[half])  # the exponent of the power of two past the largest number
    factor = 2.0**ends / ((_E4M3_MOST + _E4M3_NAN) / 2)
    lines = [
        ".reg .b32 r0, r1, power, factor, zero, none;",
        f"mov.b32 power, {twice(bits_of(2.0 ** (ends - 1 - _E4M3_BIAS), half))};",
        f"mov.b32 factor, {twice(bits_of(factor, half))};",
        "mov.b32 zero, 0;",
        f"mov.b32 none, {twice(0x8000)};",  # added to a zero it leaves the sign
        # Each byte in the lower half of two, below copies of its sign.
        "prmt.b32 r0, $2, 0, 0x9180;",
        "prmt.b32 r1, $2, 0, 0xb3a2;",
    ]
    for k in range(2):
        lines += [f"shl.b32 r{k}, r{k}, {shift};", f"and.b32 r{k}, r{k}, {twice(0x8000 | 0x7F << shift)};"]
        lines += [f"fma.rn.{kind}x2 r{k}, r{k}, power, none;", f"fma.rn.{kind}x2 ${k}, r{k}, factor, none;"]
        lines += [f"fma.rn.{kind}x2 ${k}, ${k}, zero, r{k};"]
    return asm_source(name, "byte", lines, "=r,=r,r", half, 4, f"The {half.value} that a byte is, four at a time.")


_CONVERSIONS: dict[str, str] = {
    "mlc_from_float8_e4m3fn": _FROM_E4M3,
    "mlc_from_float8_e4m3fn_bfloat16": _AS_BFLOAT16.format(name="float8_e4m3fn"),
    "mlc_from_float8_e5m2": _FROM_E5M2,
    "mlc_from_float8_e5m2_bfloat16": _AS_BFLOAT16.format(name="float8_e5m2"),
    "mlc_to_float8_e4m3fn": _to(DType.FLOAT8_E4M3FN, 3, 7, 480.0, 0x7F),
    "mlc_to_float8_e5m2": _to(DType.FLOAT8_E5M2, 2, 15, 65536.0, 0x7C),
}
_PAIRS: dict[str, str] = {
    name: _from_e4m3_pairs(name, half)
    for name, half in (
        ("mlc_from_float8_e4m3fn", DType.FLOAT16),
        ("mlc_from_float8_e4m3fn_bfloat16", DType.BFLOAT16),
    )
}


def conversion_source(name: str, target: Target) -> str | None:
    """The device function of that name for a target; None where it is none of these."""
    return (_PAIRS.get(name) if target.has_pairs else None) or _CONVERSIONS.get(name)
