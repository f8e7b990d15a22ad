"""Opened products keep ATen's meaning for every form and type, and read operands as they are packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import IndexValue, Load, Select, call, cast, const, index_exprs, loads, symbol, walk
from torch_mlc.ir.graph.graph import Compute, Graph, Input, IRModule, Library, Reduction
from torch_mlc.ir.oracle.oracle import run_graph
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.facts.contraction import Decision, Products
from torch_mlc.scheduler.facts.digits import refine
from torch_mlc.scheduler.passes import decompose_contractions, eliminate_dead
from torch_mlc.scheduler.passes.products.decompose_contractions import decompose_product

R0, R1, I0 = symbol("r0"), symbol("r1"), symbol("i0")
_DIVISIONS = (FloorDiv, ModularIndexing)


def _div(a: sympy.Expr, b: int) -> sympy.Expr:
    return FloorDiv(a, sympy.Integer(b))


def _mod(a: sympy.Expr, b: int) -> sympy.Expr:
    return ModularIndexing(a, sympy.Integer(1), sympy.Integer(b))


def imported(fn: Callable[..., object], *inputs: Tensor, dynamic: bool = False) -> Graph:
    """The graph of a function, products of half types as they are."""
    (gm,) = capture(fn, inputs, dynamic=dynamic)
    return import_graph(gm, numerics="eager")


def opened(graph: Graph, inlined: bool = False, pieces: int = 1) -> Graph:
    """Every product opened, whatever it costs."""
    products, taken = Products(graph), {n for node in graph.nodes for n in node.names}
    nodes = []
    for node in graph.nodes:
        p = products.product(node)
        made = (True, True) if inlined else (False, False)
        nodes += [node] if p is None else decompose_product(p, Decision(True, "asked for", made, pieces), graph, taken)
    graph = eliminate_dead(replace(graph, nodes=tuple(nodes)))
    verify(IRModule({"main": graph}))
    return graph


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    if dtype.is_floating_point:
        return [torch.randn(s).to(dtype) for s in shapes]
    return [torch.randint(-100, 100, s).to(dtype) for s in shapes]


def answer(graph: Graph, inputs: list[Tensor]) -> Tensor:
    """The oracle's result; halves go in and come out as float32, which holds them."""
    arrays = {}
    for node, t in zip((i for i in graph.inputs if isinstance(i, Input)), ordered(graph, inputs), strict=True):
        raw = t.float().numpy().astype(node.type.dtype.numpy) if node.type.dtype.is_half else t.numpy()
        arrays[node.name] = raw
    (result,) = run_graph(graph, arrays, {}).values()
    return torch.from_numpy(result.astype(np.float32) if graph.types()[graph.outputs[0]].dtype.is_half else result)


def ordered(graph: Graph, inputs: list[Tensor]) -> list[Tensor]:
    """capture lifts inputs in order of first use; here shapes and types tell them apart."""
    left = list(inputs)
    found = []
    for node in graph.inputs:
        assert isinstance(node, Input)
        shape = tuple(int(s) for s in node.type.shape)
        k = next(
            k for k, t in enumerate(left) if tuple(t.shape) == shape and DType.from_torch(t.dtype) is node.type.dtype
        )
        found.append(left.pop(k))
    return found


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((3, 5), (5, 4))),
    "transposed": (lambda a, b: a @ b.t(), ((3, 5), (4, 5))),
    "no terms": (torch.mm, ((3, 0), (0, 4))),
    "no rows": (torch.mm, ((0, 3), (3, 4))),
    "bmm": (torch.bmm, ((2, 3, 5), (2, 5, 4))),
    "mv": (torch.mv, ((3, 5), (5,))),
    "dot": (torch.dot, ((7,), (7,))),
    "addmm": (torch.addmm, ((4,), (3, 5), (5, 4))),
    "addmm of a column": (torch.addmm, ((3, 1), (3, 5), (5, 4))),
    "scaled addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), ((3, 4), (3, 5), (5, 4))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=2), ((2, 3, 4), (2, 3, 5), (2, 5, 4))),
    "linear": (lambda x, w, b: torch.nn.functional.linear(x, w, b), ((2, 3, 5), (4, 5), (4,))),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8])
def test_an_opened_product_is_that_product(name: str, dtype: torch.dtype) -> None:
    fn, shapes = PRODUCTS[name]
    inputs = tensors(*shapes, dtype=dtype)
    graph = opened(imported(fn, *inputs))
    assert not any(isinstance(n, Library) for n in graph.nodes)
    result = answer(graph, inputs)
    # Integers wrap alike. Halves are added in float32 and rounded once.
    wanted = fn(*(t.double() for t in inputs)).to(dtype) if dtype.is_floating_point else fn(*inputs)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}.get(dtype, 0.0)
    torch.testing.assert_close(result.to(dtype), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["mm", "scaled addmm", "baddbmm"])
def test_a_product_in_pieces_is_that_product(name: str) -> None:
    fn, shapes = PRODUCTS[name]
    # Six terms in three pieces of two.
    inputs = tensors(*(tuple(6 if e == 5 else e for e in s) for s in shapes))
    graph = opened(imported(fn, *inputs), pieces=3)
    assert next(n.types[0].shape[0] for n in graph.nodes if isinstance(n, Reduction)) == 3
    torch.testing.assert_close(answer(graph, inputs), fn(*inputs))


def test_with_beta_zero_what_is_added_is_not_read() -> None:
    c, a, b = torch.full((3, 4), float("nan")), *tensors((3, 5), (5, 4))
    graph = opened(imported(lambda c, a, b: torch.addmm(c, a, b, beta=0), c, a, b))
    torch.testing.assert_close(answer(graph, [c, a, b]), a @ b)


def test_plain_products_are_left_to_blas_with_a_reason() -> None:
    graph = decompose_contractions(imported(torch.mm, *tensors((3, 64), (64, 64))))
    (node,) = graph.nodes
    assert isinstance(node, Library) and "nothing to read in packed form" in node.reason


SMALL: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 10), (10, 5))),
    "of no element": (torch.mm, ((5, 0), (0, 4))),
    "batch": (torch.bmm, ((25, 10, 10), (25, 10, 5))),
    "linear": (torch.nn.functional.linear, ((4, 32), (16, 32), (16,))),
}


@pytest.mark.parametrize("name", SMALL)
def test_what_takes_less_than_a_call_is_opened(name: str) -> None:
    fn, shapes = SMALL[name]
    inputs = tensors(*shapes)
    graph = decompose_contractions(imported(fn, *inputs))
    assert not any(isinstance(n, Library) for n in graph.nodes)
    notes = [o.note for n in graph.nodes if isinstance(n, Reduction) for o in n.origins]
    assert all("less than a call of a library" in note for note in notes)
    torch.testing.assert_close(answer(graph, inputs), fn(*inputs))


@pytest.mark.parametrize("shapes", [((0, 5), (5, 4)), ((3, 5), (5, 0)), ((3, 0), (0, 4))])
def test_products_of_nothing_are_scheduled_as_nothing(shapes: tuple[tuple[int, ...], ...]) -> None:
    def f(c: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.mm(a, b), torch.addmm(c, a, b, beta=2) + 1

    inputs = tensors((shapes[0][0], shapes[1][1]), *shapes)
    graph = decompose_contractions(imported(f, *inputs))
    assert all(isinstance(n, Compute) for n in graph.nodes)
    found = torch.compile(f, backend="mlc", dynamic=False)(*inputs)
    torch.testing.assert_close(found, f(*inputs))


def test_a_product_without_a_sum_is_element_wise() -> None:
    inputs = tensors((90, 1), (1, 80))
    graph = decompose_contractions(imported(torch.mm, *inputs))
    (node,) = graph.nodes
    assert isinstance(node, Compute)
    torch.testing.assert_close(answer(graph, inputs), torch.mm(*inputs))


def test_a_small_product_of_sizes_that_vary_is_left_to_blas() -> None:
    graph = decompose_contractions(imported(torch.mm, *tensors((5, 10), (10, 5)), dynamic=True))
    assert any(isinstance(n, Library) for n in graph.nodes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_small_products_of_integers_are_opened(dtype: torch.dtype) -> None:
    graph = decompose_contractions(imported(torch.mm, *tensors((5, 10), (10, 5), dtype=dtype)))
    assert not any(isinstance(n, Library) for n in graph.nodes)
    graph = decompose_contractions(imported(torch.mm, *tensors((70, 90), (90, 80), dtype=dtype)))
    assert any(isinstance(n, Library) for n in graph.nodes)


def test_a_dequantised_weight_is_read_as_it_is_packed() -> None:
    def f(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return x @ (w.to(x.dtype) * s).t()

    x, s = tensors((1, 64), (128, 1))
    (w,) = tensors((128, 64), dtype=torch.int8)
    graph = eliminate_dead(decompose_contractions(imported(f, x, w, s)))
    (node,) = graph.nodes
    assert isinstance(node, Reduction)
    types = graph.types()
    assert sorted(types[ld.buffer].dtype.value for ld in loads(node.values[0])) == ["float32", "float32", "int8"]
    assert all("in its loops" in o.note for o in node.origins)


def test_a_gathered_operand_is_made_first() -> None:
    def f(table: Tensor, at: Tensor, w: Tensor) -> Tensor:
        return table[at] @ w

    table, w = tensors((50, 64), (64, 64))
    graph = decompose_contractions(imported(f, table, torch.arange(8), w))
    (node,) = (n for n in graph.nodes if isinstance(n, Library))
    assert "gathers by data" in node.reason


def test_an_operand_that_others_read_too_is_no_reason_to_open() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = w.to(x.dtype)
        return x @ wide.t(), wide

    (x,) = tensors((1, 64))
    (w,) = tensors((64, 64), dtype=torch.int8)
    shared = [Products(g).product(n) for g in [imported(f, x, w)] for n in g.nodes if isinstance(n, Library)]
    assert [p.shared for p in shared if p is not None] == [(True, True)]


def test_digits_leave_no_division() -> None:
    """Groups of 32 and two elements a byte: three axes."""
    w = Load("w", (I0, _div(R0, 2)), DType.UINT8)
    low = call("lt", IndexValue(_mod(R0, 2), DType.INT64), const(1, DType.INT64))
    nibble = Select(low, call("bit_and", w, const(15, DType.UINT8)), call("shr", w, const(4, DType.UINT8)))
    value = call("mul", cast(nibble, DType.FLOAT32), Load("s", (I0, _div(R0, 32)), DType.FLOAT32))
    axes, moved = refine(value, {R0: sympy.Integer(128)}, {I0: sympy.Integer(4)}, SymbolTable())
    assert list(map(int, axes.values())) == [4, 16, 2]
    assert not any(e.has(*_DIVISIONS) for e in index_exprs(moved))
    assert [str(ld.indices) for ld in loads(moved)][-1] == "(i0, r0)"


def test_halves_side_by_side_are_two_digits() -> None:
    first = call("lt", IndexValue(R0, DType.INT64), const(64, DType.INT64))
    value = Select(first, Load("w", (R0,), DType.FLOAT32), Load("w", (R0 - 64,), DType.FLOAT32))
    axes, moved = refine(value, {R0: sympy.Integer(128)}, {}, SymbolTable())
    assert list(map(int, axes.values())) == [2, 64]
    assert [e for e in walk(moved) if isinstance(e, IndexValue)] == [IndexValue(R0, DType.INT64)]


@pytest.mark.parametrize("extent", [sympy.Integer(100), symbol("s0")])
def test_an_axis_that_its_divisors_do_not_divide_stays_whole(extent: sympy.Expr) -> None:
    value = Load("s", (_div(R0, 32),), DType.FLOAT32)
    axes, moved = refine(value, {R0: extent}, {}, SymbolTable((Size(symbol("s0"), 1),)))
    assert axes == {R0: extent} and moved is value


def test_a_symbolic_extent_that_is_known_to_be_divisible_is_split() -> None:
    extent = 32 * symbol("s0")
    axes, _ = refine(Load("s", (_div(R0, 32),), DType.FLOAT32), {R0: extent}, {}, SymbolTable((Size(symbol("s0"), 1),)))
    assert axes == {R0: symbol("s0"), R1: 32}


def test_a_compute_follows_where_the_sum_is_not_the_result() -> None:
    graph = opened(imported(torch.mm, *tensors((3, 5), (5, 4), dtype=torch.bfloat16)))
    total, result = graph.nodes
    assert isinstance(total, Reduction) and total.types[0].dtype is DType.FLOAT32
    assert isinstance(result, Compute) and result.type.dtype is DType.BFLOAT16


def activated(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x) @ w


def gated(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x) * y) @ w


def normed(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * g) @ w


def across(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x).t() @ torch.sigmoid(w)


PROLOGUES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "gelu": (activated, ((7, 33), (33, 5))),
    "gated": (gated, ((7, 33), (7, 33), (33, 5))),
    "norm": (normed, ((7, 33), (33,), (33, 5))),
    "both, one across": (across, ((33, 7), (33, 5))),
    "no rows": (gated, ((0, 33), (0, 33), (33, 5))),
}


@pytest.mark.parametrize("name", PROLOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_may_make_an_operand_itself(name: str, dtype: torch.dtype) -> None:
    """What is element-wise in front of a product moves into it, also where that reads no less; a sum of rows stays."""
    fn, shapes = PROLOGUES[name]
    inputs = tensors(*shapes, dtype=dtype)
    graph = opened(imported(fn, *inputs), inlined=True)
    products = [n for n in graph.nodes if isinstance(n, Reduction)][-1:]
    made = {n.name for n in graph.nodes if isinstance(n, Compute) and n.type.shape == shapes[0]}
    assert made.isdisjoint(ld.buffer for p in products for v in p.values for ld in loads(v))
    wanted = fn(*(t.double() for t in inputs)).to(torch.float32)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(answer(graph, inputs).float(), wanted, rtol=tolerance, atol=tolerance)
