"""A graph that is being made into calls: what every pass from the first function to the last call works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...ir.errors import VerifyError
from ...ir.graph.graph import CallTensor, Graph, Library, View
from ...ir.passes import GRAPH, Form, Level
from ...ir.verify.verify import verify
from ..functions.function import TensorFunction
from ..functions.function_text import function_text


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
    """A graph with calls of tensor functions, the functions by name, and the report. Equal functions are one."""

    graph: Graph
    functions: Mapping[str, TensorFunction] = field(default_factory=dict)
    report: FusionReport = FusionReport()

    def having(self, graph: Graph, functions: Mapping[str, TensorFunction]) -> Fusion:
        """With another graph and its functions; the same object where they are the same."""
        if _are_same(graph.nodes, self.graph.nodes) and functions.keys() == self.functions.keys():
            if all(functions[name] is f for name, f in self.functions.items()):
                return self
        return replace(self, graph=graph, functions=functions)


def _are_same(one: Iterable[object], other: Iterable[object]) -> bool:
    a, b = tuple(one), tuple(other)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def fusion_text(fusion: Fusion) -> str:
    """The functions, then the graph that calls them."""
    functions = (f"# {name}\n{function_text(f)}\n" for name, f in fusion.functions.items())
    return "\n".join((*functions, GRAPH.show(fusion.graph)))


def verify_calls(fusion: Fusion) -> None:
    """Raises VerifyError where the graph breaks a rule, or calls a function that is not there."""
    verify(fusion.graph)
    for node in fusion.graph.nodes:
        if isinstance(node, CallTensor) and node.function not in fusion.functions:
            raise VerifyError(f"{node.names[0]} is of {node.function!r}; there are {', '.join(fusion.functions)}")


CALLS: Level[Fusion] = Level("calls", fusion_text, lambda f: len(f.graph.nodes), verify_calls)

# Every node is a call, or a view for one.
ONLY_CALLS: Form[Fusion] = Form(
    "only calls", lambda f: all(isinstance(n, (CallTensor, Library, View)) for n in f.graph.nodes)
)
