"""Bits of packed weights, and arithmetic on half types, for GPUs without instructions of PTX: an element at a time, in
float32, of which a bfloat16 is the upper half.

What a half type holds exactly needs no rounding. Elsewhere the upper half is rounded without a look at what is no
number: all operands are half types, so of such a result the lower half is zero, and no carry reaches the exponent.
"""

from __future__ import annotations

from ....ir.expr.dtypes import DType
from .assembly import MANTISSA
from .digits import Digit

_OPERATORS = {"add": "+", "sub": "-", "mul": "*"}


def plain_digit(name: str, d: Digit, half: DType, less: bool) -> str:
    """The device function for the digit of an element, as a half type, or as the float32 that arithmetic takes; where
    ``less``, a number for each row is added to a power of two that has the digit as its lowest bits."""
    flipped = 1 << (d.bits - 1) if d.signed else 0
    digit = f"((a.to(tl.int32) >> {d.at}) & {(1 << d.bits) - 1})"
    digit = f"({digit} ^ {flipped})" if flipped else digit
    if less:
        value = f"({digit} + {1 << MANTISSA[half]}).to(tl.float32) + taken.to(tl.float32)"
    else:
        value = f"({digit} + {d.added - flipped}).to(tl.float32)" if d.added - flipped else f"{digit}.to(tl.float32)"
    says = f"Bits {d.at} to {d.at + d.bits - 1} of an element as a number, which the type holds."
    args = "a, taken" if less else "a"
    if half is DType.BFLOAT16:
        return _upper_half(name, args, value, says)
    return _converted(name, args, value, half, says)


def plain_arithmetic(name: str, fn: str, half: DType, rounds: bool) -> str:
    """The device function for a sum, a difference or a product of half types; ``rounds``: an instruction makes them of
    float32."""
    value = f"a.to(tl.float32) {_OPERATORS[fn]} b.to(tl.float32)"
    says = f"{fn}, rounded to the same type."
    if half is DType.FLOAT16 or rounds:
        return _converted(name, "a, b", value, half, says)
    return _upper_half(name, "a, b", value, says, "    bits += 0x7FFF + ((bits >> 16) & 1)\n")


def _converted(name: str, args: str, value: str, dtype: DType, says: str) -> str:
    return _function(name, args, value, says, f"    return value.to(tl.{dtype.value})")


def _upper_half(name: str, args: str, value: str, says: str, rounded: str = "") -> str:
    bits = f"    bits = value.to(tl.uint32, bitcast=True)\n{rounded}"
    upper = "    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)"
    return _function(name, args, value, says, bits + upper)


def _function(name: str, args: str, value: str, says: str, made: str) -> str:
    return f'''
@triton.jit
def {name}({args}):
    """{says}"""
    value = {value}
{made}
'''
