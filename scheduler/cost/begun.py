"""How long calls, collectives and copies between devices take, as far as that decides what runs beside what.

Nothing here has to be exact: what is begun is begun early enough when what runs beside it takes about as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from torch.utils.flop_counter import flop_registry

from ...ir.function.function import Callee, TensorFunction
from ...ir.graph.begun import HOST, is_begun, is_begun_copy, is_wait
from ...ir.graph.by_size import call_at
from ...ir.graph.collectives import is_collective
from ...ir.graph.effects import resolve_op, schema_of
from ...ir.graph.graph import CallRegion, CallTensor, Graph, Library, Node, Ref, uses
from ...ir.machine import Machine

# Nanoseconds from the call of a collective until its first byte is there.
LATENCY = 15e3
# Nanoseconds from a copy between devices until its first byte is there.
COPY_LATENCY = 8e3
# Nanoseconds that events, streams and the wait of a copy cost the host: what hides less is not begun.
WORTH_BEGINNING = 20e3
# A sum over a group is brought to everybody: what is sent is sent twice.
_TWICE = "all_reduce"


def copy_time(nbytes: int, *gpus: Machine) -> float:
    """Nanoseconds of a copy between two GPUs, or a GPU and the host."""
    return COPY_LATENCY + nbytes / min(m.link if len(gpus) > 1 else m.host_link for m in gpus)


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of a graph's calls on a machine, at typical sizes; on some devices on ``machines`` of their own."""

    graph: Graph
    functions: Mapping[str, Callee]
    machine: Machine
    machines: Mapping[str, Machine] = field(default_factory=dict)

    def stream_of(self, node: Node) -> str:
        """The stream on which a node is begun, beside calls, which have none: that of collectives, or for each
        direction between two devices that of copies."""
        if is_begun_copy(node):
            return " to ".join(self._devices(node))
        return "collectives" if is_begun(node) else ""

    def of(self, node: Node) -> float:
        """A kernel or a library's call takes a launch and what it moves, or multiplies; what is begun what it sends;
        views and waits nothing.

        Rings send what is larger, operands or results, past each device, less the share that it has: of large groups
        all of it (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
        """
        if isinstance(node, Library):
            node = call_at(node, self.graph.symbols.hint)
        moved = (self._bytes(uses(node)), self._bytes(node.names))
        match node:
            case Library() if is_wait(node):
                return 0.0
            case Library() if is_collective(node):
                return LATENCY + max(moved) * (2 if _TWICE in node.target else 1) / self.machine.link
            case Library() if is_begun_copy(node):
                gpus = [self.machines.get(d, self.machine) for d in self._devices(node) if d != HOST]
                return copy_time(max(moved), *gpus)
            case Library():
                operations = self._of_library(node)
            case CallTensor():
                operations = self._of_function(self.functions.get(node.function))
            case CallRegion():
                return node.times * sum(replace(self, graph=node.region).of(n) for n in node.region.nodes)
            case _:
                return 0.0
        device = next((t.device for t in node.types if t is not None), "")
        machine = self.machines.get(device, self.machine)
        return machine.launch + max(sum(moved) / machine.bandwidth, operations / machine.matmul)

    def _devices(self, node: Node) -> tuple[str, str]:
        types = self.graph.types()
        return types[uses(node)[0]].device, types[node.names[0]].device

    def _bytes(self, names: Iterable[str]) -> int:
        types = self.graph.types()
        return sum(self.graph.symbols.hint(types[n].nbytes) for n in names if n in types)

    def _of_library(self, node: Library) -> int:
        """Operations of products, convolutions and attention, by torch's own count of them; of other calls none."""
        if schema_of(node.target) is None:
            return 0  # what the host program does itself, such as handing out memory
        count = flop_registry.get(getattr(resolve_op(node.target), "overloadpacket", None))
        if count is None:
            return 0
        types, hint = self.graph.types(), self.graph.symbols.hint

        def shape(name: str) -> list[int]:
            return [hint(extent) for extent in types[name].shape]

        given = tuple(shape(a.name) if isinstance(a, Ref) and a.name in types else a for a in node.args)
        try:
            return int(count(*given, out_val=shape(node.names[0])))
        except (TypeError, ValueError, IndexError, KeyError, AssertionError):
            return 0  # arguments in another form than torch counts: what the call moves is known all the same

    def _of_function(self, function: Callee | None) -> int:
        if not isinstance(function, TensorFunction):
            return 0
        hint = self.graph.symbols.hint if not function.symbols.symbols else function.symbols.hint
        products = (s for s in function.stages if s.role is not None and s.role.has_operands)
        return sum(2 * prod(hint(d.extent) for d in (*function.axes_of(s), *function.over_of(s))) for s in products)
