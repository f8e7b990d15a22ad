"""Gradients of bags of embeddings are generated."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_mlc

CASES = [
    (mode, last, padding, weighted)
    for mode, last, padding, weighted in product(("sum", "mean", "max"), (False, True), (None, 2), (False, True))
    if mode == "sum" or not weighted
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mode", "last", "padding", "weighted"), CASES)
def test_gradients_of_embeddings_and_of_their_weights(
    mode: str, last: bool, padding: int | None, weighted: bool, dtype: torch.dtype
) -> None:
    def fn(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        how = {"mode": mode, "include_last_offset": last, "padding_idx": padding, "per_sample_weights": weights}
        return F.embedding_bag(indices, table, offsets, **how)  # type: ignore[arg-type]

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=False)
    for ends in ([0, 3, 3, 9], [0, 0, 4, 13]):  # one bag is empty
        leaves = [torch.randn(8, 5, dtype=dtype), *([torch.rand(13, dtype=dtype)] if weighted else [])]
        rest = torch.randint(0, 8, (13,)), torch.tensor([*ends, *([13] if last else [])])
        given = [t.requires_grad_() for t in leaves]
        gradient = torch.randn(4, 5, dtype=dtype)
        results = []
        for call in (fn, compiled):
            out = call(given[0], *rest, given[1] if weighted else None)
            results.append([out, *torch.autograd.grad(out, given, gradient)])
        tolerance = {} if dtype is torch.float64 else {"rtol": 4e-2, "atol": 4e-2}
        torch.testing.assert_close(results[1], results[0], **tolerance)  # type: ignore[arg-type]


def test_no_library_call_is_left_in_the_backward() -> None:
    table, indices = torch.randn(50, 8, requires_grad=True), torch.randint(0, 50, (6, 4))
    _, backward = torch_mlc.explain(
        lambda t, i: F.embedding_bag(i, t, mode="mean"), table, indices, training=True
    ).graphs
    assert not backward.libraries and backward.kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_whose_number_varies(mode: str, dtype: torch.dtype) -> None:
    """Not known to be any, as a quotient of sizes is not: ``offset2bag`` has another shape than fake tensors say."""

    def fn(table: Tensor, indices: Tensor) -> Tensor:
        return F.embedding_bag(indices, table, mode=mode)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="mlc", dynamic=True)
    for shape in ((3, 2), (5, 4), (2, 7)):
        table, indices = torch.randn(6, 5, dtype=dtype, requires_grad=True), torch.randint(0, 6, shape)
        gradient = torch.randn(shape[0], 5, dtype=dtype)
        found, wanted = (
            [out := call(table, indices), *torch.autograd.grad(out, table, gradient)] for call in (compiled, fn)
        )
        tolerance = {} if dtype is torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
        torch.testing.assert_close(found, wanted, **tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_bags_have_zero_gradients(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda t, i, o: F.embedding_bag(i, t, o, mode="sum"), backend="mlc", dynamic=dynamic)
    none = torch.zeros(0, dtype=torch.int64)
    table = torch.randn(6, 5, requires_grad=True)
    out = compiled(table, none, none)
    assert out.shape == (0, 5)
    assert not torch.autograd.grad(out, table, torch.zeros(0, 5))[0].any()
