"""What a graph is run on when its programs are raced: random inputs of typical sizes, told as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ...ir.expr.value import Load, is_value, walk
from ...ir.graph.graph import Compute, Graph, Input, Reduction, Scan, Scatter, SizeInput, node_values
from ...runtime.tuning.measure import MAX_BYTES
from ...scheduler.tuning.measurer import MeasuringError

# What integers are below where no index tells: every dimension that is looked up in has so many places.
FEWEST = 2


@dataclass(frozen=True, slots=True)
class TypicalInputs:
    """Inputs of a graph in order: a size, or shape, strides, dtype and whether it is a parameter. Integers are below
    ``limit``, and so in range wherever the graph looks something up. ``consumed`` are positions of inputs whose memory
    the program may take."""

    items: tuple[Any, ...]
    limit: int
    consumed: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"items": [*self.items], "limit": self.limit, "consumed": [*self.consumed]}


def typical_inputs(graph: Graph, count: int, devices: Collection[str], given: Iterable[str] = ()) -> TypicalInputs:
    """Inputs of an imported graph that has ``count`` of them; ``given`` are names of those that nobody else holds.

    Raises:
        MeasuringError: there are inputs that are neither tensors of ``devices`` nor sizes, or too large ones.
    """
    hint, items, total = graph.symbols.hint, list[Any](), 0
    if len(graph.inputs) != count:
        raise MeasuringError(f"{graph.name} has inputs that are neither tensors nor sizes")
    for i in graph.inputs:
        match i:
            case SizeInput():
                items.append(hint(i.value))
            case Input():
                if i.type.device not in devices:
                    raise MeasuringError(f"{graph.name} has inputs on {i.type.device}, where no program is raced")
                if i.type.dtype.is_carried:
                    raise MeasuringError(f"{graph.name} has inputs of {i.type.dtype.value}")
                shape, strides = [hint(n) for n in i.type.shape], [hint(s) for s in i.type.strides]
                total += hint(i.type.nbytes)
                dtype = str(i.type.dtype.torch).removeprefix("torch.")
                items.append({"shape": shape, "strides": strides, "dtype": dtype, "static": i.static})
    if total > MAX_BYTES:
        raise MeasuringError(f"{graph.name} takes {total >> 20} MiB of inputs; {MAX_BYTES >> 20} are made at most")
    held = set(given)
    consumed = tuple(k for k, i in enumerate(graph.inputs) if i.name in held)
    return TypicalInputs(tuple(items), index_limit(graph), consumed)


def index_limit(graph: Graph) -> int:
    """The least dimension that data index anywhere in a graph."""
    types, hint, least = graph.types(), graph.symbols.hint, 1 << 62
    for node in graph.nodes:
        if isinstance(node, Scatter):
            for place, size in zip(node.values[2:], node.type.shape, strict=True):
                if any(isinstance(e, Load) for e in walk(place)):
                    least = min(least, hint(size))
        for value in node_values(node) if isinstance(node, (Compute, Reduction, Scan, Scatter)) else ():
            for e in walk(value):
                if isinstance(e, Load) and e.buffer in types:
                    for index, size in zip(e.indices, types[e.buffer].shape, strict=True):
                        if is_value(index):
                            least = min(least, hint(size))
    return max(least if least < 1 << 62 else FEWEST, 1)
