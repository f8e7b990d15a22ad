"""Tiles of a sum that an instruction adds up: its operands as registers, and what is left of constants in them.

The tile is a loop over neighbours along the sum, and lanes in it. The operand of the lanes is one load of all bytes;
the other one is a word of neighbours that all lanes get.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...ir.expr.codes import Codes, DotOperands, chosen, dot_operands, taken
from ...ir.expr.dots import DOTS, DotInstruction
from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.value import Call, Const, Expr, Load, rewrite, symbol
from ...ir.nest.hints import TENSORIZE
from ...ir.nest.loops import Block, Loop, LoopKind
from ..kernel import EmitError
from .memory.access import bound_mask
from .memory.index import in_loops
from .memory.values import evaluate
from .reductions.accumulators import Accumulator, element, position, read
from .reductions.integers import corrected_at
from .text.builder import Val
from .text.context import Context, conjunction
from .text.control import branch

I8, I32, F32 = DType.INT8, DType.INT32, DType.FLOAT32
# A table that one instruction looks numbers up in, by the lowest bits of a lane.
_TABLE = 16


@dataclass(frozen=True, slots=True)
class DotTile:
    """A loop along the sum, the lanes in it, and the block that they hold alone."""

    depth: Loop
    lane: Loop
    block: Block

    @property
    def instruction(self) -> DotInstruction:
        return DOTS[TENSORIZE.of(self.block)]

    def moving(self, loop: Loop) -> set[sympy.Symbol]:
        """The axes that a loop moves."""
        pairs = zip(self.block.axes, self.block.bindings, strict=True)
        return {a.var for a, e in pairs if loop.var in e.free_symbols}

    def operands(self, value: Expr) -> DotOperands:
        """What the instruction multiplies. Raises EmitError for what a schedule would have refused."""
        found = dot_operands(value, self.moving(self.lane), self.moving(self.depth), self.instruction)
        if isinstance(found, str) or found.others:
            why = found if isinstance(found, str) else "a factor stands in the sum"
            raise EmitError(f"{self.block.name} is no tile of {self.instruction.name}: {why}")
        return found


def dot_tile(loop: Loop) -> DotTile | None:
    """The tile of an instruction that begins at a loop; None where there is none."""
    inner = loop.body[0] if len(loop.body) == 1 else None
    if not isinstance(inner, Loop) or inner.kind is not LoopKind.VECTORIZED or len(inner.body) != 1:
        return None
    block = inner.body[0]
    return DotTile(loop, inner, block) if isinstance(block, Block) and TENSORIZE.of(block) in DOTS else None


def emit_dot(ctx: Context, tile: DotTile) -> None:
    """One step of the tile's sum. Lanes past the last element are summed too, and never stored."""
    block = tile.block
    ctx.axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    ctx.block, ctx.values = block, {}
    ctx.extents |= {tile.depth.var: tile.depth.extent, tile.lane.var: tile.lane.extent}
    condition = Val("true", DType.BOOL)
    for bound in block.predicate:
        if bound not in ctx.assumed and tile.lane.var not in in_loops(ctx, bound.rhs - bound.lhs).free_symbols:
            condition = conjunction(ctx.b, condition, bound_mask(ctx, bound).live)
    if condition.name == "true":
        _step(ctx, tile)
    elif condition.name != "false":
        with branch(ctx, condition, frozenset()):
            _step(ctx, tile)
    for lp in (tile.depth, tile.lane):
        del ctx.extents[lp.var]
    ctx.axes, ctx.block, ctx.values = {}, None, {}


def _step(ctx: Context, tile: DotTile) -> None:
    acc = ctx.accumulators.get((tile.block.name, 0))
    if not isinstance(acc, Accumulator):
        raise EmitError(f"{tile.block.name}: its sums are too many for registers, where {tile.instruction.name} adds")
    operands = tile.operands(acc.values[0])
    if tile.instruction.is_whole:
        _whole(ctx, tile, acc, operands)
    else:
        _converted(ctx, tile, acc, operands)


def _whole(ctx: Context, tile: DotTile, acc: Accumulator, operands: DotOperands) -> None:
    """Products of integers: one instruction, and another one for a constant in the left operand, which sums the right
    one; that is the same for all columns."""
    b, instruction = ctx.b, tile.instruction
    added, zero = taken(operands.left, instruction) or (0, 0)
    left = _bytes(ctx, tile, operands.left.value)
    if added:
        left = b.binary("xor", left, b.const(-128, I8))
    right = _shared(ctx, tile, operands.right)
    _add(ctx, instruction, acc, 0, position(ctx, acc), left, right)
    if zero and all(ctx.indices[var].name == "0" for var in acc.columns):
        ones = b.const(zero, instruction.left, instruction.lanes * instruction.depth)
        _add(ctx, instruction, acc, 1, corrected_at(ctx, acc), ones, right)


def _add(ctx: Context, instruction: DotInstruction, acc: Accumulator, k: int, at: str, left: Val, right: Val) -> None:
    b, slot = ctx.b, acc.whole[k]
    kind = f"<{instruction.lanes * instruction.depth} x i8>"
    total = read(ctx, slot, at)
    made = b.call(total.type, instruction.llvm, str(total), f"{kind} {left.name}", f"{kind} {right.name}")
    b.line(f"store {total.type} {made}, ptr {element(ctx, slot, at)}")


def _shared(ctx: Context, tile: DotTile, right: Expr) -> Val:
    """The neighbours of the operand that all lanes share, in each lane."""
    b, lanes, depth = ctx.b, tile.instruction.lanes, tile.instruction.depth
    vector, ctx.vector = ctx.vector, (tile.depth.var, depth)
    ctx.values = {}
    word = b.splat(evaluate(ctx, right), depth)
    ctx.vector, ctx.values = vector, {}
    whole = Val(b.op(f"bitcast {word} to i{depth * 8}"), I32)
    return Val(b.op(f"bitcast {b.splat(whole, lanes)} to <{lanes * depth} x i8>"), I8, lanes * depth)


def _bytes(ctx: Context, tile: DotTile, value: Expr) -> Val:
    """The operand that lanes move along: their neighbours beside each other, as they lie in memory."""
    lanes = int(tile.lane.extent) * int(tile.depth.extent)
    axes, bindings = ctx.axes, _here(ctx)
    byte = symbol(f"{tile.lane.var.name}_byte")
    start = {tile.lane.var: sympy.S.Zero, tile.depth.var: sympy.S.Zero}

    def flat(e: Expr) -> Expr | None:
        if not isinstance(e, Load):
            return None
        strides = ctx.places[e.buffer].strides
        where = [
            simplify(sympy.expand(i.xreplace(bindings)), ctx.extents, ctx.nest.symbols).xreplace(start)  # type: ignore[union-attr]
            for i in e.indices
        ]
        last = next(k for k, s in enumerate(strides) if s == 1)
        return Load(e.buffer, tuple(i + byte if k == last else i for k, i in enumerate(where)), e.dtype)

    made = rewrite(chosen(value, bindings), flat)
    vector = ctx.vector
    ctx.axes, ctx.vector, ctx.values = {}, (byte, lanes), {}
    ctx.extents[byte] = sympy.Integer(lanes)
    found = ctx.b.splat(evaluate(ctx, made), lanes)
    del ctx.extents[byte]
    ctx.axes, ctx.vector, ctx.values = axes, vector, {}
    return found


def _here(ctx: Context) -> dict[sympy.Symbol, sympy.Expr]:
    """The axes of the block, with the numbers of loops that are written out."""
    here = {var: sympy.Integer(int(v.name)) for var, v in ctx.indices.items() if v.is_literal}
    return {var: e.xreplace(here) for var, e in ctx.axes.items()}


# --- bytes by floats --------------------------------------------------------------------------------------------------


def _converted(ctx: Context, tile: DotTile, acc: Accumulator, operands: DotOperands) -> None:
    """Bytes that are converted one of each lane at a time and multiplied by an element that all lanes share."""
    b, lanes, depth = ctx.b, tile.instruction.lanes, tile.instruction.depth
    left, at = operands.left, position(ctx, acc)
    value = chosen(left.value, _here(ctx))
    table = _table(ctx, left, value, lanes)
    shift, value = _nibble(value) if table is not None else (0, value)
    found = _bytes(ctx, tile, value)
    words = Val(b.op(f"bitcast {found} to <{lanes} x i32>"), I32, lanes)
    total = read(ctx, acc.slots[0], at)
    vector, ctx.vector = ctx.vector, None
    for k in range(depth):
        if table is not None:
            index = b.binary("lshr", words, b.const(8 * k + shift, I32)) if k or shift else words
            name = b.call(table.type, "llvm.x86.avx512.permvar.sf.512", str(table), str(index))
            number = Val(name, F32, lanes)
        else:
            number = _number(ctx, words, k, left)
        ctx.indices[tile.depth.var], ctx.values = Val(str(k), DType.INT64), {}
        factor = evaluate(ctx, operands.right)
        total = b.intrinsic("fmuladd", number, b.splat(factor, lanes), total)
    del ctx.indices[tile.depth.var]
    ctx.vector, ctx.values = vector, {}
    b.line(f"store {total}, ptr {element(ctx, acc.slots[0], at)}")


def _table(ctx: Context, codes: Codes, value: Expr, lanes: int) -> Val | None:
    """The numbers that few codes mean, where one instruction looks them up by the lowest four bits of each lane."""
    if "avx512f" not in ctx.b.features or lanes != _TABLE or not 0 <= codes.low <= codes.high < _TABLE:
        return None
    if not _is_nibble(value):
        return None
    numbers = ", ".join(f"float {float(k - codes.zero):e}" for k in range(_TABLE))
    return Val(f"<{numbers}>", F32, _TABLE)


def _is_nibble(value: Expr) -> bool:
    match value:
        case Call("bit_and", (_, Const(15, _)), _) | Call("shr", (_, Const(4, _)), _):
            return True
    return False


def _nibble(value: Expr) -> tuple[int, Expr]:
    """How far a number of four bits lies from the lowest bit, and the byte that it is in."""
    assert isinstance(value, Call)
    return (4 if value.fn == "shr" else 0), value.args[0]


def _number(ctx: Context, words: Val, k: int, codes: Codes) -> Val:
    """The k-th byte of each word, less the constant, as a float."""
    b, signed = ctx.b, codes.value.dtype is I8
    if signed:
        up = b.binary("shl", words, b.const(24 - 8 * k, I32)) if k < 3 else words
        number = b.binary("ashr", up, b.const(24, I32))
    else:
        down = b.binary("lshr", words, b.const(8 * k, I32)) if k else words
        number = b.binary("and", down, b.const(255, I32)) if k < 3 else down
    if codes.zero:
        number = b.binary("sub", number, b.const(codes.zero, I32))
    return b.convert("sitofp", number, F32)
