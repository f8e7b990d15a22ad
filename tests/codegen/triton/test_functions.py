"""Every function of the IR and every cast, interpreted against the oracle and compiled for both vendors."""

import numpy as np
import pytest
import sympy

from tests.versions import triton_mends_it
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.codegen.triton.functions import FUNCTIONS
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.iterations import ITERATIONS
from torch_mlc.ir.expr.ops import APPROXIMATIONS, OPS
from torch_mlc.ir.expr.value import Const, Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.nest.loops import Axis, Block, Buffer, Loop, LoopKind, LoopNest, Store, contiguous_strides
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.triton.compile import compile_triton

N = 32
F32, F64, I32, I64, BOOL = DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64, DType.BOOL
FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
RANDOM = ("rand", "randn", "randbits")
INTEGER = ("gcd", "check_bounds", "check_divisor", "bit_and", "bit_or", "bit_xor", "bit_not", "shl", "shr")
EITHER = ("floordiv", "remainder", "truncdiv", "fmod", "pow", "maximum", "minimum", "sign", "abs", "neg", "eq", "lt")
# Where the function is defined, and away from poles that magnify rounding.
DOMAIN = {
    "log": (0.1, 9), "log2": (0.1, 9), "log10": (0.1, 9), "log1p": (-0.9, 9), "sqrt": (0, 9), "rsqrt": (0.1, 9),
    "asin": (-1, 1), "acos": (-1, 1), "atanh": (-0.9, 0.9), "erfinv": (-0.9, 0.9), "acosh": (1, 9), "lgamma": (0.1, 9),
    "digamma": (0.5, 9), "tan": (-1.2, 1.2), "pow": (0.1, 3),
    "gamma_series": (0.1, 2), "gamma_difference": (0.1, 1), "gamma_fraction": (1.2, 1.3),
}  # fmt: skip


def nest_of(value: Expr, inputs: dict[str, DType]) -> LoopNest:
    shape = (sympy.Integer(N),)

    def buffer(name: str, dtype: DType) -> Buffer:
        return Buffer(name, shape, contiguous_strides(shape), dtype)

    block = Block("b0", (Axis(symbol("i0"), shape[0]),), (symbol("t"),), (Store("out0", (symbol("i0"),), value),))
    params = (*(buffer(n, d) for n, d in inputs.items()), buffer("out0", value.dtype))
    return LoopNest("kernel", params, ("out0",), (Loop(symbol("t"), shape[0], (block,), LoopKind.THREAD_X),))


def operand(k: int, dtype: DType) -> Load:
    return Load(f"in{k}", (symbol("i0"),), dtype)


def case(fn: str, dtype: DType) -> tuple[LoopNest, dict[str, np.ndarray]]:
    """A nest that applies one function, and its inputs."""
    rng = np.random.default_rng(3)
    if fn in RANDOM:
        kinds = {"rand": F32, "randn": F32, "randbits": I64}
        offset = call("add", IndexValue(symbol("i0"), I64), const((1 << 33) + 5, I64))
        value = call(fn, operand(0, I64), offset, dtype=kinds[fn])
        return nest_of(value, {"in0": I64}), {"in0": rng.integers(-(1 << 62), 1 << 62, N)}
    arity = OPS[fn].arity
    args = [operand(k, dtype) for k in range(arity)]
    value = call(fn, *args, dtype=I32 if fn == "bitcast" else None)
    low, high = DOMAIN.get(fn, (-4, 4))
    inputs = {}
    for k in range(arity):
        if dtype is BOOL:
            inputs[f"in{k}"] = rng.random(N) < 0.5
        elif dtype.is_int:
            data = rng.integers(-9, 9, N)
            data[data == 0] = 3
            inputs[f"in{k}"] = np.abs(data).astype(dtype.numpy) if fn in ("shl", "shr") else data.astype(dtype.numpy)
        else:
            inputs[f"in{k}"] = rng.uniform(low, high, N).astype(dtype.numpy)
    if fn == "gamma_fraction":
        inputs["in1"] += 0.2
    return nest_of(value, {f"in{k}": dtype for k in range(arity)}), inputs


def types_of(fn: str) -> tuple[DType, ...]:
    if fn.startswith("logical"):
        return (BOOL,)
    if fn in INTEGER:
        return (I32, I64)
    return (F32, I64) if fn in EITHER else (F32,)


# The oracle fails where an index is out of range, of which a GPU's kernel tells nothing.
CASES = [(fn, dtype) for fn in OPS if fn != "check_bounds" for dtype in types_of(fn)]


def test_the_table_is_covered():
    assert FUNCTIONS.keys() == OPS.keys()


def tolerance(fn: str) -> float:
    if fn in APPROXIMATIONS:
        return max(APPROXIMATIONS[fn].error, 1e-6)
    return 2e-5 if fn in (*ITERATIONS, "digamma", "randn", "fmod", "remainder") else 1e-6


@pytest.mark.parametrize(("fn", "dtype"), CASES, ids=lambda v: str(v))
def test_function(agrees, fn, dtype):
    nest, inputs = case(fn, dtype)
    agrees(nest, inputs=inputs, tolerance=tolerance(fn))


INTEGERS = [d for d in DType if d.is_int]


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=() if d.numpy.kind == "i" else triton_mends_it) for d in INTEGERS], ids=str
)
def test_integers_of_every_type_up_to_their_ends(agrees, dtype):
    """Functions of integers, all of them in one kernel: they wrap, and unsigned ones are never below zero."""
    info, rng = np.iinfo(dtype.numpy), np.random.default_rng(4)
    first, second = (rng.integers(info.min, info.max, N, dtype.numpy, endpoint=True) for _ in range(2))
    first[:6] = info.min, info.max, info.min, 2, 6, info.max
    second[:6] = info.max, info.min or 1, 3, info.max // 2 + 1, 4, info.max
    second[8::2] = rng.integers(1, 9, N // 2 - 4)
    second[second == 0] = 5
    total: Expr = const(0, I64)
    for fn in sorted({*EITHER, *INTEGER, "add", "sub", "mul", "fmax", "ge"} - {"check_bounds", "check_divisor"}):
        # Each of them weighs something else, or equal faults of two would leave nothing.
        found = cast(call(fn, *(operand(k, dtype) for k in range(OPS[fn].arity))), I64)
        total = call("add", call("mul", total, const(31, I64)), found)
    agrees(nest_of(total, {"in0": dtype, "in1": dtype}), inputs={"in0": first, "in1": second})


@pytest.mark.parametrize("dtype", [F32, F64, DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_digamma_at_its_ends(agrees, dtype):
    data = np.resize(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, -3.0, 0.5, 1000.0]), N).astype(dtype.numpy)
    agrees(nest_of(call("digamma", operand(0, dtype)), {"in0": dtype}), inputs={"in0": data})


@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_every_function_compiles(target):
    """All functions in one kernel of floats and one of integers, so that it is two compilations and not a hundred."""
    machine = gpu_target(target)
    floats: Expr = const(0.0, F32)
    integers: Expr = const(0, I64)
    for fn, info in OPS.items():
        seeds = (operand(1, I64), IndexValue(symbol("i0"), I64))
        if fn in RANDOM:
            integers = call("add", integers, cast(call(fn, *seeds, dtype=I64 if fn == "randbits" else F32), I64))
        elif fn in INTEGER:
            integers = call("add", integers, call(fn, *[operand(1, I64)] * info.arity))
        elif fn.startswith("logical"):
            flag = call("lt", operand(0, F32), const(0.0, F32))
            floats = call("add", floats, cast(call(fn, *[flag] * info.arity), F32))
        else:
            found = call(fn, *[operand(0, F32)] * info.arity, dtype=I32 if fn == "bitcast" else None)
            floats = call("add", floats, cast(found, F32))
            if fn in EITHER:
                integers = call("add", integers, cast(call(fn, *[operand(1, I64)] * info.arity), I64))
    for value in (floats, integers):
        compile_triton(emit_triton(nest_of(value, {"in0": F32, "in1": I64}), machine), machine)


@pytest.mark.parametrize("source", [F32, F64, DType.FLOAT16, DType.BFLOAT16, I64, I32, DType.INT8, DType.UINT8, BOOL])
@pytest.mark.parametrize("to", [F32, F64, DType.FLOAT16, DType.BFLOAT16, I64, I32, DType.INT8, BOOL])
def test_cast(agrees, source, to):
    agrees(nest_of(cast(operand(0, source), to), {"in0": source}))


@pytest.mark.skipif(DType.FLOAT8_E4M3FN.limit is None, reason="this torch makes NaN of large numbers, Triton 448")
@pytest.mark.parametrize("source", [F32, F64, DType.FLOAT16, DType.BFLOAT16, I32])
def test_casts_to_eight_bits(agrees, source):
    values = [0, 1, -3, 17, 300, 447, 448, 455, 456, 463, 465, -480, 5000, -60000]
    if source.is_float:
        values += [0.3, -1.7, 2.0**-6, 2.0**-9, 2.0**-10, 2.0**-11, np.inf, -np.inf, np.nan, -0.0]
    data = np.resize(np.array(values, np.float64), N).astype(source.numpy)
    agrees(nest_of(cast(cast(operand(0, source), DType.FLOAT8_E4M3FN), F32), {"in0": source}), inputs={"in0": data})


def all_of(dtype: DType) -> np.ndarray:
    """The first numbers of eight bits, and NaN, infinity or the largest of both signs."""
    return np.arange(256, dtype=np.uint8)[[*range(N - 6), 0x7E, 0x7F, 0x7C, 0x80, 0xFC, 0xFF]].view(dtype.numpy)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -448.0, np.inf, np.nan])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_loads_and_constants_of_eight_bits(agrees, dtype, value):
    """A load that a condition guards gives zero in other lanes, which Triton makes of no integer."""
    condition = call("gt", operand(1, F32), const(0.0, F32))
    inputs = {"in0": all_of(dtype), "in1": np.resize([1.0, -1.0, 2.0], N).astype(np.float32)}
    for chosen in (
        Select(condition, operand(0, dtype), Const(value, dtype)),
        cast(Select(condition, operand(0, dtype), Const(value, dtype)), F32),
        Select(condition, cast(operand(0, dtype), F32), const(value, F32)),
        Const(value, dtype),
    ):
        source = agrees(nest_of(chosen, {"in0": dtype, "in1": F32}), inputs=inputs)
        compile_triton(source, gpu_target("cuda:sm_90"))


@pytest.mark.parametrize("source", [I64, F64], ids=str)
@pytest.mark.parametrize("half", [DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_what_is_sent_to_a_half_type(agrees, source, half):
    """A conversion back keeps what was rounded, or became infinite."""
    data = np.resize([70000, -70000, 65519, 65520, 2049, 2051, 257, 3, 1 << 40], N).astype(source.numpy)
    agrees(nest_of(cast(cast(cast(operand(0, source), F32), half), F32), {"in0": source}), inputs={"in0": data})


def test_an_iteration_of_scalars(agrees):
    """What is the same for a whole tile has a loop of its own."""
    value = call("add", call("gcd", Load("in0", (sympy.S.Zero,), I64), const(18, I64)), operand(0, I64))
    agrees(nest_of(value, {"in0": I64}), inputs={"in0": np.arange(12, 12 + N)})


def test_half_types_compute_in_float32(agrees):
    value = call("mul", operand(0, DType.BFLOAT16), operand(1, DType.BFLOAT16))
    source = agrees(nest_of(value, {"in0": DType.BFLOAT16, "in1": DType.BFLOAT16}))
    assert source.text.count(".to(tl.float32)") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("fn", "dtype"), CASES, ids=lambda v: str(v))
def test_function_on_a_gpu(agrees_on_gpu, fn, dtype):
    nest, inputs = case(fn, dtype)
    agrees_on_gpu(
        lambda target: nest,
        inputs=inputs,
        tolerance=max(tolerance(fn), 2e-5 if fn == "lgamma" else 4e-6),
    )
