"""Gradients of bags of embeddings in simpler ops: each row's bag is found from the offsets alone.

What torch saves of a bag for its backward (``offset2bag`` and others) is of other shapes than its fake tensors say
where a library takes a shorter way, so nothing here reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
_SUM, _MEAN = 0, 1


def _bags(grad: Tensor, indices: Tensor, offsets: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of bags, at least one; the bag of each row; and whether the row counts: what pads does not, nor
    what stands behind the last bag."""
    rows = torch.arange(indices.shape[0], device=indices.device)
    bag = torch.searchsorted(offsets.to(torch.int64), rows, right=True) - 1
    counts = bag < grad.shape[0]
    if padding >= 0:
        counts = counts & (indices != padding)
    if not statically_known_true(grad.shape[0] > 0):
        grad = F.pad(grad, (0, 0, 0, 1))
    return grad, torch.where(counts, bag, 0), counts


def _backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor,
    num_weights: Any, scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    """``aten._embedding_bag_backward`` of sums and means."""
    if sparse or scale_grad_by_freq or mode not in (_SUM, _MEAN) or indices.dim() != 1:
        return NotImplemented
    grad, bag, counts = _bags(grad, indices, offsets, padding_idx)
    # Sums of halves are made in single precision, and rounded once.
    part = grad.to(torch.promote_types(grad.dtype, torch.float32))[bag]
    if per_sample_weights is not None:
        part = part * per_sample_weights[:, None]
    if mode == _MEAN:
        size = torch.zeros(grad.shape[0], dtype=torch.int64, device=grad.device).index_add(0, bag, counts.long())
        part = part / size[bag].clamp(min=1)[:, None]
    part = torch.where(counts[:, None], part, 0)
    return aten.embedding_dense_backward(part, indices, num_weights, padding_idx, False).to(grad.dtype)


def _weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Any:
    """``aten._embedding_bag_per_sample_weights_backward``."""
    if indices.dim() != 1:
        return NotImplemented
    grad, bag, counts = _bags(grad, indices, offsets, padding_idx)
    kind = torch.promote_types(grad.dtype, torch.float32)
    return torch.where(counts, (grad.to(kind)[bag] * weight.to(kind)[indices]).sum(-1), 0).to(grad.dtype)


EMBEDDING_BAGS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag_backward.default: _backward,
    aten._embedding_bag_per_sample_weights_backward.default: _weights_backward,
}
