"""Equal nodes of the graph that holds forward and backward become one before it is parted, and so do a value and a copy
of it in memory like its own, which is how autograd writes the gradient of what was written in place.

torch's partitioner can do this itself, but asks Inductor's pattern matcher which nodes stand between two writes, and
loading that takes as long as all of our own work on a graph of a hundred layers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ...ir.passes import Form

aten = torch.ops.aten

# Functions of sizes and of tuples: the rest of what is no op may do anything.
_MODULES = (operator.__name__, "_operator", math.__name__)
# Memory with nothing in it is no value that two readers may share.
_EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class _NoKeyError(Exception):
    """An argument that cannot be compared."""


def eliminate_dead_nodes(graph: fx.Graph) -> int:
    """Erase, in place, what nobody reads; how many nodes are gone."""
    before = len(graph.nodes)
    graph.eliminate_dead_code()
    return before - len(graph.nodes)


# What a node is of is decided by who reads it.
NO_DEAD: Form[fx.GraphModule] = Form(
    "no node that nobody reads", lambda gm: all(n.users or n.is_impure() for n in gm.graph.nodes)
)


def share_nodes(graph: fx.Graph) -> int:
    """Merge, in place, every node into an earlier one that computes or holds the same; how many nodes are gone.

    Random and writing ops stay, and so does what looks at the memory of an output: callers may write into it. Two nodes
    with a write between them are not the same. The rest of the graph keeps its nodes and their names.
    """
    leaving = _memory_of_outputs(graph)
    known: dict[Hashable, fx.Node] = {}
    writes = merged = 0
    for node in list(graph.nodes):
        writes += _may_write(node)
        if not _may_share(node) or not leaving.isdisjoint(_memory(node)):
            continue
        if (source := _copied(node)) is not None:
            place = node.args[0]
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            if isinstance(place, fx.Node) and not place.users and place.op == "call_function":
                graph.erase_node(place)
                merged += 1
            merged += 1
            continue
        try:
            key = (node.target, writes, _key(node.args), _key(node.kwargs), _key(node.meta.get("custom")))
        except _NoKeyError:
            continue
        twin = known.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
            merged += 1
    return merged


def _copied(node: fx.Node) -> fx.Node | None:
    """What a node is a copy of, element by element and in the same order of memory; nothing that the caller gave.

    Both begin at the same place of their memory too: views of the copy tell theirs from its.
    """
    source = node.args[1] if node.target is aten.copy.default else None
    if not isinstance(source, fx.Node) or not _may_share(source):
        return None
    a, b = (n.meta.get("val") for n in (node, source))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None
    if (a.dtype, a.device, a.dim()) != (b.dtype, b.device, b.dim()):
        return None
    pairs = [*zip(a.shape, b.shape, strict=True), *zip(a.stride(), b.stride(), strict=True)]
    pairs.append((a.storage_offset(), b.storage_offset()))
    return source if all(statically_known_true(m == n) for m, n in pairs) else None


def _may_write(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    return _is_higher(node)


def _is_higher(node: fx.Node) -> bool:
    """Whether a node is an op of higher order, or some other function of which nothing is known."""
    known = isinstance(node.target, OpOverload) or getattr(node.target, "__module__", "") in _MODULES
    return node.op == "call_function" and not known


def _may_share(node: fx.Node) -> bool:
    if node.op != "call_function" or "unbacked_bindings" in node.meta:
        return False
    if not isinstance(node.target, OpOverload):
        return not _is_higher(node)
    op = node.target
    is_plain = not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags
    # What an op of higher order is given may be written by what it runs.
    return is_plain and op.overloadpacket not in _EMPTY and not any(_is_higher(user) for user in node.users)


def _memory_of_outputs(graph: fx.Graph) -> set[StorageWeakRef]:
    (output,) = graph.find_nodes(op="output")
    return {ref for n in output.all_input_nodes for ref in _memory(n)}


def _memory(node: fx.Node) -> list[StorageWeakRef]:
    """The memory of a node's result, of every one where there are several."""
    return [ref for value in tree_leaves(node.meta.get("val")) if (ref := storage_of(value)) is not None]


def storage_of(value: Any) -> StorageWeakRef | None:
    """The memory of a tensor that has any."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return StorageWeakRef(value.untyped_storage())
    except NotImplementedError:
        return None


def _key(arg: Any) -> Hashable:
    """An argument as something that equals another only where they are the same: 1 is not 1.0, nor 0.0 -0.0."""
    match arg:
        case fx.Node():
            return arg
        case None | bool() | int() | float() | complex() | str():
            return (type(arg), repr(arg))
        case tuple() | list():
            return (type(arg), *(_key(a) for a in arg))
        case dict():
            return (dict, *((k, _key(v)) for k, v in arg.items()))
        case slice():
            return (slice, _key((arg.start, arg.stop, arg.step)))
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return arg
    raise _NoKeyError
