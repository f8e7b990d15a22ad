"""Matrix products of tiles: a block that sums products is one ``tl.dot`` a step.

The factors of the product are told apart by the axes on which they depend: those of the rows and the summed axis are
the left operand, those of the summed axis and the columns the right. Each operand is computed as a tile of its own two
axes, whatever its expression is: conversions, scales, gathers and unpacking happen on the way to the tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.product import bare, factors, multiplied, product_of
from ....ir.expr.value import Cast, Expr, Load, free_symbols, is_value
from ....ir.nest.hints import INPUT_PRECISION, OPERANDS
from ....ir.nest.loops import Scope, Update
from ...kernel import EmitError
from ..program import BlockInfo
from ..types import type_text
from ..values import Values
from ..writer import Dims, SourceWriter, Value


def dot(values: Values, out: SourceWriter, info: BlockInfo, update: Update, accumulator: str | None) -> Value:
    """Write one step of a product: the tile, added to ``accumulator`` where there is one.

    The hint ``OPERANDS`` names the type to which both are rounded, where it is not that in which they come.
    Raises EmitError where the block is no sum of products of a left and a right factor.
    """
    if update.monoid.name != "sum" or len(update.values) != 1:
        raise EmitError(f"block {info.block.name} is tensorized as a dot and reduces by {update.monoid.name}")
    (value,) = update.values
    dtype = value.dtype.compute
    sides = _sides(info, factors(value), values.program.copies)
    asked = OPERANDS.found(info.block)
    left, right = map(_narrow, sides)
    narrow = multiplied(left, right, dtype) if asked is None else DType(asked)
    if dtype is not (DType.INT32 if narrow is DType.INT8 else DType.FLOAT32):
        raise EmitError(f"block {info.block.name}: a dot of {narrow.value} does not sum in {dtype.value}")
    tiles = [_operand(values, out, operand, side, narrow) for operand, side in zip(info.operands, sides, strict=True)]
    arguments = [t.text for t in tiles] + ([accumulator] if accumulator else [])
    if narrow is DType.FLOAT32:
        arguments.append(f'input_precision="{INPUT_PRECISION.of(info.block)}"')
    if narrow is DType.INT8:
        arguments.append("out_dtype=tl.int32")
    text = f"tl.dot({', '.join(arguments)})"
    if accumulator is None:
        return Value(out.assign("v", text), info.tile, dtype)
    out.line(f"{accumulator} = {text}")
    return Value(accumulator, info.tile, dtype)


def _sides(info: BlockInfo, factors: Sequence[Expr], copies: sympy.Symbol | None) -> tuple[list[Expr], list[Expr]]:
    """The factors of the left operand and of the right one, which is a vector where its columns are ``copies``."""
    left: list[Expr] = []
    right: list[Expr] = []
    for f in factors:
        dims = _dims(info, f)
        if dims & info.operands[0].spatial and dims & info.operands[1].spatial:
            raise EmitError(
                f"block {info.block.name}: a factor of the product depends on rows and columns alike; "
                "store it first, or leave the block a plain reduction"
            )
        is_right = dims & info.operands[1].spatial or (copies is not None and not dims & info.operands[0].spatial)
        (right if is_right else left).append(f)
    if not left or not right:
        raise EmitError(f"block {info.block.name} is tensorized as a dot and has no left or no right factor")
    return left, right


def _dims(info: BlockInfo, expr: Expr) -> Dims:
    """The tile axes of rows and columns on which an expression depends."""
    found = {s for v in free_symbols(expr) & info.axes.keys() for s in info.axes[v].free_symbols}
    return frozenset(found & info.tile)


def _narrow(side: Sequence[Expr]) -> DType:
    """The type of an operand before it was widened."""
    if len(side) != 1:
        return side[0].dtype.compute
    return bare(side[0]).dtype


def _operand(values: Values, out: SourceWriter, info: BlockInfo, side: Sequence[Expr], narrow: DType) -> Value:
    """The tile of one operand: zero where the summed axis has no element, full along both of its axes."""
    values.enter(info)
    product = product_of([bare(e) if narrow is not e.dtype else e for e in side])
    tile = values.value(product)
    if tile.dtype is not narrow:
        tile = Value(out.assign("v", values.program.types.cast(tile.typed, tile.dtype, narrow)), tile.dims, narrow)
    mask = values.all_of(values.reduction_bounds())
    if mask is not None and not _is_masked(values, info, product):
        zero = f"tl.full([], 0, {type_text(narrow)})"
        text = f"tl.where({mask.text}, {tile.typed}, {zero})"
        tile = Value(out.assign("v", text), mask.dims | tile.dims, narrow)
    copies = values.program.copies
    if copies in info.tile - tile.dims and values.program.target.has_operands_ahead:
        # The first column is the result. Of copies alone Triton would bring the columns ahead as if they were rows.
        text = f"tl.where({copies} == 0, {tile.typed}, tl.full([], 0, {type_text(narrow)}))"
        tile = Value(out.assign("v", text), tile.dims | {copies}, narrow)
    return values.broadcast(tile, info.tile)


def _is_masked(values: Values, info: BlockInfo, expr: Expr) -> bool:
    """Whether the expression is a load that is switched off wherever the summed axis has no element, and zero there."""
    while isinstance(expr, Cast):
        expr = expr.value
    if not isinstance(expr, Load) or values.program.buffers[expr.buffer].scope is not Scope.GLOBAL:
        return False
    # An expanded dimension has one element for all lanes, which none of them switches off.
    strides = values.program.buffers[expr.buffer].strides
    moving = [i for i, stride in zip(expr.indices, strides, strict=True) if stride != 0 and not is_value(i)]
    moved = {s for i in moving for v in i.free_symbols & info.axes.keys() for s in info.axes[v].free_symbols}  # type: ignore[union-attr]
    return info.reduced_tile <= moved
