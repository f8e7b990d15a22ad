"""Kernels over a table on CPUs: rows of any size like the oracle, by one thread and by a team."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.codegen.llvm.module import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, Load, call, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import target_for
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules import default_schedule

F32 = DType.FLOAT32
N, I0, R0 = symbol("s0"), symbol("i0"), symbol("r0")


def buffer(name: str, *shape: sympy.Expr) -> Buffer:
    strides = [sympy.S.One]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return Buffer(name, shape, tuple(strides[: len(shape)]), F32, align=4)


def momentum() -> TensorFunction:
    """Both results in place."""

    def load(name: str) -> Expr:
        return Load(name, (I0,), F32)

    p, g, m, rate = buffer("in0", N), buffer("in1", N), buffer("in2", N), buffer("in3")
    moving = call("add", call("mul", load("in2"), const(0.9, F32)), load("in1"))
    moved = call("sub", load("in0"), call("mul", Load("in3", (), F32), load("t0")))
    return TensorFunction(
        "momentum", (Dim(I0, N),), (), (p, g, m, rate), (Output(m, "t0", (I0,)), Output(p, "t1", (I0,))),
        (Stage(("t0",), (moving,), False), Stage(("t1",), (moved,), False)), SymbolTable((Size(N),)), table=True,
    )  # fmt: skip


def sums() -> TensorFunction:
    """A sum over each row of a matrix: iterations that hold a reduction."""
    wide = sympy.Integer(37)
    return TensorFunction(
        "sums", (Dim(I0, N),), (Dim(R0, wide),), (buffer("in0", N, wide),), (Output(buffer("out0", N), "t0", (I0,)),),
        (Stage(("t0",), (Load("in0", (I0, R0), F32),), True, SUM),), SymbolTable((Size(N),)), table=True,
    )  # fmt: skip


def scalar() -> TensorFunction:
    """No loop at all."""
    value = call("add", Load("in0", (), F32), const(1, F32))
    return TensorFunction(
        "scalar", (), (), (buffer("in0"),), (Output(buffer("in0"), "t0", ()),), (Stage(("t0",), (value,), False),),
        table=True,
    )  # fmt: skip


@pytest.mark.parametrize("make", [momentum, sums, scalar], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(1,), (0, 0), (0, 5, 0), (3, 4096, 70, 0, 129, 9001, 1)], ids=str)
@pytest.mark.parametrize("cores", [1, 3])
def test_rows_of_any_size(make, sizes: tuple[int, ...], cores: int) -> None:
    function = make()
    target = replace(target_for("cpu", None, None), cores=cores)
    nest = default_schedule(lower_to_loops(function), target).nest
    plain = lower_to_loops(replace(function, table=False))
    kernel = load_kernel(emit_llvm(nest, target), target)
    rng = np.random.default_rng(0)
    count = len(nest.symbols.symbols)
    arguments, rows = [len(sizes)], []
    for n in sizes:
        shapes = {b.name: tuple(int(e.subs(N, n)) for e in b.shape) for b in nest.params}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        rows.append((arrays, {k: v.copy() for k, v in arrays.items()}, {"s0": n} if count else {}))
        arguments += [arrays[b.name].ctypes.data for b in nest.params] + [n] * count
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        kernel(*arguments)
    finally:
        torch.set_num_threads(before)
    for arrays, given, numbers in rows:
        wanted = run_nest(plain, {b.name: given[b.name] for b in plain.given}, numbers)
        for name in nest.outputs:
            np.testing.assert_allclose(arrays[name], wanted[name], rtol=1e-5, atol=1e-5)
