"""Tiles of a product that a BLAS library multiplies: one call of ``sgemm_`` in the place of three loops.

The library is called by the thread that comes to the tile. Inside a team it uses that thread alone.
"""

from __future__ import annotations

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Call, Index, Load, is_value
from ...ir.nest.hints import TENSORIZE
from ...ir.nest.loops import Block, Loop, LoopKind, Update
from ..kernel import EmitError
from .memory.index import in_loops, scalar_index, split_linear
from .memory.limits import smin
from .text.builder import Val
from .text.context import Context

I64 = DType.INT64
_PLAIN, _TURNED = ord("N"), ord("T")


def gemm_tile(loop: Loop) -> tuple[tuple[Loop, ...], Block] | None:
    """The loops from here down to a block that the library computes, where they hold nothing else, and the block."""
    loops = [loop]
    while len(loops[-1].body) == 1 and isinstance(loops[-1].body[0], Loop):
        loops.append(loops[-1].body[0])
    inside = loops[-1].body
    if len(inside) != 1 or not isinstance(inside[0], Block) or TENSORIZE.of(inside[0]) != "gemm":
        return None
    return (tuple(loops), inside[0]) if all(lp.kind is LoopKind.SERIAL for lp in loops) else None


def emit_gemm(ctx: Context, loops: tuple[Loop, ...], block: Block) -> None:
    """``result[m, n] = sum over k of left[m, k] * right[k, n]``. Raises EmitError for strides that no matrix has."""
    update = block.body[0]
    assert isinstance(update, Update)
    value, target = update.values[0], update.targets[0]
    if not isinstance(value, Call) or value.fn != "mul" or not all(isinstance(a, Load) for a in value.args):
        raise _refused(ctx, block, "its factors are no elements of buffers")
    ctx.axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    result = _GemmMatrix(ctx, block, target.buffer, target.indices, loops)
    first, second = (_GemmMatrix(ctx, block, a.buffer, a.indices, loops) for a in value.args if isinstance(a, Load))
    ctx.axes = {}
    lanes = [v for v, step in result.steps.items() if step == 1]
    others = [v for v in result.steps if v not in lanes]
    if len(lanes) != 1 or len(others) != 1:
        raise _refused(ctx, block, "its result is no matrix with neighbours along one axis")
    # The library counts along columns: what has neighbours in the result is its first index.
    (n,), (m,) = lanes, others
    right, left = (first, second) if n in first.steps else (second, first)
    over = [lp.var for lp in loops if lp.var not in (m, n)]
    if len(over) != 1 or set(right.steps) != {n, over[0]} or set(left.steps) != {m, over[0]}:
        raise _refused(ctx, block, "its factors are no two matrices")
    (k,) = over
    counts = {lp.var: _count(ctx, block, lp) for lp in loops}
    kinds = (right.turned(n, k), left.turned(k, m))
    b = ctx.b
    one, zero = _cell(ctx, "float", "1.0"), _cell(ctx, "float", "0.0")
    sizes = [_int(ctx, counts[v]) for v in (n, m, k)]
    ld = [_int(ctx, scalar_index(ctx, e)) for e in (kinds[0][1], kinds[1][1], result.steps[m])]
    letters = [_cell(ctx, "i8", str(letter)) for letter, _ in kinds]
    places = [x.pointer(ctx) for x in (right, left, result)]
    passed = [*letters, *sizes, one, places[0], ld[0], places[1], ld[1], zero, places[2], ld[2]]
    b.call("void", "sgemm_", *(f"ptr {p}" for p in passed), pure=False)
    ctx.touch(frozenset((target.buffer,)))


class _GemmMatrix:
    """A buffer that a tile reads or writes: where its first element lies, and its steps along the tile's loops."""

    def __init__(
        self, ctx: Context, block: Block, name: str, indices: tuple[Index, ...], loops: tuple[Loop, ...]
    ) -> None:
        place = ctx.places[name]
        if place.dtype is not DType.FLOAT32 or any(is_value(i) for i in indices):
            raise _refused(ctx, block, f"{name} is no matrix of float32")
        shifts = place.shift or (sympy.S.Zero,) * len(indices)
        self.place = place
        self.steps: dict[sympy.Symbol, sympy.Expr] = {}
        offset = sympy.expand(
            sympy.Add(
                *((in_loops(ctx, i) - s) * d for i, s, d in zip(indices, shifts, place.strides, strict=True))  # type: ignore[arg-type]
            )
        )
        for lp in loops:
            parts = split_linear(offset, lp.var)
            if parts is None:
                raise _refused(ctx, block, f"{name} is not read evenly along {lp.var}")
            offset, step = parts
            if step != 0:
                self.steps[lp.var] = step
        self.offset = offset
        self.refused = _refused(ctx, block, f"{name} has no neighbours along an axis of the tile")

    def turned(self, first: sympy.Symbol, second: sympy.Symbol) -> tuple[int, sympy.Expr]:
        """How the library reads it as a matrix over two loops, counted along columns, and the step between those."""
        if self.steps[first] == 1:
            return _PLAIN, self.steps[second]
        if self.steps[second] == 1:
            return _TURNED, self.steps[first]
        raise self.refused

    def pointer(self, ctx: Context) -> str:
        at = scalar_index(ctx, self.offset)
        return ctx.b.op(f"getelementptr inbounds float, ptr {self.place.pointer}, i64 {at.name}")


def _count(ctx: Context, block: Block, loop: Loop) -> Val:
    """How often a loop of the tile runs: to its end, or as far as predicates go."""
    count = scalar_index(ctx, in_loops(ctx, loop.extent))
    for bound in block.predicate:
        difference = sympy.expand(bound.rhs - bound.lhs)
        if bound in ctx.assumed or loop.var not in difference.free_symbols:
            continue
        parts = split_linear(difference, loop.var)
        if parts is None or parts[1] != -1:
            raise _refused(ctx, block, f"its predicate {bound.lhs} < {bound.rhs} is no end of a loop")
        count = smin(ctx, count, scalar_index(ctx, parts[0]))
    return count


def _int(ctx: Context, value: Val) -> str:
    name = value.name if value.is_literal else ctx.b.op(f"trunc i64 {value.name} to i32")
    return _cell(ctx, "i32", name)


def _cell(ctx: Context, kind: str, value: str) -> str:
    """The address of a number, as Fortran takes it."""
    cell = ctx.b.alloca(kind)
    ctx.b.line(f"store {kind} {value}, ptr {cell}")
    return cell


def _refused(ctx: Context, block: Block, why: str) -> EmitError:
    return EmitError(f"{ctx.nest.name}: {block.name} is no product for a library: {why}")
