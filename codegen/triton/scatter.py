"""Stores of a tile at places that data decide: masked by their range, and combined in memory by atomic operations."""

from __future__ import annotations

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Expr, Index, is_value
from ...ir.nest.hints import ATOMIC
from ...ir.nest.loops import Buffer, Store, Update
from ..kernel import EmitError
from .program import BlockInfo
from .types import type_text
from .values import Value, Values
from .writer import SourceWriter

_ATOMIC = {"sum": "add", "max": "max", "min": "min"}
_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64)


def scatter(values: Values, out: SourceWriter, info: BlockInfo, statement: Store | Update) -> None:
    """One statement of a block that scatters. Places out of range are left alone.

    Raises EmitError for an update that no atomic operation makes.
    """
    if isinstance(statement, Update):
        (target,), (expr,) = statement.targets, statement.values
        buffer, indices, how = values.program.buffers[target.buffer], target.indices, _atomic(info, statement)
    else:
        buffer, indices, expr, how = (
            values.program.buffers[statement.buffer],
            statement.indices,
            statement.value,
            "store",
        )
    if expr.dtype is not buffer.dtype:
        raise EmitError(f"block {info.block.name} scatters {expr.dtype.value} to {buffer.name} of {buffer.dtype.value}")
    if how != "store" and buffer.dtype not in _TYPES:
        raise EmitError(f"block {info.block.name}: there is no atomic operation on {buffer.dtype.value} in memory")
    _write(values, out, info, buffer, indices, expr, how)


def _atomic(info: BlockInfo, update: Update) -> str:
    name = _ATOMIC.get(update.monoid.name)
    if name is None or not ATOMIC.of(info.block):
        raise EmitError(
            f"block {info.block.name} scatters by {update.monoid.name}: programs combine by {', '.join(_ATOMIC)}"
        )
    return f"atomic_{name}"


def _write(
    values: Values, out: SourceWriter, info: BlockInfo, buffer: Buffer, indices: tuple[Index, ...], expr: Expr, how: str
) -> None:
    value = values.value(expr)
    text, dims, _, _ = values.address(buffer, indices, {}, ())
    lanes = dims | value.dims | info.spatial
    inside: list[Value] = []
    for index, extent in zip(indices, buffer.shape, strict=True):
        if is_value(index):
            at = values.value(index)
            test = f"({at.typed} >= 0) & ({at.typed} < {values.index(extent)})"
            inside.append(Value(f"({out.assign('m', test)})", at.dims, DType.BOOL))
    mask = values.all_of((*values.bounds(lanes), *inside))
    suffix = f", mask={mask.text}" if mask is not None else ""
    if how != "store":
        suffix += ', sem="relaxed"'
    out.forget(buffer.name)
    where = Value(values.pointer(buffer, text), dims, buffer.dtype)
    if lanes != dims:  # a place that is the same for all of them: sums take each, and of stores one lasts, as in torch
        where = values.broadcast(where, lanes)
    value = values.broadcast(value, lanes)
    if how in ("atomic_max", "atomic_min") and value.dtype.is_float:
        value = _with_lasting_nan(values, out, where, value, mask, how)
    out.line(f"tl.{how}({where.text}, {value.text}{suffix})")
    values.stored.add(buffer.name)


def _with_lasting_nan(
    values: Values, out: SourceWriter, where: Value, value: Value, mask: Value | None, how: str
) -> Value:
    """The value of each lane, or a NaN that no other value replaces where it is one or the place holds one.

    Triton compares floats as integers: those without a sign bit as signed, those with it as unsigned ones. So a NaN
    without it is above all floats and one with it below, and of the NaNs in memory some would lose. Each lane looks
    before it writes, so the first one that writes to a place has seen what was there.
    """
    bits = DType.INT32 if value.dtype is DType.FLOAT32 else DType.INT64
    pattern = -1 if how == "atomic_min" else (1 << (bits.bits - 1)) - 1
    nan = f"tl.full([], {pattern}, {type_text(bits)}).to({type_text(value.dtype)}, bitcast=True)"
    suffix = values.program.types.masked(mask.text, value.dtype) if mask is not None else ""
    old = out.assign("old", f"tl.load({where.text}{suffix}, volatile=True)")
    has_nan = f"({value.text} != {value.text}) | ({old} != {old})"
    return Value(out.assign("v", f"tl.where({has_nan}, {nan}, {value.text})"), value.dims, value.dtype)
