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
