"""Conjugation and negation that tensors only carry as bits: ``x.conj()`` and its ``imag`` have the memory of ``x``.

Kernels read memory as it is. What a graph is given is brought into the form that it was traced with: conjugated where
its fake tensor is, for ATen's ops know of that, and never negated, for the graph does that itself where it is to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .executable import Boxed


@dataclass(frozen=True, slots=True)
class Lazy:
    """The argument at ``position`` may come with other bits than those of its fake tensor, which are these."""

    position: int
    is_conj: bool = False
    is_neg: bool = False


def memory_of(tensor: Tensor, is_conj: bool, is_neg: bool) -> Tensor:
    """What a graph takes for a tensor that was traced with these bits: the same memory where it has them, else a copy.

    The result is conjugated if ``is_conj``. It is never negated by a bit; if ``is_neg`` it is the tensor's negative.
    """
    if is_neg:
        tensor = torch._neg_view(tensor)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_conj() != is_conj:
        tensor = tensor.conj().resolve_conj().conj() if is_conj else tensor.resolve_conj()
    return tensor


def with_memory_of(call: Boxed, lazy: Iterable[Lazy]) -> Boxed:
    """A program whose arguments are brought into the form that it was traced with."""
    marks = tuple((x.position, x.is_conj, x.is_neg) for x in lazy)
    if not marks:
        return call

    def taken(args: list[Any]) -> Sequence[Any]:
        for position, is_conj, is_neg in marks:
            tensor = args[position]
            if tensor is not None and (is_neg or tensor.is_neg() or tensor.is_conj() != is_conj):
                args[position] = memory_of(tensor, is_conj, is_neg)
        return call(args)

    taken._boxed_call = True  # type: ignore[attr-defined]
    taken.__name__ = taken.__qualname__ = getattr(call, "__name__", "mlc")
    return taken
