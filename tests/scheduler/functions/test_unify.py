"""Functions that differ in constants alone become one of further sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.expr.value import Load, call, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, contiguous_strides
from torch_mlc.scheduler.functions.unify import skeleton, unify

A, B, C = (symbol(n) for n in ("i0", "i1", "i2"))
F32 = DType.FLOAT32


def scaled(heads: int, rows: int = 5, width: int = 8, factor: float = 2.0) -> TensorFunction:
    """out[i, j, k] = factor * in[j, i, k]"""

    def buffer(name: str, *shape: int) -> Buffer:
        sizes = tuple(map(sympy.Integer, shape))
        return Buffer(name, sizes, contiguous_strides(sizes), F32)

    source, made = buffer("in0", rows, heads, width), buffer("out0", heads, rows, width)
    value = call("mul", Load("in0", (B, A, C), F32), const(factor, F32))
    dims = tuple(Dim(v, sympy.Integer(e)) for v, e in ((A, heads), (B, rows), (C, width)))
    return TensorFunction(
        "scaled", dims, (), (source,), (Output(made, "t0", (A, B, C)),), (Stage(("t0",), (value,), False),)
    )


def test_constants_become_multiples_of_one_size() -> None:
    unified = unify([scaled(32), scaled(8), scaled(4)])
    assert unified is not None and unified.values == ((8,), (2,), (1,))
    (size,) = unified.function.symbols.sizes
    s0 = size.symbol
    assert (size.lower, size.upper, size.divisor) == (1, 8, 1)
    assert [d.extent for d in unified.function.rows] == [4 * s0, 5, 8]
    assert unified.function.inputs[0].strides == (32 * s0, 8, 1)
    for given, (value,) in zip((32, 8, 4), unified.values, strict=True):
        assert [d.extent.xreplace({s0: sympy.Integer(value)}) for d in unified.function.rows] == [given, 5, 8]


def test_two_numbers_at_most() -> None:
    assert unify([scaled(2, 3), scaled(4, 9)]) is not None
    pairs = [scaled(2, 3), scaled(4, 9)]
    wider = [replace(f, inputs=(replace(f.inputs[0], strides=(e, *f.inputs[0].strides[1:])),)) for f, e in
             zip(pairs, map(sympy.Integer, (1000, 7000)), strict=True)]  # fmt: skip
    assert unify(wider) is None


@pytest.mark.parametrize("other", [scaled(4, width=16), scaled(0)], ids=["rows of another length", "nothing"])
def test_what_stays_apart(other: TensorFunction) -> None:
    assert skeleton(other) == skeleton(scaled(4))
    assert unify([scaled(4), other]) is None


def test_skeletons_differ_by_more_than_constants() -> None:
    assert skeleton(scaled(4, factor=3.0)) != skeleton(scaled(4))
    reducing = replace(scaled(4), stages=(replace(scaled(4).stages[0], axes=(A,)),))
    assert skeleton(reducing) is None


def summed(rows: int, columns: int, turned: bool = False) -> TensorFunction:
    """out[j] = sum of in[:, j], or of in[j, :]"""

    def buffer(name: str, *shape: int) -> Buffer:
        sizes = tuple(map(sympy.Integer, shape))
        return Buffer(name, sizes, contiguous_strides(sizes), F32)

    row = symbol("r0")
    source = buffer("in0", *((columns, rows) if turned else (rows, columns)))
    value = Load("in0", (A, row) if turned else (row, A), F32)
    dims = (Dim(A, sympy.Integer(columns)),), (Dim(row, sympy.Integer(rows)),)
    made = Output(buffer("out0", columns), "t0", (A,))
    return TensorFunction("summed", *dims, (source,), (made,), (Stage(("t0",), (value,), True, SUM),))


def test_sums_of_columns_are_one_whatever_their_sizes() -> None:
    unified = unify([summed(256, 768), summed(64, 3072), summed(8, 2304)])
    assert unified is not None and unified.values == ((1, 32), (4, 8), (3, 1))
    columns, rows = unified.function.symbols.sizes
    assert unified.function.inner[0].extent == 8 * rows.symbol
    assert unified.function.rows[0].extent == 768 * columns.symbol


@pytest.mark.parametrize(
    "functions",
    [(summed(256, 768, turned=True), summed(64, 768, turned=True)), (summed(256, 768), summed(64, 770))],
    ids=["registers hold rows", "vectors end within"],
)
def test_other_sums_are_not(functions: tuple[TensorFunction, ...]) -> None:
    assert skeleton(functions[0]) == skeleton(functions[1])
    assert unify(functions) is None
