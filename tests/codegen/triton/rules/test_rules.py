"""The GPU rules on nests as lowering leaves them: interpreted against the oracle, and compiled for both vendors."""

import numpy as np
import pytest
import sympy
import torch

from torch_mlc.codegen.triton import emit_triton
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import MAX, SUM
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, Load, call, cast, const, symbol
from torch_mlc.ir.nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Buffer,
    Loop,
    LoopNest,
    Node,
    Scope,
    Statement,
    Store,
    Update,
    contiguous_strides,
)
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.gpu.launch import GpuKernel
from torch_mlc.runtime.triton.compile import compile_triton, resource_report
from torch_mlc.scheduler.rules import default_schedule, design_space

SM90, GFX942 = gpu_target("cuda:sm_90"), gpu_target("hip:gfx942")
F32, BF16 = DType.FLOAT32, DType.BFLOAT16
I0, I1, R0 = symbol("i0"), symbol("i1"), symbol("r0")
S0 = symbol("s0")


def tensor(name: str, shape: tuple, dtype: DType, strides: tuple = (), scope: Scope = Scope.GLOBAL) -> Buffer:
    shape = tuple(map(sympy.sympify, shape))
    return Buffer(name, shape, tuple(map(sympy.sympify, strides)) or contiguous_strides(shape), dtype, scope)


def stage(name: str, axes: tuple[Axis, ...], *body: Statement) -> Node:
    bindings = tuple(symbol(f"{name}_{a.var.name}") for a in axes)
    node: Node = Block(name, axes, bindings, body)
    for axis, var in zip(reversed(axes), reversed(bindings), strict=True):
        node = Loop(var, axis.extent, (node,))
    return node


def axes(*pairs: tuple[sympy.Symbol, object], reduce: bool = False) -> tuple[Axis, ...]:
    kinds = [AxisKind.REDUCTION if reduce and v.name.startswith("r") else AxisKind.SPATIAL for v, _ in pairs]
    return tuple(Axis(v, sympy.sympify(e), k) for (v, e), k in zip(pairs, kinds, strict=True))


def wide(name: str, indices: tuple, dtype: DType) -> Expr:
    return cast(Load(name, indices, dtype), F32)


def flat(n, dtype=BF16, **table) -> LoopNest:
    value = cast(call("mul", call("tanh", wide("in0", (I0,), dtype)), wide("in1", (I0,), dtype)), dtype)
    params = tuple(tensor(x, (n,), dtype) for x in ("in0", "in1", "out0"))
    return LoopNest("kernel", params, ("out0",), (stage("b0", axes((I0, n)), Store("out0", (I0,), value)),), **table)


def bias(m, n, dtype=BF16, pitch=None) -> LoopNest:
    value = cast(call("add", wide("in0", (I0, I1), dtype), wide("in1", (I1,), dtype)), dtype)
    params = (tensor("in0", (m, n), dtype, (pitch or n, 1)), tensor("in1", (n,), dtype), tensor("out0", (m, n), dtype))
    tree = stage("b0", axes((I0, m), (I1, n)), Store("out0", (I0, I1), value))
    return LoopNest("kernel", params, ("out0",), (tree,))


def transpose(m, n, dtype=BF16, pitch=None) -> LoopNest:
    value = cast(call("add", wide("in0", (I1, I0), dtype), wide("in1", (I0, I1), dtype)), dtype)
    params = (
        tensor("in0", (n, m), dtype, (pitch or m, 1)),
        tensor("in1", (m, n), dtype),
        tensor("out0", (m, n), dtype),
    )
    tree = stage("b0", axes((I0, m), (I1, n)), Store("out0", (I0, I1), value))
    return LoopNest("kernel", params, ("out0",), (tree,))


def softmax(m, n, dtype=BF16, strides=(), **table) -> LoopNest:
    """Softmax in four stages, one of them an intermediate element."""
    x = wide("in0", (I0, R0), dtype)
    e = Load("t1", (I0, R0), F32)
    body = (
        stage("b0", axes((I0, m), (R0, n), reduce=True), Update(MAX, (Access("t0", (I0,)),), (x,))),
        stage("b1", axes((I0, m), (R0, n)), Store("t1", (I0, R0), call("exp", call("sub", x, Load("t0", (I0,), F32))))),
        stage("b2", axes((I0, m), (R0, n), reduce=True), Update(SUM, (Access("t2", (I0,)),), (e,))),
        stage(
            "b3",
            axes((I0, m), (R0, n)),
            Store("out0", (I0, R0), cast(call("div", e, Load("t2", (I0,), F32)), dtype)),
        ),
    )
    local = (
        tensor("t0", (m,), F32, scope=Scope.LOCAL),
        tensor("t1", (m, n), F32, scope=Scope.LOCAL),
        tensor("t2", (m,), F32, scope=Scope.LOCAL),
    )
    params = (tensor("in0", (m, n), dtype, strides), tensor("out0", (m, n), dtype))
    return LoopNest("kernel", params, ("out0",), body, local, **table)


def columns(m, n, dtype=BF16, pitch=None) -> LoopNest:
    total = Update(SUM, (Access("out0", (I0,)),), (wide("in0", (R0, I0), dtype),))
    tree = stage("b0", axes((I0, n), (R0, m), reduce=True), total)
    params = (tensor("in0", (m, n), dtype, (pitch or n, 1)), tensor("out0", (n,), F32))
    return LoopNest("kernel", params, ("out0",), (tree,))


def everything(n, dtype=F32) -> LoopNest:
    tree = stage("b0", axes((R0, n), reduce=True), Update(SUM, (Access("out0", ()),), (wide("in0", (R0,), dtype),)))
    return LoopNest("kernel", (tensor("in0", (n,), dtype), tensor("out0", (), F32)), ("out0",), (tree,))


def scheduled(nest: LoopNest, rule: str, target=SM90) -> LoopNest:
    found = default_schedule(nest, target)
    assert found.rule == rule
    return found.nest


SMALL = [
    (flat(512), "gpu_pointwise"),
    (flat(301), "gpu_pointwise"),
    (bias(5, 64), "gpu_pointwise"),
    (bias(7, 19), "gpu_pointwise"),
    (bias(6, 24, F32, pitch=31), "gpu_pointwise"),
    (transpose(64, 96), "gpu_transpose"),
    (transpose(33, 50, F32), "gpu_transpose"),
    (softmax(4, 64), "gpu_row_persistent"),
    (softmax(7, 37, F32), "gpu_row_persistent"),
    (softmax(3, 1), "gpu_column_reduction"),
    (columns(64, 32), "gpu_column_reduction"),
    (columns(37, 21, F32), "gpu_column_reduction"),
    (everything(100), "gpu_row_persistent"),
    # Strided and transposed inputs, the other type, other parities.
    (flat(640, F32), "gpu_pointwise"),
    (bias(5, 64, BF16, pitch=80), "gpu_pointwise"),
    (transpose(40, 35, BF16, pitch=43), "gpu_transpose"),
    (transpose(32, 64, F32, pitch=36), "gpu_transpose"),
    (softmax(6, 40, BF16, strides=(47, 1)), "gpu_row_persistent"),
    (softmax(4, 64, F32, strides=(128, 2)), "gpu_row_persistent"),
    (softmax(5, 33, F32, strides=(1, 5)), "gpu_column_reduction"),
    (softmax(8, 32, BF16, strides=(1, 8)), "gpu_column_reduction"),
    (columns(32, 21, BF16, pitch=24), "gpu_column_reduction"),
]


@pytest.mark.parametrize(("nest", "rule"), SMALL, ids=[f"{r}-{k}" for k, (_, r) in enumerate(SMALL)])
def test_rule_keeps_the_meaning(agrees, nest, rule):
    agrees(scheduled(nest, rule), tolerance=1e-2 if nest.params[0].dtype is BF16 else 1e-5)


def test_looped_rule_keeps_the_meaning(agrees):
    table = SymbolTable((Size(S0, 1, None, hint=64),))
    nest = scheduled(softmax(3, S0, F32, symbols=table), "gpu_row_looped")
    for n in (1, 64, 130):
        agrees(nest, {"s0": n}, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "step"), [(BF16, 1), (BF16, 2), (F32, 3)])
def test_looped_rule_on_other_inputs(agrees, dtype, step):
    table = SymbolTable((Size(S0, 1, None, hint=64),))
    nest = scheduled(softmax(5, S0, dtype, strides=(S0 * step, step), symbols=table), "gpu_row_looped")
    for n in (33, 64):
        agrees(nest, {"s0": n}, tolerance=1e-2 if dtype is BF16 else 1e-5)


PLAIN = [
    flat(37), bias(5, 7, F32, pitch=9), softmax(3, 11, F32), softmax(4, 6, strides=(1, 4)), columns(9, 5),
    everything(20),
]  # fmt: skip


@pytest.mark.parametrize("nest", PLAIN, ids=["flat", "strided", "row", "transposed", "column", "everything"])
def test_the_last_resort_keeps_the_meaning(agrees, nest):
    (rule,) = [r for r in design_space(nest, SM90).rules if r.name == "gpu_plain"]
    candidate = design_space(nest, SM90).candidate(rule, {})
    agrees(candidate.schedule.nest, tolerance=1e-2 if nest.params[0].dtype is BF16 else 1e-5)


def test_symbolic_rows_and_elements(agrees):
    table = SymbolTable((Size(S0, 1, 1 << 20, hint=600),))
    agrees(scheduled(flat(S0, symbols=table), "gpu_pointwise"), {"s0": 300})
    agrees(scheduled(softmax(S0, 33, F32, symbols=table), "gpu_row_persistent"), {"s0": 5}, tolerance=1e-5)


def test_a_broadcast_vector_is_no_transpose():
    value = call("add", Load("in0", (I0, I1), F32), Load("in1", (I0,), F32))
    params = (tensor("in0", (512, 256), F32), tensor("in1", (512,), F32), tensor("out0", (512, 256), F32))
    tree = stage("b0", axes((I0, 512), (I1, 256)), Store("out0", (I0, I1), value))
    scheduled(LoopNest("kernel", params, ("out0",), (tree,)), "gpu_pointwise")


def test_a_row_is_read_once():
    text = emit_triton(scheduled(softmax(4096, 4096), "gpu_row_persistent"), SM90).text
    assert text.count("tl.load") == 1 and "mask" not in text


def test_divisor_of_a_size_drops_the_mask():
    table = SymbolTable((Size(S0, 2048, None, divisor=2048, hint=1 << 20),))
    text = emit_triton(scheduled(flat(S0, symbols=table), "gpu_pointwise"), SM90).text
    assert "mask" not in text and "else" not in text


LARGE = [
    (flat(1 << 20), "gpu_pointwise"),
    (flat(1 << 20, F32), "gpu_pointwise"),
    (bias(4096, 1024, F32), "gpu_pointwise"),
    (transpose(4096, 2048), "gpu_transpose"),
    (transpose(4096, 2048, F32), "gpu_transpose"),
    (softmax(8192, 512), "gpu_row_persistent"),
    (softmax(8192, 4096), "gpu_row_persistent"),
    (softmax(8192, 4096, F32), "gpu_row_persistent"),
    (softmax(4096, 32768), "gpu_row_persistent"),
    (softmax(1024, 131072), "gpu_row_looped"),
    (columns(16384, 4096), "gpu_column_reduction"),
]


@pytest.mark.parametrize(("nest", "rule"), LARGE, ids=[f"{r}-{k}" for k, (_, r) in enumerate(LARGE)])
def test_aligned_kernels_use_wide_accesses_and_spill_nothing(nest, rule):
    report = resource_report(compile_triton(emit_triton(scheduled(nest, rule), SM90), SM90))
    assert report.spills == 0
    assert report.shared <= 227 << 10
    assert report.wide_loads >= (0.79 if nest.params[1].name == "in1" and len(nest.params[1].shape) == 1 else 0.95)
    assert report.wide_stores >= 0.95 or rule == "gpu_column_reduction"  # a column's result is one value


@pytest.mark.parametrize(("nest", "rule"), LARGE[::2], ids=[f"{r}-{k}" for k, (_, r) in enumerate(LARGE[::2])])
def test_kernels_compile_for_amd(nest, rule):
    report = resource_report(compile_triton(emit_triton(scheduled(nest, rule, GFX942), GFX942), GFX942))
    assert report.spills == 0 and report.registers > 0


@pytest.mark.parametrize(
    "nest", [flat(1000), softmax(64, 48, F32), columns(64, 48, F32)], ids=["flat", "row", "column"]
)
def test_every_candidate_keeps_the_meaning(agrees, nest):
    found = list(design_space(nest, SM90).candidates())
    assert len(found) > 3
    for candidate in found[:6]:
        agrees(candidate.schedule.nest, tolerance=1e-2 if nest.params[0].dtype is BF16 else 1e-5)


def test_an_odd_length_keeps_wide_accesses_in_whole_programs():
    report = resource_report(compile_triton(emit_triton(scheduled(flat((1 << 20) + 1), "gpu_pointwise"), SM90), SM90))
    assert report.wide_loads >= 0.5 and report.spills == 0


def test_constant_of_a_fused_scale(agrees):
    value = call("mul", Load("in0", (I0,), F32), const(0.125, F32))
    nest = LoopNest(
        "kernel",
        (tensor("in0", (300,), F32), tensor("out0", (300,), F32)),
        ("out0",),
        (stage("b0", axes((I0, 300)), Store("out0", (I0,), value)),),
    )
    assert "* 0.125" in agrees(scheduled(nest, "gpu_pointwise"), inputs={"in0": np.ones(300, np.float32)}).text


@pytest.mark.gpu
@pytest.mark.parametrize(("nest", "rule"), SMALL, ids=[f"{r}-{k}" for k, (_, r) in enumerate(SMALL)])
def test_rule_on_a_gpu(agrees_on_gpu, nest, rule):
    tolerance = 1e-2 if nest.params[0].dtype is BF16 else 1e-5
    agrees_on_gpu(lambda target: default_schedule(nest, target).nest, tolerance=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("nest", "expected"),
    [
        (flat((1 << 20) + 3, F32), lambda a, b: torch.tanh(a) * b),
        (bias(4096, 1000), lambda a, b: a + b),
        (transpose(4096, 2048), lambda a, b: a.t() + b),
        (softmax(2048, 32768), lambda a: torch.softmax(a, -1)),
        (softmax(512, 131072), lambda a: torch.softmax(a, -1)),
        (softmax(512, 50257, F32), lambda a: torch.softmax(a, -1)),
        (columns(16384, 4097), lambda a: a.float().sum(0)),
    ],
    ids=["flat", "bias", "transpose", "row", "long-row", "odd-row", "column"],
)
def test_large_kernels_equal_torch_on_a_gpu(nest, expected):
    from_torch = [torch.randn([int(e) for e in b.shape], device="cuda").to(b.dtype.torch) for b in nest.params[:-1]]
    major, minor = torch.cuda.get_device_capability()
    target = gpu_target(f"cuda:sm_{major}{minor}")
    out = torch.empty([int(e) for e in nest.params[-1].shape], device="cuda", dtype=nest.params[-1].dtype.torch)
    GpuKernel(emit_triton(default_schedule(nest, target).nest, target), target)([*from_torch, out])
    torch.testing.assert_close(
        out, expected(*from_torch), rtol=2e-2, atol=1e-2 if nest.params[0].dtype is BF16 else 1e-5
    )
