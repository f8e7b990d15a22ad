"""Scheduled nests, written by hand, as Triton kernels."""

import math

import numpy as np
import pytest
import sympy

from torch_mlc.codegen.kernel import EmitError, wide_source
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import LOGSUMEXP, MAX, SUM, WELFORD, Monoid, monoid
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Const, Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.nest.hints import EVICT
from torch_mlc.ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    Loop,
    LoopKind,
    LoopNest,
    Node,
    Scope,
    Store,
    Update,
    contiguous_strides,
)
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.schedule.schedule import Schedule

SM90 = gpu_target("cuda:sm_90")
F32, BF16, I64 = DType.FLOAT32, DType.BFLOAT16, DType.INT64
BLOCK, TILE, SERIAL = LoopKind.BLOCK_X, LoopKind.THREAD_X, LoopKind.SERIAL
I0, R0 = symbol("i0"), symbol("r0")


def tensor(name: str, shape: tuple, dtype: DType = F32, scope: Scope = Scope.GLOBAL, strides: tuple = ()) -> Buffer:
    shape = tuple(map(sympy.sympify, shape))
    return Buffer(name, shape, tuple(map(sympy.sympify, strides)) or contiguous_strides(shape), dtype, scope)


def loop(name: str, extent: int | sympy.Expr, kind: LoopKind, *body: Node) -> Loop:
    return Loop(symbol(name), sympy.sympify(extent), body, kind)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pointwise(
    n: int, dtype: DType, value, block: int = 64, inputs: int = 1, out: DType | None = None, **notes
) -> LoopNest:
    """out0[i] = value(in0[i], ...), one tile a program."""
    names = [f"in{k}" for k in range(inputs)]
    index = symbol("b") * block + symbol("t")
    element = value(*(Load(x, (I0,), dtype) for x in names))
    body = Block(
        "b0", (Axis(I0, sympy.Integer(n)),), (index,), (Store("out0", (I0,), element),),
        () if n % block == 0 else (Bound(index, sympy.Integer(n)),),
    )  # fmt: skip
    params = (*(tensor(x, (n,), dtype) for x in names), tensor("out0", (n,), out or element.dtype))
    tree = loop("b", ceil_div(n, block), BLOCK, loop("t", block, TILE, body))
    return LoopNest("kernel", params, ("out0",), (tree,), annotations=tuple(notes.items()))


def reduced(n: int, tile: int, kind: Monoid, lifted, targets: tuple[str, ...], name: str, looped: bool) -> Node:
    """One reduction of in0[row, :], over a tile or over a loop of tiles."""
    k, t = symbol(f"{name}_k"), symbol(f"{name}_t")
    index = k * tile + t if looped else t
    block = Block(
        name,
        (Axis(I0, sympy.Integer(3)), Axis(R0, sympy.Integer(n), AxisKind.REDUCTION)),
        (symbol("row"), index),
        (Update(kind, tuple(Access(x, (I0,)) for x in targets), lifted),),
        () if n % tile == 0 else (Bound(index, sympy.Integer(n)),),
    )
    inner = loop(f"{name}_t", tile, TILE, block)
    return loop(f"{name}_k", ceil_div(n, tile), SERIAL, inner) if looped else inner


def row_reduction(n: int, tile: int, kind: Monoid, lifted, types: tuple[DType, ...], looped: bool, dtype: DType = F32):
    outs = tuple(f"out{k}" for k in range(len(types)))
    params = (tensor("in0", (3, n), dtype), *(tensor(o, (3,), d) for o, d in zip(outs, types, strict=True)))
    tree = loop("row", 3, BLOCK, reduced(n, tile, kind, lifted, outs, "b0", looped))
    return LoopNest("kernel", params, outs, (tree,))


X = Load("in0", (I0, R0), F32)


@pytest.mark.parametrize("n", [64, 1, 63, 65, 200])
def test_pointwise(agrees, n):
    source = agrees(pointwise(n, F32, lambda a, b: call("mul", call("exp", a), b), inputs=2))
    assert ("mask" in source.text) == (n % 64 != 0)


def test_peeled_programs_have_no_mask(agrees):
    source = agrees(pointwise(200, BF16, lambda a: cast(call("exp", cast(a, F32)), BF16), peel=True))
    full, tail = source.text.split("else:")
    assert "mask" not in full and "mask" in tail


def test_caches_are_told_what_to_keep():
    """A block's policy goes before its nest's."""
    nest = pointwise(64, F32, lambda a, b: call("add", a, b), inputs=2, **{"evict:in0": "evict_first"})
    loads = [line for line in emit_triton(nest, SM90).text.splitlines() if "tl.load" in line]
    assert ['eviction_policy="evict_first"' in line for line in loads] == [True, False]
    s = Schedule(nest)
    s.annotate("b0", EVICT.key("in0"), "evict_last")
    assert 'eviction_policy="evict_last"' in emit_triton(s.nest, SM90).text


def test_equal_loads_and_expressions_are_written_once(agrees):
    source = agrees(pointwise(64, F32, lambda a: call("add", call("exp", a), call("exp", a))))
    assert source.text.count("tl.load") == 1
    assert source.text.count("exp(") == 1


def test_shared_parts_do_not_multiply_the_text():
    def power(a: Expr) -> Expr:
        for _ in range(40):
            a = call("mul", a, a)
        return a

    assert emit_triton(pointwise(64, F32, power), SM90).text.count(" * v") == 39


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("n", [1, 16, 30, 33])
@pytest.mark.parametrize("name", ["sum", "max", "min", "product"])
def test_row_reduction(agrees, name, n, looped):
    if not looped and n > 32:
        n = 32
    agrees(row_reduction(n, 16 if looped else 32, monoid(name), (X,), (F32,), looped), tolerance=1e-5)


@pytest.mark.parametrize("looped", [False, True])
def test_maximum_of_a_row_with_nan_is_nan(agrees, looped):
    x = np.arange(60, dtype=np.float32).reshape(3, 20)
    x[1, 7] = math.nan
    agrees(row_reduction(20, 8 if looped else 32, MAX, (X,), (F32,), looped), inputs={"in0": x})


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_argument_reduction_takes_the_first_of_equals(agrees, name, looped):
    x = np.array([[1, 5, 5, 2, 0, 0] * 3, [math.nan, 1, math.nan, 2, 3, 4] * 3, [7] * 18], np.float32)
    lifted = (X, IndexValue(R0, I64))
    agrees(row_reduction(18, 8 if looped else 32, monoid(name), lifted, (F32, I64), looped), inputs={"in0": x})


@pytest.mark.parametrize("looped", [False, True])
def test_welford(agrees, looped):
    lifted = (X, const(0.0, F32), const(1.0, F32))
    x = np.random.default_rng(1).standard_normal((3, 27)).astype(np.float32) + 100
    source = agrees(
        row_reduction(27, 8 if looped else 32, WELFORD, lifted, (F32, F32, F32), looped),
        inputs={"in0": x},
        tolerance=2e-4,
    )
    assert ("combine_welford" in source.text) == looped


@pytest.mark.parametrize("looped", [False, True])
def test_log_sum_exp(agrees, looped):
    agrees(row_reduction(27, 8 if looped else 32, LOGSUMEXP, (X, const(1.0, F32)), (F32, F32), looped), tolerance=1e-5)


@pytest.mark.parametrize("name", ["any", "all"])
def test_logical_reduction(agrees, name):
    lifted = (call("gt", X, const(1.2, F32)),)
    agrees(row_reduction(20, 32, monoid(name), lifted, (DType.BOOL,), False))
    agrees(row_reduction(20, 8, monoid(name), lifted, (DType.BOOL,), True))


def softmax(n: int, tile: int, rows: int, count: int) -> LoopNest:
    """Three stages over one tile of rows: the row stays in registers."""
    top, total = tensor("t0", (count,), F32, Scope.LOCAL), tensor("t1", (count,), F32, Scope.LOCAL)
    row = symbol("p") * rows + symbol("x")
    bounds = () if count % rows == 0 else (Bound(row, sympy.Integer(count)),)

    def stage(name: str, kind: AxisKind, statement) -> Node:
        t = symbol(f"{name}_t")
        tail = () if n == tile else (Bound(t, sympy.Integer(n)),)
        axes = (Axis(I0, sympy.Integer(count)), Axis(R0, sympy.Integer(n), kind))
        return loop(f"{name}_t", tile, TILE, Block(name, axes, (row, t), (statement,), (*bounds, *tail)))

    shifted = call("exp", call("sub", X, Load("t0", (I0,), F32)))
    stages = (
        stage("b0", AxisKind.REDUCTION, Update(MAX, (Access("t0", (I0,)),), (X,))),
        stage("b1", AxisKind.REDUCTION, Update(SUM, (Access("t1", (I0,)),), (shifted,))),
        stage("b2", AxisKind.SPATIAL, Store("out0", (I0, R0), call("div", shifted, Load("t1", (I0,), F32)))),
    )
    tree = loop("p", ceil_div(count, rows), BLOCK, loop("x", rows, TILE, *stages))
    return LoopNest("kernel", (tensor("in0", (count, n)), tensor("out0", (count, n))), ("out0",), (tree,), (top, total))


@pytest.mark.parametrize(("n", "tile", "rows", "count"), [(32, 32, 4, 8), (27, 32, 4, 7), (20, 32, 1, 3), (1, 1, 2, 5)])
def test_softmax_reads_its_input_once(agrees, n, tile, rows, count):
    source = agrees(softmax(n, tile, rows, count), tolerance=1e-5)
    assert source.text.count("tl.load") == 1
    assert source.text.count("exp(") == 1
    assert ("mask=" in source.text) == (n != tile or count % rows != 0)


def test_column_reduction_over_a_loop(agrees):
    m, n, rb, cb = 21, 37, 8, 16
    r, c = symbol("k") * rb + symbol("r"), symbol("p") * cb + symbol("c")
    block = Block(
        "b0",
        (Axis(I0, sympy.Integer(n)), Axis(R0, sympy.Integer(m), AxisKind.REDUCTION)),
        (c, r),
        (Update(SUM, (Access("out0", (I0,)),), (Load("in0", (R0, I0), F32),)),),
        (Bound(c, sympy.Integer(n)), Bound(r, sympy.Integer(m))),
    )
    inner = loop("k", ceil_div(m, rb), SERIAL, loop("r", rb, TILE, block))
    nest = LoopNest(
        "kernel", (tensor("in0", (m, n)), tensor("out0", (n,))), ("out0",),
        (loop("p", ceil_div(n, cb), BLOCK, loop("c", cb, TILE, inner)),),
    )  # fmt: skip
    agrees(nest, tolerance=1e-5)


def test_select_guards_its_loads(agrees):
    n = 40

    def shifted(a: Load) -> Expr:
        inside = call("ge", IndexValue(I0, I64), const(3, I64))
        return Select(inside, Load("in0", (I0 - 3,), F32), Const(-1.0, F32))

    source = agrees(pointwise(n, F32, shifted, block=64))
    assert "& m" in source.text


def test_gather(agrees):
    rows, n = 5, 20
    index = Load("in1", (symbol("i0"),), I64)
    block = Block(
        "b0", (Axis(I0, sympy.Integer(n)),), (symbol("t"),),
        (Store("out0", (I0,), Load("in0", (index, sympy.Integer(2)), F32)),), (Bound(symbol("t"), sympy.Integer(n)),),
    )  # fmt: skip
    params = (tensor("in0", (rows, 4)), tensor("in1", (n,), I64), tensor("out0", (n,)))
    nest = LoopNest("kernel", params, ("out0",), (loop("p", 1, BLOCK, loop("t", 32, TILE, block)),))
    agrees(nest, inputs={"in1": np.arange(n) % rows})


def symbolic(size: Size, block: int = 32) -> LoopNest:
    from torch.utils._sympy.functions import CeilDiv

    n = size.symbol
    index = symbol("b") * block + symbol("t")
    body = Block(
        "b0",
        (Axis(I0, n),),
        (index,),
        (Store("out0", (I0,), call("neg", Load("in0", (I0,), F32))),),
        (Bound(index, n),),
    )
    tree = loop("b", CeilDiv(n, block), BLOCK, loop("t", block, TILE, body))
    return LoopNest(
        "kernel", (tensor("in0", (n,)), tensor("out0", (n,))), ("out0",), (tree,), symbols=SymbolTable((size,))
    )


def test_symbolic_size(agrees):
    nest = symbolic(Size(symbol("s0"), 1, None))
    for n in (1, 32, 50):
        assert "mask=" in agrees(nest, {"s0": n}).text


def test_mask_is_dropped_where_the_divisor_proves_it(agrees):
    source = agrees(symbolic(Size(symbol("s0"), 1, None, divisor=64)), {"s0": 128})
    assert "mask" not in source.text


def test_index_type_follows_the_range():
    unbounded = emit_triton(symbolic(Size(symbol("s0"), 1, None)), SM90)
    assert unbounded.option("index") == "i32" and "tl.int64" not in unbounded.text
    wide = wide_source(unbounded)
    assert wide.option("index") == "i64" and "tl.int64" in wide.text and wide.reach is None
    bounded = emit_triton(symbolic(Size(symbol("s0"), 1, 1 << 20)), SM90)
    assert bounded.option("index") == "i32" and "INDEX" not in bounded.text and bounded.reach is None
    large = emit_triton(pointwise((1 << 31) + 1024, F32, lambda a: call("neg", a), block=1024), SM90)
    assert large.option("index") == "i64"
    just_below = emit_triton(pointwise(1 << 31, F32, lambda a: call("neg", a), block=1024), SM90)
    assert just_below.option("index") == "i32"


def test_large_strides_alone_need_int64(agrees):
    index = symbol("t")
    stride = 1 << 27
    body = Block("b0", (Axis(I0, sympy.Integer(32)),), (index,), (Store("out0", (I0,), Load("in0", (I0,), F32)),))
    params = (tensor("in0", (32,), strides=(stride,)), tensor("out0", (32,)))
    nest = LoopNest("kernel", params, ("out0",), (loop("p", 1, BLOCK, loop("t", 32, TILE, body)),))
    assert emit_triton(nest, SM90).option("index") == "i64"


def test_a_tile_is_read_where_it_was_written():
    local = tensor("t0", (32,), F32, Scope.LOCAL)
    axis, t = (Axis(I0, sympy.Integer(32)),), symbol("t")
    write = Block("b0", axis, (t,), (Store("t0", (I0,), Load("in0", (I0,), F32)),))
    read = Block("b1", axis, (t,), (Store("out0", (I0,), Load("t0", (31 - I0,), F32)),))
    nest = LoopNest(
        "kernel",
        (tensor("in0", (32,)), tensor("out0", (32,))),
        ("out0",),
        (loop("t", 32, TILE, write, read),),
        (local,),
    )
    with pytest.raises(EmitError, match="read at the lane that wrote it"):
        emit_triton(nest, SM90)


def test_a_tile_does_not_outlive_its_loop():
    local = tensor("t0", (4, 32), F32, Scope.LOCAL)
    axes = (Axis(I0, sympy.Integer(4)), Axis(R0, sympy.Integer(32)))
    write = Block("b0", axes, (symbol("k"), symbol("t")), (Store("t0", (I0, R0), X),))
    read = Block("b1", axes, (symbol("j"), symbol("u")), (Store("out0", (I0, R0), Load("t0", (I0, R0), F32)),))
    trees = (loop("k", 4, SERIAL, loop("t", 32, TILE, write)), loop("j", 4, SERIAL, loop("u", 32, TILE, read)))
    nest = LoopNest("kernel", (tensor("in0", (4, 32)), tensor("out0", (4, 32))), ("out0",), trees, (local,))
    with pytest.raises(EmitError, match="last iteration alone"):
        emit_triton(nest, SM90)


def test_refusals_say_what_to_do():
    bad = pointwise(64, F32, lambda a: a, block=48)
    with pytest.raises(EmitError, match="power of two"):
        emit_triton(bad, SM90)


def test_a_loop_over_targets_inside_the_loop_that_reduces_is_refused():
    nest = parse(
        "@nest(outputs=['out0'])\n"
        "def f(in0: float32[4, 4], out0: float32[4]):\n"
        "    for r in serial(4):\n"
        "        for i in serial(4):\n"
        "            with block('b0'):\n"
        "                a = spatial(4, i)\n"
        "                b = reduction(4, r)\n"
        "                out0[a] = sum.update(in0[b, a])\n"
    )
    assert isinstance(nest, LoopNest)
    with pytest.raises(EmitError, match="loop i over targets of block b0 stands inside r, over which it reduces"):
        emit_triton(nest, SM90)


def test_a_tail_of_the_reduction_alone_does_not_mask_its_result(agrees):
    nest = parse(
        "@nest(outputs=['out0'])\n"
        "def f(in0: float32[s0], out0: float32[()]):\n"
        "    s0 = size()\n"
        "    for ro in serial((s0 + 7) // 8):\n"
        "        for ri in serial(8):\n"
        "            with block('b0'):\n"
        "                b = reduction(s0, ri + 8*ro)\n"
        "                where(ri + 8*ro < s0)\n"
        "                out0[()] = sum.update(in0[b])\n"
    )
    for n in (0, 3, 9):
        agrees(nest, {"s0": n})
