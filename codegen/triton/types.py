"""Element types as a target's Triton has them: their names, literals, loads, and conversions between them.

A float type of eight bits that it lacks is bytes in memory and in registers. They are widened and rounded by integer
arithmetic (``packed/eight_bits.py``), so that kernels compute with them as with any other half type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...ir.expr.dtypes import DType
from ...ir.nest.loops import Buffer
from ...ir.target import Target
from ..kernel import LibraryOnlyError

_NAMES: dict[DType, str] = {
    DType.FLOAT64: "tl.float64",
    DType.FLOAT32: "tl.float32",
    DType.FLOAT16: "tl.float16",
    DType.BFLOAT16: "tl.bfloat16",
    DType.FLOAT8_E4M3FN: "tl.float8e4nv",
    DType.FLOAT8_E5M2: "tl.float8e5",
    DType.INT64: "tl.int64",
    DType.INT32: "tl.int32",
    DType.INT16: "tl.int16",
    DType.INT8: "tl.int8",
    DType.UINT64: "tl.uint64",
    DType.UINT32: "tl.uint32",
    DType.UINT16: "tl.uint16",
    DType.UINT8: "tl.uint8",
    DType.BOOL: "tl.int1",
}
FP8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)


def type_text(dtype: DType) -> str:
    """``tl.float32`` and so on. Raises LibraryOnlyError for types that Triton lacks on every target."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise LibraryOnlyError(f"Triton has no element type {dtype.value}; leave this op to the library") from None


def literal(value: bool | int | float) -> str:
    """A Python literal, infinities and NaN included."""
    if isinstance(value, float):
        if value != value:
            return 'float("nan")'
        if value in (float("inf"), float("-inf")):
            return f'float("{value}")'
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def typed_literal(value: str, dtype: DType) -> str:
    """A literal as a scalar of a definite type. Triton 3.6's interpreter makes none of bfloat16."""
    if dtype is DType.BFLOAT16:
        return f"tl.full([], {value}, tl.float32).to(tl.bfloat16)"
    return f"tl.full([], {value}, {type_text(dtype)})"


@dataclass(frozen=True, slots=True)
class Types:
    """The element types of a kernel; those of ``as_bytes`` the target's Triton lacks."""

    as_bytes: frozenset[DType] = frozenset()

    @staticmethod
    def of(target: Target) -> Types:
        return Types(frozenset(d for d in FP8 if target.lacks(d)))

    def text(self, dtype: DType) -> str:
        """The name of what holds elements of a type."""
        return type_text(DType.UINT8 if dtype in self.as_bytes else dtype)

    def in_memory(self, buffer: Buffer) -> Buffer:
        """A parameter as the kernel takes it."""
        return replace(buffer, dtype=DType.UINT8) if buffer.dtype in self.as_bytes else buffer

    def masked(self, mask: str, dtype: DType) -> str:
        """The arguments of a load of which the lanes without ``mask`` give zero: Triton makes floats of eight bits of
        other floats, and not of integers."""
        return f", mask={mask}, other={'0.0' if dtype in FP8 and dtype not in self.as_bytes else '0'}"

    def eight_bits(self, value: float, dtype: DType) -> str:
        """A number of eight bits, by its bits: Triton has no constant of some of them."""
        bits = int(dtype.numpy.type(dtype.rounded(value)).view("u1"))
        return self._of_byte(f"tl.full([], {bits}, tl.uint8)", dtype)

    def wide(self, text: str, dtype: DType) -> str:
        """What is of a half type, as float32."""
        return f"{self._read(text, dtype)}.to(tl.float32)"

    def cast(self, text: str, source: DType, target: DType) -> str:
        """``text`` converted with torch's rules."""
        if target in FP8:
            return self._rounded(text, source, target)
        if target is DType.BOOL:  # Triton compares the bits of eight
            return f"({self.wide(text, source) if source in FP8 else text} != 0)"
        if source in self.as_bytes and target is DType.BFLOAT16:
            return f"mlc_from_{source.value}_bfloat16({text})"
        if source in self.as_bytes:
            text, source = self._read(text, source), DType.FLOAT16
        if target is source:
            return text
        name = type_text(target)
        # torch rounds twice on the way from float64 and the integers to the half types.
        if (target.is_half and source not in (DType.FLOAT32, *FP8)) or (source.is_half and target is not DType.FLOAT32):
            return f"{text}.to(tl.float32).to({name})"
        return f"{text}.to({name})"

    def _rounded(self, text: str, source: DType, target: DType) -> str:
        """To a float of eight bits, from float32."""
        text = self._read(text, source)
        if target.limit is not None and target not in self.as_bytes:  # Triton does too, but says so of hardware alone
            most = f"{text}.to(tl.float32), -{target.limit}, {target.limit}, tl.PropagateNan.ALL"
            return f"tl.clamp({most}).to({type_text(target)})"
        wide = text if source is DType.FLOAT32 else f"{text}.to(tl.float32)"
        return self._of_byte(f"mlc_to_{target.value}({wide})", target)

    def _read(self, text: str, dtype: DType) -> str:
        """What is of a type, as a float type that the target has."""
        return f"mlc_from_{dtype.value}({text})" if dtype in self.as_bytes else text

    def _of_byte(self, text: str, dtype: DType) -> str:
        return text if dtype in self.as_bytes else f"{text}.to({type_text(dtype)}, bitcast=True)"
