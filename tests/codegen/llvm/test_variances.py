"""Variances as the rules for CPUs schedule them: short rows together, columns in registers, lanes for elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.codegen.llvm.test_nests import Execute, check, kernels
from torch_mlc.ir.expr.monoid import MOMENTS
from torch_mlc.ir.nest.loops import Block, Loop, LoopKind, LoopNest, Update, blocks, walk_nodes
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.cost.cpu_kernels import SHORT_ROWS_TILES, SHORT_ROWS_TOGETHER
from torch_mlc.scheduler.rules import default_schedule


def loops_of(nest: LoopNest) -> list[Loop]:
    return [n for n, _ in walk_nodes(nest.body) if isinstance(n, Loop)]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("columns", [1, 20, 64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_short_rows_go_together(execute: Execute, cores: int, columns: int, dynamic: bool) -> None:
    """A stage of sixteen rows before the next one, what belongs to rows in lanes, and rows left over."""
    x = torch.randn(SHORT_ROWS_TILES * SHORT_ROWS_TOGETHER * cores + 5, columns)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)

    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x + 1, (columns,))

    (nest,) = kernels(function, [x], dynamic=None if dynamic else False)  # type: ignore[arg-type]
    target = replace(cpu_target(cores), vector_bytes=64)
    if columns > 1:
        scheduled = default_schedule(nest, target).nest
        shared = [lp for lp in scheduled.body if isinstance(lp, Loop)]
        assert len(shared) == 1, "stages share the loop over tiles"
        inside = [lp for lp in shared[0].body if isinstance(lp, Loop) and lp.extent == SHORT_ROWS_TOGETHER]
        assert len(inside) > 2, "and have loops over the rows of a tile of their own"
        lanes = [lp for lp in inside if lp.kind is LoopKind.VECTORIZED]
        assert lanes and all(isinstance(n, Block) for lp in lanes for n in lp.body)
    for rows in (1, 19, x.shape[0]) if dynamic else (0,):
        check(execute, nest, {s.name: rows for s in nest.symbols.symbols}, target)


@pytest.mark.parametrize("rows", [16, 21, 263])
@pytest.mark.parametrize("columns", [300, 40])
def test_columns_in_registers(execute: Execute, rows: int, columns: int) -> None:
    """Both sums of a column take some rows at once; with many columns they are fetched from among others."""
    (nest,) = kernels(lambda x: x.var(0), [torch.randn(rows, columns)], dynamic=False)
    target = replace(cpu_target(1), vector_bytes=32)
    held = [lp for lp in loops_of(default_schedule(nest, target).nest) if dict(lp.annotations).get("hold")]
    assert len(held) == (1 if columns == 300 else 0)
    assert all(lp.kind is LoopKind.UNROLLED for lp in held)
    check(execute, nest, {}, target)


def test_what_all_lanes_share_does_not_make_them_fewer() -> None:
    """The first mean, in double precision, is one number a row, and its elements are floats."""
    target, found = replace(cpu_target(1), vector_bytes=64), []
    for nest in kernels(lambda x: x.var(1), [torch.randn(4, 1 << 18)], dynamic=False):
        updates = [s for b, _ in blocks(nest) for s in b.body if isinstance(s, Update)]
        if any(s.monoid == MOMENTS for s in updates):
            loops = loops_of(default_schedule(nest, target).nest)
            found.append(max(int(lp.extent) for lp in loops if lp.kind is LoopKind.VECTORIZED))
    assert found == [64]


def test_a_sample_of_rows_is_read_in_the_order_of_memory() -> None:
    """Rows at sums of axes, such as the first of each few, stand around their elements."""
    (nest,) = kernels(lambda x: x.view(8, 16, 40)[:, :4].sum(), [torch.randn(128, 40)], dynamic=False)
    (block,) = (n for n, _ in walk_nodes(nest.body) if isinstance(n, Block) and n.is_reduction)
    assert [int(a.extent) for a in block.axes] == [8, 4, 40]
