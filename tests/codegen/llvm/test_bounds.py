"""Indices that data give, and divisors: right ones cost nothing in meaning, wrong ones raise and read nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv

from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.errors import DivisionByZeroError, OutOfRangeError
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Call, Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.nest.loops import Axis, Block, Bound, Buffer, Loop, LoopKind, LoopNest, Store
from torch_mlc.ir.target import Target
from torch_mlc.runtime.cpu import CpuKernel, load_kernel

I64, F32 = DType.INT64, DType.FLOAT32
N, ROWS, I0, I1 = symbol("n"), symbol("rows"), symbol("i0"), symbol("i1")
Made = Callable[..., CpuKernel]


def size(expr: sympy.Expr) -> Expr:
    return const(int(expr), I64) if expr.is_Integer else IndexValue(expr, I64)


def row_of(extent: sympy.Expr, low: int = 0) -> Expr:
    return call("check_bounds", Load("in1", (I0,), I64), const(low, I64), size(extent), const(0, I64))


def gathering(
    value: Callable[[Expr], Expr], extent: sympy.Expr, lanes: int, least: int, team: bool = False
) -> LoopNest:
    """``out0[i] = value(in0[in1[i]])`` for n elements, ``lanes`` at a time, over a table of ``extent`` elements."""
    one = sympy.S.One
    params = (
        Buffer("in0", (extent,), (one,), F32),
        Buffer("in1", (N,), (one,), I64),
        Buffer("out0", (N,), (one,), F32),
    )
    outer, lane, width = symbol("io"), symbol("ii"), sympy.Integer(lanes)
    where = outer * width + lane
    store = Store("out0", (I0,), value(Load("in0", (row_of(extent),), F32)))
    block = Block("b0", (Axis(I0, N),), (where,), (store,), (Bound(where, N),))
    kind = LoopKind.PARALLEL if team else LoopKind.SERIAL
    loops = Loop(outer, CeilDiv(N, width), (Loop(lane, width, (block,), LoopKind.VECTORIZED),), kind)
    if team:
        loops = replace(loops, annotations=(("grain", 0),))
    sizes = (Size(N), Size(ROWS, least)) if extent == ROWS else (Size(N),)
    return LoopNest("kernel", params, ("out0",), (loops,), symbols=SymbolTable(sizes))


def embedding(width: int, lanes: int) -> LoopNest:
    """``out0[i, j] = in0[in1[i], j]``."""
    w, one = sympy.Integer(width), sympy.S.One
    params = (
        Buffer("in0", (ROWS, w), (w, one), F32), Buffer("in1", (N,), (one,), I64), Buffer("out0", (N, w), (w, one), F32)
    )  # fmt: skip
    outer, lane, row, step = symbol("jo"), symbol("ji"), symbol("io"), sympy.Integer(lanes)
    store = Store("out0", (I0, I1), Load("in0", (row_of(ROWS), I1), F32))
    block = Block(
        "b0", (Axis(I0, N), Axis(I1, w)), (row, outer * step + lane), (store,), (Bound(outer * step + lane, w),)
    )
    inner = Loop(outer, CeilDiv(w, step), (Loop(lane, step, (block,), LoopKind.VECTORIZED),))
    table = SymbolTable((Size(N), Size(ROWS, 1)))
    return LoopNest("kernel", params, ("out0",), (Loop(row, N, (inner,)),), symbols=table)


def run(nest: LoopNest, target: Target, data: np.ndarray, index: np.ndarray) -> np.ndarray:
    kernel = load_kernel(emit_llvm(nest, target), target)
    out = np.full((len(index), *data.shape[1:]), np.nan, np.float32)
    sizes = {"n": len(index), "rows": len(data)}
    kernel(data.ctypes.data, index.ctypes.data, out.ctypes.data, *(sizes[s.name] for s in nest.symbols.symbols))
    return out


@pytest.mark.parametrize("team", [False, True])
@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("extent", [sympy.Integer(11), ROWS], ids=["constant", "symbol"])
def test_every_wrong_index_is_told(extent: sympy.Expr, lanes: int, team: bool, target: Target) -> None:
    nest = gathering(lambda x: x, extent, lanes, 1, team)
    several = replace(target, cores=2)
    rng = np.random.default_rng(0)
    data, good = rng.normal(size=11).astype(np.float32), rng.integers(0, 11, 53)
    np.testing.assert_array_equal(run(nest, several, data, good), data[good])
    for place, wrong in ((0, 11), (52, -1), (30, 1 << 40), (7, -(1 << 40))):
        bad = good.copy()
        bad[place] = wrong
        with pytest.raises(OutOfRangeError, match=f"index {wrong} is out of bounds for dimension 0 with size 11"):
            run(nest, several, data, bad)


def test_the_error_is_either_of_eagers(target: Target) -> None:
    for kind in (IndexError, RuntimeError):
        with pytest.raises(kind, match="index 3 "):
            run(gathering(lambda x: x, ROWS, 8, 1), target, np.zeros(3, np.float32), np.array([3]))


@pytest.mark.parametrize("width", [1, 7, 24])
def test_rows_are_checked_outside_of_the_loop_over_them(width: int, target: Target) -> None:
    nest = embedding(width, 8)
    data = np.random.default_rng(1).normal(size=(5, width)).astype(np.float32)
    good = np.array([4, 0, 0, 3])
    np.testing.assert_array_equal(run(nest, target, data, good), data[good])
    with pytest.raises(OutOfRangeError, match="index 5 "):
        run(nest, target, data, np.array([4, 5]))
    if width == 24:
        text = emit_llvm(nest, target).text
        loop = text[text.rindex("\nhead.") :]
        assert "store <8 x float>" in loop and "wrong" not in loop, text


@pytest.mark.parametrize("fn", ["floordiv", "remainder", "truncdiv", "fmod"])
@pytest.mark.parametrize("lanes", [1, 8])
def test_a_divisor_that_is_zero_is_told(fn: str, lanes: int, target: Target) -> None:
    """Beside indices that are checked as well, and only where a choice takes the quotient."""
    divisor = Load("in1", (I0,), I64)
    quotient = call(fn, const(20, I64), call("check_divisor", divisor))

    def chosen(x: Expr) -> Expr:
        return Select(call("lt", divisor, const(7, I64)), call("add", x, cast(quotient, F32)), const(-1.0, F32))

    nest = gathering(chosen, ROWS, lanes, 1)
    data, good = np.arange(9, dtype=np.float32), np.array([3, 2, 7, 1, 100, 6, 5, 4, 3, 2, 1])
    expected = {"floordiv": 20 // good, "truncdiv": 20 // good}.get(fn, 20 % good)
    np.testing.assert_array_equal(run(nest, target, data, good), np.where(good < 7, good + expected, -1))
    for place in (0, 4, 10):
        bad = good.copy()
        bad[place] = 0
        with pytest.raises(DivisionByZeroError, match="ZeroDivisionError"):
            run(nest, target, data, bad)
        bad[place] = -1
        with pytest.raises(OutOfRangeError, match="index -1 "):
            run(nest, target, data, bad)


def test_what_a_select_leaves_out_is_not_checked(target: Target) -> None:
    def unless_negative(x: Expr) -> Expr:
        return Select(call("ge", Load("in1", (I0,), I64), const(0, I64)), x, const(-1.0, F32))

    for lanes in (1, 8):
        nest = gathering(unless_negative, ROWS, lanes, 1)
        data, index = np.arange(4, dtype=np.float32), np.array([3, -100, 0, -1, 2, 1, 1, 1, -7, 3])
        np.testing.assert_array_equal(run(nest, target, data, index), np.where(index < 0, -1, index))
        with pytest.raises(OutOfRangeError, match="index 4 "):
            run(nest, target, data, np.array([3, -100, 4]))


@pytest.mark.parametrize("lanes", [1, 8])
def test_nor_is_a_position_that_no_data_give(lanes: int, target: Target) -> None:
    """Nothing is loaded in the branches, and yet it matters who takes them."""
    place = IndexValue(I0, I64)
    checked = cast(call("check_bounds", place, const(0, I64), const(5, I64), const(0, I64)), F32)
    for value in (
        lambda x: Select(call("lt", place, const(5, I64)), checked, x),
        lambda x: Select(call("le", const(5, I64), place), x, checked),
    ):
        nest = gathering(value, ROWS, lanes, 1)
        data, index = np.arange(9, dtype=np.float32), np.full(13, 7)
        np.testing.assert_array_equal(run(nest, target, data, index), [0, 1, 2, 3, 4, *[7] * 8])
    with pytest.raises(OutOfRangeError, match=r"index \d+ is out of bounds for dimension 0 with size 5"):
        run(gathering(lambda x: call("add", x, checked), ROWS, lanes, 1), target, data, index)


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_table_without_elements(lanes: int, target: Target) -> None:
    """There is nothing to read in the wrong index's place, be the address valid or not."""
    nest = gathering(lambda x: x, ROWS, lanes, 0)
    out, index = np.zeros(9, np.float32), np.zeros(9, np.int64)
    kernel = load_kernel(emit_llvm(nest, target), target)
    with pytest.raises(OutOfRangeError, match="index 0 is out of bounds for dimension 0 with size 0"):
        kernel(0, index.ctypes.data, out.ctypes.data, 9, 0)
    kernel(0, index.ctypes.data, out.ctypes.data, 0, 0)


def test_threads_that_run_one_kernel_hear_of_their_own_faults(target: Target) -> None:
    nest = gathering(lambda x: x, ROWS, 8, 1)
    kernel = load_kernel(emit_llvm(nest, target), target)
    data, wrong = np.zeros(100, np.float32), []

    def work(value: int) -> None:
        index, out = np.full(1000, value), np.empty(1000, np.float32)
        for _ in range(50):
            try:
                kernel(data.ctypes.data, index.ctypes.data, out.ctypes.data, 1000, 100)
                told = ""
            except OutOfRangeError as error:
                told = str(error)
            if told.startswith(f"index {value} ") != (value >= 100):
                wrong.append((value, told))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, (5, 100, 70, 205)))
    assert not wrong


def test_kernels_without_gathers_have_no_checks(target: Target) -> None:
    nest = gathering(lambda x: x, ROWS, 8, 1)

    def unchecked(e: Expr) -> Expr:
        return e.args[0] if isinstance(e, Call) else e

    (block,) = (n for n in _blocks(nest))
    plain = replace(block, body=(Store("out0", (I0,), Load("in0", (unchecked(row_of(ROWS)),), F32)),))
    loop = nest.body[0]
    assert isinstance(loop, Loop) and isinstance(loop.body[0], Loop)
    bare = replace(nest, body=(replace(loop, body=(replace(loop.body[0], body=(plain,)),)),))
    assert "wrong" not in emit_llvm(bare, target).text and "wrong" in emit_llvm(nest, target).text


def _blocks(nest: LoopNest) -> list[Block]:
    loop = nest.body[0]
    while isinstance(loop, Loop):
        loop = loop.body[0]
    return [loop]
