"""Groups of a few neighbours: picked from whole registers, woven together and stored in whole registers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import torch_mlc
from torch_mlc.codegen.llvm import emit_llvm
from torch_mlc.ir.nest.loops import LoopKind, LoopNest, blocks
from torch_mlc.ir.oracle.oracle import run_nest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.cpu import load_kernel
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.rules.cpu.pointwise import CPU_POINTWISE
from torch_mlc.scheduler.schedule.schedule import Schedule

WIDE, NARROW = (replace(cpu_target(2), vector_bytes=b) for b in (64, 32))
TYPES = (torch.float32, torch.float64, torch.int32, torch.bfloat16, torch.int8)


def into_groups(count: int, groups: int, dtype: torch.dtype) -> LoopNest:
    x = torch.zeros(count, groups, dtype=dtype)
    (kernel,) = torch_mlc.explain(lambda x: x.t().contiguous() + 1, x).kernels
    return kernel.nest


def out_of_groups(count: int, groups: int, dtype: torch.dtype) -> LoopNest:
    x = torch.zeros(groups, count, dtype=dtype)
    (kernel,) = torch_mlc.explain(lambda x: x.t().contiguous() + 1, x).kernels
    return kernel.nest


def scheduled(nest: LoopNest, target: Target) -> LoopNest:
    schedule = Schedule(nest)
    CPU_POINTWISE.apply(schedule, target, {k: v[0] for k, v in CPU_POINTWISE.parameters(nest, target).items()})
    return schedule.nest


def check(nest: LoopNest, done: LoopNest, target: Target) -> None:
    """Bit by bit against the oracle; nothing is written around the result."""
    if target.vector_bytes > cpu_target().vector_bytes:
        return
    rng = np.random.default_rng(0)
    inputs = [p for p in nest.params if p.name not in nest.outputs]
    given = [(rng.standard_normal(int(np.prod(p.shape))) * 9).astype(p.dtype.numpy) for p in inputs]
    results = run_nest(nest, given, {})
    outputs = [(np.full(results[n].size + 64, 7, results[n].dtype), results[n]) for n in nest.outputs]
    kernel = load_kernel(emit_llvm(done, target), target)
    kernel(*(a.ctypes.data for a in given), *(o[32:].ctypes.data for o, _ in outputs))
    for out, wanted in outputs:
        kind = f"u{wanted.itemsize}"
        np.testing.assert_array_equal(out[32:-32].view(kind), wanted.reshape(-1).view(kind))
        assert (out[:32] == 7).all() and (out[-32:] == 7).all()


@pytest.mark.parametrize("target", [WIDE, NARROW], ids=["64", "32"])
@pytest.mark.parametrize("count", range(2, 17))
def test_values(count: int, target: Target) -> None:
    for make in (into_groups, out_of_groups):
        nest = make(count, 83, torch.float32)
        check(nest, scheduled(nest, target), target)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 7, 16, 64, 65])
def test_types_and_tails(groups: int, dtype: torch.dtype) -> None:
    for count in (2, 3, 6):
        for make in (into_groups, out_of_groups):
            nest = make(count, groups, dtype)
            check(nest, scheduled(nest, WIDE), WIDE)


@pytest.mark.parametrize("count", [2, 3, 4, 6, 7])
def test_whole_registers_are_moved(count: int) -> None:
    """A group for each lane, and neither gathers nor scatters where no lanes are left over."""
    for make in (into_groups, out_of_groups):
        nest = make(count, 256, torch.float32)
        done = scheduled(nest, WIDE)
        ((_, around),) = blocks(done)
        assert [(int(lp.extent), lp.kind) for lp in around][-2:] == [
            (count, LoopKind.UNROLLED), (16, LoopKind.VECTORIZED),
        ]  # fmt: skip
        text = emit_llvm(done, WIDE).text
        assert "gather" not in text and "scatter" not in text


def test_what_is_made_of_a_group_and_of_each_part_shares_a_loop() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp() * 2
        return y, torch.stack((y + 1, y - 1), -1)

    x = torch.randn(1000)
    (kernel,) = torch_mlc.explain(both, x).kernels
    roots = {around[0].var for _, around in blocks(scheduled(kernel.nest, WIDE))}
    assert len(roots) == 1
    for got, wanted in zip(torch.compile(both, backend="mlc")(x), both(x.double()), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)


READ = """
@nest(outputs=["out0", "out1"])
def f(in0: float32[48], out0: float32[48, 3], out1: float32[48, 3]):
    for i in serial(48):
        for k in serial(3):
            with block("b0"):
                i0 = spatial(48, i)
                k0 = spatial(3, k)
                out0[i0, k0] = mul(in0[i0], float32(2.0))
            with block("b1"):
                i0 = spatial(48, i)
                k0 = spatial(3, k)
                out1[i0, k0] = add(out0[i0, k0], float32(1.0))
"""


def test_what_copies_read_again_is_stored_at_once() -> None:
    nest = parse(READ)
    assert isinstance(nest, LoopNest)
    s = Schedule(nest)
    outer, lane = s.split("i", [None, 16])
    s.reorder(outer, "k", lane)
    s.unroll("k")
    s.vectorize(lane)
    check(nest, s.nest, WIDE)
    assert emit_llvm(s.nest, WIDE).text.count("call void @llvm.masked.scatter") == 3, "those of out0 alone"
