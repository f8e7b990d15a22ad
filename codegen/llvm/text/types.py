"""Element types in registers and in memory, and conversions between them."""

from __future__ import annotations

from ....ir.expr.dtypes import DType
from ...kernel import EmitError
from .builder import Builder, Val

F32, I32 = DType.FLOAT32, DType.INT32
_MEMORY = {
    DType.FLOAT64: "double",
    DType.FLOAT32: "float",
    DType.FLOAT16: "half",
    DType.BFLOAT16: "i16",
    DType.BOOL: "i8",
}


def memory_type(dtype: DType, lanes: int = 0) -> str:
    """The LLVM type of an element in memory: bool is a byte, bfloat16 its bits."""
    element = _MEMORY.get(dtype) or f"i{dtype.itemsize * 8}"
    return f"<{lanes} x {element}>" if lanes else element


def from_memory(b: Builder, name: str, dtype: DType, lanes: int) -> Val:
    """What was loaded (of ``memory_type``) as a value in registers."""
    memory = memory_type(dtype, lanes)
    match dtype:
        case DType.BOOL:
            zero = "zeroinitializer" if lanes else "0"
            return Val(b.op(f"icmp ne {memory} {name}, {zero}"), dtype, lanes)
        case DType.FLOAT16:
            return Val(b.op(f"fpext {memory} {name} to {Val('', F32, lanes).type}"), dtype, lanes)
        case DType.BFLOAT16:
            wide = b.convert("zext", Val(name, DType.INT16, lanes), I32)
            bits = b.binary("shl", wide, b.const(16, I32))
            return b.convert("bitcast", bits, dtype)
        case DType.FLOAT8_E5M2:
            half = b.binary(
                "shl", b.convert("zext", Val(name, DType.INT8, lanes), DType.INT16), b.const(8, DType.INT16)
            )
            text = b.op(f"bitcast {half} to {memory_type(DType.FLOAT16, lanes)}")
            return from_memory(b, text, DType.FLOAT16, lanes)
        case DType.FLOAT8_E4M3FN:
            return _from_e4m3(b, Val(name, DType.INT8, lanes))
        case _:
            return Val(name, dtype, lanes)


def to_memory(b: Builder, v: Val) -> str:
    """The name of ``v`` as a value of ``memory_type``; a half value is already rounded."""
    memory = memory_type(v.dtype, v.lanes)
    match v.dtype:
        case DType.BOOL:
            return b.op(f"zext {v} to {memory}")
        case DType.FLOAT16:
            return b.op(f"fptrunc {v} to {memory}")
        case DType.BFLOAT16:
            high = b.binary("lshr", b.convert("bitcast", v, I32), b.const(16, I32))
            return b.op(f"trunc {high} to {memory}")
        case DType.FLOAT8_E5M2:
            half = b.op(f"fptrunc {v} to {memory_type(DType.FLOAT16, v.lanes)}")
            bits = b.op(f"bitcast {memory_type(DType.FLOAT16, v.lanes)} {half} to {memory_type(DType.INT16, v.lanes)}")
            high = b.binary("lshr", Val(bits, DType.INT16, v.lanes), b.const(8, DType.INT16))
            return b.op(f"trunc {high} to {memory}")
        case DType.FLOAT8_E4M3FN:
            return _to_e4m3(b, v).name
        case _:
            return v.name


def cast(b: Builder, v: Val, dtype: DType) -> Val:
    """torch's conversion: float to int truncates, to bool is ``!= 0``, to a half type rounds to nearest even."""
    source = v.dtype
    if source is dtype:
        return v
    if dtype is DType.BOOL:
        zero = b.const(0, source)
        return b.binary("fcmp une" if source.is_float else "icmp ne", v, zero, DType.BOOL)
    if dtype.is_float:
        return _to_float(b, v, dtype)
    if source.is_float:
        return _float_to_int(b, v, dtype)
    if source is DType.BOOL:
        return b.convert("zext", v, dtype)
    if dtype.itemsize > source.itemsize:
        return b.convert("sext" if source.is_signed else "zext", v, dtype)
    if dtype.itemsize < source.itemsize:
        return b.convert("trunc", v, dtype)
    return Val(v.name, dtype, v.lanes)


def _to_float(b: Builder, v: Val, dtype: DType) -> Val:
    source = v.dtype
    if not source.is_float:
        instruction = "sitofp" if source.is_signed else "uitofp"
        if dtype is DType.FLOAT64:
            return b.convert(instruction, v, dtype)
        v = b.convert(instruction, v, F32)
    elif source is DType.FLOAT64:
        v = b.convert("fptrunc", v, F32)
    elif dtype is DType.FLOAT64:
        return b.convert("fpext", Val(v.name, F32, v.lanes), dtype)
    return round_half(b, Val(v.name, F32, v.lanes), dtype)


def _float_to_int(b: Builder, v: Val, dtype: DType) -> Val:
    # Narrow types go through int32 (uint32 through int64) and wrap, which is what C++ on x86 and so torch does.
    wide = I32 if dtype.itemsize < 4 or dtype is I32 else DType.INT64
    instruction = "fptosi" if dtype is not DType.UINT64 else "fptoui"
    return cast(b, b.convert(instruction, v, wide), dtype)


def round_half(b: Builder, v: Val, dtype: DType) -> Val:
    """A float32 rounded to what ``dtype`` can hold, still carried as float32."""
    match dtype:
        case DType.FLOAT32:
            return v
        case DType.FLOAT16:
            half = memory_type(dtype, v.lanes)
            return Val(b.op(f"fpext {half} {b.op(f'fptrunc {v} to {half}')} to {v.type}"), dtype, v.lanes)
        case DType.BFLOAT16:
            bits = b.convert("bitcast", v, I32)
            odd = b.binary("and", b.binary("lshr", bits, b.const(16, I32)), b.const(1, I32))
            rounded = b.binary("add", bits, b.binary("add", odd, b.const(0x7FFF, I32)))
            # Rounding could carry the payload of a NaN into infinity.
            nan = b.binary("fcmp uno", v, b.const(0.0, F32), DType.BOOL)
            kept = b.select(nan, b.const(0x7FC00000, I32), rounded)
            return b.convert("bitcast", b.binary("and", kept, b.const(-65536, I32)), dtype)
        case DType.FLOAT8_E5M2:
            return _round_e5m2(b, v)
        case DType.FLOAT8_E4M3FN:
            return _from_e4m3(b, _to_e4m3(b, v))
        case _:
            raise EmitError(f"no rounding from float32 to {dtype.value} on the CPU")


def _round_e5m2(b: Builder, v: Val) -> Val:
    """Nearest even on float32's bits: three significant bits, exponents from -16 (subnormal step) to 15."""
    bits = b.convert("bitcast", v, I32)
    sign = b.binary("and", bits, b.const(-(1 << 31), I32))
    size = b.binary("and", bits, b.const(0x7FFFFFFF, I32))
    odd = b.binary("and", b.binary("lshr", size, b.const(21, I32)), b.const(1, I32))
    carried = b.binary("add", size, b.binary("add", odd, b.const((1 << 20) - 1, I32)))
    normal = b.binary("and", carried, b.const(-(1 << 21), I32))
    over = b.binary("icmp sge", normal, b.const(0x47800000, I32), DType.BOOL)
    normal = b.select(over, b.const(0x7F800000, I32), normal)
    # Below 2**-14 the step is 2**-16: adding and subtracting 2**7 rounds at that bit.
    big = b.const(2.0**7, F32)
    magnitude = b.convert("bitcast", size, F32)
    small = b.convert("bitcast", b.binary("fsub", b.binary("fadd", magnitude, big), big), I32)
    small_range = b.binary("icmp slt", size, b.const(0x38800000, I32), DType.BOOL)
    chosen = b.select(small_range, small, normal)
    nan = b.binary("icmp sgt", size, b.const(0x7F800000, I32), DType.BOOL)
    chosen = b.select(nan, b.const(0x7FE00000, I32), chosen)
    return b.convert("bitcast", b.binary("or", chosen, sign), DType.FLOAT8_E5M2)


def _to_e4m3(b: Builder, v: Val) -> Val:
    """float32 to the byte of float8_e4m3fn: nearest even, past 448 that or NaN as torch does."""
    bits = b.convert("bitcast", v, I32)
    sign = b.binary("and", b.binary("lshr", bits, b.const(24, I32)), b.const(0x80, I32))
    size = b.binary("and", bits, b.const(0x7FFFFFFF, I32))
    if DType.FLOAT8_E4M3FN.limit is not None:
        largest, infinity = b.const(0x43E00000, I32), b.const(0x7F800000, I32)
        number = b.binary("icmp sle", size, infinity, DType.BOOL)
        beyond = b.binary("and", number, b.binary("icmp sgt", size, largest, DType.BOOL), DType.BOOL)
        size = b.select(beyond, largest, size)
    odd = b.binary("and", b.binary("lshr", size, b.const(20, I32)), b.const(1, I32))
    carried = b.binary("add", size, b.binary("add", odd, b.const((1 << 19) - 1 - ((127 - 7) << 23), I32)))
    normal = b.binary("lshr", carried, b.const(20, I32))
    # Subnormals have the step 2**-9: the sum with 2**14 holds the rounded multiple in its low bits.
    big = b.const(2.0**14, F32)
    total = b.convert("bitcast", b.binary("fadd", b.convert("bitcast", size, F32), big), I32)
    small = b.binary("sub", total, b.convert("bitcast", b.splat(big, v.lanes), I32))
    chosen = b.select(b.binary("icmp slt", size, b.const((127 - 6) << 23, I32), DType.BOOL), small, normal)
    over = b.binary("icmp sge", size, b.const(0x43F00000, I32), DType.BOOL)
    chosen = b.select(over, b.const(0x7F, I32), chosen)
    return b.convert("trunc", b.binary("or", chosen, sign), DType.INT8)


def _from_e4m3(b: Builder, v: Val) -> Val:
    wide = b.convert("zext", v, I32)
    sign = b.binary("shl", b.binary("and", wide, b.const(0x80, I32)), b.const(24, I32))
    size = b.binary("and", wide, b.const(0x7F, I32))
    # As the bits of a float32 whose exponent is 120 too small, subnormals included; the product puts it right.
    scaled = b.convert("bitcast", b.binary("shl", size, b.const(20, I32)), F32)
    value = b.convert("bitcast", b.binary("fmul", scaled, b.const(2.0**120, F32)), I32)
    nan = b.binary("icmp eq", size, b.const(0x7F, I32), DType.BOOL)
    value = b.select(nan, b.const(0x7FC00000, I32), value)
    return b.convert("bitcast", b.binary("or", value, sign), DType.FLOAT8_E4M3FN)
