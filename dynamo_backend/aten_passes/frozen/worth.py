"""Which values that do not change are kept: those that cost a call of the program more to make again than to read.

A fill, a count or an index map costs a kernel nothing, and so does arithmetic on them: those are never kept.
Reductions, calls of libraries and functions of many steps are, and on CPUs small tables of more than a few steps that
many elements read: weights, and places in memory. What is made of parameters element by element is kept
where it is no larger than what it is made of; a wider copy, as of weights of few bits, only for products of many rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from ....ir.target import Target, TargetError
from ....scheduler.cost.frozen import table_pays, wide_pays
from ...tracing.hints import hint_of
from .known import is_view, memories

aten = torch.ops.aten

# Values that no promise stands behind are kept up to so many bytes.
MOST_BYTES = 1 << 20
# What a kernel makes of positions.
_COUNTS = frozenset({
    "full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "arange",
    "iota", "eye", "scalar_tensor", "linspace", "fill",
})  # fmt: skip
# Ops that move elements, or choose among them by position.
_MOVES = frozenset({
    "clone", "_to_copy", "convert_element_type", "cat", "stack", "slice", "select", "expand", "repeat", "flip", "roll",
    "triu", "tril", "constant_pad_nd", "view", "reshape", "_unsafe_view", "permute", "t", "transpose", "unsqueeze",
    "squeeze", "copy", "tril_indices", "triu_indices", "contiguous", "diagonal", "unfold", "split", "split_with_sizes",
    "select_scatter", "slice_scatter", "lift_fresh_copy", "alias", "detach", "as_strided", "unbind", "device_put",
})  # fmt: skip
_CONVERSIONS = frozenset({"_to_copy", "convert_element_type"})
# Element-wise functions of many steps.
_CURVED = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma", "pow",
    "gelu", "silu", "softplus", "logit", "polygamma", "xlogy", "i0",
})  # fmt: skip
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
# What reads a few rows of a table.
_LOOKUPS = (aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor)


def is_heavy(node: fx.Node) -> bool:
    """Whether an op is a kernel or a call of a library: it neither counts, nor moves elements, nor is element-wise."""
    op = node.target
    if op is operator.getitem:
        return False
    assert isinstance(op, OpOverload)
    return op._opname not in _COUNTS | _MOVES and not is_pointwise(node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an op is element-wise."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_curved(node: fx.Node) -> bool:
    """Whether an op is an element-wise function of many steps."""
    return isinstance(node.target, OpOverload) and node.target._opname in _CURVED


def _steps(node: fx.Node) -> int:
    """Instructions by which a node is made of its operands, about: many processors have none for conversions between
    floating point and long whole numbers."""
    if is_pointwise(node):
        return 1
    return 2 if isinstance(node.target, OpOverload) and node.target._opname in _CONVERSIONS else 0


def _names_places(reader: fx.Node, node: fx.Node) -> bool:
    """Whether a reader gathers elements at the places that a node names, without looking whether they are in range."""
    return reader.target is aten._unsafe_index.Tensor and node not in reader.all_input_nodes[:1]


def bytes_of(node: fx.Node) -> int:
    """Bytes of the elements of a node's tensor."""
    value = node.meta["val"]
    return math.prod(value.shape) * value.dtype.itemsize


@dataclass(slots=True)
class Worth:
    """Decides for nodes of one graph that do not change. ``leaving`` is the memory of its results, which belongs to the
    caller; ``target`` tells the machine that code for a device is made for."""

    leaving: Collection[StorageWeakRef]
    target: Callable[[str], Target]
    _costs: dict[fx.Node, bool] = field(default_factory=dict)
    _leaves: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, target: Callable[[str], Target]) -> Worth:
        """Of a graph as it is."""
        (end,) = graph.find_nodes(op="output")
        return cls({ref for n in end.all_input_nodes for ref in memories(n)}, target)

    def keeps(self, node: fx.Node) -> bool:
        """Whether a node that others read is computed once and kept."""
        if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor) or not node.meta["val"].numel():
            return False
        if not memories(node).isdisjoint(self.leaving) or is_view(node):
            return False
        # What only spreads others out, as a repetition does, is made of those again.
        operands = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        spreads = not is_heavy(node) and not is_curved(node) and bytes_of(node) > sum(map(bytes_of, operands))
        if not any(n.op == "placeholder" for n in reached(node)):
            worth = (self.costs(node) and not spreads) or self._table_pays(node)
            return worth and bytes_of(node) <= MOST_BYTES
        if self.costs(node) and not spreads:
            return True
        if all(r.target in _LOOKUPS for r in readers_of(node)):
            return False  # few of its elements are read
        read = sum(map(bytes_of, self.leaves(node)))
        return bytes_of(node) <= read or self._wide_pays(node, read)

    def costs(self, node: fx.Node) -> bool:
        """Whether a node, or one that it is made of element by element, takes more than a kernel spares by reading."""
        if node not in self._costs:
            self._costs[node] = node.op == "call_function" and (
                is_heavy(node) or is_curved(node) or any(self.costs(n) for n in node.all_input_nodes)
            )
        return self._costs[node]

    def leaves(self, node: fx.Node) -> frozenset[fx.Node]:
        """What a kernel that makes a node for itself reads."""
        if node not in self._leaves:
            inner: set[fx.Node] = set()
            for n in node.all_input_nodes:
                inner |= {n} if n.op != "call_function" or is_heavy(n) else self.leaves(n)
            self._leaves[node] = frozenset(n for n in inner if isinstance(n.meta["val"], torch.Tensor))
        return self._leaves[node]

    def _table_pays(self, node: fx.Node) -> bool:
        """Whether what changes reads a node for so many elements that a table of it is faster to read than it is made.
        Whole numbers are such as places in memory alone: of others much is known by how they are made, as of masks."""
        value = node.meta["val"]
        varying = [r for r in readers_of(node) if any(n.op == "placeholder" for n in reached(r))]
        if value.dtype is torch.bool or not varying:
            return False
        if not value.dtype.is_floating_point and not all(_names_places(r, node) for r in varying):
            return False
        results = [r.meta["val"] for r in varying if isinstance(r.meta.get("val"), torch.Tensor)]
        elements = min((hint_of(v.numel()) for v in results), default=0)
        steps = sum(_steps(n) for n in reached(node))
        try:
            target = self.target(str(value.device))
        except TargetError:  # nobody knows the machine, as where a graph is captured alone
            return False
        return table_pays(steps, hint_of(value.numel()), elements, target)

    def _wide_pays(self, node: fx.Node, read: int) -> bool:
        """Whether all that reads a copy that is wider than what it is made of are products that read it faster."""
        value, readers = node.meta["val"], readers_of(node)
        target = self.target(str(value.device))
        return bool(readers) and all(
            wide_pays(_rows(r, node), value.numel(), read, bytes_of(node), target) for r in readers
        )


def reached(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is made of."""
    found, waiting = {node}, [node]
    while waiting:
        new = [n for n in waiting.pop().all_input_nodes if n not in found]
        found.update(new)
        waiting += new
    return found


def readers_of(node: fx.Node) -> set[fx.Node]:
    """What reads a node, or a view of it."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= readers_of(user) if user.op == "call_function" and is_view(user) and user.users else {user}
    return found


def _rows(reader: fx.Node, weight: fx.Node) -> int:
    """The rows that a product has of what is not ``weight``; 0 of what is no product of it with something else."""
    if reader.target not in _PRODUCTS:
        return 0
    left, right = (a.meta["val"] for a in reader.args[-2:] if isinstance(a, fx.Node))
    memory = memories(weight)
    of_weight = [not memories(a).isdisjoint(memory) for a in reader.args[-2:] if isinstance(a, fx.Node)]
    if sum(of_weight) != 1:
        return 0
    return hint_of(right.shape[-1]) if of_weight[0] else hint_of(left.shape[-2])
