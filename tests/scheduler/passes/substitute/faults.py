"""Graphs with one node made wrong, which a check of a rewrite has to see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import sympy

from torch_mlc.ir.expr.value import Call, Expr, Load, is_value, rewrite
from torch_mlc.ir.graph.graph import Compute, Graph, Library, Node, Ref, View


def wrong_of(graph: Graph, known: set[str]) -> Iterator[tuple[str, Graph]]:
    """The graph with one of its new nodes made wrong: another element is read, a term or a factor is left out, an
    operand is another part of its tensor, two operands are exchanged."""
    for k, node in enumerate(graph.nodes):
        if node.names and node.names[0] in known and not isinstance(node, Compute):
            continue
        for what, other in _wrong(node):
            if other != node:
                yield what, replace(graph, nodes=(*graph.nodes[:k], other, *graph.nodes[k + 1 :]))


def _wrong(node: Node) -> Iterator[tuple[str, Node]]:
    match node:
        case Compute():
            for fn in ("add", "mul"):
                yield f"no {fn}", replace(node, value=rewrite(node.value, lambda e, f=fn: _first(e, f)))
            yield "first element", replace(node, value=rewrite(node.value, _at_first))
        case View() if len(node.indices) > 0 and not any(map(is_value, node.indices)):
            yield "first element", replace(node, indices=tuple(_not_last(i) for i in node.indices))
        case Library() if len(node.args) == 2:
            left, right = node.args
            if isinstance(left, Ref) and isinstance(right, Ref):
                yield "exchanged", replace(node, args=(right, left))


def _first(e: Expr, fn: str) -> Expr | None:
    return e.args[0] if isinstance(e, Call) and e.fn == fn else None


def _at_first(e: Expr) -> Expr | None:
    if isinstance(e, Load) and e.indices and not is_value(e.indices[0]):
        return Load(e.buffer, (sympy.S.Zero, *e.indices[1:]), e.dtype)
    return None


def _not_last(index: Any) -> Any:
    return sympy.Add(*(t for t in sympy.Add.make_args(index) if not t.is_Integer))


__all__ = ["wrong_of"]
