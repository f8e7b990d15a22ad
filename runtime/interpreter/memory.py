"""What a kernel may touch while Triton's interpreter runs it: the elements of its arguments, first to last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, Any]
# Where spans of memory begin and end, in order and apart.
_SPANS: ContextVar[tuple[Array, Array]] = ContextVar("spans", default=(np.empty(0, np.uint64), np.empty(0, np.uint64)))


@contextmanager
def allowed(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """While it is entered, memory of these tensors may be touched."""
    spans = []
    for t in tensors:
        if t.numel():
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
            spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    joined: list[list[int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    starts, ends = np.array(joined, np.uint64).reshape(-1, 2).T
    token = _SPANS.set((starts, ends))
    try:
        yield
    finally:
        _SPANS.reset(token)


def check_access(pointers: Any, mask: Any, what: str) -> None:
    """Raise IndexError where a lane that is not masked touches ("load", "store", "atomic") what it may not.

    ``pointers`` and ``mask`` are handles of the interpreter.
    """
    starts, ends = _SPANS.get()
    size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    at = np.asarray(pointers.data, np.uint64)
    at = at[np.broadcast_to(np.asarray(mask.data, bool), at.shape)]
    place = np.searchsorted(starts, at, "right")  # how many begin before
    inside = place > 0
    inside[inside] = at[inside] + np.uint64(size) <= ends[place[inside] - 1]
    if not inside.all():
        raise IndexError(f"{what} beside the arguments in {np.sum(~inside)} of {at.size} lanes")
