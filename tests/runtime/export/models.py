"""Small models as libraries: kernels by the emitter, host programs written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import sympy

from torch_mlc.codegen.export.library import (
    ExportedFunction,
    ExportedModel,
    Guard,
    KernelVariant,
    TensorSpec,
    Weight,
)
from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.nest.loops import Loop, LoopKind, LoopNest, map_nodes
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.export.write import write_library
from torch_mlc.scheduler.rules import default_schedule

S0, S1 = (sympy.Symbol(n, integer=True, positive=True) for n in ("s0", "s1"))
ONE = sympy.S.One
V3 = Target("cpu", "x86-64-v3", 4, vector_bytes=32)
V4 = Target("cpu", "x86-64-v4", 4, vector_bytes=64)
ARM = Target("cpu", "generic", 4, vector_bytes=16)
WIDTH = 64

SCALE = """
@nest(outputs=["out0"])
def scale(in0: float32[s0, 64], in1: float32[64], out0: float32[s0, 64]):
    s0 = size()
    for x in parallel(s0):
        for y in serial(64):
            with block("b0"):
                x0 = spatial(s0, x)
                x1 = spatial(64, y)
                out0[x0, x1] = mul(exp(in0[x0, x1]), in1[x1])
"""
TAKE = """
@nest(outputs=["out0"])
def take(in0: float32[10, 64], in1: int64[s1], out0: float32[s1, 64]):
    s1 = size()
    for x in serial(s1):
        for y in serial(64):
            with block("b0"):
                x0 = spatial(s1, x)
                x1 = spatial(64, y)
                out0[x0, x1] = in0[check_bounds(in1[x0], int64(0), int64(10), int64(0)), x1]
"""
# Adds one to the count of calls and gives it.
COUNT = """
define void @count(ptr %arguments) {
  %state = load ptr, ptr %arguments
  %result.at = getelementptr i64, ptr %arguments, i64 1
  %result = load ptr, ptr %result.at
  %old = load i64, ptr %state
  %new = add i64 %old, 1
  store i64 %new, ptr %state
  store i64 %new, ptr %result
  ret void
}
"""
# Copies so many bytes.
COPY = """
declare ptr @memcpy(ptr, ptr, i64)
define void @copy(ptr %arguments) {
  %from = load ptr, ptr %arguments
  %to.at = getelementptr i64, ptr %arguments, i64 1
  %to = load ptr, ptr %to.at
  %count.at = getelementptr i64, ptr %arguments, i64 2
  %count = load i64, ptr %count.at
  %bytes = mul i64 %count, 4
  %r = call ptr @memcpy(ptr %to, ptr %from, i64 %bytes)
  ret void
}
"""


@dataclass(frozen=True)
class Launch:
    """A kernel with what it is given: "inputs 0", "weights 1", "results 0", "sizes 0", "arena", "results 0 + sizes 0"
    (an address, so many floats further)."""

    kernel: str
    arguments: tuple[str, ...]


def host_text(entry: str, launches: Sequence[Launch]) -> str:
    """The host program that launches kernels one after another."""
    lines = [f"declare void @{name}(ptr)" for name in sorted({launch.kernel for launch in launches})]
    lines.append(
        f"define internal i32 @{entry}(ptr %inputs, ptr %results, ptr %weights, ptr %sizes, ptr %arena, ptr %status) {{"
    )
    lines.append("  %arguments = alloca [32 x i64]")
    for n, launch in enumerate(launches):
        for k, argument in enumerate(launch.arguments):
            lines += _argument(f"%a{n}.{k}", argument)
            lines.append(f"  %at{n}.{k} = getelementptr i64, ptr %arguments, i64 {k}")
            lines.append(f"  store i64 %a{n}.{k}, ptr %at{n}.{k}")
        behind = len(launch.arguments)
        lines.append(f"  %told{n} = getelementptr i64, ptr %arguments, i64 {behind}")
        lines.append(f"  store i64 0, ptr %told{n}")
        lines.append(f"  call void @{launch.kernel}(ptr %arguments)")
        lines.append(f"  %what{n} = load i64, ptr %told{n}")
        lines.append(f"  %fine{n} = icmp eq i64 %what{n}, 0")
        lines.append(f"  br i1 %fine{n}, label %go{n}, label %wrong{n}")
        lines.append(f"wrong{n}:")
        lines.append(f"  call void @llvm.memcpy.p0.p0.i64(ptr %status, ptr %told{n}, i64 32, i1 false)")
        lines.append(f"  %launch{n} = getelementptr i64, ptr %status, i64 4")
        lines.append(f"  store i64 {n}, ptr %launch{n}")
        lines.append("  ret i32 1")
        lines.append(f"go{n}:")
    return "\n".join([*lines, "  ret i32 0", "}", ""])


def _argument(name: str, text: str) -> list[str]:
    if text == "arena":
        return [f"  {name} = ptrtoint ptr %arena to i64"]
    base, _, more = text.partition(" + ")
    array, number = base.split()
    inner = name if not more else f"{name}.base"
    lines = [f"  {name}.at = getelementptr i64, ptr %{array}, i64 {number}", f"  {inner} = load i64, ptr {name}.at"]
    if more:
        array, number = more.split()
        lines += [
            f"  {name}.more.at = getelementptr i64, ptr %{array}, i64 {number}",
            f"  {name}.more = load i64, ptr {name}.more.at",
            f"  {name}.bytes = mul i64 {name}.more, 4",
            f"  {name} = add i64 {inner}, {name}.bytes",
        ]
    return lines


def kernel(text: str, target: Target, *, team: bool = True) -> KernelSource:
    """A nest as the rules schedule it; parallel loops start their team however little they do."""
    nest = parse(text)
    assert isinstance(nest, LoopNest)
    nest = default_schedule(nest, target).nest

    def change(node: Any) -> Any:
        if team and isinstance(node, Loop) and node.kind is LoopKind.PARALLEL:
            return replace(node, annotations=(*(a for a in node.annotations if a[0] != "grain"), ("grain", 0)))
        return None

    return emit_llvm(replace(nest, body=map_nodes(nest.body, change)), target)


def kernels(target: Target) -> tuple[KernelSource, ...]:
    own = [KernelSource(n, "llvm", t, (), ()) for n, t in (("count", COUNT), ("copy", COPY))]
    return (kernel(SCALE, target), kernel(TAKE, target), *own)


def spec(name: str, dtype: DType, *shape: Any, strides: Sequence[Any] | None = None) -> TensorSpec:
    sizes = tuple(sympy.sympify(e) for e in shape)
    if strides is None:
        strides = [sympy.Mul(*sizes[k + 1 :]) for k in range(len(sizes))]
    return TensorSpec(name, dtype, sizes, tuple(sympy.sympify(s) for s in strides))


def sample(
    name: str = "sample",
    target: Target = V3,
    variants: Sequence[Target] = (),
    machine: str = "x86-64",
    factor: float = 1.0,
) -> tuple[ExportedModel, Mapping[str, np.ndarray]]:
    """``forward(x, index)`` gives ``exp(x) * w``, rows of a table, and the number of the call; ``twice(x)`` gives x two
    times, through the arena."""
    forward = ExportedFunction(
        "forward",
        (spec("x", DType.FLOAT32, S0, WIDTH), spec("index", DType.INT64, S1)),
        (
            spec("y", DType.FLOAT32, S0, WIDTH),
            spec("rows", DType.FLOAT32, S1, WIDTH),
            spec("calls", DType.INT64),
        ),
        {S0: (0, 0), S1: (1, 0)},
        {S0: (1, 2048), S1: (0, None)},
        (Guard(sympy.Ne(S0, 7), "s0 (dimension 0 of x) may not be 7"),),
        sympy.Integer(0),
        "main",
        host_text(
            "main",
            [
                Launch("scale", ("inputs 0", "weights 1", "results 0", "sizes 0")),
                Launch("take", ("weights 2", "inputs 1", "results 1", "sizes 1")),
                Launch("count", ("weights 3", "results 2")),
            ],
        ),
    )
    twice = ExportedFunction(
        "twice",
        (spec("x", DType.FLOAT32, S0),),
        (spec("y", DType.FLOAT32, 2 * S0),),
        {S0: (0, 0)},
        {S0: (0, 1 << 20)},
        (),
        4 * S0,
        "main",
        host_text(
            "main",
            [
                Launch("copy", ("inputs 0", "arena", "sizes 0")),
                Launch("copy", ("arena", "results 0", "sizes 0")),
                Launch("copy", ("arena", "results 0 + sizes 0", "sizes 0")),
            ],
        ),
    )
    model = ExportedModel(
        name,
        (forward, twice),
        (
            Weight("odd", DType.INT8, (3,), (1,)),
            Weight("w", DType.FLOAT32, (WIDTH,), (1,)),
            Weight("table", DType.FLOAT32, (10, WIDTH), (WIDTH, 1)),
            Weight("calls", DType.INT64, (), (), mutable=True),
            Weight("turned", DType.BFLOAT16, (3, 5), (1, 3)),
        ),
        kernels(target),
        target,
        tuple(KernelVariant(t, kernels(t)) for t in variants),
        machine,
    )
    rng = np.random.default_rng(0)
    weights = {
        "odd": np.array([1, 2, 3], np.int8),
        "w": (factor * rng.normal(size=WIDTH)).astype(np.float32),
        "table": rng.normal(size=(10, WIDTH)).astype(np.float32),
        "calls": np.array(0, np.int64),
        "turned": np.arange(15).reshape(3, 5).astype(DType.BFLOAT16.numpy),
    }
    return model, weights


def written(folder: Path, **options: Any) -> Mapping[str, np.ndarray]:
    """Write the sample to a folder: its weights."""
    model, weights = sample(**options)
    write_library(model, weights, folder)
    return weights


def expected(weights: Mapping[str, np.ndarray], x: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.exp(x.astype(np.float64)) * weights["w"], weights["table"][index]
