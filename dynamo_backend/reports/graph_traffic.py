"""Bytes of a whole graph: what its kernels and library calls read and write, and what no program for it avoids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from ...ir.function.function import TensorFunction
from ...ir.graph.begun import passed_on
from ...ir.graph.graph import CallTensor, Graph, Input, Library, TensorType, View, uses
from ...ir.graph.slices import NOTHING
from .traffic import Traffic


@dataclass(frozen=True, slots=True)
class GraphTraffic:
    """Of one run of a graph: bytes that its kernels and its library calls move, and ``compulsory``: its inputs, as far
    as they are read, and its outputs, once each.

    ``reads`` is how often each input is read, by all kernels and calls together: 1 where each byte that is needed is
    asked for once. A library call is taken to read its arguments and write its results once. Sizes that are symbols
    count with their typical values. ``calls`` are the bytes of each library call, in order; ``rows`` by function over
    a table how many times what it has at typical sizes a call does, on average.
    """

    kernels: int
    libraries: int
    compulsory: int
    reads: Mapping[str, float] = field(default_factory=dict)
    calls: tuple[int, ...] = ()
    rows: Mapping[str, float] = field(default_factory=dict)

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
    return _GraphCounter(graph, functions, traffic).count()


class _GraphCounter:
    def __init__(
        self, graph: Graph, functions: Mapping[str, TensorFunction], traffic: Mapping[str, Traffic | None]
    ) -> None:
        self.graph = graph
        self.functions = functions
        self.traffic = traffic
        self.types = graph.types()
        # Function over a table -> of each of its calls, how many times what it has at typical sizes.
        self.rows: dict[str, list[float]] = {}
        self.home = {name: name for name in self.types}
        # Bytes of each input that are read, by the view through which they are.
        self.read: dict[str, dict[str, int]] = {i.name: {} for i in graph.inputs if isinstance(i, Input)}
        self.visited = dict.fromkeys(self.read, 0)
        self.written: set[str] = set()

    def count(self) -> GraphTraffic:
        kernels = 0
        calls: list[int] = []
        for node in self.graph.nodes:
            match node:
                case View():
                    self.home[node.name] = self.home[node.source]
                case CallTensor():
                    moved = sum(self.call(c) for c in node.calls())
                    kernels += moved
                    if (of := self.traffic[node.function]) is not None and len(node.calls()) > 1 and of.moved:
                        self.rows.setdefault(node.function, []).append(moved / of.moved)
                case Library(target=target) if target in NOTHING:
                    pass
                case Library() if passed := passed_on(node):
                    self.home.update((name, self.home[source]) for name, source in passed.items())
                    calls.append(0)
                case Library():
                    calls.append(self.library(node))
                case _:
                    raise AssertionError(f"{node.names[0]} is in no kernel: the graph is not fused")
        needed = {name: min(self.bytes(name), sum(views.values())) for name, views in self.read.items()}
        reads = {name: self.visited[name] / size for name, size in needed.items() if size}
        rows = {name: sum(found) / len(found) for name, found in self.rows.items()}
        return GraphTraffic(kernels, sum(calls), sum(needed.values()) + self.results(), reads, tuple(calls), rows)

    def call(self, call: CallTensor) -> int:
        traffic = self.traffic[call.function]
        for name, into in zip(call.names, call.into or (None,) * len(call.names), strict=True):
            if into is not None:
                self.home[name] = self.home[into]
                self.written.add(self.home[into])
        plain = sum(map(self.bytes, uses(call))) + sum(self.bytes(n) for n in call.names)
        if traffic is None:
            for name in uses(call):
                self.visit(name, self.bytes(name), self.bytes(name))
            return plain
        # The sizes of a function over a table are those of no call.
        table = self.functions[call.function].table
        for name, buffer in zip(call.args, self.functions[call.function].inputs, strict=True):
            visits, whole = traffic.arrays[buffer.name], self.bytes(name)
            touched = whole if table else min(whole, visits.touched)
            self.visit(name, touched, round(touched * visits.times))
        return round(plain * traffic.moved / max(traffic.least, 1)) if table else traffic.moved

    def library(self, node: Library) -> int:
        sizes = {name: self.bytes(name) for name in uses(node) if name in self.types}
        for name, size in sizes.items():
            self.visit(name, size, size)
        made = [self.bytes(n) for n, t in zip(node.names, node.types, strict=True) if t is not None]
        return sum(sizes.values()) + sum(made)

    def visit(self, name: str, touched: int, read: int) -> None:
        """A tensor is read, ``touched`` bytes of it, ``read`` in all; what counts are the graph's inputs."""
        home = self.home[name]
        if home in self.read:
            self.read[home][name] = max(self.read[home].get(name, 0), touched)
            self.visited[home] += read

    def results(self) -> int:
        """Bytes that leave the graph: outputs that are no inputs, and inputs that are written."""
        returned = {self.home[o] for o in self.graph.outputs if isinstance(o, str)}
        written = {n for n in returned if n not in self.read} | (self.written & self.read.keys())
        return sum(map(self.bytes, written))

    def bytes(self, name: str) -> int:
        """Bytes in memory of a tensor or a view of one: a dimension of stride zero holds one element."""
        kind: TensorType = self.types[name]
        held = [n for n, stride in zip(kind.shape, kind.strides, strict=True) if stride != 0]
        return int(self.graph.symbols.hint(sympy.Mul(*held))) * kind.dtype.itemsize
