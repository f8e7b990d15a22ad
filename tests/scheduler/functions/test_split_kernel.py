"""A reduction in pieces and their combination is that reduction, for any monoid and any cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import ANY, ARGMAX, LOGSUMEXP, MAX, PRODUCT, SUM, WELFORD, Monoid
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, call, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.graph.graph import CallTensor, Graph, Input, IRModule, Reduction, TensorType
from torch_mlc.ir.nest.loops import Buffer, contiguous_strides
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.functions.split_kernel import (
    Cut,
    Halves,
    below,
    combined,
    numbered,
    partial,
    split_axes,
    whole,
)

F32, I64 = DType.FLOAT32, DType.INT64
N = symbol("n")
AXES = (symbol("a"), symbol("b"))
ROW = symbol("row")


def kind(shape: Sequence[sympy.Expr | int], dtype: DType) -> TensorType:
    extents = tuple(map(sympy.sympify, shape))
    return TensorType(extents, contiguous_strides(extents), dtype)


def reduction(monoid: Monoid, shape: tuple[sympy.Expr | int, sympy.Expr | int]) -> Reduction:
    """``monoid`` of x[row, a, b] over a and b."""
    x = Load("x", (ROW, *AXES), F32)
    values: tuple[Expr, ...] = (x,)
    if monoid is ARGMAX:
        values = (x, IndexValue(AXES[0] * shape[1] + AXES[1], I64))
    elif monoid in (WELFORD, LOGSUMEXP):
        values = monoid.lift(x)
    elif monoid is ANY:
        values = (call("gt", x, const(1.5, F32)),)
    names = tuple(f"y{k}" for k in range(len(values)))
    types = tuple(kind((3,), v.dtype) for v in values)
    return Reduction(names, types, (ROW,), AXES, tuple(map(sympy.sympify, shape)), monoid, values)


def ceil(extent: sympy.Expr | int, size: int) -> Cut:
    """Pieces of so many iterations."""
    return Cut(FloorDiv(sympy.sympify(extent) + size - 1, sympy.Integer(size)), sympy.Integer(size), False)


TWO = sympy.Integer(2)
CUTS = [
    ((6, 5), (whole(sympy.Integer(6)), None)),
    ((6, 5), (Cut(sympy.Integer(3), TWO, True), None)),
    ((6, 5), (None, ceil(5, 2))),
    ((6, 5), (ceil(6, 4), ceil(5, 3))),
    ((6, 5), (whole(sympy.Integer(6)), whole(sympy.Integer(5)))),
    ((N, 5), (ceil(N, 4), None)),
]


@pytest.mark.parametrize("monoid", [SUM, PRODUCT, MAX, ANY, ARGMAX, WELFORD, LOGSUMEXP], ids=lambda m: m.name)
@pytest.mark.parametrize(("shape", "cuts"), CUTS, ids=str)
def test_the_pieces_combined_are_the_whole(
    monoid: Monoid, shape: tuple[sympy.Expr | int, sympy.Expr | int], cuts: tuple[Cut | None, Cut | None]
) -> None:
    node = reduction(monoid, shape)
    over = [Dim(a, e) for a, e in zip(AXES, node.reduce_shape, strict=True)]
    split = split_axes(over, cuts, numbered("i"), numbered("r")).moved({ROW: symbol("i9")})
    first = partial(node, tuple(f"{n}_pieces" for n in node.names), split, (Dim(symbol("i9"), sympy.Integer(3)),))
    counted = [Dim(symbol(f"r{k}"), d.extent) for k, d in enumerate(split.pieces)]
    second = combined(node, first, counted, (*(d.var for d in counted), *node.axes))
    table = SymbolTable((Size(N, 1, None, hint=8),)) if N in sympy.sympify(shape[0]).free_symbols else SymbolTable()
    given = (Input("x", kind((3, *shape), F32)),)
    graphs = [Graph("main", given, nodes, node.names, table) for nodes in ((node,), (first, second))]
    for extent in (1, 4, 7) if table.sizes else (6,):
        x = np.random.default_rng(extent).integers(-2, 3, (3, extent, 5)).astype(np.float32)
        sizes = {"n": extent} if table.sizes else {}
        for a, b in zip(*(ran(g, x, sizes) for g in graphs), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def ran(graph: Graph, x: np.ndarray, sizes: dict[str, int]) -> list[np.ndarray]:
    verify(IRModule({"main": graph}))
    return list(run_graph(graph, [x], sizes).values())


def test_what_is_cut_and_what_is_not() -> None:
    axes = [Dim(symbol(v), sympy.Integer(e)) for v, e in (("a", 4), ("b", 10), ("c", 7))]
    split = split_axes(axes, [whole(axes[0].extent), ceil(10, 4), None], numbered("i"), numbered("r", 5))
    i0, i1, r5, r6 = map(symbol, ("i0", "i1", "r5", "r6"))
    assert split.pieces == (Dim(i0, sympy.Integer(4)), Dim(i1, sympy.Integer(3)))
    assert split.own == (Dim(r5, sympy.Integer(4)), Dim(r6, sympy.Integer(7)))
    assert split.place == {axes[0].var: i0, axes[1].var: 4 * i1 + r5, axes[2].var: r6}
    assert split.inside == (below(4 * i1 + r5, sympy.Integer(10)),)
    assert [s.name for s in islice(numbered("x", 2), 2)] == ["x2", "x3"]


def test_a_call_becomes_two() -> None:
    """Results that the second half does not make stay the first's, whose states come behind them."""
    row, size = Dim(symbol("i0"), N), SymbolTable((Size(N, 1, None, hint=8),))

    def function(name: str, inputs: tuple[str, ...], *outputs: str) -> TensorFunction:
        buffers = [Buffer(b, (N,), (sympy.S.One,), F32) for b in (*inputs, *outputs)]
        stages = tuple(Stage((f"t{k}",), (Load(inputs[0], (row.var,), F32),), False) for k in range(len(outputs)))
        made = tuple(Output(b, f"t{k}", (row.var,)) for k, b in enumerate(buffers[len(inputs) :]))
        return TensorFunction(name, (row,), (), tuple(buffers[: len(inputs)]), made, stages, size)

    first, second = function("f_pieces", ("in0", "in1"), "out0", "out1"), function("f_rest", ("in0", "in1"), "out0")
    m = sympy.Integer(16)
    whole_call = CallTensor(("p", "q"), (kind((m,), F32),) * 2, "f", ("x", "y"), (m,))
    a, b = Halves(first, second, 1, (1,), (0,)).calls(whole_call, "pieces")
    assert (a.function, a.names, a.args) == ("f_pieces", ("q", "p_pieces0"), ("x", "y"))
    assert (b.function, b.names, b.args) == ("f_rest", ("p",), ("p_pieces0", "y"))
    assert a.types == (kind((m,), F32),) * 2 and a.sizes == b.sizes == (m,)
