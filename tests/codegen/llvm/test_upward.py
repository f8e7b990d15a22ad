"""Long vectors are stored a register at a time, from the lowest address on, whatever machine the code is for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

import torch_mlc
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import call, cast
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.rules import default_schedule

Array = np.ndarray[Any, Any]
STORE = re.compile(r"store <(\d+) x (\w+)> %\S+, ptr (%\S+),")
STEP = re.compile(r"(%\S+) = getelementptr inbounds \w+, ptr (%\S+), i64 (\d+)")


def stores(text: str) -> list[tuple[str, int, int, str]]:
    """Base, element from there on, lanes and element type of each vector store, as they are written."""
    steps = {name: (base, int(at)) for name, base, at in STEP.findall(text)}
    return [(*steps.get(place, (place, 0)), int(lanes), kind) for lanes, kind, place in STORE.findall(text)]


@pytest.mark.parametrize("width", [64, 32, 16])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64, DType.INT8], ids=str)
def test_whole_vectors_are_stored_in_order(
    width: int, dtype: DType, target: Target, nest_of: Callable[..., LoopNest]
) -> None:
    nest = nest_of([DType.FLOAT32], lambda x: cast(x, dtype), 64)
    found = stores(emit_llvm(nest, replace(target, vector_bytes=width)).text)
    count = width // dtype.itemsize
    whole = [s for s in found if s[0] == found[0][0]]
    assert [at for _, at, _, _ in whole] == list(range(0, 64, min(count, 64)))
    assert {lanes for _, _, lanes, _ in whole} == {min(count, 64)}


@pytest.mark.parametrize("width", [64, 32])
def test_what_is_left_of_a_row_is_stored_in_order(width: int, target: Target) -> None:
    (kernel,) = torch_mlc.explain(lambda x, w: x * w, torch.zeros(7, 62), torch.zeros(62)).kernels
    # For a maker whose processors take such a row as one vector.
    scheduled = default_schedule(kernel.nest, Target("cpu", "sapphirerapids", 2, vector_bytes=64)).nest
    found = stores(emit_llvm(scheduled, replace(target, vector_bytes=width)).text)
    assert [lanes for _, _, lanes, _ in found] == [*[width // 4] * (62 * 4 // width), *[8] * (width == 64), 4, 2]
    assert [at for _, at, _, _ in found] == [sum(n for _, _, n, _ in found[:k]) for k in range(len(found))]


def test_machine_code_keeps_the_order(target: Target, nest_of: Callable[..., LoopNest]) -> None:
    """LLVM would otherwise store the parts of a long vector from the last to the first."""
    nest = nest_of([DType.FLOAT32, DType.FLOAT32], lambda x, y: call("mul", x, y), 64)
    text = emit_llvm(nest, target).text
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=target.arch, features=target.features, opt=2
    )
    module = llvm.parse_assembly(text, llvm.create_context())
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    assembly = machine.emit_assembly(module)
    if not re.search(r"\bvmovups\b", assembly):
        pytest.skip("another instruction set")
    register = {64: "zmm", 32: "ymm", 16: "xmm"}[target.vector_bytes]
    places = re.findall(rf"vmovups\s+%{register}\d+, (-?\d*)\(([^)]*)\)", assembly)
    runs: list[int] = []
    base = places[0][1]
    for at, around in places:
        if around == base and len(runs) < 256 // target.vector_bytes:
            runs.append(int(at or 0))
    assert len(runs) > 1
    assert runs == sorted(runs)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.INT16, DType.BOOL], ids=str)
@pytest.mark.parametrize("lanes", [8, 13, 48, 64, 100])
@pytest.mark.parametrize("width", [64, 32])
def test_values(
    dtype: DType,
    lanes: int,
    width: int,
    target: Target,
    nest_of: Callable[..., LoopNest],
    execute: Callable[..., dict[str, Array]],
) -> None:
    nest = nest_of([DType.FLOAT32], lambda x: cast(x, dtype), lanes)
    for n in (0, 1, lanes - 1, lanes, lanes + 1, 5 * lanes + 3):
        x = (np.random.default_rng(n).standard_normal(n) * 9).astype("f4")
        got = execute(nest, [x], {"n": n}, replace(target, vector_bytes=min(width, target.vector_bytes)))["out0"]
        np.testing.assert_array_equal(got, x.astype(dtype.numpy))
