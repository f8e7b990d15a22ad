"""Who may hold the memory of a tensor, and how they look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * given[0]


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "the tensor": (lambda t: t, lambda h: h),
    "a view": (lambda t: t[:, 5:], lambda h: h),
    "a view of another type": (lambda t: t.view(torch.int32), lambda h: h.view(torch.float32)),
    "an alias": (lambda t: t.detach(), lambda h: h),
    "a parameter": (lambda t: torch.nn.Parameter(t), lambda h: h.detach()),
    "its storage": (lambda t: t.untyped_storage(), lambda h: torch.empty(0).set_(h)),
    "an array": (lambda t: t.numpy(), torch.from_numpy),
    "a view of an array": (lambda t: t.numpy()[:, 7:], torch.from_numpy),
    "a memory view": (lambda t: memoryview(t.numpy()), lambda h: torch.from_numpy(np.asarray(h))),
    "a capsule": (torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack),
    "an array by DLPack": (np.from_dlpack, torch.from_numpy),
    "a graph of autograd": (lambda t: Saved.apply(t.requires_grad_()), lambda h: h.grad_fn.saved_tensors[0]),
    "a list": (lambda t: [t], lambda h: h[0]),
}
