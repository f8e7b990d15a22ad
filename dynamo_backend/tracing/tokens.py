"""Tokens that keep ops with effects in their order: empty tensors while torch traces, None when a program runs."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import HigherOrderOperator

# Higher-order ops that compute with their tensors, which may have no elements.
_COMPUTES = ("run_and_save_rng_state", "run_with_rng_state", "associative_scan")


def is_token(node: fx.Node) -> bool:
    """Whether an argument of a graph may come as None, though it was traced as a tensor: one without elements that only
    higher-order ops hand on."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor) or not node.users:
        return False
    empty = any(type(n) is int and n == 0 for n in value.shape)
    return empty and all(n.op == "output" or _hands_on(n.target) for n in node.users)


def _hands_on(target: object) -> bool:
    return isinstance(target, HigherOrderOperator) and target.name() not in _COMPUTES
