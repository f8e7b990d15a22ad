"""Reductions on a GPU that are split keep the oracle's answer, and have results enough to occupy it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import ARGMAX, LOGSUMEXP, MAX, MIN, SUM, WELFORD, Monoid
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, call, symbol
from torch_mlc.ir.graph.graph import Graph, Input, IRModule, Reduction, TensorType
from torch_mlc.ir.nest.loops import contiguous_strides
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.passes import split_reductions
from torch_mlc.scheduler.passes.reduction.split_reductions import exact_cuts

F32, I64 = DType.FLOAT32, DType.INT64
S0, S1 = symbol("s0"), symbol("s1")
SIZES = SymbolTable((Size(S0, 1, None, hint=1 << 16), Size(S1, 0, None, hint=64)))


def tensor(shape: tuple, dtype: DType, device: str) -> TensorType:
    extents = tuple(map(sympy.sympify, shape))
    return TensorType(extents, contiguous_strides(extents), dtype, device)


def reduction(shape: tuple, over: tuple[int, ...], monoid: Monoid, device: str = "cuda:0") -> Graph:
    """``monoid`` of x over the dimensions ``over``; a position is that within all of them."""
    kept = [k for k in range(len(shape)) if k not in over]
    place = {d: symbol(f"r{n}") for n, d in enumerate(over)} | {d: symbol(f"i{n}") for n, d in enumerate(kept)}
    x = Load("x", tuple(place[d] for d in range(len(shape))), F32)
    values: tuple[Expr, ...] = (call("mul", x, x),) if monoid is SUM else (x,)
    if monoid is ARGMAX:
        position: sympy.Expr = sympy.S.Zero
        for d in over:
            position = position * shape[d] + place[d]
        values = (x, IndexValue(sympy.expand(position), I64))
    elif monoid in (WELFORD, LOGSUMEXP):
        values = monoid.lift(x)
    names = tuple(f"y{k}" for k in range(len(values)))
    node = Reduction(
        names,
        tuple(tensor(tuple(shape[d] for d in kept), v.dtype, device) for v in values),
        tuple(place[d] for d in kept),
        tuple(place[d] for d in over),
        tuple(sympy.sympify(shape[d]) for d in over),
        monoid,
        values,
    )
    return Graph("main", (Input("x", tensor(shape, F32, device)),), (node,), names, SIZES)


@pytest.mark.parametrize(
    ("shape", "parts", "cut"), [((3, 1024), 2, [1, 2]), ((4, 9), 6, [2, 3]), ((32, 64, 2), 4, [4])]
)
def test_pieces_of_one_length_are_cut_from_the_outermost_axes_that_divide(shape, parts, cut):
    found = exact_cuts(tuple(map(sympy.Integer, shape)), parts)
    assert [int(c.parts) for c in found] == cut
    assert all(int(c.parts * c.size) == extent for c, extent in zip(found, shape, strict=False))


def pieces(graph: Graph) -> tuple[Reduction, Reduction]:
    verify(IRModule({"main": graph}))
    first, second = graph.nodes
    assert isinstance(first, Reduction) and isinstance(second, Reduction)
    return first, second


def same_meaning(graph: Graph, split: Graph, shape: tuple[int, ...], **sizes: int) -> None:
    # Many elements are equal: positions must be the first.
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    known = {"s0": 1, "s1": 1, **sizes}
    before, after = run_graph(graph, {"x": x}, known), run_graph(split, {"x": x}, known)
    for name in before:
        exact = before[name].dtype.kind == "i" or (name == "y0" and graph.nodes[0].monoid.exact)
        np.testing.assert_allclose(after[name], before[name], rtol=0 if exact else 1e-4, err_msg=name)


SHAPES = [
    ((1 << 16,), (0,)),
    ((40007,), (0,)),
    ((256, 160), (0, 1)),
    ((16, 2800), (0, 1)),
    ((2, 41, 509), (0, 1, 2)),
    ((33000, 3), (0,)),
    ((3, 35000), (1,)),
    ((19, 2, 2003), (0, 2)),
]


@pytest.mark.parametrize(
    ("shape", "over", "monoid"),
    [
        *((shape, over, monoid) for shape, over in SHAPES for monoid in (SUM, ARGMAX)),
        *(((37003,), (0,), monoid) for monoid in (MAX, MIN, WELFORD, LOGSUMEXP)),
    ],
    ids=lambda x: x.name if isinstance(x, Monoid) else str(x),
)
def test_keeps_the_meaning(shape: tuple[int, ...], over: tuple[int, ...], monoid: Monoid) -> None:
    graph = reduction(shape, over, monoid)
    split = split_reductions(graph)
    first, second = pieces(split)
    assert first.types[0].numel >= 8 and second.names == graph.nodes[0].names
    same_meaning(graph, split, shape)


@pytest.mark.parametrize("monoid", [SUM, ARGMAX, WELFORD], ids=lambda m: m.name)
@pytest.mark.parametrize("n", [1, 700, 9001])
def test_a_symbolic_size_has_a_fixed_number_of_pieces(n: int, monoid: Monoid) -> None:
    graph = reduction((S0,), (0,), monoid)
    split = split_reductions(graph)
    assert pieces(split)[0].types[0].shape == (16,)
    same_meaning(graph, split, (n,), s0=n)


def test_a_symbolic_axis_that_is_short_enough_becomes_rows() -> None:
    graph = reduction((S1, 512, 8), (0, 1, 2), SUM)
    split = split_reductions(graph)
    assert pieces(split)[0].types[0].shape == (S1,)
    same_meaning(graph, split, (5, 512, 8), s1=5)


def test_large_tensors_are_cut_without_tails_into_pieces_that_occupy_a_gpu() -> None:
    first, second = pieces(split_reductions(reduction((16384, 4096), (0, 1), SUM)))
    assert first.types[0].shape == (512,) and first.reduce_shape == (32, 4096)
    assert second.reduce_shape == (512,)
    first, _ = pieces(split_reductions(reduction((1 << 26,), (0,), SUM)))
    assert first.types[0].shape == (512,) and first.reduce_shape == (1 << 17,)


@pytest.mark.parametrize(
    "graph",
    [
        reduction((1 << 16,), (0,), SUM, "cpu"),
        reduction((8192,), (0,), SUM),
        reduction((1024, 4096), (1,), SUM),
        reduction((4096, 1024), (0,), SUM),
    ],
    ids=["cpu", "short", "rows", "columns"],
)
def test_leaves_alone_what_gains_nothing(graph: Graph) -> None:
    assert split_reductions(graph) is graph


def test_names_stay_unique() -> None:
    graph = reduction((1 << 16,), (0,), SUM)
    (node,) = graph.nodes
    assert isinstance(node, Reduction)
    twice = replace(graph, nodes=(node, replace(node, names=("y0_pieces",))), outputs=("y0", "y0_pieces"))
    split = split_reductions(twice)
    verify(IRModule({"main": split}))
    assert len(split.nodes) == 4
    same_meaning(twice, split, (1 << 16,))
