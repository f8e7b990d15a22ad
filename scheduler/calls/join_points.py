"""Writes of the same points into different tensors become one call: a step's keys and values go into their caches by
one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...ir.function.function import TensorFunction
from ...ir.graph.graph import CallTensor, Graph, Node
from ...ir.target import updates_in_order
from ..context import PassContext
from ..cost.calls import MOST_JOINED, UNIFIED_BYTES
from ..functions.function_table import FunctionTable
from ..functions.scalars import is_elementwise
from ..fusion.fusion import Fusion
from .horizontal import Tables
from .joined_parts import JoinedParts


def join_points(fusion: Fusion, context: PassContext) -> Fusion:
    """Let small calls that write as many points of the same dimensions over what is there (scatters, parts of a tensor)
    and do not depend on one another be one, on devices where each call is a launch."""
    return fusion.having(*_Points(fusion.graph, fusion.functions, context.target_of).run())


@dataclass(slots=True)
class _Points(Tables):
    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        found: dict[object, list[int]] = {}
        for k, node, function in self.writes():
            key = (function.rows, function.extra, function.symbols, node.sizes, node.types[0].device)
            found.setdefault((key, function.scatters), []).append(k)
        groups = [g[k : k + MOST_JOINED] for g in found.values() for k in range(0, len(g), MOST_JOINED)]
        return self.chosen_of([[g for g in groups if len(g) > 1]])

    def writes(self) -> Iterator[tuple[int, CallTensor, TensorFunction]]:
        """Calls that write few points over arguments, on devices without an order of updates, by their positions."""
        hint = self.graph.symbols.hint
        for k, node in enumerate(self.graph.nodes):
            if not isinstance(node, CallTensor) or node.count != 1 or updates_in_order(node.types[0].device):
                continue
            function = self.functions[node.function]
            if function.table or function.inner or any(o.buffer not in function.inputs for o in function.outputs):
                continue
            if not function.scatters and not is_elementwise(function):
                continue
            points = 1
            for d in function.extra if function.scatters else function.rows:
                points *= hint(d.extent.xreplace(dict(zip(function.symbols.symbols, node.sizes, strict=True))))
            if points * max(o.buffer.dtype.itemsize for o in function.outputs) <= UNIFIED_BYTES:
                yield k, node, function

    def joined(self, calls: list[Node], table: FunctionTable) -> CallTensor:
        members = [c for c in calls if isinstance(c, CallTensor)]
        functions = [self.functions[c.function] for c in members]
        parts = JoinedParts(members)
        for c, f in zip(members, functions, strict=True):
            parts.add(c, f, {})  # they have the same dimensions
        function = replace(functions[0], inputs=parts.inputs, outputs=tuple(parts.outputs), stages=tuple(parts.stages))
        return parts.call(function, table)


__all__ = ["join_points"]
