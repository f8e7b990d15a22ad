"""Reading through views: a load of a view becomes a load of the memory it looks at, with the index maps composed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod, ModularIndexing, PythonMod

from ...ir.errors import IRError
from ...ir.expr.dtypes import DType
from ...ir.expr.index import Extents, simplify
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Call, Cast, Expr, Index, IndexValue, Load, Select, call, cast, const, is_value, rewrite
from ...ir.graph.facts import fact
from ...ir.graph.graph import Graph, Node, View, uses


def index_to_value(index: sympy.Expr, env: Mapping[sympy.Symbol, Index]) -> Expr:
    """An index expression as an int64 value, its symbols replaced by what ``env`` gives (indices or values)."""
    if not any(is_value(env[s]) for s in index.free_symbols if s in env):
        return IndexValue(index.xreplace({s: e for s, e in env.items() if not is_value(e)}), DType.INT64)
    if index.is_Symbol:
        return cast(env[index], DType.INT64)
    args = [index_to_value(a, env) for a in index.args]
    match index:
        case sympy.Add():
            return _chain("add", args)
        case sympy.Mul():
            return _chain("mul", args)
        case FloorDiv():
            return call("floordiv", args[0], args[1])
        case CeilDiv():
            return call("floordiv", call("add", args[0], call("sub", args[1], const(1, DType.INT64))), args[1])
        case Mod() | PythonMod():
            return call("remainder", args[0], args[1])
        case ModularIndexing():
            return call("remainder", call("floordiv", args[0], args[1]), args[2])
    raise IRError(f"the index {index} cannot be computed from data")


def _chain(fn: str, args: list[Expr]) -> Expr:
    result = args[0]
    for a in args[1:]:
        result = call(fn, result, a)
    return result


def map_index(index: Index, env: Mapping[sympy.Symbol, Index]) -> Index:
    """Substitute indices, which may be values, for the symbols of an index."""
    if is_value(index):
        return map_value(index, env)
    if index.is_Symbol and index in env:
        return env[index]
    if index.is_Number:
        return index
    used = [s for s in index.free_symbols if s in env]
    if any(is_value(env[s]) for s in used):
        return index_to_value(index, env)
    return index.xreplace({s: env[s] for s in used}) if used else index


def map_value(value: Expr, env: Mapping[sympy.Symbol, Index]) -> Expr:
    """Substitute indices, which may be values, for the symbols of a value expression."""
    if not any(is_value(e) for e in env.values()):
        return rewrite(value, lambda _: None, lambda i: _moved(i, env))
    match value:
        case Load(buffer, indices, dtype):
            return Load(buffer, tuple(map_index(i, env) for i in indices), dtype)
        case IndexValue(index, dtype):
            return cast(index_to_value(index, env), dtype)
        case Call(fn, args, dtype):
            return Call(fn, tuple(map_value(a, env) for a in args), dtype)
        case Cast(inner, dtype, when_stored):
            return cast(map_value(inner, env), dtype, when_stored)
        case Select(condition, if_true, if_false):
            return Select(map_value(condition, env), map_value(if_true, env), map_value(if_false, env))
        case _:
            return value


def _moved(index: sympy.Expr, env: Mapping[sympy.Symbol, Index]) -> sympy.Expr:
    if index.is_Symbol:
        return env.get(index, index)
    return index if index.is_Number else index.xreplace(env)


class ViewMap:
    """The views of a graph, each resolved to the tensor that owns the memory."""

    def __init__(self, graph: Graph) -> None:
        self.table: SymbolTable = graph.symbols
        self.views: dict[str, tuple[str, tuple[sympy.Symbol, ...], tuple[Index, ...]]] = {}
        # Accesses by where they are and what the view does to them: a layer that repeats asks what the first one did.
        self._known: dict[tuple[Any, ...], tuple[Index, ...]] = {}
        for node in graph.nodes:
            if isinstance(node, View):
                extents = dict(zip(node.axes, node.type.shape, strict=True))
                source, indices = self.access(node.source, node.indices, extents)
                self.views[node.name] = (source, node.axes, indices)

    def base(self, name: str) -> str:
        """The tensor whose memory a name reads."""
        return self.views[name][0] if name in self.views else name

    def access(self, name: str, indices: tuple[Index, ...], extents: Extents) -> tuple[str, tuple[Index, ...]]:
        """The owning tensor and the indices into it for an access that may go through views."""
        view = self.views.get(name)
        if view is None:
            return name, indices
        source, axes, inner = view
        if axes == indices:
            return source, inner
        key = (axes, inner, indices, *extents.items())
        known = self._known.get(key)
        if known is None:
            env = dict(zip(axes, indices, strict=True))
            known = tuple(self._simplify(map_index(i, env), extents) for i in inner)
            if not any(map(is_value, indices)):  # what data name is rarely named twice, and long to compare
                self._known[key] = known
        return source, known

    def _simplify(self, index: Index, extents: Extents) -> Index:
        return index if is_value(index) else simplify(index, extents, self.table)

    def resolve(self, value: Expr, extents: Extents) -> Expr:
        """Every load of the value read through its views."""

        def leaf(e: Expr) -> Expr | None:
            if isinstance(e, Load) and e.buffer in self.views:
                return Load(*self.access(e.buffer, e.indices, extents), e.dtype)
            return None

        return rewrite(value, leaf)


@fact
def views_of(graph: Graph) -> ViewMap:
    """The views of a graph."""
    return ViewMap(graph)


@fact
def readers_of(graph: Graph) -> Mapping[str, Sequence[Node]]:
    """Who reads each tensor, through views or not."""
    base = views_of(graph).base
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not isinstance(node, View):
            for name in dict.fromkeys(base(u) for u in uses(node)):
                found.setdefault(name, []).append(node)
    return found


@fact
def results_of(graph: Graph) -> frozenset[str]:
    """The tensors that the graph returns, or views of which it returns."""
    return frozenset(views_of(graph).base(o) for o in graph.outputs if isinstance(o, str))
