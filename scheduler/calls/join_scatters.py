"""Scatters of the same points into different tensors become one: a step's keys and values go into their caches by one
launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...ir.expr.value import rename_loads
from ...ir.function.function import Stage, TensorFunction
from ...ir.graph.graph import CallTensor, Graph, Node
from ...ir.target import updates_in_order
from ..context import PassContext
from ..functions.function_table import FunctionTable
from ..fusion.fusion import Fusion
from .horizontal import Tables

# Stages of a scatter over its own result: what is there, and what is written.
ALONE = 2


def join_scatters(fusion: Fusion, context: PassContext) -> Fusion:
    """Let scatters that do not depend on one another, and write as many points of the same dimensions over results that
    are begun, be one call on devices where each call is a launch."""
    return fusion.having(*_Scatters(fusion.graph, fusion.functions, context.target_of).run())


@dataclass(slots=True)
class _Scatters(Tables):
    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        found: dict[object, list[int]] = {}
        for k, node, function in self.scatters():
            key = (function.rows, function.extra, function.symbols, node.sizes, node.types[0].device)
            found.setdefault(key, []).append(k)
        return self.chosen_of([[g for g in found.values() if len(g) > 1]])

    def scatters(self) -> Iterator[tuple[int, CallTensor, TensorFunction]]:
        """Scatters over their own results on devices without an order of updates, by their positions."""
        for k, node in enumerate(self.graph.nodes):
            if isinstance(node, CallTensor) and node.count == 1 and not updates_in_order(node.types[0].device):
                function = self.functions[node.function]
                written = [o.buffer in function.inputs for o in function.outputs]
                if function.scatters and written == [True] and len(function.stages) == ALONE:
                    yield k, node, function

    def joined(self, calls: list[Node], table: FunctionTable) -> CallTensor:
        members = [c for c in calls if isinstance(c, CallTensor)]
        functions = [self.functions[c.function] for c in members]
        first = functions[0]
        args = list(dict.fromkeys(a for c in members for a in c.args))
        names = {a: f"in{k}" for k, a in enumerate(args)}
        inputs = {names[a]: replace(b, name=names[a]) for c, f in zip(members, functions, strict=True)
                  for a, b in zip(c.args, f.inputs, strict=True)}  # fmt: skip
        stages: list[Stage] = []
        outputs = []
        for k, (c, f) in enumerate(zip(members, functions, strict=True)):
            given = {b.name: names[a] for a, b in zip(c.args, f.inputs, strict=True)}
            result = f"t{k}"
            for s in f.stages:
                values = tuple(rename_loads(v, given) for v in s.values)
                stages.append(replace(s, values=values, results=(result,) if s.results else (), into=s.into and result))
            (output,) = f.outputs
            outputs.append(replace(output, buffer=inputs[given[output.buffer.name]], result=result))
        function = replace(
            first, inputs=tuple(inputs[n] for n in names.values()), outputs=tuple(outputs), stages=tuple(stages)
        )
        return replace(
            members[0],
            names=tuple(n for c in members for n in c.names),
            types=tuple(t for c in members for t in c.types),
            function=table.enter(function),
            args=tuple(args),
            origins=tuple(dict.fromkeys(o for c in members for o in c.origins)),
            into=tuple(t for c in members for t in c.into),
        )


__all__ = ["join_scatters"]
