"""Which products of few rows are loops of ours, and which a library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.ir.graph.graph import Library
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.cost.products.contraction import decide_product
from torch_mlc.scheduler.facts.contraction import Decision, Products

WIDE = Target("cpu", "znver5", 1, 64, 48 << 10, 1 << 20, warp=1, max_threads=1, onednn=True)
NARROW = replace(WIDE, arch="znver3", vector_bytes=32)


def along(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def across(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def decided(
    fn: Callable[..., Tensor], x: Tensor, w: Tensor, target: Target = WIDE, dynamic: bool = False, fast: bool = True
) -> Decision:
    with torch.no_grad():
        (traced,) = capture(fn, (x, w), dynamic=dynamic)
    graph = import_graph(traced)
    products, (node,) = Products(graph), [n for n in graph.nodes if isinstance(n, Library)]
    product = products.product(node)
    assert product is not None
    return decide_product(product, target.machine, fast)


def matrices(rows: int, size: int = 2048) -> tuple[Tensor, Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(rows, size), torch.empty(size, size)


@pytest.mark.parametrize(
    ("fn", "target", "wanted"),
    [
        (along, WIDE, (*range(1, 13), 15, 16)), (across, WIDE, range(1, 13)), (along, NARROW, (*range(1, 7), 8)),
        (across, NARROW, (2, 3, 4)),
    ],
)  # fmt: skip
def test_few_rows_are_read_by_loops_and_many_by_a_library(
    fn: Callable[..., Tensor], target: Target, wanted: Sequence[int]
) -> None:
    """Tiles of rows that are not full are as much work as full ones."""
    found = [rows for rows in range(1, 40) if decided(fn, *matrices(rows), target).decomposed]
    assert found == list(wanted)
    assert decided(fn, *matrices(1), target).reason.startswith("few rows: 1 x 2048 x 2048 in loops in ")


@pytest.mark.parametrize("fn", [along, across])
def test_others_are_a_librarys(fn: Callable[..., Tensor]) -> None:
    x, w = matrices(4)
    assert decided(fn, x, w, replace(WIDE, cores=2)).decomposed
    assert not decided(fn, x, w, replace(WIDE, l2_bytes=32 << 20)).decomposed, "a cache holds the weight"
    assert not decided(fn, x, w, dynamic=True).decomposed, "the next call may have more rows"
    assert not decided(fn, x, w, fast=False).decomposed
    assert not decided(fn, x.double(), w.double()).decomposed


def test_operands_whose_elements_are_no_neighbours_are_a_librarys() -> None:
    x, w = matrices(4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        apart, turned = torch.empty(2048, 4096)[:, ::2], torch.empty(2048, 4).t()
    for fn in (along, across):
        assert not decided(fn, x, apart).decomposed
    assert not decided(along, turned, w).decomposed and decided(across, turned, w).decomposed


def test_few_columns_are_few_rows() -> None:
    x, w = matrices(4)
    assert decided(lambda x, w: w @ x.t(), x, w).decomposed and decided(lambda x, w: w.t() @ x.t(), x, w).decomposed
    assert decided(lambda x, w: torch.mv(w, x[0]), x, w).decomposed


def test_a_weight_that_the_graph_makes_is_in_a_cache() -> None:
    """A gradient of a chunk's logits is read once, right behind the kernel that has made it."""
    x, w = matrices(8)
    assert decided(along, x, w).decomposed
    assert not decided(lambda x, w: x @ torch.cumsum(w, 1).t(), x, w).decomposed
