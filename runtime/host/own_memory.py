"""What a program is given for itself: arguments that it may write over, since nobody reads them again.

What a forward saves goes to its backward, and is gone behind it unless the graph is retained. Whether anybody can still
see a tensor is told at each call, by how often it and its storage are held: by autograd, where the graph is retained,
by hooks, by views, or by whoever took it from a node of autograd's.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pool.pool import POOL
from .executable import Boxed

_holders = getattr(torch._C, "_storage_Use_Count", None)
_retains = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
CAN_TELL = _holders is not None and _retains is not None and hasattr(Tensor, "_use_count")
"""Whether this torch can tell who holds a tensor; without that nothing is written over."""


def _of_tensor(args: Sequence[Any], position: int) -> tuple[int, int]:
    """How often Python, and torch's own code, hold a tensor of a list."""
    tensor = args[position]
    return sys.getrefcount(tensor), tensor._use_count()


def _of_storage(args: Sequence[Any], position: int) -> tuple[int, int]:
    """How often torch's own code, and Python, hold the storage of a tensor of a list."""
    storage = args[position].untyped_storage()
    return _holders(storage._cdata), sys.getrefcount(storage)  # type: ignore[misc]


# The same of a tensor that only the list holds, whose storage is its own.
_ALONE = (_of_tensor([torch.empty(1)], 0), _of_storage([torch.empty(1)], 0)) if CAN_TELL else None


def is_alone(args: Sequence[Any], position: int) -> bool:
    """Whether nobody but a list holds its tensor at a position, and nobody but that tensor its storage."""
    if _ALONE is None or _of_tensor(args, position) != _ALONE[0]:
        return False
    held = POOL.is_held_once(args[position])
    return _of_storage(args, position) == _ALONE[1] if held is None else held


def with_own_memory(call: Boxed, positions: Collection[int]) -> Boxed:
    """A program that may write over its arguments at ``positions``: what somebody may still read is copied before.

    Outside of a backward of autograd's all of them are copied.
    """
    places = tuple(positions)
    if not places:
        return call

    def owning(args: list[Any]) -> Sequence[Any]:
        retained = _retains is None or _retains()
        for k in places:
            if retained or not is_alone(args, k):
                args[k] = copied(args[k])
        return call(args)

    owning._boxed_call = True  # type: ignore[attr-defined]
    owning.__name__ = owning.__qualname__ = getattr(call, "__name__", "mlc")
    return owning


def copied(tensor: Tensor) -> Tensor:
    """A tensor of the same elements and strides in memory of its own."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


__all__ = ["CAN_TELL", "copied", "is_alone", "with_own_memory"]
