"""Bytes of a whole graph: what its kernels and library calls read and write, and what no program for it avoids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ..ir.graph import CallTensor, Graph, Input, Library, TensorType, View, uses
from ..scheduler.function import TensorFunction
from .traffic import Traffic


@dataclass(frozen=True, slots=True)
class GraphTraffic:
    """Of one run of a graph: bytes that its kernels and its library calls move, and ``compulsory``: its inputs, as far
    as they are read, and its outputs, once each.

    A library call is taken to read its arguments and write its results once. Sizes that are symbols count with their
    typical values.
    """

    kernels: int
    libraries: int
    compulsory: int

    @property
    def moved(self) -> int:
        return self.kernels + self.libraries

    @property
    def ratio(self) -> float:
        """Bytes moved for each one that had to be."""
        return self.moved / self.compulsory if self.compulsory else 1.0


def graph_traffic(
    graph: Graph, functions: Mapping[str, TensorFunction], traffic: Mapping[str, Traffic | None]
) -> GraphTraffic:
    """Count a fused graph; ``traffic`` is by function, None where a function's ATen ops run in its place."""
    return _Counter(graph, functions, traffic).count()


class _Counter:
    def __init__(
        self, graph: Graph, functions: Mapping[str, TensorFunction], traffic: Mapping[str, Traffic | None]
    ) -> None:
        self.graph = graph
        self.functions = functions
        self.traffic = traffic
        self.types = graph.types()
        self.home = {name: name for name in self.types}
        # Bytes of each input that are read, by the view through which they are.
        self.read: dict[str, dict[str, int]] = {i.name: {} for i in graph.inputs if isinstance(i, Input)}
        self.written: set[str] = set()

    def count(self) -> GraphTraffic:
        kernels = libraries = 0
        for node in self.graph.nodes:
            match node:
                case View():
                    self.home[node.name] = self.home[node.source]
                case CallTensor():
                    kernels += sum(self.call(c) for c in node.calls())
                case Library():
                    libraries += self.library(node)
                case _:
                    raise AssertionError(f"{node.names[0]} is in no kernel: the graph is not fused")
        return GraphTraffic(kernels, libraries, self.compulsory())

    def call(self, call: CallTensor) -> int:
        traffic = self.traffic[call.function]
        for name, into in zip(call.names, call.into or (None,) * len(call.names), strict=True):
            if into is not None:
                self.home[name] = self.home[into]
                self.written.add(self.home[into])
        plain = sum(map(self.bytes, uses(call))) + sum(self.bytes(n) for n in call.names)
        if traffic is None:
            self.reads({a: self.bytes(a) for a in uses(call)})
            return plain
        inputs = self.functions[call.function].inputs
        sizes = {a: min(self.bytes(a), traffic.arrays[b.name].touched) for a, b in zip(call.args, inputs, strict=True)}
        table = self.functions[call.function].table
        self.reads({a: self.bytes(a) for a in call.args} if table else sizes)
        # The sizes of a function over a table are those of no call.
        return round(plain * traffic.moved / max(traffic.least, 1)) if table else traffic.moved

    def library(self, node: Library) -> int:
        sizes = {name: self.bytes(name) for name in uses(node) if name in self.types}
        self.reads(sizes)
        made = [self.bytes(n) for n, t in zip(node.names, node.types, strict=True) if t is not None]
        return sum(sizes.values()) + sum(made)

    def reads(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            views = self.read.get(self.home[name])
            if views is not None:
                views[name] = max(views.get(name, 0), size)

    def compulsory(self) -> int:
        read = sum(min(self.bytes(name), sum(views.values())) for name, views in self.read.items())
        returned = {self.home[o] for o in self.graph.outputs if isinstance(o, str)}
        written = {n for n in returned if n not in self.read} | (self.written & self.read.keys())
        return read + sum(map(self.bytes, written))

    def bytes(self, name: str) -> int:
        """Bytes in memory of a tensor or a view of one: a dimension of stride zero holds one element."""
        kind: TensorType = self.types[name]
        held = [n for n, stride in zip(kind.shape, kind.strides, strict=True) if stride != 0]
        return int(self.graph.symbols.hint(sympy.Mul(*held))) * kind.dtype.itemsize
