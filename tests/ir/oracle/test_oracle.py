"""The oracle runs nests and graphs: reductions, tails, gathers, lazy selects, empty shapes; errors name places."""

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.ir.errors import IRError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import ARGMAX, LOGSUMEXP, SUM, WELFORD
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.graph.graph import (
    CallTensor,
    Compute,
    Graph,
    Input,
    IRModule,
    Library,
    Reduction,
    Ref,
    TensorType,
    View,
)
from torch_mlc.ir.nest.loops import contiguous_strides
from torch_mlc.ir.oracle.oracle import OracleError, run_graph, run_nest
from torch_mlc.ir.text.parser import parse

F32, I64 = DType.FLOAT32, DType.INT64
n, m = symbol("n"), symbol("m")
i0, r0 = symbol("i0"), symbol("r0")
SIZES = SymbolTable((Size(n), Size(m)))
RNG = np.random.default_rng(0)


def tensor(*shape: sympy.Expr | int, dtype: DType = F32) -> TensorType:
    extents = tuple(map(sympy.sympify, shape))
    return TensorType(extents, contiguous_strides(extents), dtype)


ROW_SUM = """
@nest(outputs=['out0'])
def row_sum(in0: float32[n, m], out0: float32[n]):
    n = size()
    m = size()
    for i in parallel(n):
        for ro in serial(FloorDiv(m + 3, 4)):
            for ri in vectorized(4):
                with block('b0'):
                    i0 = spatial(n, i)
                    r0 = reduction(m, 4*ro + ri)
                    where(4*ro + ri < m)
                    out0[i0] = sum.update(in0[i0, r0])
"""


@pytest.mark.parametrize("rows, columns", [(3, 7), (1, 1), (0, 5), (5, 0), (4, 8)])
@pytest.mark.parametrize("backward", [False, True])
def test_split_reduction_with_a_tail(rows: int, columns: int, backward: bool) -> None:
    x = RNG.standard_normal((rows, columns), np.float32)
    out = run_nest(parse(ROW_SUM), [x], {"n": rows, "m": columns}, backward=backward)["out0"]
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, x.sum(1), rtol=1e-5, atol=1e-6)


def test_storage_is_read_at_the_strides() -> None:
    nest = parse(ROW_SUM.replace("in0: float32[n, m]", "in0: tensor(float32, [n, m], strides=[1, n])"))
    storage = np.arange(6, dtype=np.float32)
    out = run_nest(nest, {"in0": storage}, {"n": 2, "m": 3})["out0"]
    np.testing.assert_array_equal(out, storage.reshape(3, 2).T.sum(1))


def test_a_missing_predicate_is_found() -> None:
    nest = parse(ROW_SUM.replace("                    where(4*ro + ri < m)\n", ""))
    with pytest.raises(OracleError, match=r"block b0: axis r0 is bound to 7, outside range\(7\)"):
        run_nest(nest, [np.zeros((2, 7), np.float32)], {"n": 2, "m": 7})


def test_out_of_range_names_block_buffer_and_index() -> None:
    nest = parse(ROW_SUM.replace("in0[i0, r0]", "in0[i0, r0 + 1]"))
    with pytest.raises(OracleError, match=r"block b0: load of in0\[0, 3\], whose shape is \(2, 3\)"):
        run_nest(nest, [np.zeros((2, 3), np.float32)], {"n": 2, "m": 3})


def test_a_body_that_speaks_of_loops_is_refused() -> None:
    nest = parse(ROW_SUM.replace("in0[i0, r0]", "in0[i0, ri]"))
    with pytest.raises(IRError, match="nothing binds the symbol ri"):
        run_nest(nest, [np.zeros((2, 3), np.float32)], {"n": 2, "m": 3})


def test_inputs_that_do_not_fit() -> None:
    nest = parse(ROW_SUM)
    with pytest.raises(OracleError, match="elements are float32, given float64"):
        run_nest(nest, [np.zeros((2, 3))], {"n": 2, "m": 3})
    with pytest.raises(OracleError, match=r"shape is \(2, 4\)"):
        run_nest(nest, [np.zeros((2, 3), np.float32)], {"n": 2, "m": 4})
    with pytest.raises(OracleError, match="no value for the size m"):
        run_nest(nest, [np.zeros((2, 3), np.float32)], {"n": 2})
    with pytest.raises(OracleError, match="takes 1 inputs"):
        run_nest(nest, [], {"n": 2, "m": 3})


def elements(outputs: str, body: str, axis: str = "spatial(4, i)", loop: str = "serial(4)"):
    """A nest over the four elements of its outputs."""
    names = outputs.split(", ")
    params = ", ".join(f"{name}: float32[4]" for name in names)
    return parse(f"""
@nest(outputs={names})
def f({params}):
    for i in {loop}:
        with block('b'):
            i0 = {axis}
            {body}
""")


def test_what_nobody_writes_is_poison() -> None:
    nest = elements("out0", "out0[i0] = float32(1.0)", "spatial(2, i)", "serial(2)")
    np.testing.assert_array_equal(run_nest(nest, [], {})["out0"], [1, 1, np.nan, np.nan])


def test_in_place() -> None:
    nest = elements("x", "x[i0] = add(x[i0], float32(1.0))")
    given = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(run_nest(nest, {"x": given}, {})["x"], given + 1)
    np.testing.assert_array_equal(given, np.arange(4))


def test_a_statement_sees_what_the_one_before_it_wrote() -> None:
    nest = elements("x, y", "x[i0] = add(x[i0], float32(1.0))\n            y[i0] = x[i0]")
    out = run_nest(nest, {"x": np.zeros(4, np.float32)}, {})
    np.testing.assert_array_equal(out["y"], [1, 1, 1, 1])


def graph(*nodes, inputs=None, outputs=None) -> Graph:
    return Graph("g", inputs or (Input("x", tensor(n, m)),), nodes, outputs or nodes[-1].names, SIZES)


def test_select_evaluates_one_branch() -> None:
    inside = call("lt", IndexValue(i0, I64), IndexValue(m, I64))
    pad = Compute("y", tensor(m + 2), (i0,), Select(inside, Load("x", (sympy.S.Zero, i0), F32), const(7.0, F32)))
    out = run_graph(graph(pad), [np.ones((1, 3), np.float32)], {"n": 1, "m": 3})["y"]
    np.testing.assert_array_equal(out, [1, 1, 1, 7, 7])


def test_a_chain_of_two_hundred_selects() -> None:
    value = const(-1.0, F32)
    for k in range(200):
        value = Select(call("eq", IndexValue(i0, I64), const(k, I64)), Load("x", (sympy.S.Zero, i0), F32), value)
    x = RNG.standard_normal((1, 210), np.float32)
    out = run_graph(graph(Compute("y", tensor(m), (i0,), value)), [x], {"n": 1, "m": 210})["y"]
    np.testing.assert_array_equal(out, np.where(np.arange(210) < 200, x[0], -1))


def test_gather() -> None:
    inputs = (Input("x", tensor(n, m)), Input("at", tensor(n, dtype=I64)))
    value = Load("x", (i0, Load("at", (i0,), I64)), F32)
    x = RNG.standard_normal((3, 4), np.float32)
    at = np.array([3, 0, 2])
    node = Compute("y", tensor(n), (i0,), value)
    out = run_graph(graph(node, inputs=inputs), [x, at], {"n": 3, "m": 4})["y"]
    np.testing.assert_array_equal(out, x[np.arange(3), at])
    with pytest.raises(OracleError, match=r"load of x\[1, 4\]"):
        run_graph(graph(node, inputs=inputs), [x, np.array([0, 4, 0])], {"n": 3, "m": 4})


def reduce(monoid, columns: int = 37) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    x = RNG.standard_normal((3, columns), np.float32)
    element = Load("x", (i0, r0), F32)
    state = monoid.lift(element, IndexValue(r0, I64)) if monoid is ARGMAX else monoid.lift(element)
    names = tuple(c.name for c in monoid.components)
    types = tuple(tensor(n, dtype=s.dtype) for s in state)
    reduction = Reduction(names, types, (i0,), (r0,), (m,), monoid, state)
    answers = monoid.project(tuple(Load(a, (i0,), t.dtype) for a, t in zip(names, types)))
    results = [Compute(f"out{k}", tensor(n, dtype=a.dtype), (i0,), a) for k, a in enumerate(answers)]
    g = graph(reduction, *results, outputs=tuple(r.name for r in results))
    return x, tuple(run_graph(g, [x], {"n": 3, "m": columns}).values())


def test_monoids_reduce_as_torch_does() -> None:
    x, (total,) = reduce(SUM)
    np.testing.assert_allclose(total, x.sum(1), rtol=1e-5, atol=1e-5)
    x, (best, at) = reduce(ARGMAX)
    np.testing.assert_array_equal(best, x.max(1))
    np.testing.assert_array_equal(at, x.argmax(1))
    x, (mean, variance) = reduce(WELFORD)
    np.testing.assert_allclose(mean, x.mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, x.var(1), rtol=1e-5)
    x, (lse,) = reduce(LOGSUMEXP)
    np.testing.assert_allclose(lse, torch.logsumexp(torch.from_numpy(x), 1).numpy(), rtol=1e-6)


def test_halves_round_where_the_casts_are() -> None:
    bf16 = DType.BFLOAT16
    inputs = (Input("x", tensor(n, dtype=bf16)),)
    wide = cast(Load("x", (i0,), bf16), F32)
    value = cast(call("add", call("mul", wide, wide), const(2.0**-9, F32)), bf16)
    x = torch.linspace(0.5, 2, 9).to(bf16.torch)
    node = Compute("y", tensor(n, dtype=bf16), (i0,), value)
    given = x.float().numpy().astype(bf16.numpy)
    out = run_graph(graph(node, inputs=inputs), [given], {"n": 9, "m": 1})["y"]
    wanted = (x.float() * x.float() + 2.0**-9).to(torch.bfloat16)
    np.testing.assert_array_equal(out.astype(np.float32), wanted.float().numpy())


def test_views_calls_and_libraries() -> None:
    i1 = symbol("i1")
    view = View("t", tensor(m, n), "x", (i0, i1), (i1, i0))
    mm = Library(("p",), (tensor(m, m),), "aten::mm.default", (Ref("t"), Ref("x")))
    double = CallTensor(("y",), (tensor(m, m),), "twice", ("p",), (m,))
    k = symbol("k")
    twice = Graph("twice", (Input("a", tensor(k, k)),),
                  (Compute("b", tensor(k, k), (i0, i1), call("mul", Load("a", (i0, i1), F32), const(2.0, F32))),),
                  ("b",), SymbolTable((Size(k),)))  # fmt: skip
    g = graph(view, mm, double, outputs=("y", n, None))
    x = RNG.standard_normal((3, 4), np.float32)
    out = run_graph(
        g, [x], {"n": 3, "m": 4},
        module=IRModule({"g": g, "twice": twice}, "g"),
        library=lambda node, arrays: [arrays["t"] @ arrays["x"]],
    )  # fmt: skip
    np.testing.assert_allclose(out["y"], 2 * x.T @ x, rtol=1e-5)
    with pytest.raises(OracleError, match="pass library="):
        run_graph(g, [x], {"n": 3, "m": 4})
