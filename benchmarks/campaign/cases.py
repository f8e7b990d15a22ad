"""Kernels of a campaign by name: functions, and inputs that are made on the device, in memory that is poisoned around
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..kernel_texts.corpus import gradients_of
from ..kernels.case import KernelCase, Shape
from ..kernels.registry import KERNELS
from .plan import TRAINING

# Bytes around an input. Every byte of poison is 255: NaN as any float, true as a truth value, -1 as an integer.
MARGIN, POISON = 256, 255


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """A kernel of the suite ``kernels`` at one size, in one type and mode."""

    case: KernelCase
    variant: str
    dtype: torch.dtype
    mode: str

    @classmethod
    def of(cls, name: str) -> NamedKernel:
        """By its name, as ``plan.kernel_checks`` has them: "softmax, odd, bfloat16, inference"."""
        case, variant, dtype, mode = name.split(", ")
        return cls(KERNELS[case], variant, getattr(torch, dtype), mode)

    def shape(self, kind: str) -> Shape:
        """Its size where it is compared ("cpu": small) or timed ("cuda")."""
        return self.case.shapes[kind][self.variant]

    def inputs(self, kind: str, device: str) -> list[Tensor]:
        """Inputs made on a device; those that are to take gradients do."""
        with torch.device(device):
            made = self.case.make(self.shape(kind), torch.Generator(device).manual_seed(0))
        return self.with_gradients([t.to(self.dtype) if t.is_floating_point() else t for t in made])

    def with_gradients(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Leaves that take gradients, where the mode is training."""
        count = gradients_of(self.case.name) if self.mode == TRAINING else 0
        return [t.detach().requires_grad_(k < count and t.is_floating_point()) for k, t in enumerate(inputs)]

    def results(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """What a call gives, by name: outputs, gradients of the sum of those, and inputs as they are afterwards."""
        with torch.set_grad_enabled(self.mode == TRAINING):
            outputs = [t for t in pytree.tree_leaves(function(*inputs)) if isinstance(t, Tensor)]
        found = {f"output {k}": t.detach() for k, t in enumerate(outputs)}
        leaves = {k: t for k, t in enumerate(inputs) if t.requires_grad}
        if leaves:
            losses = [t.float().sum() if t.dtype != torch.float64 else t.sum() for t in outputs if t.requires_grad]
            gradients = torch.autograd.grad(losses, list(leaves.values()), allow_unused=True)
            found |= {f"gradient {k}": g for k, g in zip(leaves, gradients, strict=True) if g is not None}
        return found | {f"input {k}": t.detach() for k, t in enumerate(inputs)}


def in_poison(t: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    """A copy of a tensor within poison, and all of that memory as bytes; ``shifted`` by one element from where an
    allocator would put it."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    offset = MARGIN + (t.element_size() if shifted else 0)
    offset += -offset % t.element_size()
    size = offset + span * t.element_size() + MARGIN
    flat = torch.full((size + -size % 16,), POISON, dtype=torch.uint8, device=t.device)
    whole = flat[: flat.numel() // t.element_size() * t.element_size()].view(t.dtype)
    copy = whole.as_strided(t.shape, t.stride(), offset // t.element_size())
    copy.copy_(t.detach())
    return copy.detach().requires_grad_(t.requires_grad), flat


def margins_hold(t: Tensor, flat: Tensor) -> bool:
    """Whether the memory around a tensor that lies in poison is as it was. Gaps between strides are not looked at."""
    begin = t.storage_offset() * t.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    end = begin + span * t.element_size()
    return bool((flat[:begin] == POISON).all() and (flat[end:] == POISON).all())


def poison_allocator(tensors: Sequence[Tensor]) -> None:
    """Let an allocator hand out poison for tensors of these sizes: it gives again what it was given back."""
    held = [torch.full((max(t.nbytes, 1),), POISON, dtype=torch.uint8, device=t.device) for t in tensors]
    held.clear()
