"""The roundings inside of a line: of every operation that a line and its gradient consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from torch_mlc.dynamo_backend.verify.roundings import Roundings

_ATEN = torch.ops.aten
# Operations of several roundings, of which some cancel: they are taken apart.
_OPENED: dict[Any, Callable[..., Any]] = get_decompositions(
    [
        _ATEN.native_layer_norm, _ATEN.native_layer_norm_backward, _ATEN.native_group_norm,
        _ATEN.native_group_norm_backward, _ATEN.native_batch_norm, _ATEN.native_batch_norm_backward,
        _ATEN._native_batch_norm_legit, _ATEN._softmax, _ATEN._softmax_backward_data, _ATEN._log_softmax,
        _ATEN._log_softmax_backward_data, _ATEN.var_mean, _ATEN.var, _ATEN.std, _ATEN.std_mean, _ATEN.logsumexp,
        _ATEN.smooth_l1_loss, _ATEN.smooth_l1_loss_backward, _ATEN.huber_loss, _ATEN.huber_loss_backward,
        _ATEN.mse_loss, _ATEN.mse_loss_backward,
    ]
)  # fmt: skip


def _by_logsumexp(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The softmax of an attention as its kernels for gradients make it, eager's too: from the rounded logarithm of the
    sum, which moves a row by as much as its scores are large. A row that sees nothing has zeros."""
    scores = scores.to(dtype or scores.dtype)
    logarithm = torch.logsumexp(scores, dim, keepdim=True)
    return torch.where(logarithm == -torch.inf, 0.0, (scores - logarithm).exp())


# Only the attention that is written out calls it.
_OPENED[_ATEN._safe_softmax.default] = _by_logsumexp


class LineRoundings(Roundings):
    """Errors of the size that each line says, and none outside of lines."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator, 0.0)

    @contextmanager
    def of(self, eps: float) -> Iterator[None]:
        """For a while, errors of that size; afterwards none."""
        self.eps = eps
        try:
            yield
        finally:
            self.eps = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        opened = _OPENED.get(func) if self.eps else None
        if opened is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return opened(*args, **(kwargs or {}))
