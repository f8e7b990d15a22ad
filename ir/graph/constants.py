"""What is in tensors of a model: their digest, and the elements of small ones as numbers that a text can hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Elements up to which a tensor is written out.
_MOST_WRITTEN = 32


def digest_of(tensor: Tensor) -> str:
    """SHA-256, in hex, of the elements in their order; "" of a tensor that is more than memory with strides."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return ""
    return hashlib.sha256(_bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().tobytes()).hexdigest()


def elements_of(tensor: Tensor) -> Any:
    """The elements as lists in lists of Python numbers; None of a tensor that is large, or not made of those again."""
    digest = digest_of(tensor)
    if not digest or tensor.numel() > _MOST_WRITTEN:
        return None
    found = tensor.detach().cpu().to(_written(tensor.dtype)).tolist()
    again = tensor_of(found, tensor.dtype)
    return found if again.shape == tensor.shape and digest_of(again) == digest else None


def tensor_of(elements: Any, dtype: torch.dtype) -> Tensor:
    """The tensor of such elements, on the CPU. Raises ValueError, TypeError or RuntimeError where they are none."""
    return torch.tensor(elements, dtype=_written(dtype)).to(dtype)


def laid_out(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The elements of a tensor in memory with other strides, in elements, which may overlap."""
    if tensor.stride() == tuple(strides) or not tensor.numel():
        return tensor
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for d, stride in enumerate(strides):
        steps = torch.arange(tensor.shape[d]) * stride
        places += steps.reshape(-1, *(1,) * (tensor.dim() - 1 - d))
    memory = torch.zeros(int(places.max()) + 1, tensor.itemsize, dtype=torch.uint8, device=tensor.device)
    memory[places.reshape(-1).to(tensor.device)] = _bytes_of(tensor)
    return memory.reshape(-1).view(tensor.dtype).as_strided(tensor.shape, tuple(strides))


def _bytes_of(tensor: Tensor) -> Tensor:
    """A row of bytes for each element, in order."""
    # A copy: one element is contiguous with any stride, but can only be seen as bytes with one of 1.
    plain = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).reshape(-1, tensor.itemsize)


def _written(dtype: torch.dtype) -> torch.dtype:
    """The type of Python's numbers that has all values of an element type."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
