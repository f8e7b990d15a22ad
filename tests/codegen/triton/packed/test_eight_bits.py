"""Floats of eight bits, where Triton has the type and where it lacks it: conversions are torch's to the bit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from tests.versions import triton_mends_it
from torch_mlc.codegen.triton import emit_triton
from torch_mlc.codegen.triton.packed.eight_bits import conversion_source
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import Const, Expr, Load, Select, call, cast, const, symbol
from torch_mlc.ir.machine import KNOWN
from torch_mlc.ir.nest.loops import Axis, Block, Buffer, Loop, LoopKind, LoopNest, Store, contiguous_strides
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.interpreter.assembly import run_assembly
from torch_mlc.runtime.triton.compile import compile_triton, gpu_backend

E4M3, E5M2 = DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2
F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
FLOAT8 = (E4M3, E5M2)
# The assembler of older versions does not know it.
LATER = {"cuda:sm_110": triton_mends_it}
ACROSS = pytest.mark.parametrize("name", ["cuda:sm_80", "cuda:sm_90"])


def pointwise(value: Expr, count: int, **inputs: DType) -> LoopNest:
    """A kernel of one program that computes ``value`` for each of ``count`` elements."""
    shape = (sympy.Integer(count),)
    buffers = [Buffer(n, shape, contiguous_strides(shape), d) for n, d in {**inputs, "out0": value.dtype}.items()]
    block = Block("b0", (Axis(symbol("i0"), shape[0]),), (symbol("t"),), (Store("out0", (symbol("i0"),), value),))
    return LoopNest("kernel", tuple(buffers), ("out0",), (Loop(symbol("t"), shape[0], (block,), LoopKind.THREAD_X),))


def x(dtype: DType, name: str = "in0") -> Load:
    return Load(name, (symbol("i0"),), dtype)


def interpreted(interpreter: Any, name: str, nest: LoopNest, **inputs: torch.Tensor) -> torch.Tensor:
    """What the kernel for a target gives."""
    given = {n: _bits(t).numpy().view(DType.from_torch(t.dtype).numpy) for n, t in inputs.items()}
    found = interpreter.run(emit_triton(nest, gpu_target(name)), ("out0",), given, {})["out0"]
    wanted = nest.buffer("out0").dtype
    if wanted is DType.BOOL:
        return torch.from_numpy(found)
    return torch.from_numpy(found.view(f"u{found.itemsize}")).view(wanted.torch)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(getattr(torch, f"uint{8 * t.element_size()}"))


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits, but for those of a NaN."""
    assert found.dtype is wanted.dtype
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    nan = wanted.double().isnan()
    assert torch.equal(found.double().isnan(), nan)
    differ = (_bits(found).long() != _bits(wanted).long()) & ~nan
    assert not differ.any(), (found[differ][:5], wanted[differ][:5])


def numbers(dtype: DType) -> torch.Tensor:
    """All numbers of a half type; of a wider one those beside each number of eight bits and beside the middles of two,
    what is special, and numbers of random bits."""
    if dtype.is_half:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype.torch)
    codes = torch.arange(256, dtype=torch.uint8)
    exact = torch.cat([codes.view(d.torch).to(dtype.torch) for d in FLOAT8])
    exact = exact[exact.isfinite()].sort().values
    exact = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.5])
    far = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3e38, -3e38, 464, 480, -0.0, 65520, 61440])
    beside = [exact.nextafter(torch.full_like(exact, end)) for end in (torch.inf, -torch.inf)]
    bits = torch.int64 if dtype is DType.FLOAT64 else torch.int32
    limits = torch.iinfo(bits)
    drawn = torch.randint(limits.min, limits.max, (1 << 14,), dtype=bits, generator=torch.Generator().manual_seed(0))
    found = torch.cat([exact, *beside, far.to(dtype.torch), drawn.view(dtype.torch)])
    scaled = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1)).to(dtype.torch) * 100
    return torch.cat([found, scaled])[: 1 << 14 << 1].clone()


def padded(t: torch.Tensor) -> torch.Tensor:
    """As many elements as a tile has."""
    size = 1 << (len(t) - 1).bit_length()
    return torch.cat([t, t[: size - len(t)]])


@ACROSS
@pytest.mark.parametrize("to", [F32, DType.FLOAT64, F16, BF16, DType.INT32, DType.BOOL], ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_all_numbers_are_widened_as_by_torch(interpreter: Any, name: str, dtype: DType, to: DType) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype.torch)
    if to.is_int:  # of what is no number integers are whatever a machine makes of it
        codes = padded(codes[codes.float().isfinite()])
    found = interpreted(interpreter, name, pointwise(cast(x(dtype), to), len(codes), in0=dtype), in0=codes)
    assert_same(found, codes.to(to.torch))


@ACROSS
@pytest.mark.parametrize("to", [F16, BF16, *FLOAT8], ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_numbers_that_were_widened_before(interpreter: Any, name: str, dtype: DType, to: DType) -> None:
    """A float32 on the way changes nothing; where one type of eight bits becomes another, it rounds once."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype.torch)
    nest = pointwise(cast(cast(x(dtype), F32), to), len(codes), in0=dtype)
    assert_same(interpreted(interpreter, name, nest, in0=codes), codes.float().to(to.torch))


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_four_bytes_at_a_time(half: DType) -> None:
    """Every code in each place beside every other: the instructions themselves, zeros with their sign."""
    name = "mlc_from_float8_e4m3fn" + ("_bfloat16" if half is BF16 else "")
    source = conversion_source(name, gpu_target("cuda:sm_80"))
    assert source is not None and "pack=4" in source
    text = "".join(re.findall(r'^        "(.*)"$', source, re.MULTILINE))
    codes = np.random.default_rng(3).integers(0, 256, (1 << 16, 4)).astype(np.uint8)
    codes[:1024] = np.arange(256, dtype=np.uint8).repeat(16).reshape(-1, 4)
    found = run_assembly(text, [codes.reshape(-1)], 2, 2, 4)
    wanted = torch.from_numpy(codes.reshape(-1)).view(E4M3.torch).to(half.torch)
    assert_same(torch.from_numpy(found).view(half.torch), wanted)


@ACROSS
@pytest.mark.parametrize("source", [F32, DType.FLOAT64, F16, BF16], ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_numbers_are_rounded_as_by_torch(interpreter: Any, name: str, dtype: DType, source: DType) -> None:
    given = padded(numbers(source))
    nest = pointwise(cast(x(source), dtype), len(given), in0=source)
    assert_same(interpreted(interpreter, name, nest, in0=given), given.to(dtype.torch))


@ACROSS
@pytest.mark.parametrize(("source", "to"), [FLOAT8, FLOAT8[::-1]], ids=str)
def test_from_one_type_of_eight_bits_to_another(interpreter: Any, name: str, source: DType, to: DType) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(source.torch)
    found = interpreted(interpreter, name, pointwise(cast(x(source), to), 256, in0=source), in0=codes)
    assert_same(found, codes.float().to(to.torch))


@ACROSS
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_moves_chooses_and_compares_numbers(agrees: Any, name: str, dtype: DType) -> None:
    """Elements as they are, of a load that a condition guards, as bits, and of functions that compute in float32."""
    rng = np.random.default_rng(2)
    codes = rng.permutation(np.arange(256, dtype=np.uint8)).view(dtype.numpy)
    inputs = {"in0": codes, "in1": rng.standard_normal(256).astype(np.float32)}
    positive = call("gt", x(F32, "in1"), const(0.0, F32))
    target = gpu_target(name)
    for value in (
        x(dtype),
        Select(positive, x(dtype), Const(-1.5, dtype)),
        Select(call("lt", x(dtype), Const(1.5, dtype)), const(1.0, F32), const(2.0, F32)),
        call("bitcast", x(dtype), dtype=DType.UINT8),
        call("bitcast", call("bitcast", x(dtype), dtype=DType.UINT8), dtype=dtype),
        call("abs", x(dtype)),
        Const(float("nan"), dtype),
    ):
        nest = pointwise(value, 256, in0=dtype, in1=F32)
        compile_triton(agrees(nest, inputs=inputs, target=target), target)


@pytest.mark.parametrize("name", [pytest.param(n, marks=LATER.get(n, ())) for n in KNOWN])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_conversions_compile_for_every_machine(name: str, dtype: DType) -> None:
    """What a machine is said to lack is bytes in the kernel, and nothing else is."""
    target = gpu_target(name)
    for value in (cast(x(dtype), BF16), cast(x(F32), dtype)):
        source = emit_triton(pointwise(value, 256, in0=value.value.dtype), target)  # type: ignore[union-attr]
        assert {b.dtype for b in source.params} == {DType.UINT8 if target.lacks(dtype) else dtype, BF16, F32} - {
            F32 if value.dtype is BF16 else BF16
        }
        compile_triton(source, target)


@pytest.mark.parametrize("name", KNOWN)
def test_types_are_bytes_where_triton_refuses_one(name: str) -> None:
    target = gpu_target(name)
    has = gpu_backend(target).parse_options({}).supported_fp8_dtypes
    refused = {d for d, own in ((E4M3, "fp8e4nv"), (E5M2, "fp8e5")) if own not in has}
    assert {d for d in FLOAT8 if target.lacks(d)} == (set(FLOAT8) if refused else set())
