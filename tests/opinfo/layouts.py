"""Operands that lie in memory in other ways than torch's database has them: its samples are contiguous."""

from __future__ import annotations

from collections.abc import Callable

import torch


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same elements with the first dimension fastest; of one dimension, every other element of memory."""
    if t.dim() == 1:
        return torch.stack((t, t), 1).select(1, 0)
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def sliced(t: torch.Tensor) -> torch.Tensor:
    """The same elements in the middle of a larger tensor: an offset, and gaps between rows."""
    if not t.dim():
        return torch.stack((t, t))[1]
    wider = t.new_zeros([n + 2 for n in t.shape])
    inner = wider[tuple(slice(1, -1) for _ in t.shape)]
    return inner.copy_(t)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """Stride 0 along the first dimension that has several elements: its first one everywhere."""
    wide = next((d for d, n in enumerate(t.shape) if n > 1), None)
    return t if wide is None else t.narrow(wide, 0, 1).expand(t.shape)


def overlapping(t: torch.Tensor) -> torch.Tensor:
    """Rows that begin one element apart, in every dimension."""
    if t.dim() < 2 or not t.numel():
        return t
    memory = t.reshape(-1)[: sum(n - 1 for n in t.shape) + 1].clone()
    return memory.as_strided(t.shape, [1] * t.dim())


def channels_last(t: torch.Tensor) -> torch.Tensor:
    """Images and volumes whose channels lie together."""
    kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=kinds[t.dim()]) if t.dim() in kinds else t


def empty(t: torch.Tensor) -> torch.Tensor:
    """No element along the first dimension."""
    return t[:0] if t.dim() else t


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    fn.__name__: fn for fn in (transposed, sliced, expanded, overlapping, channels_last, empty)
}


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor as the layout has it; the very same where that is no other, or where it has no strides at all."""
    if t.layout is not torch.strided or t.is_conj() or t.is_neg() or t.is_nested or t.is_quantized:
        return t
    with torch.no_grad():
        made = LAYOUTS[layout](t.detach())
    same = made.shape == t.shape and made.stride() == t.stride() and made.storage_offset() == t.storage_offset()
    return t if same else made
