"""Contractions: which blocks are sums of products of two operands, and which machines have an instruction for them."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.product import BYTES, bare, multiplied
from ....ir.expr.value import Call, Expr, free_symbols
from ....ir.nest.loops import AxisKind, Block, Loop, LoopKind, Update


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """An instruction (or a function of the emitter) that contracts two tiles, ``[m, k]`` and ``[k, n]``, or the first
    and a vector ``[k]`` where it takes ``vectors``.

    ``kinds`` are the kinds of targets that have it; ``loops`` is what the tile's loops are bound to; ``least`` are the
    smallest extents (m, n, k); ``powers`` asks for powers of two; ``operands`` are the element types that it takes,
    each with the type in which it sums their products.
    """

    name: str
    kinds: tuple[str, ...]
    loops: LoopKind
    least: tuple[int, int, int]
    powers: bool
    operands: tuple[tuple[DType, DType], ...]
    vectors: bool = False


# Triton's dot: its own least extents are smaller on some machines; below these the tile units are mostly padding.
DOT = Intrinsic(
    "dot", ("cuda", "hip"), LoopKind.THREAD_X, (2, 16, 16), True,
    (*((d, DType.FLOAT32) for d in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)), (DType.INT8, DType.INT32)),
    vectors=True,
)  # fmt: skip
# The function of a BLAS library, which takes any extents.
GEMM = Intrinsic("gemm", ("cpu",), LoopKind.SERIAL, (0, 0, 0), False, ((DType.FLOAT32, DType.FLOAT32),))
INTRINSICS: dict[str, Intrinsic] = {i.name: i for i in (DOT, GEMM)}


@dataclass(frozen=True, slots=True)
class ContractionBlock:
    """A block that sums the products of two operands.

    ``left`` and ``right`` are the factors, conversions that instructions do themselves left off; the axes are those of
    the result that only the left factor has (``m``), only the right one (``n``), both or none (``batch``), and the
    reduced ones (``k``).
    """

    left: Expr
    right: Expr
    m: tuple[sympy.Symbol, ...]
    n: tuple[sympy.Symbol, ...]
    k: tuple[sympy.Symbol, ...]
    batch: tuple[sympy.Symbol, ...]

    @property
    def dtypes(self) -> tuple[DType, DType]:
        return self.left.dtype, self.right.dtype


def contraction_of(block: Block) -> ContractionBlock | str:
    """The block as a contraction, or in one sentence why it is none."""
    if len(block.body) != 1 or not isinstance(block.body[0], Update) or block.body[0].monoid.name != "sum":
        return "it is no single sum"
    value = block.body[0].values[0]
    if not isinstance(value, Call) or value.fn != "mul":
        return "what it sums is no product"
    first, second = map(bare, value.args)
    reduced = {a.var for a in block.axes if a.kind is AxisKind.REDUCTION}
    spatial = [a.var for a in block.axes if a.kind is not AxisKind.REDUCTION]
    used = free_symbols(first), free_symbols(second)
    for var in sorted(reduced, key=str):
        if not all(var in u for u in used):
            return f"its reduction axis {var} is not in both factors"
    k = tuple(a.var for a in block.axes if a.var in reduced)
    m = tuple(v for v in spatial if v in used[0] and v not in used[1])
    n = tuple(v for v in spatial if v in used[1] and v not in used[0])
    batch = tuple(v for v in spatial if v not in (*m, *n))
    # The result's first axis belongs to the left operand, however the product was written; a vector is the right one.
    if n and (not m or spatial.index(n[0]) < spatial.index(m[0])):
        first, second, m, n = second, first, n, m
    return ContractionBlock(first, second, m, n, k, batch)


def misfit(block: Block, around: tuple[Loop, ...], intrinsic: Intrinsic) -> tuple[str, str]:
    """Why a block's tile is not what an intrinsic takes, and how to mend it; empty texts where it is."""
    found = contraction_of(block)
    if isinstance(found, str):
        return found, ""
    sums = dict(intrinsic.operands)
    wrong = [d for d in found.dtypes if d not in sums and d not in BYTES]
    if wrong:
        names = ", ".join(d.value for d in sums)
        return f"its operands are {' and '.join(d.value for d in found.dtypes)}, and {intrinsic.name} takes {names}", ""
    update = block.body[0]
    assert isinstance(update, Update)
    asked = update.values[0].dtype
    taken_as = multiplied(*found.dtypes, asked)
    if sums[taken_as] is not asked:
        return f"it sums {asked.value}, and {intrinsic.name} sums {taken_as.value} in {sums[taken_as].value}", ""
    binding = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    tile = [lp for lp in around if lp.kind is intrinsic.loops and lp.extent != 1]
    groups = (("m", found.m), ("n", found.n), ("k", found.k))
    hint = f"bind one loop of each to {intrinsic.loops.value}: {', '.join(f'{g} is {_names(a)}' for g, a in groups)}"
    taken: set[sympy.Symbol] = set()
    for (group, axes), least in zip(groups, intrinsic.least, strict=True):
        if group == "n" and not axes and intrinsic.vectors:
            continue
        mine = [lp for lp in tile if any(lp.var in binding[a].free_symbols for a in axes)]
        if len(mine) != 1:
            says = f"{len(mine)} loops of the tile" if mine else "no loop of the tile"
            return f"{says} run over {group}, the axes {_names(axes)}", hint
        if mine[0].var in taken:
            return f"the loop {mine[0].var} runs over axes of several operands at once", hint
        taken.add(mine[0].var)
        extent = int(mine[0].extent) if mine[0].extent.is_Integer else 0
        if extent < least or (intrinsic.powers and extent & (extent - 1)):
            kind = "a power of two of at least" if intrinsic.powers else "at least"
            return f"{mine[0].var} runs {mine[0].extent} times, and {group} of {intrinsic.name} is {kind} {least}", ""
    rest = [lp for lp in tile if lp.var not in taken and any(lp.var in b.free_symbols for b in binding.values())]
    if rest:
        return f"the loop {rest[0].var} of the tile runs over none of m, n and k alone", hint
    return "", ""


def _names(axes: tuple[sympy.Symbol, ...]) -> str:
    return ", ".join(a.name for a in axes) or "of which there are none"
