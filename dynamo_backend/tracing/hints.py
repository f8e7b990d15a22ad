"""Typical values of torch's sizes: for heuristics, never for decisions of correctness."""

from __future__ import annotations

import torch

from ..converters.sizes import SizeMap


def hint_of(size: int | torch.SymInt) -> int:
    """A typical value of a size: that of this compilation, or as many as kernels expect of what data decide (what
    ``mark_unbacked`` was told, else 64)."""
    if isinstance(size, int):
        return size
    if not is_decided_by_data(size):
        return int(size.node.hint)
    sizes = SizeMap(set())
    return sizes.hint(sizes.size(size))


def is_decided_by_data(size: int | torch.SymInt) -> bool:
    """Whether a size has no value yet, so that nothing may be asked of it that needs one, as a guard does."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint()
