"""Loads and stores: addresses, and how lanes reach memory.

Neighbouring elements are one vector access, one element for all lanes is a scalar load, elements a few apart are picked
from whole registers (``strided``), everything else is a gather. Dead lanes never touch memory: a contiguous access is
masked, a gather reads dead lanes from a zero that always exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from ....ir.errors import IRError
from ....ir.expr.dtypes import DType
from ....ir.expr.index import expanded, simplify
from ....ir.expr.value import Index, is_value
from ....ir.nest.loops import Bound
from ..text.builder import Val
from ..text.context import SLACK, BufferPlace, Context, Mask
from ..text.types import from_memory, memory_type, to_memory
from .index import in_loops, iota, lane_index, scalar_index, split_linear
from .interleaved import unwoven, weave
from .strided import strided
from .transpose import element_pointer, transposed

I64, I32, BOOL = DType.INT64, DType.INT32, DType.BOOL
# Bytes of a cache line.
_LINE = 64


@dataclass(frozen=True, slots=True)
class Address:
    """Where lane 0 is, and how many elements apart lanes are: 0 or 1, or -1, where it is the last lane that is there.

    Step None: ``name`` is a pointer a lane. ``base`` and ``offset`` say the same where the offset is no data.
    """

    name: str
    step: int | None
    base: str = ""
    offset: sympy.Expr | None = None


def address(
    ctx: Context, place: BufferPlace, indices: tuple[Index, ...], values: list[Val | None], whole: bool = False
) -> Address:
    """The address of an access. ``values[k]`` is the computed index where ``indices[k]`` is a value expression.

    ``whole``: all lanes are accessed, so they may be so as one vector and be turned round.
    """
    computed = [(value, stride) for value, stride in zip(values, place.strides, strict=True) if value is not None]
    offset = _offset(ctx, place, tuple([i if v is None else None for i, v in zip(indices, values, strict=True)]))
    element = memory_type(place.dtype)
    base = place.pointer
    for value, stride in computed:
        if value.lanes:
            continue
        scaled = _times(ctx, value, stride)
        base = ctx.b.op(f"getelementptr inbounds {element}, ptr {base}, i64 {scaled.name}")
    lanes = [(v, s) for v, s in computed if v.lanes]
    parts = split_linear(offset, ctx.vector[0]) if ctx.vector else (offset, sympy.S.Zero)
    if parts is None and ctx.vector is not None:  # lanes within one digit of an index that is divided
        simpler = simplify(offset, ctx.extents, ctx.nest.symbols)
        if simpler != offset:
            offset = expanded(simpler)
            parts = split_linear(offset, ctx.vector[0])
    if parts is not None and parts[1].is_Integer and not lanes and int(parts[1]) in (0, 1):
        plain = offset if not computed else None
        return Address(element_pointer(ctx, base, parts[0], element), int(parts[1]), base, plain)
    if parts is not None and parts[1] == -1 and not lanes and whole:
        last = expanded(parts[0] - (ctx.lanes - 1))
        return Address(element_pointer(ctx, base, last, element), -1)
    total = lane_index(ctx, offset)
    for value, stride in lanes:
        total = ctx.b.binary("add", total, _times(ctx, value, stride))
    name = ctx.b.op(f"getelementptr {element}, ptr {base}, {ctx.b.splat(total, ctx.lanes)}")
    return Address(name, None, base, None if lanes or parts is None else offset)


def _offset(ctx: Context, place: BufferPlace, indices: tuple[Index | None, ...]) -> sympy.Expr:
    """Elements from where a buffer begins, in loop variables; None is an index that data say."""
    key = (indices, place.strides, place.shift, tuple(ctx.axes.items()))
    found = ctx.offsets.get(key)
    if found is not None:
        return found
    offset: sympy.Expr = sympy.S.Zero
    for k, (index, stride) in enumerate(zip(indices, place.strides, strict=True)):
        shift = place.shift[k] if place.shift else sympy.S.Zero
        if index is None:
            offset -= shift * stride
        elif index != 0 or shift != 0:
            offset += (in_loops(ctx, index) - shift) * stride
    found = ctx.offsets[key] = in_loops(ctx, offset)
    return found


def _times(ctx: Context, value: Val, stride: sympy.Expr) -> Val:
    wide = value
    if value.dtype is not I64:
        wide = ctx.b.convert("sext" if value.dtype.is_signed else "zext", value, I64)
    return wide if stride == 1 else ctx.b.binary("mul", wide, scalar_index(ctx, in_loops(ctx, stride)))


# --- loads ------------------------------------------------------------------------------------------------------------


def load(ctx: Context, name: str, indices: tuple[Index, ...], values: list[Val | None]) -> Val:
    """The value at an access. Lanes outside the mask are zero and never read.

    See ``in_range`` for which mask it takes.
    """
    place = ctx.places[name]
    mask = ctx.block_mask if ctx.mask is not ctx.block_mask and in_range(ctx, place, indices) else ctx.mask
    if place.own and mask is not None and mask.count is not None and ctx.lanes * place.dtype.itemsize * 4 <= SLACK:
        mask = None  # dead lanes may hold anything, and what they read there is ours
    where = address(ctx, place, indices, values, mask is None and not place.own)
    if where.step is None and where.offset is not None and mask is None:
        version, element, size = ctx.versions.get(name, 0), memory_type(place.dtype), place.dtype.itemsize
        reader = _row_loader(ctx, name)
        turned = transposed(ctx, where.base, where.offset, version, element, size, reader, place.own)
        if turned is None:
            turned = unwoven(ctx, where.base, where.offset, version, element, size, reader)
        if turned is None and not place.own:
            turned = strided(ctx, place, where.base, where.offset, indices, reader)
        if turned is not None:
            return from_memory(ctx.b, turned, place.dtype, ctx.lanes)
    if ctx.ahead and place.fixed and mask is None and _streams(ctx, where):
        _fetch_ahead(ctx, where, ctx.lanes * place.dtype.itemsize, ctx.ahead)
    text, movable = _load_text(ctx, place, where, mask)
    lanes = 0 if where.step == 0 else ctx.lanes
    loaded = ctx.b.load(text, name, None if place.fixed else ctx.versions.get(name, 0), movable)
    if where.step == -1:
        loaded = _turned(ctx, f"{memory_type(place.dtype, lanes)} {loaded}")
    return from_memory(ctx.b, loaded, place.dtype, lanes)


def _row_loader(ctx: Context, name: str) -> Callable[[str], str]:
    place = ctx.places[name]
    version = None if place.fixed else ctx.versions.get(name, 0)
    return lambda text: ctx.b.load(text, name, version, movable=True)


def _streams(ctx: Context, where: Address) -> bool:
    """Whether lanes are neighbours, and every loop around goes on to other elements."""
    moving = {var for var, extent in ctx.extents.items() if extent != 1}
    return where.step == 1 and where.offset is not None and moving <= where.offset.free_symbols


def _fetch_ahead(ctx: Context, where: Address, size: int, ahead: int, *, to_write: bool = False) -> None:
    """Ask for the lines that come into use ``ahead`` bytes later; past the end of an array that does nothing.

    ``to_write`` asks for them as a store wants them, with no other core keeping a copy.
    """
    b, pointer = ctx.b, where.name
    b.declarations["llvm.prefetch.p0"] = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
    lines = []
    for at in range(0, size, _LINE):
        line = b.fresh("line")
        lines.append(f"{line} = getelementptr i8, ptr {pointer}, i64 {ahead + at}")
        lines.append(f"call void @llvm.prefetch.p0(ptr {line}, i32 {int(to_write)}, i32 3, i32 1)")
    b.note(f"fetch ahead of {pointer}", lines, (pointer,))


def _load_text(ctx: Context, place: BufferPlace, where: Address, mask: Mask | None) -> tuple[str, bool]:
    """The instruction, and whether it reads the same at any time before."""
    b, lanes, size = ctx.b, ctx.lanes, place.dtype.itemsize
    element, vector = memory_type(place.dtype), memory_type(place.dtype, ctx.lanes)
    note = ", !invariant.load !0" if place.fixed else ""
    if where.step == 0 or not lanes:
        pointer = where.name
        if mask is not None and mask.live.name != "true":
            pointer = b.op(f"select i1 {any_lane(ctx, mask)}, ptr {pointer}, ptr @mlc_zero")
            note = ""
        return f"load {element}, ptr {pointer}, align {size}{note}", True
    if where.step in (1, -1):
        if mask is None or mask.live.name == "true":
            return f"load {vector}, ptr {where.name}, align {size}{note}", True
        if size >= 4 or "avx512bw" in b.features:
            live = b.splat(mask.live, lanes)
            pointer = f"ptr align {size} {where.name}"
            return _masked(ctx, "load", vector, pointer, str(live), f"{vector} zeroinitializer"), True
        if mask.count is not None:
            return _through_stack(ctx, where.name, vector, mask.count, size), False
    pointers = where.name
    if where.step == 1:
        pointers = b.op(f"getelementptr {element}, ptr {where.name}, {iota(lanes)}")
    if mask is not None and mask.live.name != "true":
        # Instead of a masked gather, which becomes a branch a lane: dead lanes read a zero.
        live = b.splat(mask.live, lanes)
        safe = f"<{lanes} x ptr> splat (ptr @mlc_zero)"
        pointers = b.op(f"select {live}, <{lanes} x ptr> {pointers}, {safe}")
    everywhere = f"<{lanes} x i1> splat (i1 true)"
    pointers = f"<{lanes} x ptr> align {size} {pointers}"
    return _masked(ctx, "gather", vector, pointers, everywhere, f"{vector} zeroinitializer"), True


def _masked(ctx: Context, verb: str, vector: str, pointer: str, live: str, other: str) -> str:
    kind = vector[1:-1].replace(" x ", " ").split()
    short = {"float": "f32", "double": "f64", "half": "f16"}.get(kind[1], kind[1])
    name = f"llvm.masked.{verb}.v{kind[0]}{short}." + (f"v{kind[0]}p0" if verb in ("gather", "scatter") else "p0")
    pointer_type = pointer.split(" align ")[0]
    mask_type = f"<{kind[0]} x i1>"
    if verb in ("load", "gather"):
        ctx.b.declarations[name] = f"declare {vector} @{name}({pointer_type}, {mask_type}, {vector})"
        return f"call {vector} @{name}({pointer}, {live}, {other})"
    ctx.b.declarations[name] = f"declare void @{name}({vector}, {pointer_type}, {mask_type})"
    return f"call void @{name}({other}, {pointer}, {live})"


def any_lane(ctx: Context, mask: Mask) -> str:
    """Whether some lane is live, as a scalar."""
    if not mask.live.lanes:
        return mask.live.name
    b, lanes = ctx.b, mask.live.lanes
    return b.call("i1", f"llvm.vector.reduce.or.v{lanes}i1", str(mask.live))


def _through_stack(ctx: Context, pointer: str, vector: str, count: str, size: int) -> str:
    """The first ``count`` elements by way of the stack.

    AVX2 has no masked access to elements of less than four bytes.
    """
    b = ctx.b
    spot = b.alloca(vector)
    b.line(f"store {vector} zeroinitializer, ptr {spot}, align 64")
    _copy(ctx, spot, pointer, count, size)
    return f"load {vector}, ptr {spot}, align 64"


def _copy(ctx: Context, to: str, source: str, count: str, size: int) -> None:
    b = ctx.b
    length = b.op(f"mul nsw i64 {count}, {size}")
    b.call("void", "llvm.memcpy.p0.p0.i64", f"ptr {to}", f"ptr {source}", f"i64 {length}", "i1 false", pure=False)


# --- stores -----------------------------------------------------------------------------------------------------------


def store(ctx: Context, name: str, indices: tuple[Index, ...], values: list[Val | None], value: Val) -> None:
    """Store a value where the mask holds."""
    place = ctx.places[name]
    b, lanes = ctx.b, ctx.lanes
    mask = ctx.mask if ctx.mask is not None and ctx.mask.live.name != "true" else None
    where = address(ctx, place, indices, values, mask is None)
    if where.step == 0 or not lanes:
        _store_one(ctx, place, where.name, value, mask)
    else:
        value = b.splat(value, lanes)
        data = f"{memory_type(place.dtype, lanes)} {to_memory(b, value)}"
        _store_lanes(ctx, name, data, where, place, mask)
    ctx.versions[name] = ctx.versions.get(name, 0) + 1
    ctx.values = {}


def _store_one(ctx: Context, place: BufferPlace, pointer: str, value: Val, mask: Mask | None) -> None:
    b = ctx.b
    if value.lanes:  # every lane writes one place: the last live lane wins
        value = Val(b.op(f"extractelement {value}, i64 {value.lanes - 1}"), value.dtype, 0)
    if mask is not None:
        pointer = b.op(f"select i1 {any_lane(ctx, mask)}, ptr {pointer}, ptr {b.alloca('i64')}")
    b.line(f"store {memory_type(place.dtype)} {to_memory(b, value)}, ptr {pointer}, align {place.dtype.itemsize}")


def _store_lanes(ctx: Context, name: str, data: str, where: Address, place: BufferPlace, mask: Mask | None) -> None:
    b, lanes, size = ctx.b, ctx.lanes, place.dtype.itemsize
    vector = data[: data.index(">") + 1]
    if where.step == -1:
        b.line(f"store {vector} {_turned(ctx, data)}, ptr {where.name}, align {size}")
        return
    if where.step == 1:
        if mask is None and not place.own:
            if ctx.ahead_of_stores and _streams(ctx, where):
                _fetch_ahead(ctx, where, lanes * size, ctx.ahead_of_stores, to_write=True)
            _store_upward(ctx, data, where.name, place)
            return
        if mask is None:
            b.line(f"store {data}, ptr {where.name}, align {size}")
            return
        live = b.splat(mask.live, lanes)
        if mask.count is not None and size < 4 and "avx512bw" not in b.features:
            spot = b.alloca(vector)
            b.line(f"store {data}, ptr {spot}, align 64")
            _copy(ctx, where.name, spot, mask.count, size)
            return
        b.line(_masked(ctx, "store", vector, f"ptr align {size} {where.name}", str(live), data))
        return
    if mask is None and where.offset is not None:
        text, element = data[data.index(">") + 2 :], memory_type(place.dtype)
        parts = weave(ctx, name, where.base, where.offset, text, element, size)
        if parts is not None:
            for pointer, register in parts:
                b.line(f"store {vector} {register}, ptr {pointer}, align {size}")
            return
    live = b.splat(mask.live if mask else Val("true", BOOL), lanes)
    b.line(_masked(ctx, "scatter", vector, f"<{lanes} x ptr> align {size} {where.name}", str(live), data))


def _store_upward(ctx: Context, data: str, pointer: str, place: BufferPlace) -> None:
    """A register at a time, what is left of one in halves, from the lowest address on.

    LLVM stores the parts of a longer vector from the last to the first. Where they lie across cache lines, as rows of
    odd lengths do, a processor then cannot put together what two of them write to a line, and takes half as long again.
    """
    b, lanes = ctx.b, ctx.lanes
    element, size = memory_type(place.dtype), place.dtype.itemsize
    at, count = 0, ctx.target.lanes(size)
    while at < lanes:
        while count > lanes - at:
            count //= 2
        part, spot = data, pointer
        if count < lanes:
            picks = ", ".join(f"i32 {k}" for k in range(at, at + count))
            name = b.op(f"shufflevector {data}, <{lanes} x {element}> poison, <{count} x i32> <{picks}>")
            part = f"<{count} x {element}> {name}"
        if at:
            spot = b.op(f"getelementptr inbounds {element}, ptr {pointer}, i64 {at}")
        b.line(f"store {part}, ptr {spot}, align {size}")
        at += count


def _turned(ctx: Context, vector: str) -> str:
    """The lanes of a typed vector, last to first."""
    kind = vector[: vector.index(">") + 1]
    picks = ", ".join(f"i32 {k}" for k in reversed(range(ctx.lanes)))
    return ctx.b.op(f"shufflevector {vector}, {kind} poison, <{ctx.lanes} x i32> <{picks}>")


# --- masks ------------------------------------------------------------------------------------------------------------


def bound_mask(ctx: Context, bound: Bound) -> Mask:
    """``lhs < rhs`` at this point: a scalar, or one bit a lane.

    With the count of live lanes where they are the first ones.
    """
    b = ctx.b
    difference = in_loops(ctx, bound.rhs - bound.lhs)
    parts = split_linear(difference, ctx.vector[0]) if ctx.vector else (difference, sympy.S.Zero)
    if parts is not None and parts[1] == 0:
        value = scalar_index(ctx, parts[0])
        if value.is_literal:
            return Mask(b.const(int(value.name) > 0, BOOL))
        return Mask(b.binary("icmp sgt", value, b.const(0, I64), BOOL))
    if parts is not None and parts[1] in (-1, 1):  # a number of first or of last lanes: compared in 32 bits
        lanes, first = ctx.lanes, parts[1] == -1
        edge = b.intrinsic("smin", scalar_index(ctx, parts[0] if first else 1 - parts[0]), b.const(lanes, I64))
        edge = b.intrinsic("smax", edge, b.const(0, I64))
        order = "icmp slt" if first else "icmp sge"
        live = b.binary(order, iota(lanes, I32), b.convert("trunc", edge, I32), BOOL)
        return Mask(live, edge.name if first else None)
    return Mask(b.binary("icmp sgt", lane_index(ctx, difference), b.const(0, I64), BOOL))


def in_range(ctx: Context, place: BufferPlace, indices: tuple[Index, ...]) -> bool:
    """Whether an access is inside its buffer wherever the block runs, whatever a ``Select`` around it says."""
    if ctx.block is None:
        return False
    extents = {a.var: a.extent for a in ctx.block.axes}
    for index, extent in zip(indices, place.shape, strict=True):
        if is_value(index):
            return False
        assert isinstance(index, sympy.Expr)
        if index.is_Symbol and extents.get(index) == extent:
            continue
        try:
            low, high = ctx.nest.symbols.bounds(index, extents)
            least, _ = ctx.nest.symbols.bounds(extent)
        except IRError:  # an expression of a form whose bounds nobody knows
            return False
        if low < 0 or high is None or high >= least:
            return False
    return True
