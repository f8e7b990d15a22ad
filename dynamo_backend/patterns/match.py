"""Where in a graph of ATen ops a pattern is found.

A match is by structure: the same ops of the same operands. Sizes in the arguments of a pattern (of views, expansions)
are expressions in the sizes of its operands, and are compared with those of the graph once the operands are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

aten = torch.ops.aten
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Found:
    """The nodes of a graph by those of a pattern, and the values of its free numbers by what these are there."""

    nodes: Mapping[fx.Node, fx.Node]
    numbers: Mapping[Any, Any] = field(default_factory=dict)
    # Sizes of the pattern, and what stands in their place.
    sizes: tuple[tuple[Any, Any], ...] = ()


def matches(pattern: fx.Graph, anchor: fx.Node, free: frozenset[Any]) -> Iterator[Found]:
    """Every way in which a node is the first result of a pattern, and other nodes are the others.

    ``free`` are the numbers of the pattern in whose place any may stand, each keyed by ``key_of``.
    """
    (end,) = pattern.find_nodes(op="output")
    results = list(end.args[0])  # type: ignore[arg-type]
    yield from (f for f in _results(results, anchor, Found({}), free) if _sizes_agree(f))


def key_of(number: Any) -> tuple[type, str]:
    """A number as patterns tell it from others: 1, 1.0 and True are three."""
    return type(number), repr(number)


def _results(results: list[fx.Node], anchor: fx.Node, found: Found, free: frozenset[Any]) -> Iterator[Found]:
    first, *others = results
    for known in _values(first, anchor, found, free):
        yield from _others(others, anchor.graph, known, free)


def _others(results: list[fx.Node], graph: fx.Graph, found: Found, free: frozenset[Any]) -> Iterator[Found]:
    if not results:
        yield found
        return
    first, *rest = results
    candidates = [found.nodes[first]] if first in found.nodes else graph.find_nodes(op=first.op, target=first.target)
    for candidate in candidates:
        for known in _values(first, candidate, found, free):
            yield from _others(rest, graph, known, free)


def _values(p: Any, g: Any, found: Found, free: frozenset[Any]) -> Iterator[Found]:
    """Every way in which an argument of the graph is one of the pattern."""
    match p:
        case fx.Node():
            if isinstance(p.meta.get("val"), _SYMBOLIC):
                yield Found(found.nodes, found.numbers, (*found.sizes, (p.meta["val"], g)))
            elif isinstance(g, fx.Node):
                yield from _nodes(p, g, found, free)
        case list() | tuple():
            if isinstance(g, (list, tuple)) and len(p) == len(g):
                yield from _rows(list(zip(p, g, strict=True)), found, free)
        case bool() | int() | float():
            if isinstance(g, fx.Node) or not isinstance(g, (bool, int, float)):
                return
            key = key_of(p)
            if key in free:
                if key_of(found.numbers.get(key, g)) == key_of(g):
                    yield Found(found.nodes, {**found.numbers, key: g}, found.sizes)
            elif key == key_of(g) or (not isinstance(p, bool) and not isinstance(g, bool) and p == g):
                yield found
        case torch.device():
            if isinstance(g, torch.device):
                yield found
        case _:
            if type(p) is type(g) and p == g:
                yield found


def _nodes(p: fx.Node, g: fx.Node, found: Found, free: frozenset[Any]) -> Iterator[Found]:
    if p in found.nodes:
        if found.nodes[p] is g:
            yield found
        return
    known = Found({**found.nodes, p: g}, found.numbers, found.sizes)
    if p.op == "placeholder":
        if _is_like(p.meta["val"], g.meta.get("val")):
            yield known
        return
    if p.op != g.op or p.target != g.target or len(p.args) != len(g.args) or p.kwargs.keys() != g.kwargs.keys():
        return
    keywords = [(p.kwargs[k], g.kwargs[k]) for k in p.kwargs]
    orders = [g.args]
    if p.target in _COMMUTATIVE and len(g.args) == 2:
        orders.append(g.args[::-1])
    for args in orders:
        yield from _rows([*zip(p.args, args, strict=True), *keywords], known, free)


def _rows(pairs: list[tuple[Any, Any]], found: Found, free: frozenset[Any]) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    (p, g), *rest = pairs
    for known in _values(p, g, found, free):
        yield from _rows(rest, known, free)


def _is_like(p: torch.Tensor, g: Any) -> bool:
    return isinstance(g, torch.Tensor) and p.dim() == g.dim() and p.dtype is g.dtype


def _sizes_agree(found: Found) -> bool:
    """Whether what stands in the place of each size of the pattern is that size, given those of the operands."""
    known: dict[sympy.Symbol, Any] = {}
    for p, g in found.nodes.items():
        if p.op == "placeholder":
            for n, size in zip(p.meta["val"].shape, g.meta["val"].shape, strict=True):
                if isinstance(n, torch.SymInt) and isinstance(n.node.expr, sympy.Symbol):
                    if not _equal(known.setdefault(n.node.expr, _expr(size)), _expr(size)):
                        return False
                elif not isinstance(n, torch.SymInt) and not _equal(sympy.Integer(n), _expr(size)):
                    return False
    for size, g in found.sizes:
        value = g.meta.get("val") if isinstance(g, fx.Node) else g
        if not isinstance(value, (int, float, *_SYMBOLIC)):
            return False
        if not _equal(size.node.expr.xreplace(known), _expr(value)):
            return False
    return True


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, _SYMBOLIC) else sympy.sympify(size)


def _equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(a == b or sympy.simplify(a - b) == 0)
