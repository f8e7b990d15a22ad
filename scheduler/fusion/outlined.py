"""What leaves a graph as functions of its own before the greedy search: who reads a tensor, and how it is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import symbol
from ...ir.function.function import TensorFunction
from ...ir.graph.graph import CallTensor, Graph, Node, Origin, TensorType, View, uses
from ...ir.nest.loops import PARAM_ALIGN, Buffer
from ..facts.order import in_order
from .fusion import Fusion


@dataclass(slots=True)
class Functions:
    """The functions outlined so far; equal ones are one."""

    names: dict[TensorFunction, str] = field(default_factory=dict)

    def enter(self, function: TensorFunction, call: CallTensor) -> CallTensor:
        """The call by the name that its function gets here."""
        return replace(call, function=self.names.setdefault(function, f"{function.name}_{len(self.names)}"))

    def outlined(self, fusion: Fusion, nodes: Sequence[Node], count: int) -> Fusion:
        """The graph with ``nodes`` for its own, and these functions, into which ``count`` of its nodes went."""
        named = {name: replace(f, name=name) for f, name in self.names.items()}
        report = replace(fusion.report, nodes=fusion.report.nodes + count)
        graph = in_order(fusion.graph, nodes)
        # Views of what is no tensor of the graph any more: functions read through them.
        graph = replace(graph, nodes=without_idle_views(graph.nodes, graph))
        return replace(fusion, graph=graph, functions={**fusion.functions, **named}, report=report)


def without_idle_views(nodes: Sequence[Node], graph: Graph) -> tuple[Node, ...]:
    """The nodes but for views that nothing needs any more."""
    needed = {o for o in graph.outputs if isinstance(o, str)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if not isinstance(node, View) or node.name in needed:
            kept.append(node)
            needed.update(uses(node))
    return tuple(reversed(kept))


def function_name(prefix: str, origins: Iterable[Origin], *, words: int = 0) -> str:
    """A name that tells the operators of a function: the last ``words`` of them, or all."""
    ops = (o.op.split(".")[1] if "." in o.op else o.op for o in origins)
    told = list(dict.fromkeys(re.sub(r"\W+", "_", op).strip("_") for op in ops))
    return "_".join([prefix, *told[-words:]])[:60].rstrip("_")


@dataclass(slots=True)
class Parameters:
    """The parameters of a function that is being written: sizes renamed in order of appearance, and inputs."""

    graph: Graph
    types: Mapping[str, TensorType]
    renamed: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    inputs: dict[str, Buffer] = field(default_factory=dict)

    def canonical(self, expr: sympy.Expr) -> sympy.Expr:
        """The expression with the graph's sizes renamed; the function's own dimensions stay."""
        given = self.graph.symbols.symbols
        for s in sorted((s for s in expr.free_symbols if s in given), key=lambda s: s.name):
            if s not in self.renamed:
                self.renamed[s] = symbol(f"s{len(self.renamed)}")
        return expr.xreplace(self.renamed) if expr.free_symbols else expr

    def buffer(self, name: str, t: TensorType) -> Buffer:
        """A tensor of the graph as a parameter."""
        shape, strides = (tuple(self.canonical(e) for e in part) for part in (t.shape, t.strides))
        return Buffer(name, shape, strides, t.dtype, align=PARAM_ALIGN)

    def input(self, name: str) -> str:
        """The parameter by which a tensor of the graph is read."""
        buffer = self.inputs.get(name)
        if buffer is None:
            buffer = self.inputs[name] = self.buffer(f"in{len(self.inputs)}", self.types[name])
        return buffer.name

    def sizes(self) -> tuple[tuple[sympy.Symbol, ...], SymbolTable]:
        """The graph's sizes that were renamed, in the order of their new names, and those names' table."""
        own = {z.symbol: z for z in self.graph.symbols.sizes}
        table = tuple(replace(own[given], symbol=new) for given, new in self.renamed.items())
        return tuple(self.renamed), SymbolTable(table)
