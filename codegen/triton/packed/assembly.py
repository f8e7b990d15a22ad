"""Device functions in PTX over half types, two elements in a register."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir.expr.dtypes import DType

REGISTER = 32
# Half type -> bits of its mantissa, and what instructions call it.
MANTISSA = {DType.BFLOAT16: 7, DType.FLOAT16: 10}
SHORT = {DType.BFLOAT16: "bf16", DType.FLOAT16: "f16"}


def bits_of(number: float, half: DType) -> int:
    """The bits of the nearest number of a half type."""
    return int(half.numpy.type(number).view("u2"))


def twice(bits: int) -> str:
    """The same 16 bits in both halves of a register, as a literal."""
    return f"0x{bits << 16 | bits:08x}"


def asm_source(name: str, args: str, lines: Sequence[str], constraints: str, half: DType, pack: int, says: str) -> str:
    """The source of a device function of ``args``, names with commas between, that takes ``pack`` elements at a time
    and gives them as a half type; ``constraints`` are those of the instructions' registers."""
    text = "\n".join(f'        "{line} "' for line in ["{", *lines, "}"])
    return f'''
@triton.jit
def {name}({args}):
    """{says}"""
    return tl.inline_asm_elementwise(
{text},
        "{constraints}", [{args}], dtype=tl.{half.value}, is_pure=True, pack={pack},
    )
'''
