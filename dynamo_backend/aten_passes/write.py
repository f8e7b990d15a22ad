"""New nodes with fake values in a graph of ATen ops."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

aten = torch.ops.aten
# How the partitioner is told what only the backward computes.
TAG, IN_BACKWARD = "partitioner_tag", "must_be_in_backward"
# Of a copy for the backward, the name of what it is a copy of.
COPY_OF = "mlc_copy_of"
_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten")
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def give_results(gm: fx.GraphModule, values: Sequence[Any]) -> None:
    """Let a graph give other results than it did, as many of them."""
    (end,) = gm.graph.find_nodes(op="output")
    end.args = (type(end.args[0])(values),)  # type: ignore[call-arg, arg-type]
    gm.graph.lint()
    gm.recompile()


def tidy(graph: fx.Graph) -> None:
    """Erase what nobody reads after a rewriting, and let the graph's module, where it has one, run what is left."""
    graph.eliminate_dead_code()
    if graph.owning_module is not None:
        graph.owning_module.recompile()


def copied_for_backward(
    graph: fx.Graph, nodes: Iterable[fx.Node], known: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copies of nodes that the backward computes, of one another where they read one another."""
    place = {n: k for k, n in enumerate(graph.nodes)}
    copies, last = dict(known), max(known.values(), key=place.__getitem__, default=None)
    for node in sorted(set(nodes) - known.keys(), key=place.__getitem__):
        after = node if last is None or place[node] > place[last] else last
        with graph.inserting_after(after):
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
        copy.meta |= {TAG: IN_BACKWARD, COPY_OF: node.name}
        copies[node] = copy
        if last is not None:
            last = copy
            place[copy] = place[after]
    return copies


@dataclass(slots=True)
class NodeWriter:
    """Writes nodes that stand for the user's line of ``like``."""

    graph: fx.Graph
    like: fx.Node
    mode: FakeTensorMode = field(init=False)
    place: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.mode = self.like.meta["val"].fake_mode
        self.place = {k: self.like.meta[k] for k in _PLACE if k in self.like.meta}

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``op`` with its fake value."""
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            value = op(*values[0], **values[1])  # type: ignore[index]
        node = self.graph.call_function(op, args, kwargs)
        node.meta.update(self.place, val=value)
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node in ``dtype``."""
        return node if node.meta["val"].dtype is dtype else self.call(aten._to_copy.default, node, dtype=dtype)

    def reshape(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """The node in the shape of another of as many elements, whose sizes are numbers."""
        shape = list(like.meta["val"].shape)
        return node if list(node.meta["val"].shape) == shape else self.call(aten.view.default, node, shape)

    def replay(self, maps: Sequence[fx.Node], start: fx.Node, old: int, new: int) -> fx.Node:
        """The ops ``maps``, which leave the last dimension of ``old`` alone, done to one whose last has ``new``."""
        result = start
        for node in maps:
            args = list(node.args)
            args[0] = result
            if node.target in _VIEWS or node.target is aten.slice_backward.default:
                sizes = list(args[1])  # type: ignore[arg-type]
                args[1] = [*sizes[:-1], new]
            if node.target in _VIEWS and not result.meta["val"].is_contiguous():
                args[0] = self.call(aten.clone.default, result, memory_format=torch.contiguous_format)
            result = self.call(node.target, *args, **node.kwargs)
        return result

    def position(self, node: fx.Node) -> int:
        """Where in the graph a node is."""
        return next(k for k, n in enumerate(self.graph.nodes) if n is node)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let all that reads ``old`` read ``new``, which has its value."""
        was, now = old.meta["val"], new.meta["val"]
        assert was.dtype == now.dtype and was.dim() == now.dim(), f"{old} becomes {now}"
        old.replace_all_uses_with(new)

    def drop(self, nodes: Collection[fx.Node]) -> None:
        """Erase those nodes that nobody reads, and then those that nobody reads any more."""
        for node in reversed(list(self.graph.nodes)):
            if node in nodes and not node.users:
                self.graph.erase_node(node)
