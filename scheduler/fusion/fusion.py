"""A graph that is being made into calls: what every pass from the first function to the last call works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...ir.function.function import Callee, TensorFunction
from ...ir.graph.graph import CallTensor, Graph, IRModule, Library, View
from ...ir.passes import Form, Level
from ...ir.text.printer import show
from ...ir.verify.verify import verify


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two nodes that share ``bytes`` and were not fused, and why."""

    first: str
    second: str
    reason: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What fusion did: how many nodes went into kernels, and what it refused."""

    nodes: int = 0
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Fusion:
    """A graph with calls of tensor functions, the functions by name, and the report. Equal functions are one.

    ``given`` is what the graph called before it was fused: functions and nests that somebody wrote, and that stay as
    they are.
    """

    graph: Graph
    functions: Mapping[str, TensorFunction] = field(default_factory=dict)
    report: FusionReport = FusionReport()
    given: Mapping[str, Callee] = field(default_factory=dict)

    @property
    def module(self) -> IRModule:
        """The graph and its functions as what is printed, verified and compiled."""
        return IRModule({self.graph.name: self.graph, **self.functions, **self.given}, self.graph.name)

    def having(self, graph: Graph, functions: Mapping[str, TensorFunction]) -> Fusion:
        """With another graph and its functions; the same object where they are the same."""
        if _are_same(graph.nodes, self.graph.nodes) and functions.keys() == self.functions.keys():
            if all(functions[name] is f for name, f in self.functions.items()):
                return self
        return replace(self, graph=graph, functions=functions)


def _are_same(one: Iterable[object], other: Iterable[object]) -> bool:
    a, b = tuple(one), tuple(other)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


CALLS: Level[Fusion] = Level(
    "calls", lambda f: show(f.module), lambda f: len(f.graph.nodes), lambda f: verify(f.module)
)  # fmt: skip

# Every node is a call, or a view for one.
ONLY_CALLS: Form[Fusion] = Form(
    "only calls", lambda f: all(isinstance(n, (CallTensor, Library, View)) for n in f.graph.nodes)
)
