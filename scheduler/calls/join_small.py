"""Small calls that do different things and do not wait for one another become one launch: the rotation of queries and
the write of rotated keys and of values into their caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy

from ...ir.expr.value import symbol
from ...ir.function.function import Dim, TensorFunction
from ...ir.graph.graph import CallTensor, Graph, Node
from ...ir.target import updates_in_order
from ..context import PassContext
from ..cost.calls import JOINED_BYTES, MOST_JOINED, MOST_JOINED_ADDRESSES
from ..functions.function_table import FunctionTable
from ..functions.lower import substitute_single_uses
from ..functions.scalars import is_elementwise
from ..fusion.fusion import Fusion
from .horizontal import Tables
from .joined_parts import JoinedParts


def join_small(fusion: Fusion, context: PassContext) -> Fusion:
    """Let calls that take less time than a launch be one, on devices where each is a launch.

    Each has its own points: of what is scattered over arguments, which one of them may do, or of its results, which
    have memory of their own.
    """
    return fusion.having(*_Small(fusion.graph, fusion.functions, context.target_of, context).run())


@dataclass(slots=True)
class _Small(Tables):
    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        found: dict[object, list[int]] = {}
        for k, node in self.small():
            found.setdefault(node.types[0].device, []).append(k)
        return self.chosen_of([[g for g in found.values() if len(g) > 1]])

    def small(self) -> Iterator[tuple[int, CallTensor]]:
        """Calls of little work whose sizes are known, on devices without an order of updates, by their positions."""
        known: dict[str, bool] = {}
        for k, node in enumerate(self.graph.nodes):
            if not isinstance(node, CallTensor) or node.count != 1 or updates_in_order(node.types[0].device):
                continue
            if node.function not in known:
                known[node.function] = _is_small(self.functions[node.function])
            if known[node.function]:
                yield k, node

    def fits(self, part: list[int], k: int) -> bool:
        """Whether one launch does another call too: its addresses are in registers, and arguments that are written
        over have one shape, that of the rows."""
        functions = [self.functions[self.call(j).function] for j in (*part, k)]
        addresses = sum(len(f.params) for f in functions)
        return (
            len(functions) <= MOST_JOINED
            and addresses <= MOST_JOINED_ADDRESSES
            and sum(f.scatters for f in functions) <= 1
        )

    def call(self, k: int) -> CallTensor:
        node = self.graph.nodes[k]
        assert isinstance(node, CallTensor)
        return node

    def joined(self, calls: list[Node], table: FunctionTable) -> CallTensor:
        members = [c for c in calls if isinstance(c, CallTensor)]
        # What writes over arguments has its rows, and comes first: outputs of its own come behind all inputs.
        members.sort(key=lambda c: not self.functions[c.function].scatters)
        parts = JoinedParts(members)
        extra: list[Dim] = []
        for c in members:
            own, moved = _apart(self.functions[c.function], len(extra))
            parts.add(c, own, moved)
            extra += [replace(d, var=moved[d.var]) for d in (own.extra if own.scatters else own.rows)]
        first = self.functions[members[0].function]
        function = TensorFunction(
            first.name, first.rows if first.scatters else (), (), parts.inputs, tuple(parts.outputs),
            tuple(parts.stages), extra=tuple(extra),
        )  # fmt: skip
        return parts.call(function, table)


def _apart(function: TensorFunction, before: int) -> tuple[TensorFunction, dict[sympy.Symbol, sympy.Symbol]]:
    """A function whose stages say over which dimensions they are, and what those are called behind some others."""
    if function.scatters:
        own = function.extra
    else:
        function = substitute_single_uses(function)
        own, axes = function.rows, tuple(d.var for d in function.rows)
        function = replace(function, stages=tuple(replace(s, axes=axes) for s in function.stages))
    return function, {d.var: symbol(f"x{before + k}") for k, d in enumerate(own)}


def _is_small(function: TensorFunction) -> bool:
    """Whether a function is element-wise, or writes points over its arguments, with so few results that a launch takes
    longer than they do."""
    if function.table or function.inner or function.symbols.sizes:
        return False
    over = [o.buffer in function.inputs for o in function.outputs]
    if not all(over) if function.scatters else any(over) or not is_elementwise(function):
        return False
    dims = function.extra if function.scatters else function.rows
    points = sympy.Mul(*(d.extent for d in dims))
    nbytes = points * sum(o.buffer.dtype.itemsize for o in function.outputs)
    if not dims or not points.is_Integer or not 0 < nbytes <= JOINED_BYTES:
        return False
    leaving = {o.result for o in function.outputs}
    return function.scatters or all(s.results[0] in leaving for s in substitute_single_uses(function).stages)


__all__ = ["join_small"]
