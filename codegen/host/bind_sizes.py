"""From where a host program reads each symbolic size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from ...ir.expr.symbols import PositivePart
from ...ir.expr.value import symbol
from ...ir.graph.graph import MADE_SIZE, CallTensor, Graph, Input, Library, SizeInput, View
from .steps.step import BindSize


def bind_sizes(graph: Graph) -> tuple[list[BindSize], set[sympy.Symbol]]:
    """A step for every size that an argument gives: an integer that is the symbol, a dimension, or a linear form of it;
    and the sizes that none gives."""
    wanted = {s for s in graph.symbols.symbols if not _decided_inside(graph, s)}
    if not wanted:
        return [], set()
    found: dict[sympy.Symbol, BindSize] = {}
    places: list[tuple[sympy.Expr, str, int | None, bool]] = []
    for i in graph.inputs:
        match i:
            case SizeInput(name, value):
                places.append((value, name, None, False))
            case Input(name, kind):
                places += [(e, name, d, False) for d, e in enumerate(kind.shape)]
                places += [(e, name, d, True) for d, e in enumerate(kind.strides)]
    # Plain symbols of integers first, then of dimensions, then forms that have to be solved.
    places.sort(key=lambda p: (not p[0].is_Symbol, p[3], p[2] is not None))
    whole = _signed(graph)
    for value, name, dim, stride in places:
        solved = _solve(whole(value), wanted - found.keys())
        if solved is not None:
            size, scale, shift = solved
            found[size] = BindSize(size, name, dim, stride, scale, shift)
    return [found[s] for s in graph.symbols.symbols if s in found], wanted - found.keys()


def sizes_of_steps(graph: Graph) -> set[sympy.Symbol]:
    """Every size symbol that the steps will compute with."""
    found: set[sympy.Symbol] = set()

    def look(arg: Any) -> None:
        if isinstance(arg, sympy.Basic):
            found.update(arg.free_symbols)
        elif isinstance(arg, (tuple, list)):
            for a in arg:
                look(a)

    for node in graph.nodes:
        for kind in node.types:
            if kind is not None:
                look((kind.shape, kind.strides))
        match node:
            case Library():
                look((node.args, tuple(v for _, v in node.kwargs)))
            case CallTensor():
                look(node.sizes)
            case View():
                look(node.offset)
    look(graph.outputs)
    return found


def _decided_inside(graph: Graph, symbol: sympy.Symbol) -> bool:
    """Whether a node of the graph gives the symbol its value (a size decided by data)."""
    return any(
        isinstance(n, Library) and symbol.name in n.names and n.types[n.names.index(symbol.name)] is None
        for n in graph.nodes
    )


def _solve(value: sympy.Expr, wanted: set[sympy.Symbol]) -> tuple[sympy.Symbol, int, int] | None:
    """The symbol, scale and shift where ``value`` is ``scale * symbol + shift`` of one wanted symbol."""
    if value.is_Symbol:
        return (value, 1, 0) if value in wanted else None
    if not isinstance(value, sympy.Expr):  # a comparison of sizes
        return None
    free = value.free_symbols & wanted
    if len(free) != 1 or len(value.free_symbols) != 1:
        return None
    (symbol,) = free
    shift = value.xreplace({symbol: sympy.S.Zero})
    scale = sympy.expand(value - shift).coeff(symbol)
    if not (scale.is_Integer and shift.is_Integer and scale > 0) or sympy.expand(scale * symbol + shift - value) != 0:
        return None
    return symbol, int(scale), int(shift)


def _signed(graph: Graph) -> Callable[[sympy.Expr], sympy.Expr]:
    """Writes what is linear in numbers that may be negative in them, in place of their two parts."""
    made = {n.args[0]: symbol(n.names[0]) for n in graph.nodes if isinstance(n, Library) and n.target == MADE_SIZE}
    parts = {above: (of.args[0], below) for of, above in made.items() if (below := made.get(_negative(of))) is not None}

    def whole(value: sympy.Expr) -> sympy.Expr:
        for above, (number, below) in parts.items() if value.free_symbols else ():
            joined = sympy.expand(value.xreplace({above: number + below})) if above in value.free_symbols else value
            value = value if below in joined.free_symbols else joined
        return value

    return whole


def _negative(of: Any) -> sympy.Expr | None:
    return PositivePart(-of.args[0]) if isinstance(of, PositivePart) and of.args[0].is_Symbol else None
