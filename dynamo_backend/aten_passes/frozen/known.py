"""Nodes whose values do not change between calls: those that depend on nothing but numbers in the graph and, where the
caller promises not to change them, on parameters and buffers."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..share_nodes import _is_higher, storage_of

# Ops whose meaning is torch's own.
_OWN = ("aten", "prims")
# Weights in a layout of a library's own: the results are read by its ops alone.
PACKING = (
    "mkldnn::_reorder_linear_weight", "mkldnn::_reorder_convolution_weight",
    "mkldnn::_reorder_convolution_transpose_weight",
)  # fmt: skip
# Memory with nothing in it is no value.
_EMPTY = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "rrelu_with_noise",
)


def memories(node: fx.Node) -> set[StorageWeakRef]:
    """The memory of a node's results."""
    return {ref for value in tree_leaves(node.meta.get("val")) if (ref := storage_of(value)) is not None}


def unwritten(graph: fx.Graph, nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Those of some inputs of a graph that nothing in it may write."""
    written: set[StorageWeakRef] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _is_higher(node):
            written.update(*map(memories, node.all_input_nodes))
        elif isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            given = zip(node.target._schema.arguments, node.args)
            places = [a for spec, a in given if spec.alias_info is not None and spec.alias_info.is_write]
            places += [node.kwargs.get(s.name) for s in node.target._schema.arguments if s.alias_info is not None]
            written.update(*(memories(n) for n in tree_leaves(places) if isinstance(n, fx.Node)))
    return {n for n in nodes if memories(n).isdisjoint(written)}


def known_nodes(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """``sources``, and all that is computed of these and of numbers alone. Their sizes are numbers."""
    known = {n for n in sources if _is_plain(n.meta.get("val"))}
    for node in graph.nodes:
        if node.op == "call_function" and _is_value(node) and all(n in known for n in node.all_input_nodes):
            known.add(node)
    return known


def known_of(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """The known nodes of a graph whose inputs of these ``names`` do not change."""
    return known_nodes(graph, [n for n in graph.find_nodes(op="placeholder") if n.name in names])


def hoist(graph: fx.Graph, known: Collection[fx.Node]) -> None:
    """Put known nodes in front of all others, in place and in their order, so that a pass may use them anywhere."""
    place = next((n for n in graph.nodes if n.op != "placeholder"), None)
    if place is None:
        return
    for node in list(graph.nodes):
        if node is place and node in known:
            place = node.next
        elif node.op == "call_function" and node in known:
            place.prepend(node)


def _is_value(node: fx.Node) -> bool:
    """Whether a call gives the same for the same arguments, and does nothing else."""
    if node.target is operator.getitem:
        return _is_plain(node.meta.get("val"))
    op = node.target
    if not isinstance(op, OpOverload) or (op.namespace not in _OWN and op._schema.name not in PACKING):
        return False
    if "unbacked_bindings" in node.meta:
        return False
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags or op._opname in _EMPTY:
        return False
    return _is_plain(node.meta.get("val")) and not any(isinstance(a, torch.SymInt) for a in tree_leaves(node.args))


def _is_plain(value: Any) -> bool:
    """Whether something is tensors of numbers, in memory with strides, whose sizes do not vary."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(_is_plain_tensor(v) for v in leaves)


def _is_plain_tensor(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    if value.is_conj() or value.is_neg():
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def is_view(node: fx.Node) -> bool:
    """Whether a node looks at memory of what it is made of."""
    return not memories(node).isdisjoint(set().union(*map(memories, node.all_input_nodes)))
