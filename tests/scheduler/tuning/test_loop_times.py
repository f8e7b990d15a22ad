"""Times of scheduled loops on CPUs: what copies share is counted once, lanes that hang over are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torch_mlc
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.expr.symbols import SymbolTable
from torch_mlc.ir.nest.loops import Block, Loop, LoopNest, blocks
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.tuning.loop_times import loops_time

ZEN4 = Target("cpu", "znver4", 1, vector_bytes=64, warp=1, max_threads=1, l1_bytes=32 << 10, l2_bytes=1 << 20)


def product(rows: int) -> LoopNest:
    """Few rows and a weight that no cache holds, in loops."""
    x, w = torch.randn(64, 1024), torch.randn(2816, 1024)
    torch._dynamo.mark_dynamic(x, 0)
    graph = torch_mlc.explain(lambda x, w: x @ w.t(), x, w, options={"regions": "17", "threads": 1}).graphs[0]
    nest = next(v.graph for v in graph.variants if v.condition.endswith("< 17")).kernels[0].scheduled
    return replace(nest, symbols=SymbolTable(tuple(replace(s, hint=rows) for s in nest.symbols.sizes)))


def test_few_rows_take_what_reading_their_weight_takes() -> None:
    machine = ZEN4.machine
    read = 4 * 2816 * 1024 / machine.bandwidth
    two, four = (loops_time(product(rows), ZEN4) for rows in (2, 4))
    assert read <= two <= four < 1.1 * read


def test_many_rows_take_the_time_of_multiplying() -> None:
    """As measured, 62 operations a nanosecond on one core of Zen 4; 30 to 120 are taken for that."""
    operations = 2.0 * 256 * 2816 * 1024
    assert 30 < operations / loops_time(product(256), ZEN4) < 120


@pytest.mark.parametrize("rows", [1, 5, 16, 63])
def test_rows_take_more_time_than_fewer(rows: int) -> None:
    assert loops_time(product(rows), ZEN4) <= loops_time(product(rows + 1), ZEN4)


def test_lanes_past_an_end_are_computed() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.exp(torch.sin(x)) * torch.cos(x)

    times = []
    for columns in (1, 15, 16, 17):
        nest = (
            torch_mlc.explain(fn, torch.randn(3, 4096, columns), options={"threads": 1}).graphs[0].kernels[0].scheduled
        )
        times.append(loops_time(nest, ZEN4))
    assert times[0] < times[2]


def test_a_product_in_a_library_is_at_its_rate() -> None:
    nest = product(64)
    (own,) = [b for b, _ in blocks(nest) if b.role is Role.PRODUCT]
    called = _with_role(nest, own.name)
    flops = 2.0 * 64 * 2816 * 1024
    assert loops_time(called, ZEN4) >= flops / ZEN4.machine.matmul
    assert loops_time(called, ZEN4) < loops_time(nest, ZEN4)


def _with_role(nest: LoopNest, name: str) -> LoopNest:
    def walk(nodes: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(
            replace(n, body=walk(n.body))
            if isinstance(n, Loop)
            else replace(n, role=Role.LIBRARY_PRODUCT)
            if isinstance(n, Block) and n.name == name
            else n
            for n in nodes
        )

    return replace(nest, body=walk(nest.body))  # type: ignore[arg-type]
