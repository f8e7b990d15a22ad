"""Calls that do one thing several times become as many calls, where others do it another number of times: all are one
launch then.

The gradients of a norm's weight and bias and of a bias beside it are three sums of pieces, those of the last norm two.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.function.function import TensorFunction
from ...ir.graph.graph import CallTensor, Node
from ..context import PassContext
from ..cost.calls import UNIFIED_BYTES, shares_rows
from ..functions.function_table import FunctionTable
from ..functions.side_by_side import calls_side_by_side, one_of
from ..fusion.fusion import Fusion


def part_side_by_side(fusion: Fusion, context: PassContext) -> Fusion:
    """Let small calls of functions that do the same for each of their results be a call for each result, where a launch
    is worth more than a table and several functions do it."""
    graph, hint, types = fusion.graph, fusion.graph.symbols.hint, fusion.graph.types()
    known: dict[str, TensorFunction | None] = {}
    found: dict[tuple[TensorFunction, str], list[int]] = {}
    for k, node in enumerate(graph.nodes):
        if not isinstance(node, CallTensor) or node.count != 1:
            continue
        if not shares_rows(context.target_of(node.types[0].device).machine):
            continue
        if sum(hint(t.nbytes) for t in (*node.types, *(types[a] for a in node.args))) > UNIFIED_BYTES:
            continue
        if node.function not in known:
            known[node.function] = one_of(fusion.functions[node.function])
        once = known[node.function]
        if once is not None:
            found.setdefault((once, node.types[0].device), []).append(k)
    table, parted = FunctionTable(fusion.functions), dict[int, list[CallTensor]]()
    for (once, _), places in found.items():
        if len({len(graph.nodes[k].names) for k in places}) < 2:
            continue
        name = table.enter(once)
        for k in places:
            call = graph.nodes[k]
            if isinstance(call, CallTensor) and len(call.names) > 1:
                parted[k] = calls_side_by_side(call, fusion.functions[call.function], name)
    if not parted:
        return fusion
    nodes: list[Node] = [n for k, node in enumerate(graph.nodes) for n in parted.get(k, [node])]
    return fusion.having(replace(graph, nodes=tuple(nodes)), table.used(nodes))


__all__ = ["part_side_by_side"]
