"""Structural keys are equal just for functions that differ in names alone."""

import dataclasses

import numpy as np
import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import (
    Cast,
    Load,
    call,
    cast,
    const,
    flops,
    free_symbols,
    length,
    loads,
    symbol,
    times,
    walk,
)
from torch_mlc.ir.graph.graph import CallTensor, Compute, Graph, Input, IRModule, Origin, TensorType
from torch_mlc.ir.nest.loops import LoopNest, contiguous_strides
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.structure import structural_key, structural_text

TEXT = """
@nest(outputs=['out'])
def f(a: float32[n, m], b: float32[n, m], out: float32[n, m]):
    n = size()
    m = size(divisor=8)
    t = local(float32[n, m])
    for p in parallel(n):
        for q in serial(m):
            with block('first'):
                i = spatial(n, p)
                j = spatial(m, q)
                t[i, j] = add(a[i, j], b[i, j])
    for u in parallel(n):
        for v in serial(m):
            with block('second'):
                i = spatial(n, u)
                j = spatial(m, v)
                out[i, j] = mul(t[i, j], a[i, (3*j + 2*i) % m])
"""


def nest(*changes: tuple[str, str]) -> LoopNest:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    made = parse(text)
    assert isinstance(made, LoopNest)
    return made


def test_names_do_not_count() -> None:
    other = nest(
        ("def f", "def g"),
        ("first", "x"),
        ("second", "y"),
        ("'out'", "'zz'"),
        ("out: ", "zz: "),
        ("out[", "zz["),
        ("t[", "q9["),
        ("t = local", "q9 = local"),
        (" p ", " z_p "),
        ("n, p)", "n, z_p)"),
        (" u ", " a_u "),
        ("n, u)", "n, a_u)"),
        (" j ", " aj "),
        (" i ", " zi "),
        ("[i, j]", "[zi, aj]"),
        ("(3*j + 2*i)", "(2*zi + 3*aj)"),
        ("a[i, ", "a[zi, "),
    )
    assert structural_text(other) == structural_text(nest())
    assert structural_key(other) == structural_key(nest())


@pytest.mark.parametrize(
    "change",
    [
        ("add(", "sub("),
        ("b[i, j])", "a[i, j])"),
        ("3*j + 2*i", "2*j + 3*i"),
        ("n = size()", "n = size(lower=2)"),
        ("n = size()\n    m = size(divisor=8)", "m = size(divisor=8)\n    n = size()"),
        ("for p in parallel", "for p in serial"),
        ("out: float32[n, m]", "out: tensor(float32, [n, m], strides=[1, n])"),
        ("out: float32[n, m]", "out: tensor(float32, [n, m], align=16)"),
        ("t = local(float32", "t = local(float64"),
        ("with block('first')", "with block('first', annotations={'atomic': True})"),
        ("@nest(outputs=['out'])", "@nest(outputs=['out'], annotations={'num_warps': 4})"),
        ("a: float32[n, m], b: float32[n, m]", "b: float32[n, m], a: float32[n, m]"),
        ("spatial(n, u)", "spatial(n, u + 1)"),
        ("mul(t[i, j]", "mul(t[i, j + 1]"),
    ],
    ids=str,
)
def test_everything_else_does(change: tuple[str, str]) -> None:
    assert structural_key(nest(change)) != structural_key(nest())


def test_hints_do_not_count() -> None:
    table = SymbolTable(tuple(dataclasses.replace(s, hint=7) for s in nest().symbols.sizes))
    assert structural_key(dataclasses.replace(nest(), symbols=table)) == structural_key(nest())


def graph(name: str, x: str, y: str, scale: float = 2.0, callee: str = "") -> Graph:
    n, i = symbol(f"n_{name}"), symbol(f"i_{name}")
    shape = (n, sympy.Integer(3))
    kind = TensorType(shape, contiguous_strides(shape), DType.FLOAT32)
    j = symbol(f"a_{name}")
    value = call("mul", Load(x, (i, j), DType.FLOAT32), const(scale, DType.FLOAT32))
    nodes: tuple = (Compute(y, kind, (i, j), value, (Origin("aten.mul", name),)),)
    if callee:
        nodes += (CallTensor(("made",), (kind,), callee, (y,), (n,)),)
    return Graph(name, (Input(x, kind),), nodes, (y, n * 3, None), SymbolTable((Size(n),)))


def test_graphs() -> None:
    assert structural_key(graph("f", "x", "y")) == structural_key(graph("g", "y", "x"))
    assert structural_key(graph("f", "x", "y")) != structural_key(graph("f", "x", "y", 3.0))


def test_a_call_is_what_it_calls() -> None:
    one = IRModule({"main": graph("m", "x", "y", callee="f"), "f": graph("f", "a", "b")})
    two = IRModule({"main": graph("m", "x", "y", callee="g"), "g": graph("g", "c", "d")})
    three = IRModule({"main": graph("m", "x", "y", callee="g"), "g": graph("g", "c", "d", 3.0)})
    keys = [structural_key(m.graph, m) for m in (one, two, three)]
    assert keys[0] == keys[1] != keys[2]


def test_shared_parts_are_written_once() -> None:
    value = Load("x", (sympy.S.Zero,), DType.FLOAT32)
    for _ in range(200):
        value = call("add", value, value)
    kind = TensorType((sympy.S.One,), (sympy.S.One,), DType.FLOAT32)
    g = Graph("g", (Input("x", kind),), (Compute("y", kind, (symbol("i"),), value),), ("y",))
    assert len(structural_text(g)) < 10000


def test_shared_parts_are_looked_at_once_and_counted_each_time() -> None:
    """A value that is made of itself twice, sixty times, is 2 to the 60th power of parts, written out."""
    value = Load("x", (sympy.S.Zero,), DType.FLOAT32)
    for _ in range(60):
        value = call("add", value, value)
    assert len(list(walk(value))) == 61 and len(list(loads(value))) == 1
    assert length(value) == 2**61 - 1 and flops(value) == 2**60 - 1
    assert times(value, "x") == 2**60 and times(value, "y") == 0 and free_symbols(value) == set()


def test_a_literal_is_rounded_by_each_type_that_it_goes_through() -> None:
    single, wide = np.float32(0.1), const(0.1, DType.FLOAT32)
    assert cast(wide, DType.FLOAT64) == const(float(single), DType.FLOAT64)
    assert cast(const(0.99999999, DType.FLOAT32), DType.INT64) == const(1, DType.INT64)
    assert cast(cast(const(1e300, DType.FLOAT64), DType.FLOAT32), DType.FLOAT64) == const(np.inf, DType.FLOAT64)
    half = cast(wide, DType.FLOAT16)
    assert isinstance(half, Cast) and half.value == const(float(np.float16(single)), DType.FLOAT32)
