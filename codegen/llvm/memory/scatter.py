"""Stores at places that data decide: nothing outside of a buffer is ever written, and the caller learns of an index
that is out of range.

A kernel that has such stores finds four numbers behind its arguments, the first of them zero. The first index that is
out of range leaves there a one, itself, its dimension and the extent of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Index, is_value
from ....ir.nest.loops import LoopNest, blocks
from ..text.builder import Val
from ..text.context import STATUS, Context, conjunction
from ..text.control import branch
from .index import in_loops, scalar_index
from .values import index_values

I64, BOOL = DType.INT64, DType.BOOL
REPORT = """define internal void @mlc_out_of_range(ptr %status, i64 %index, i64 %dim, i64 %extent) cold nounwind {
entry:
  %fine = icmp ult i64 %index, %extent
  br i1 %fine, label %done, label %report
report:
  %found = cmpxchg ptr %status, i64 0, i64 1 monotonic monotonic
  %first = extractvalue { i64, i1 } %found, 1
  br i1 %first, label %write, label %done
write:
  %index.at = getelementptr inbounds i64, ptr %status, i64 1
  store i64 %index, ptr %index.at, align 8
  %dim.at = getelementptr inbounds i64, ptr %status, i64 2
  store i64 %dim, ptr %dim.at, align 8
  %extent.at = getelementptr inbounds i64, ptr %status, i64 3
  store i64 %extent, ptr %extent.at, align 8
  br label %done
done:
  ret void
}"""


def is_checked(nest: LoopNest) -> bool:
    """Whether a nest has stores whose places data decide."""
    return any(is_value(i) for b, _ in blocks(nest) for w in b.writes for i in w.indices)


@contextmanager
def checked(ctx: Context, buffer: str, indices: tuple[Index, ...]) -> Iterator[list[Val | None]]:
    """The computed indices of a store; what is done inside is done where they are in range. Others are reported."""
    b, values = ctx.b, index_values(ctx, indices)
    found = [
        (k, _wide(ctx, v), scalar_index(ctx, in_loops(ctx, extent)))
        for k, (v, extent) in enumerate(zip(values, ctx.places[buffer].shape, strict=True))
        if v is not None
    ]
    if not found:
        yield values
        return
    inside = Val("true", BOOL)
    for _, index, extent in found:
        inside = conjunction(b, inside, b.binary("icmp ult", index, extent, BOOL))
    status = ctx.places[STATUS].pointer
    if inside.lanes:
        _report_lanes(ctx, status, found, inside)
        with ctx.masked(inside):
            yield values
        return
    if ctx.mask is not None:  # no lane at all may be live
        some = _some(ctx, ctx.mask.live)
        zero, one = b.const(0, I64), b.const(1, I64)
        found = [(k, b.select(some, index, zero), b.select(some, extent, one)) for k, index, extent in found]
    with ctx.inside(written=frozenset((buffer,))):
        then, fail, done = b.fresh("then"), b.fresh("outside"), b.fresh("end")
        b.line(f"br {inside}, label {then}, label {fail}")
        b.label(fail)
        for k, index, extent in found:
            b.line(f"call void @mlc_out_of_range(ptr {status}, i64 {index.name}, i64 {k}, i64 {extent.name})")
        b.branch(done)
        b.label(then)
        yield values
        b.branch(done)
        b.label(done)


def _wide(ctx: Context, v: Val) -> Val:
    return v if v.dtype is I64 else ctx.b.convert("sext" if v.dtype.is_signed else "zext", v, I64)


def _some(ctx: Context, live: Val) -> Val:
    if not live.lanes:
        return live
    return Val(ctx.b.call("i1", f"llvm.vector.reduce.or.v{live.lanes}i1", str(live)), BOOL)


def _report_lanes(ctx: Context, status: str, found: list[tuple[int, Val, Val]], inside: Val) -> None:
    """Report the live lanes that are out of range, if there are any."""
    b, lanes = ctx.b, inside.lanes
    every = b.splat(Val("true", BOOL), lanes)
    live = every if ctx.mask is None else b.splat(ctx.mask.live, lanes)
    wrong = b.binary("and", live, b.binary("xor", inside, every))
    # Lanes that are right, or dead, have an index that is in range of any extent above zero.
    shown = [(k, b.splat(index, lanes), extent) for k, index, extent in found]
    with branch(ctx, _some(ctx, wrong), frozenset()):
        for lane in range(lanes):
            at = b.effect(f"extractelement {wrong}, i64 {lane}")
            for k, index, extent in shown:
                here = b.effect(f"extractelement {index}, i64 {lane}")
                told = b.effect(f"select i1 {at}, i64 {here}, i64 0")
                limit = b.effect(f"select i1 {at}, i64 {extent.name}, i64 1")
                b.line(f"call void @mlc_out_of_range(ptr {status}, i64 {told}, i64 {k}, i64 {limit})")
