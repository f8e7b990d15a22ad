"""tensorize."""

from __future__ import annotations

from ....ir.expr.dots import DOTS
from ....ir.nest.hints import TENSORIZE
from ....ir.nest.loops import LoopNest, blocks
from ...error import ScheduleError
from ..analysis.contraction import INTRINSICS, misfit
from ..analysis.dots import dot_misfit
from ..analysis.tree import find_block, with_annotation
from .blockize import is_unit


def tensorize(nest: LoopNest, block: str, intrinsic: str) -> LoopNest:
    """Give the tile of a contraction to a matrix instruction.

    Rewrites::

        for m in threadIdx.x(64):                   for m in threadIdx.x(64):
            for n in threadIdx.x(64):         ->        for n in threadIdx.x(64):
                for k in threadIdx.x(32):                   for k in threadIdx.x(32):
                    C[m, n] += A[m, k] * B[k, n]                C[m, n] += A[m, k] * B[k, n]  # tensorize="dot"

    A tail stays a predicate of the block, and the emitter fills the operands with zeros beyond it. Primitives that
    would leave the block no contraction of such a tile are refused from then on.

    Requires: the block is one sum of products of two factors; each reduction axis is in both, and of the tile's loops
    one runs over axes of the left factor alone (m), one over axes of the right factor alone (n) and one over
    reduction axes (k); a right factor that is a vector has no n. Types and extents are those of the intrinsic. "dot"
    (cuda, hip): loops bound to threadIdx.x, powers of two, n and k at least 16; factors of float16, bfloat16 or
    float32, summed in float32, or of int8 in int32. "gemm" (cpu): serial loops of any extents that hold this block
    alone; factors are elements of float32 buffers, each with neighbours along one axis. An instruction of the table in
    ``ir/expr/dots.py``, or one that ``torch_mlc.register_dot`` has added: a serial loop along the sum and lanes in it,
    of the instruction's sizes; one factor is a byte less a constant that lies as a register has it, the other is the
    same for all lanes, and what else multiplies them is the same for the whole sum, or for its loops from the last one
    with the hint ``cascade`` on. A unit that the block stands in holds nothing else.
    Raises: ScheduleError.    Source: TVM ``Schedule.tensorize``.
    """
    asked = f"tensorize({block}, {intrinsic!r})"
    node, outer = find_block(nest, block, asked)
    if intrinsic in DOTS:
        reason, hint = dot_misfit(nest, node, outer, DOTS[intrinsic])
        if reason:
            raise ScheduleError(asked, reason, nest, block, hint)
        return with_annotation(nest, node, TENSORIZE.name, intrinsic)
    if intrinsic not in INTRINSICS:
        known = ", ".join((*INTRINSICS, *DOTS))
        raise ScheduleError(asked, f"there is no intrinsic {intrinsic!r}; there are {known}", nest, block)
    reason, hint = misfit(node, outer, INTRINSICS[intrinsic])
    if reason:
        raise ScheduleError(asked, reason, nest, block, hint)
    unit = next((lp for lp in outer if is_unit(lp)), None)
    if unit is not None:
        for lp in outer[outer.index(unit) :]:
            if lp.kind is not INTRINSICS[intrinsic].loops or len(lp.body) != 1:
                raise ScheduleError(
                    asked, f"the unit {unit.var} holds more than the tile of {block}", nest, lp.var.name,
                    "blockize the outermost loop of the tile",
                )  # fmt: skip
    return with_annotation(nest, node, TENSORIZE.name, intrinsic)


def check_tensorized(before: LoopNest, after: LoopNest, asked: object) -> None:
    """Refuse what leaves a tensorized block no contraction of its intrinsic. Raises ScheduleError."""
    for block, outer in blocks(after):
        name = TENSORIZE.found(block)
        if name is None:
            continue
        intrinsic = INTRINSICS.get(name)
        if name in DOTS:
            reason = dot_misfit(after, block, outer, DOTS[name])[0]
        else:
            reason = f"there is no intrinsic {name!r}" if intrinsic is None else misfit(block, outer, intrinsic)[0]
        if reason:
            tiles = [b.name for b, _ in blocks(before) if TENSORIZE.found(b)]
            raise ScheduleError(
                str(asked), f"{block.name} would be tensorized and no tile of {name}: {reason}", before,
                block.name if block.name in tiles or not tiles else tiles[0], "do it before tensorize",
            )  # fmt: skip
