"""Tiles of a sum that an instruction of a CPU adds up: which blocks have them, and for which instructions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import sympy

from ....ir.expr.codes import DotOperands, chosen, codes_of, dot_operands
from ....ir.expr.dots import DotInstruction
from ....ir.expr.dtypes import DType
from ....ir.expr.index import is_within, simplify
from ....ir.expr.value import Expr, IndexValue, is_value, loads, walk
from ....ir.nest.hints import CASCADE
from ....ir.nest.loops import AxisKind, Block, Loop, LoopKind, LoopNest, Update
from .tree import linear_part

# Sums of integers are exact below this.
_MOST = 1 << 31


def dot_misfit(nest: LoopNest, block: Block, around: tuple[Loop, ...], instruction: DotInstruction) -> tuple[str, str]:
    """Why a block's innermost loops are no tile of an instruction, and how to mend it; empty texts where they are."""
    if len(block.body) != 1 or not isinstance(block.body[0], Update) or block.body[0].monoid.name != "sum":
        return "it is no single sum", ""
    value = block.body[0].values[0]
    kinds = (DType.FLOAT32, DType.INT32) if instruction.is_whole else (DType.FLOAT32,)
    if value.dtype not in kinds:
        return f"it sums {value.dtype.value}, and {instruction.name} is for {' and '.join(k.value for k in kinds)}", ""
    hint = f"its innermost loops are to be a serial one of {instruction.depth}, and {instruction.lanes} lanes in it"
    if len(around) < 2 or len(around[-2].body) != 1 or len(around[-1].body) != 1:
        return "no two loops hold it alone", hint
    depth, lane = around[-2:]
    wanted = ((depth, LoopKind.SERIAL, instruction.depth), (lane, LoopKind.VECTORIZED, instruction.lanes))
    for loop, kind, extent in wanted:
        if loop.kind is not kind or loop.extent != extent:
            return f"the loop {loop.var} is {loop.kind.value} and runs {loop.extent} times", hint
    binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    lanes, neighbours = (_moving(block, {lp.var}) for lp in (lane, depth))
    reduced = {a.var for a in block.axes if a.kind is AxisKind.REDUCTION}
    if lanes & reduced or not neighbours or not neighbours <= reduced:
        return f"{depth.var} is to run along the sum, and {lane.var} is not", hint
    carried = {lp.var for lp in around if any(lp.var in binding[a].free_symbols for a in reduced)}
    if any(b.lhs.free_symbols & carried | b.rhs.free_symbols & carried for b in block.predicate):
        return "its sum has a tail", "split the sum by sizes that divide it"
    operands = dot_operands(value, lanes, neighbours, instruction)
    if isinstance(operands, str):
        return operands, ""
    own = _own(around, carried)
    inside = _moving(block, own)
    if any(_names(f) & inside for f in operands.others):
        return "a factor differs among terms that are summed together", "let the loops of a group sum by themselves"
    if instruction.is_whole:
        terms = sympy.Mul(*(lp.extent for lp in around if lp.var in own))
        found = codes_of(operands.right)
        size = operands.left.most + 256  # of what instructions add: codes before a constant is taken off
        if found is None or not terms.is_Integer or int(terms) * size * found.most >= _MOST:
            return f"{terms} terms may be more than int32 holds", "sum them in groups"
    return _layout(nest, block, around, operands, instruction)


def _own(around: tuple[Loop, ...], carried: set[sympy.Symbol]) -> set[sympy.Symbol]:
    """The loops of the innermost sum: from the last that sums by itself on, or all."""
    over = [lp for lp in around if lp.var in carried]
    first = max((k for k, lp in enumerate(over) if k and CASCADE.of(lp)), default=0)
    return {lp.var for lp in over[first:]}


def _moving(block: Block, loops: set[sympy.Symbol]) -> set[sympy.Symbol]:
    """The axes of a block that loops move."""
    pairs = zip(block.axes, block.bindings, strict=True)
    return {a.var for a, e in pairs if e.free_symbols & loops}


def _names(e: Expr) -> set[sympy.Symbol]:
    found = {s for ld in loads(e) for i in ld.indices if not is_value(i) for s in i.free_symbols}
    return found | {s for part in walk(e) if isinstance(part, IndexValue) for s in part.index.free_symbols}


def _layout(
    nest: LoopNest, block: Block, around: tuple[Loop, ...], operands: DotOperands, instruction: DotInstruction
) -> tuple[str, str]:
    """Whether the left operand lies as a register wants it, and inside its buffers for all lanes."""
    depth, lane = around[-2:]
    extents = {lp.var: lp.extent for lp in around}
    for env in _choices(operands.left.value, block, around):
        bindings = {a.var: e.xreplace(env) for a, e in zip(block.axes, block.bindings, strict=True)}
        for ld in loads(chosen(operands.left.value, bindings)):
            buffer = nest.buffer(ld.buffer)
            if buffer.dtype.itemsize != 1 or any(is_value(i) for i in ld.indices):
                return f"{ld.buffer} is not read byte by byte", ""
            where = [
                simplify(sympy.expand(i.xreplace(bindings)), extents, nest.symbols)  # type: ignore[union-attr]
                for i in ld.indices
            ]
            offset = sympy.expand(sympy.Add(*(i * s for i, s in zip(where, buffer.strides, strict=True))))
            steps = [linear_part(offset, lp.var) for lp in (depth, lane)]
            if [s[0] if s else None for s in steps] != [1, instruction.depth]:
                return f"{ld.buffer} does not hold {instruction.depth} bytes of each lane beside each other", ""
            for i, size in zip(where, buffer.shape, strict=True):
                if not is_within(i, size, extents, nest.symbols):
                    return f"{ld.buffer} may end before the last lane", "pad it to whole registers"
    return "", ""


def _choices(e: Expr, block: Block, around: tuple[Loop, ...]) -> Iterator[Mapping[sympy.Symbol, sympy.Expr]]:
    """The values of the unrolled loops that choices in an expression depend on."""
    asked = {s for part in walk(e) if isinstance(part, IndexValue) for s in part.index.free_symbols}
    names = {s for a, b in zip(block.axes, block.bindings, strict=True) if a.var in asked for s in b.free_symbols}
    loops = [lp for lp in around if lp.var in names and lp.kind is LoopKind.UNROLLED and lp.extent.is_Integer]
    for values in product(*(range(int(lp.extent)) for lp in loops)):
        yield {lp.var: sympy.Integer(v) for lp, v in zip(loops, values, strict=True)}
