"""Which products read an operand through indices, and which leave that to a kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.scheduler.cost.test_contraction_gpu import decided, empty, products
from torch_mlc.ir.expr.value import is_value, loads
from torch_mlc.ir.graph.graph import Compute

WORDS = torch.int64


def rows(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return x[index] @ w


def both(x: Tensor, index: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    chosen = x[index]
    return (chosen @ gate) * (chosen @ up)


def summed(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return x[:, index] @ w


def test_rows_in_front_of_a_shallow_product_are_read_through_the_index():
    graph = decided(rows, empty(65536, 256), torch.zeros(65536, dtype=WORDS), empty(256, 256))
    (made,), library = products(graph)
    assert not library and not any(isinstance(n, Compute) and n.types[0].numel == 65536 * 256 and n.name == "index"
                                   for n in graph.nodes)  # fmt: skip
    assert any(is_value(i) for v in made.values for ld in loads(v) for i in ld.indices)


def test_products_of_one_gathered_operand_all_read_it_through_the_index():
    graph = decided(both, empty(65536, 256), torch.zeros(65536, dtype=WORDS), empty(256, 256), empty(256, 256))
    made, library = products(graph)
    assert len(made) == 2 and not library
    assert all(any(is_value(i) for v in n.values for ld in loads(v) for i in ld.indices) for n in made)


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096, 14336), (4096, 64, 4096, 4096)])
def test_deep_products_and_those_of_few_rows_leave_it_to_a_kernel(sizes):
    table, count, depth, columns = sizes
    graph = decided(rows, empty(table, depth), torch.zeros(count, dtype=WORDS), empty(depth, columns))
    opened, (call,) = products(graph)
    assert not opened and "made of" in call.reason


def test_indices_along_the_sum_are_gathered_first():
    graph = decided(summed, empty(65536, 512), torch.zeros(256, dtype=WORDS), empty(256, 256))
    opened, (call,) = products(graph)
    assert not opened and "made of" not in call.reason


@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_cpu_answers_as_eager(count):
    x, w = torch.randn(13, 24), torch.randn(24, 11, requires_grad=True)
    index = torch.randint(-13, 13, (count,))
    fn = torch.compile(rows, backend="mlc", dynamic=True)
    wanted, found = rows(x, index, w), fn(x, index, w)
    torch.testing.assert_close(found, wanted)
    (there,), (here,) = (torch.autograd.grad(r.sum(), w) for r in (wanted, found))
    torch.testing.assert_close(here, there)
