"""What a lock file calls the nodes of a graph: the module and the op, which an edit elsewhere in the model leaves as
they are."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...runtime.cache.fingerprint import key_of
from ..repeats.layers import HEAD, Layers
from ..tracing.origins import origins_of, path_of

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
# What is made of no node of the graph, or of the graph as a whole.
GRAPH = "the graph"


@dataclass(slots=True)
class NodeNames:
    """NodeNames of the nodes of an ATen graph, as it is when ``take`` is called; what had a name before keeps it.

    A name is the path of the module that a node stands in ("layers.0.attn"), or the function where there is none, then
    the op, and which of several of that op it is: ``layers.0.attn: mm #2``. With ``from_operands`` a node of no module
    stands where the last of what it reads does: sums of gradients belong to nobody.
    """

    from_operands: bool = False
    # Of results that are called otherwise, the nodes that they are made of; the importer fills it.
    made_of: dict[str, str] = field(default_factory=dict)
    _by_node: dict[str, str] = field(default_factory=dict)
    _sources: dict[str, str] = field(default_factory=dict)
    # How many had a path before, and the path, "" for none.
    _paths: dict[str, tuple[int, str]] = field(default_factory=dict)
    _rank: dict[str, int] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    def take(self, gm: fx.GraphModule) -> None:
        """Name what a graph has and had not before."""
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.name not in self._by_node:
                source = "".join(o.source for o in origins_of(node, ""))
                name = self._named(node, source)
                self._by_node[node.name], self._sources[name] = name, source
                self._rank[name] = len(self._rank)

    def _named(self, node: fx.Node, source: str) -> str:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].name in self._by_node:
            self._paths[node.name] = self._paths.get(node.args[0].name, (0, ""))
            return f"{self._by_node[node.args[0].name]}[{node.args[1]}]"
        path = path_of(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {})
        if not path and self.from_operands:
            path = max((self._paths.get(n.name, (0, "")) for n in node.all_input_nodes), default=(0, ""))[1]
        self._paths[node.name] = (len(self._paths) + 1, path) if path else (0, "")
        _, _, function = source.partition(" in ")
        plain = f"{path or function_name(function.partition(':')[0]) or 'model'}: {_op(node.target)}"
        self._counts[plain] += 1
        return plain if self._counts[plain] == 1 else f"{plain} #{self._counts[plain]}"

    @property
    def text(self) -> str:
        """A digest of all names: what is kept of a graph under names is no other's."""
        return key_of([f"{node} {name}" for node, name in self._by_node.items()])

    def node(self, result: str) -> str:
        """The node that a result is made of, "" for none: passes call results after it, with something behind its
        name."""
        base = result
        while base and base not in self._by_node and base not in self.made_of:
            base = base.rpartition("_")[0]
        return base if base in self._by_node else self.made_of.get(base, "")

    def of_node(self, node: str) -> str:
        """The name of a node."""
        return self._by_node.get(node, GRAPH)

    def of(self, result: str) -> str:
        """The name of a result; which of its node's it is stands behind a dot."""
        node = self.node(result)
        return self.of_ending(node, self.ending(result, node))

    def of_ending(self, node: str, ending: str) -> str:
        """The name of a result of a node, which has an ending behind the node's."""
        return f"{self.of_node(node)}.{ending}" if node and ending else self.of_node(node)

    def ending(self, result: str, node: str) -> str:
        """What a result's name has behind that of its node."""
        return result.removeprefix(node).strip("_") if node else ""

    def rank(self, name: str) -> int:
        """Where a name stands in the order of the graph."""
        found = self._rank.get(name)
        return found if found is not None else self._rank.get(name.rpartition(".")[0], -1)

    def source(self, name: str) -> str:
        """The line of the model that a name stands for, "" where it is not known."""
        return self._sources.get(name) or self._sources.get(name.rpartition(".")[0], "")

    def mentioned(self, line: str) -> str:
        """The longest name that stands in a line of a lock file, "" for none."""
        return max((name for name in self._sources if name in line), key=len, default="")


@dataclass(frozen=True, slots=True)
class LayerNames:
    """NodeNames of what a few layers of a graph stand for (``repeats``)."""

    names: NodeNames
    layers: Layers | None

    def beyond(self, results: Iterable[str]) -> tuple[int, bool]:
        """How many layers on a call lies of the like one of the few layers, and whether its own was left out."""
        if self.layers is not None:
            for node in map(self.names.node, results):
                if node in self.layers.slots:
                    layer = self.layers.slots[node][1]
                    left_out = HEAD <= layer < HEAD + self.layers.left_out
                    return (layer - (HEAD - 1) if left_out else layer - self._short(layer)), left_out
        return 0, False

    def before(self, result: str, by: int) -> str:
        """What a result is called in the few layers, so many layers back."""
        node = self.names.node(result)
        if self.layers is None or node not in self.layers.slots:
            return result
        slot, layer = self.layers.slots[node]
        there, row = layer - by, self.layers.names[slot]
        base = row[there if there < HEAD else there + self.layers.left_out] if there >= 0 else None
        return result if base is None else base + result.removeprefix(node)

    def moved(self, node: str, by: int) -> str:
        """What a node of the few layers is called, those counted one after the other, so many layers on: "" where there
        is no such layer; itself outside of layers."""
        if self.layers is None or node not in self.layers.slots:
            return node
        slot, layer = self.layers.slots[node]
        row, there = self.layers.names[slot], self._short(layer) + by
        return (row[there] or "") if 0 <= there < len(row) else ""

    def of(self, result: str, by: int) -> str:
        """The name of a result so many layers on."""
        node = self.names.node(result)
        return self.names.of_ending(self.moved(node, by), self.names.ending(result, node))

    def each(self, result: str) -> range:
        """So many layers on lie those that a result of the few layers stands for."""
        node = self.names.node(result)
        if self.layers is None or node not in self.layers.slots:
            return range(1)
        layer = self.layers.slots[node][1]
        if layer == HEAD - 1:
            return range(self.layers.left_out + 1)
        by = layer - self._short(layer)
        return range(by, by + 1)

    def _short(self, layer: int) -> int:
        """Which of the few layers a layer is."""
        assert self.layers is not None
        return layer if layer < HEAD else layer - self.layers.left_out


def function_name(name: str) -> str:
    """The function that a frame runs; one that goes on behind a graph break is that function, resumed."""
    found = _RESUMED.fullmatch(name)
    return f"{found[1]}, resumed" if found else name


def is_resumed(name: str) -> bool:
    """Whether a frame goes on behind a graph break."""
    return _RESUMED.fullmatch(name) is not None


def _op(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    called = schema.name if schema is not None else getattr(target, "__name__", str(target))
    return str(called).removeprefix("aten::")
