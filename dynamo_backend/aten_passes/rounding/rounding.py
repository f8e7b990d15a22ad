"""Which values of half types their readers must see rounded, as they would be in memory.

Kernels compute with float32 what is of half types, and round where they store. That errs less than eager, but who
compares two values decides by their last bits, and so does who makes whole numbers of them or says where the largest
is. The gradient of a maximum asks which elements of a row are the largest, and computes the row again: rounded elements
are none where the maximum was rounded and they are not.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ...converters.context import KEEPS_ROUNDING

aten = torch.ops.aten

_DECIDES = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder", "floor_divide",
    "bucketize", "searchsorted", "heaviside", "argmax", "argmin", "max", "min", "cummax", "cummin",
    "sign", "sgn", "isinf", "any", "all", "logical_and", "logical_or", "logical_xor", "logical_not", "sort", "frexp",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
))  # fmt: skip
# What hands values on as they are, besides views.
_HANDED_ON = (aten.clone.default, aten._unsafe_view.default, aten.neg.default, aten.abs.default)


def keep_compared(gm: fx.GraphModule) -> int:
    """Let half-typed values that are compared with others, or made whole numbers, be read as they are stored; how many
    were not."""
    marked = 0
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _decides(node):
            marked += sum(map(keep_rounding, node.all_input_nodes))
    return marked


def _decides(node: fx.Node) -> bool:
    """Whether a last bit of an operand may change all of the result."""
    name = node.target._opname  # type: ignore[union-attr]
    if name == "div":
        return node.kwargs.get("rounding_mode") is not None
    if name == "threshold_backward":  # that of ReLU asks for the sign alone
        return node.args[2] != 0
    if name == "linalg_vector_norm":  # of order 0, which counts what is not zero
        return len(node.args) > 1 and node.args[1] == 0
    if name == "_to_copy":
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return name in _DECIDES


def keep_rounding(node: fx.Node) -> bool:
    """Let a value that is rounded to a half type, maybe seen through views or in a wider type, be read so; whether it
    was not."""
    while _hands_on(node):
        node = node.all_input_nodes[0]
    if not _is_half(node):
        return False
    if node.target is operator.getitem:  # it is made where the other results of its operation are
        (node,) = node.all_input_nodes
        if _hands_on(node):
            return keep_rounding(node.all_input_nodes[0])
    is_new = KEEPS_ROUNDING not in node.meta
    node.meta[KEEPS_ROUNDING] = True
    return is_new


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _hands_on(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    views = [r for r in node.target._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    widens = node.target is aten._to_copy.default and not _is_half(node)
    return bool(views) or widens or node.target in _HANDED_ON
