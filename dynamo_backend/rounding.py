"""Which values of half types their readers must see rounded, as they would be in memory.

Kernels compute with float32 what is of half types, and round where they store. That errs less than eager, but who
compares two values decides by their last bits. The gradient of a maximum asks which elements of a row are the largest,
and computes the row again: rounded elements are none where the maximum was rounded and they are not.
"""

from __future__ import annotations

import torch
from torch import fx

from .converters.context import KEEPS_ROUNDING

aten = torch.ops.aten

_COMPARISONS = (aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor)
# What hands values on as they are, besides views.
_HANDED_ON = (aten.clone.default, aten._unsafe_view.default, aten.neg.default, aten.abs.default)


def keep_compared(gm: fx.GraphModule) -> None:
    """Let half-typed values that are compared with others be read as they are stored."""
    for node in gm.graph.nodes:
        if node.target in _COMPARISONS:
            for operand in node.all_input_nodes:
                keep_rounding(operand)


def keep_rounding(node: fx.Node) -> None:
    """Let a value that is rounded to a half type, maybe seen through views, be read so."""
    while _hands_on(node):
        node = node.all_input_nodes[0]
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        node.meta[KEEPS_ROUNDING] = True


def _hands_on(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    views = [r for r in node.target._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    return bool(views) or node.target in _HANDED_ON
