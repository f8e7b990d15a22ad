"""Contractions as the fuser leaves them: functions of one product or two, what goes before and what comes after."""

from __future__ import annotations

import sympy
from torch.utils._sympy.functions import FloorDiv

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import MAX, SUM
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, LoopNest, contiguous_strides
from torch_mlc.ir.target import gpu_target
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.rules.gpu.contraction import GPU_CONTRACTION
from torch_mlc.scheduler.schedule.schedule import Schedule

F32, BF16, I8, U8, I32 = DType.FLOAT32, DType.BFLOAT16, DType.INT8, DType.UINT8, DType.INT32
B, M, N, K = symbol("i0"), symbol("i1"), symbol("i2"), symbol("r0")

NO_SIZES = SymbolTable()
SM90 = gpu_target("cuda:sm_90")


def buffer(name: str, shape: tuple, dtype: DType, strides: tuple | None = None) -> Buffer:
    sizes = tuple(map(sympy.sympify, shape))
    steps = contiguous_strides(sizes) if strides is None else tuple(map(sympy.sympify, strides))
    return Buffer(name, sizes, steps, dtype, align=16)


def wide(name: str, indices: tuple, dtype: DType) -> Expr:
    return cast(Load(name, indices, dtype), F32)


def dims(**extents: object) -> tuple[Dim, ...]:
    return tuple(Dim(symbol(k), sympy.sympify(v)) for k, v in extents.items())


def function(name, rows, inner, inputs, outputs, stages, table=NO_SIZES) -> LoopNest:
    return lower_to_loops(TensorFunction(name, rows, inner, tuple(inputs), tuple(outputs), tuple(stages), table))


def gelu(x: Expr) -> Expr:
    half = call("mul", const(0.5, F32), x)
    return call("mul", half, call("add", const(1.0, F32), call("erf", call("mul", x, const(0.7071067811865476, F32)))))


def silu(x: Expr) -> Expr:
    return call("mul", x, call("sigmoid", x))


def linear(m, n, k, dtype=BF16, a_strides=None, w_strides=None, epilogue="none", table=NO_SIZES) -> LoopNest:
    """``x @ w.T`` of x (m, k) and w (n, k), then ``epilogue``: none, gelu (with bias), residual, which is added or
    written over (over), gated."""
    i, j = symbol("i0"), symbol("i1")
    inputs = [buffer("in0", (m, k), dtype, a_strides), buffer("in1", (n, k), dtype, w_strides)]
    product = call("mul", wide("in0", (i, K), dtype), wide("in1", (j, K), dtype))
    stages = [Stage(("t0",), (product,), True, SUM)]
    t0 = Load("t0", (i, j), F32)
    result = t0
    match epilogue:
        case "gelu":
            inputs.append(buffer("in2", (n,), dtype))
            result = gelu(call("add", t0, wide("in2", (j,), dtype)))
        case "residual" | "over":
            inputs.append(buffer("in2", (m, n), dtype))
            result = call("add", t0, wide("in2", (i, j), dtype))
        case "gated":
            inputs.append(buffer("in2", (n, k), dtype, w_strides))
            other = call("mul", wide("in0", (i, K), dtype), wide("in2", (j, K), dtype))
            stages.append(Stage(("t1",), (other,), True, SUM))
            result = call("mul", silu(t0), Load("t1", (i, j), F32))
    stages.append(Stage(("t2",), (result,), False))
    out = Output(inputs[2] if epilogue == "over" else buffer("out0", (m, n), dtype), "t2", (i, j))
    return function("linear", dims(i0=m, i1=n), dims(r0=k), inputs, [out], stages, table)


def batched(b, m, n, k, dtype=BF16) -> LoopNest:
    """``x @ y`` of x (b, m, k) and y (b, k, n)."""
    inputs = [buffer("in0", (b, m, k), dtype), buffer("in1", (b, k, n), dtype)]
    product = call("mul", wide("in0", (B, M, K), dtype), wide("in1", (B, K, N), dtype))
    stages = [Stage(("t0",), (product,), True, SUM), Stage(("t1",), (Load("t0", (B, M, N), F32),), False)]
    out = Output(buffer("out0", (b, m, n), dtype), "t1", (B, M, N))
    return function("batched", dims(i0=b, i1=m, i2=n), dims(r0=k), inputs, [out], stages)


def dequantised(m, n, k, group=None, dtype=BF16) -> LoopNest:
    """``x @ w.T`` with bytes ``w`` (n, k), a scale and a zero point for each row, or for each ``group`` of a row."""
    i, j = symbol("i0"), symbol("i1")
    at = (j,) if group is None else (j, FloorDiv(K, group))
    sizes = (n,) if group is None else (n, -(-k // group))
    inputs = [buffer("in0", (m, k), dtype), buffer("in1", (n, k), I8), buffer("in2", sizes, dtype),
              buffer("in3", sizes, I8)]  # fmt: skip
    zero = wide("in3", at, I8)
    weight = call("mul", call("sub", wide("in1", (j, K), I8), zero), wide("in2", at, dtype))
    product = call("mul", wide("in0", (i, K), dtype), cast(cast(weight, dtype), F32))
    stages = [Stage(("t0",), (product,), True, SUM), Stage(("t1",), (Load("t0", (i, j), F32),), False)]
    out = Output(buffer("out0", (m, n), dtype), "t1", (i, j))
    return function("dequantised", dims(i0=m, i1=n), dims(r0=k), inputs, [out], stages)


def byte_products(m, n, k, dtype=BF16) -> LoopNest:
    """``x @ w.T`` with bytes ``w`` (n, k) as they are."""
    i, j = symbol("i0"), symbol("i1")
    inputs = [buffer("in0", (m, k), dtype), buffer("in1", (n, k), I8)]
    product = call("mul", wide("in0", (i, K), dtype), wide("in1", (j, K), I8))
    stages = [Stage(("t0",), (product,), True, SUM), Stage(("t1",), (Load("t0", (i, j), F32),), False)]
    out = Output(buffer("out0", (m, n), dtype), "t1", (i, j))
    return function("bytes", dims(i0=m, i1=n), dims(r0=k), inputs, [out], stages)


def packed(m, n, groups, size, both=False, parts=2) -> LoopNest:
    """``x @ w.T`` of x (m, groups * size) and w of 4 bits, two in a byte (or of fewer, in more ``parts``), with a scale
    for each group of a row; with ``both``, the product of two such, gated."""
    i, j, g, b, part = symbol("i0"), symbol("i1"), K, symbol("r1"), symbol("r2")
    k, bytes_, bits = groups * size, groups * size // parts, 8 // parts
    inputs = [buffer("in0", (m, k), BF16)]
    x = wide("in0", (i, g * size + parts * b + part), BF16)
    stages = []
    for which in range(2 if both else 1):
        name, scales = f"in{1 + 2 * which}", f"in{2 + 2 * which}"
        inputs += [buffer(name, (n, bytes_), U8), buffer(scales, (n, groups), BF16)]
        byte = Load(name, (j, g * (size // parts) + b), U8)
        is_low = call("lt", IndexValue(part, DType.INT64), const(1, DType.INT64))
        value = Select(is_low, call("bit_and", byte, const(15, U8)), call("shr", byte, const(4, U8)))
        if parts > 2:
            shifted = call("shr", byte, cast(IndexValue(part * bits, DType.INT64), U8))
            value = call("bit_and", shifted, const((1 << bits) - 1, U8))
        weight = call("mul", call("sub", cast(value, F32), const(8.0, F32)), wide(scales, (j, g), BF16))
        stages.append(Stage((f"t{which}",), (call("mul", x, cast(cast(weight, BF16), F32)),), True, SUM))
    result = Load("t0", (i, j), F32)
    result = call("mul", silu(result), Load("t1", (i, j), F32)) if both else result
    stages.append(Stage(("t2",), (result,), False))
    out = Output(buffer("out0", (m, n), BF16), "t2", (i, j))
    return function("packed", dims(i0=m, i1=n), dims(r0=groups, r1=size // parts, r2=parts), inputs, [out], stages)


def integers(m, n, k) -> LoopNest:
    """``(x @ w.T) * s`` of bytes x (m, k) and w (n, k), summed in int32, with a scale for each column."""
    i, j = symbol("i0"), symbol("i1")
    inputs = [buffer("in0", (m, k), I8), buffer("in1", (n, k), I8), buffer("in2", (n,), F32)]
    product = call("mul", cast(Load("in0", (i, K), I8), I32), cast(Load("in1", (j, K), I8), I32))
    result = call("mul", cast(Load("t0", (i, j), I32), F32), Load("in2", (j,), F32))
    stages = [Stage(("t0",), (product,), True, SUM), Stage(("t1",), (result,), False)]
    out = Output(buffer("out0", (m, n), F32), "t1", (i, j))
    return function("integers", dims(i0=m, i1=n), dims(r0=k), inputs, [out], stages)


def normed(m, n, k, dtype=BF16) -> LoopNest:
    """``((x * r) * g) @ w.T`` with a scale ``r`` for each row and ``g`` for each element, rounded to the input's
    type."""
    i, j = symbol("i0"), symbol("i1")
    inputs = [buffer("in0", (m, k), dtype), buffer("in1", (n, k), dtype), buffer("in2", (m,), F32),
              buffer("in3", (k,), dtype)]  # fmt: skip
    scaled = call("mul", call("mul", wide("in0", (i, K), dtype), Load("in2", (i,), F32)), wide("in3", (K,), dtype))
    product = call("mul", cast(cast(scaled, dtype), F32), wide("in1", (j, K), dtype))
    stages = [Stage(("t0",), (product,), True, SUM), Stage(("t1",), (Load("t0", (i, j), F32),), False)]
    out = Output(buffer("out0", (m, n), dtype), "t1", (i, j))
    return function("normed", dims(i0=m, i1=n), dims(r0=k), inputs, [out], stages)


def row_softmax(m, n, k, dtype=BF16) -> LoopNest:
    """The softmax of the rows of ``x @ w.T``."""
    i, j = symbol("i0"), symbol("i1")
    inputs = [buffer("in0", (m, k), dtype), buffer("in1", (n, k), dtype)]
    t0 = Load("t0", (i, j), F32)
    exp = call("exp", call("sub", t0, Load("t1", (i,), F32)))
    stages = [
        Stage(("t0",), (call("mul", wide("in0", (i, K), dtype), wide("in1", (j, K), dtype)),), True, SUM,
              axes=(i, j), over=(K,)),
        Stage(("t1",), (t0,), True, MAX, axes=(i,), over=(j,)),
        Stage(("t2",), (exp,), True, axes=(i, j)),
        Stage(("t3",), (Load("t2", (i, j), F32),), True, SUM, axes=(i,), over=(j,)),
        Stage(("t4",), (call("div", Load("t2", (i, j), F32), Load("t3", (i,), F32)),), True, axes=(i, j)),
    ]  # fmt: skip
    out = Output(buffer("out0", (m, n), dtype), "t4", (i, j))
    return function("row_softmax", dims(i0=m, i1=n), dims(r0=k), inputs, [out], stages)


def scheduled(nest, target=SM90, **params) -> LoopNest:
    """The rule's schedule with some parameters given and the others at their default."""
    schedule = Schedule(nest, GPU_CONTRACTION.name)
    values = GPU_CONTRACTION.parameters(nest, target)
    GPU_CONTRACTION.apply(schedule, target, {k: v[0] for k, v in values.items()} | params)
    return schedule.nest
