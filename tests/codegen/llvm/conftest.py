"""Kernels of one expression, compiled and run on arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv

from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, Load, symbol
from torch_mlc.ir.nest.loops import Axis, Block, Bound, Buffer, Loop, LoopKind, LoopNest, Store
from torch_mlc.ir.oracle.oracle import poison, size
from torch_mlc.ir.target import Target
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import cpu_target

Array = np.ndarray[Any, Any]
N = symbol("n")
# Elements behind each result.
MARGIN = 64


def run_compiled(nest: LoopNest, inputs: Sequence[Array], sizes: Mapping[str, int], target: Target) -> dict[str, Array]:
    """As ``oracle.run_nest``, by compiled code, which writes nothing behind a result. Inputs are storage that fits the
    buffers' strides."""
    kernel = load_kernel(emit_llvm(nest, target), target)
    given = iter(inputs)
    storage: dict[str, Array] = {}
    results: dict[str, Array] = {}
    margins: dict[str, Array] = {}
    for p in nest.params:
        shape = tuple(size(e, sizes) for e in p.shape)
        strides = tuple(size(e, sizes) for e in p.strides)
        if p.name in nest.outputs:
            span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
            flat = poison((span + MARGIN,), p.dtype)
            storage[p.name] = flat
            margins[p.name] = flat.view(np.uint8)[span * flat.itemsize :]
            steps = tuple(s * flat.itemsize for s in strides)
            raw = flat.view(f"u{flat.itemsize}")  # NumPy strides no types but its own
            results[p.name] = np.lib.stride_tricks.as_strided(raw, shape, steps)
        else:
            storage[p.name] = np.ascontiguousarray(next(given))
    symbols = [sizes[s.name] for s in nest.symbols.symbols]
    before = {name: margin.copy() for name, margin in margins.items()}
    kernel(*(storage[p.name].ctypes.data for p in nest.params), *symbols)
    for name, margin in margins.items():
        np.testing.assert_array_equal(margin, before[name], err_msg=f"behind {name}")
    return {k: v.copy().view(nest.buffer(k).dtype.numpy) for k, v in results.items()}


def pointwise(args: Sequence[DType], value: Callable[..., Expr], lanes: int) -> LoopNest:
    """``out0[i] = value(in0[i], …)`` over n elements, ``lanes`` at a time (1: one by one)."""
    i, outer, lane = symbol("i0"), symbol("io"), symbol("ii")
    inputs = [Buffer(f"in{k}", (N,), (sympy.S.One,), d) for k, d in enumerate(args)]
    expr = value(*(Load(b.name, (i,), b.dtype) for b in inputs))
    out = Buffer("out0", (N,), (sympy.S.One,), expr.dtype)
    width = sympy.Integer(lanes)
    where = outer * width + lane
    block = Block("b0", (Axis(i, N),), (where,), (Store("out0", (i,), expr),), (Bound(where, N),))
    loops = Loop(outer, CeilDiv(N, width), (Loop(lane, width, (block,), LoopKind.VECTORIZED),))
    return LoopNest("kernel", (*inputs, out), ("out0",), (loops,), symbols=SymbolTable((Size(N),)))


@pytest.fixture(scope="session")
def target() -> Target:
    return cpu_target()


@pytest.fixture(scope="session")
def nest_of() -> Callable[..., LoopNest]:
    return pointwise


@pytest.fixture(scope="session")
def execute() -> Callable[..., dict[str, Array]]:
    return run_compiled


@pytest.fixture(scope="session")
def compute(target: Target) -> Callable[..., Array]:
    """``compute(value, *arrays, lanes=16)``: one expression over arrays of one length, by compiled code."""

    def run(value: Callable[..., Expr], *arrays: Array, lanes: int = 16) -> Array:
        kinds = [next(d for d in DType if d.numpy == a.dtype) for a in arrays]
        nest = pointwise(kinds, value, lanes)
        return run_compiled(nest, arrays, {"n": len(arrays[0])}, target)["out0"]

    return run
