"""``parse``: read back what ``printer.show`` wrote, by Python's own parser. Nothing in the text is executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import sympy

from ..expr.dtypes import DType
from ..expr.role import Role
from ..expr.symbols import SymbolTable
from ..expr.value import symbol
from ..function.function import TensorFunction
from ..graph.constants import laid_out, tensor_of
from ..graph.graph import (
    CallRegion,
    CallTensor,
    Compute,
    Constant,
    Graph,
    GraphInput,
    GraphOutput,
    Input,
    IRModule,
    Library,
    Node,
    Reduction,
    Scan,
    Scatter,
    SizeInput,
    TensorType,
    View,
)
from ..nest.hints import Annotations, Place, misfit
from ..nest.loops import (
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    DimKind,
    Loop,
    LoopKind,
    LoopNest,
    Scope,
    Statement,
    Store,
    Update,
)
from ..nest.loops import Node as LoopNode
from .parser_expr import (
    ExprReader,
    ParseError,
    argument,
    assignment,
    buffer_of,
    call_of,
    fail,
    function_name,
    index,
    items,
    literal,
    monoid_of,
    name_of,
    options,
    parameters,
    role_of,
    sizes_of,
    string,
    tensor,
)
from .parser_function import read_function
from .printer_expr import LIBRARY_MARKS, is_let

__all__ = ["ParseError", "parse"]

_LOOPS = {k.name.lower(): k for k in LoopKind}
_AXES = {k.value: k for k in AxisKind}
_DIMS = {k.value: k for k in DimKind}


def parse(text: str) -> IRModule | Graph | TensorFunction | LoopNest:
    """The object whose script is ``text``: ``parse(show(x)) == x``. Raises ParseError, which gives line and column."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ParseError(f"no Python syntax: {error}") from None
    if body and isinstance(body[0], ast.Expr) and ast.unparse(body[0]).startswith("module("):
        _, _, given = call_of(body[0].value)
        functions = dict(_function(node) for node in body[1:])
        return IRModule(functions, string(options(given, body[0], "main")["main"]))
    if len(body) != 1:
        raise ParseError(f"expected one function, or module(main=…) and functions; found {len(body)} statements")
    return _function(body[0])[1]


def _function(node: ast.stmt) -> tuple[str, Graph | TensorFunction | LoopNest]:
    if not isinstance(node, ast.FunctionDef) or len(node.decorator_list) != 1:
        raise fail(node, "a function under @graph, @function or @nest")
    decorator = node.decorator_list[0]
    name, _, given = call_of(decorator) if isinstance(decorator, ast.Call) else (name_of(decorator), [], {})
    key = string(given.pop("key")) if "key" in given else node.name
    if name == "nest":
        return key, _nest(node, options(given, decorator, "outputs", "annotations"))
    if name == "graph":
        return key, _graph(node, options(given, decorator, "device"))
    if name == "function":
        return key, read_function(node, options(given, decorator, "table"))
    raise fail(decorator, "@graph, @function or @nest")


def _annotations(given: Mapping[str, ast.expr], place: Place, kind: LoopKind | None = None) -> Annotations:
    if "annotations" not in given:
        return ()
    found: Annotations = tuple(literal(given["annotations"]).items())
    for key, value in found:
        if wrong := misfit(key, value, place, kind):
            raise fail(given["annotations"], f"hints of a {place.value} ({wrong[0]}; {wrong[1]})")
    return found


# --- nests ----------------------------------------------------------------------------------------------------------


def _nest(node: ast.FunctionDef, given: Mapping[str, ast.expr]) -> LoopNest:
    params = tuple(buffer_of(name, kind, Scope.GLOBAL) for name, kind in parameters(node))
    outputs = tuple(string(e) for e in items(given["outputs"])) if "outputs" in given else ()
    symbols, body = sizes_of(node.body)
    local: list[Buffer] = []
    while body and (pair := assignment(body[0])) and function_name(pair[1]) == "local":
        local.append(buffer_of(name_of(pair[0]), call_of(pair[1])[1][0], Scope.LOCAL))
        body = body[1:]
    reader = _NestReader({b.name: b.dtype for b in (*params, *local)})
    notes = _annotations(given, Place.NEST)
    return LoopNest(node.name, params, outputs, reader.nodes(body), tuple(local), symbols, notes)


class _NestReader:
    def __init__(self, dtypes: Mapping[str, DType]) -> None:
        self.exprs = ExprReader(dtypes)

    def nodes(self, body: list[ast.stmt]) -> tuple[LoopNode, ...]:
        return tuple(self.node(n) for n in body if not isinstance(n, ast.Pass))

    def node(self, node: ast.stmt) -> LoopNode:
        match node:
            case ast.For():
                kind, args, given = call_of(node.iter)
                if kind not in _LOOPS or len(args) != 1:
                    raise fail(node.iter, f"one of {', '.join(_LOOPS)} of an extent")
                notes = _annotations(options(given, node.iter, "annotations"), Place.LOOP, _LOOPS[kind])
                return Loop(symbol(name_of(node.target)), index(args[0]), self.nodes(node.body), _LOOPS[kind], notes)
            case ast.With(items=[item]):
                name, args, given = call_of(item.context_expr)
                if name != "block":
                    raise fail(item.context_expr, "block(name)")
                given = options(given, item.context_expr, "annotations", "role")
                return self.block(string(args[0]), _annotations(given, Place.BLOCK), role_of(given), node.body)
        raise fail(node, "a loop or a block")

    def block(self, name: str, annotations: Annotations, role: Role | None, body: list[ast.stmt]) -> Block:
        axes: list[Axis] = []
        bindings: list[sympy.Expr] = []
        predicate: list[Bound] = []
        statements: list[Statement] = []
        for node in body:
            pair = assignment(node)
            if isinstance(node, ast.Expr) and function_name(node.value) == "where":
                predicate.append(_bound(call_of(node.value)[1][0]))
            elif pair is None:
                if not isinstance(node, ast.Pass):
                    raise fail(node, "an axis, where(a < b), or an assignment")
            elif isinstance(pair[0], ast.Name) and (kind := function_name(pair[1])) in _AXES:
                _, args, given = call_of(pair[1])
                dim = options(given, pair[1], "dim").get("dim")
                axes.append(Axis(symbol(pair[0].id), index(args[0]), _AXES[kind], _dim_kind(dim)))
                bindings.extend(index(a) for a in args[1:])
            elif isinstance(pair[0], ast.Name):
                self.exprs.lets[pair[0].id] = self.exprs.value(pair[1])
            else:
                statements.append(self.statement(*pair))
        self.exprs.lets.clear()
        return Block(name, tuple(axes), tuple(bindings), tuple(statements), tuple(predicate), annotations, role)

    def statement(self, target: ast.expr, value: ast.expr) -> Statement:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "update":
            monoid = monoid_of(value.func.value, self.exprs)
            targets = tuple(self.access(t) for t in (target.elts if isinstance(target, ast.Tuple) else [target]))
            _, args, given = call_of(value)
            options(given, value, "begins")
            begins = bool(literal(given["begins"])) if "begins" in given else True
            return Update(monoid, targets, tuple(map(self.exprs.value, args)), begins)
        place = self.access(target)
        return Store(place.buffer, place.indices, self.exprs.value(value))

    def access(self, node: ast.expr) -> Access:
        if not isinstance(node, ast.Subscript):
            raise fail(node, "buffer[indices]")
        return Access(name_of(node.value), self.exprs.indices(node.slice))


def _dim_kind(node: ast.expr | None) -> DimKind:
    if node is None:
        return DimKind.ROW
    found = _DIMS.get(node.id) if isinstance(node, ast.Name) else None
    if found is None:
        raise fail(node, f"one of {', '.join(_DIMS)}")
    return found


def _bound(node: ast.expr) -> Bound:
    match node:
        case ast.Compare(ops=[ast.Lt()], comparators=[right]):
            return Bound(index(node.left), index(right))
    raise fail(node, "a < b")


# --- graphs ---------------------------------------------------------------------------------------------------------


def _graph(node: ast.FunctionDef, given: Mapping[str, ast.expr]) -> Graph:
    device = string(given["device"]) if "device" in given else "cpu"
    symbols, body = sizes_of(node.body)
    constants: dict[str, Constant] = {}
    while body and isinstance(body[0], ast.Expr) and function_name(body[0].value) == "constant":
        name, constant = _constant(body[0].value, device)
        if name in constants:
            raise fail(body[0], f"one constant called {name!r}")
        constants[name], body = constant, body[1:]
    return _graph_of(node, body, device, symbols, constants)


def _graph_of(
    node: ast.FunctionDef,
    body: list[ast.stmt],
    device: str,
    symbols: SymbolTable,
    constants: Mapping[str, Constant] | None = None,
) -> Graph:
    """A graph, or a region, whose device, sizes and constants are those of the graph around it."""
    inputs = tuple(_graph_input(name, kind, device) for name, kind in parameters(node))
    reader = _GraphReader(device, symbols, {i.name: i.type.dtype for i in inputs if isinstance(i, Input)})
    if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
        raise fail(node, "a function that ends in return (…)")
    nodes = [n for statement in body[:-1] if (n := reader.node(statement)) is not None]
    outputs = tuple(_output(e) for e in items(body[-1].value))
    return Graph(node.name, inputs, tuple(nodes), outputs, symbols, constants or {})


def _constant(node: ast.expr, device: str) -> tuple[str, Constant]:
    """The name of a constant, and what the text has of it."""
    _, args, given = call_of(node)
    digest = string(options(given, node, "sha256")["sha256"]) if given else ""
    match args:
        case [name, ast.Constant() as kind] if not given:
            return string(name), Constant(string(kind))
        case [name, kind]:
            return string(name), Constant(_type(kind, device), digest=digest)
        case [name, kind, elements] if not given:
            wanted = _type(kind, device)
            try:
                value = tensor_of(argument(elements), wanted.dtype.torch)
                fits = tuple(value.shape) == tuple(map(int, wanted.shape))
            except (TypeError, ValueError, RuntimeError):
                fits = False
            if not fits:
                raise fail(elements, f"the elements of {ast.unparse(kind)} as lists in lists")
            return string(name), Constant(wanted, laid_out(value, tuple(map(int, wanted.strides))))
    raise fail(node, "constant(name, type, elements), constant(name, type, sha256=…) or constant(name, type's name)")


def _type(node: ast.expr, device: str) -> TensorType:
    kind: dict[str, Any] = {"device": device, **tensor(node)}
    if kind.keys() - {"shape", "strides", "dtype", "device"}:
        raise fail(node, "a tensor's type, which has no scope or alignment")
    return TensorType(**kind)


def _graph_input(name: str, node: ast.expr, device: str) -> GraphInput:
    function = function_name(node)
    if function == "size":
        return SizeInput(name, index(call_of(node)[1][0]))
    if function == "static":
        return Input(name, _type(call_of(node)[1][0], device), True)
    return Input(name, _type(node, device))


def _output(node: ast.expr) -> GraphOutput:
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    return index(call_of(node)[1][0]) if isinstance(node, ast.Call) else name_of(node)


class _GraphReader:
    def __init__(self, device: str, symbols: SymbolTable, dtypes: dict[str, DType]) -> None:
        self.device, self.symbols = device, symbols
        self.regions: dict[str, Graph] = {}
        self.dtypes = dtypes
        self.exprs = ExprReader(dtypes)

    def node(self, statement: ast.stmt) -> Node | None:
        """The node of a statement; None where it only names a part of the next one's expression, or is a region."""
        names: tuple[str, ...] = ()
        if isinstance(statement, ast.FunctionDef):
            self.regions[statement.name] = _graph_of(statement, statement.body, self.device, self.symbols)
            return None
        if isinstance(statement, ast.Expr):
            value = statement.value
        elif pair := assignment(statement):
            target, value = pair
            names = tuple(map(name_of, target.elts)) if isinstance(target, ast.Tuple) else (name_of(target),)
        else:
            raise fail(statement, "an assignment")
        node = self.read(names, value)
        if node is None:
            self.exprs.lets[names[0]] = self.exprs.value(value)
            return None
        self.exprs.lets.clear()
        self.dtypes.update({n: t.dtype for n, t in zip(node.names, node.types) if t is not None})
        return node

    def read(self, names: tuple[str, ...], value: ast.expr) -> Node | None:
        if len(names) == 1 and is_let(names[0]):
            return None
        function, args, given = call_of(value)
        match function, args:
            case "compute", [kind, ast.Lambda() as fn]:
                return Compute(names[0], _type(kind, self.device), _axes(fn), self.exprs.value(fn.body))
            case "reduce", [monoid, kinds, extents, ast.Lambda() as fn]:
                types, axes = tuple(_type(k, self.device) for k in items(kinds)), _axes(fn)
                over = tuple(index(e) for e in items(extents))
                kept = len(axes) - len(over)
                values = tuple(self.exprs.value(e) for e in items(fn.body))
                combine = monoid_of(monoid, self.exprs)
                return Reduction(names, types, axes[:kept], axes[kept:], over, combine, values)
            case "scan", [monoid, kinds, along, ast.Lambda() as fn]:
                types = tuple(_type(k, self.device) for k in items(kinds))
                values = tuple(self.exprs.value(e) for e in items(fn.body))
                combine = monoid_of(monoid, self.exprs)
                return Scan(names, types, _axes(fn), symbol(name_of(along)), combine, values)
            case "scatter", [monoid, kind, ast.Lambda() as initial, extents, ast.Lambda() as fn]:
                how = None if isinstance(monoid, ast.Constant) else monoid_of(monoid, self.exprs)
                values = (self.exprs.value(initial.body), *(self.exprs.value(e) for e in items(fn.body)))
                shape = tuple(index(e) for e in items(extents))
                return Scatter(names[0], _type(kind, self.device), _axes(initial), _axes(fn), shape, how, values)
            case "view", [kind, source, ast.Lambda() as fn]:
                offset = index(given["offset"]) if "offset" in given else sympy.S.Zero
                indices = tuple(self.exprs.index(e) for e in items(fn.body))
                return View(names[0], _type(kind, self.device), name_of(source), _axes(fn), indices, offset)
            case "library", [target, kinds, arguments, reason, *marks]:
                said = [name_of(m) for m in marks]
                if len(said) > len(LIBRARY_MARKS.intersection(said)):
                    raise fail(value, f"after the reason one of {', '.join(sorted(LIBRARY_MARKS))}, each once")
                optional = tuple(self.optional(k) for k in items(kinds))
                keywords = tuple((k, argument(v)) for k, v in given.items())
                return Library(
                    names, optional, string(target), argument(arguments), keywords, string(reason), (),
                    "rounded" in said, "refused" in said,
                )  # fmt: skip
            case "call", [callee, kinds, arguments]:
                types = tuple(_type(k, self.device) for k in items(kinds))
                sizes = tuple(index(e) for e in items(given["sizes"])) if "sizes" in given else ()
                into = tuple(_optional_name(e) for e in items(given["into"])) if "into" in given else ()
                count = int(index(given["count"])) if "count" in given else 1
                inputs = tuple(map(name_of, items(arguments)))
                return CallTensor(names, types, string(callee), inputs, sizes, (), into, count)
            case "repeat", [ast.Name(id=region), times, carried, *rows] if region in self.regions and len(rows) <= 2:
                taken, shared = [tuple(items(row)) for row in rows] + [()] * (2 - len(rows))
                given_by_call = tuple(tuple(map(name_of, items(row))) for row in taken)
                handed, same = tuple(map(name_of, items(carried))), tuple(map(name_of, shared))
                return CallRegion(names, self.regions[region], int(index(times)), handed, given_by_call, same)
        raise fail(value, "compute, reduce, scan, scatter, view, library, call, or repeat of a region above it")

    def optional(self, node: ast.expr) -> TensorType | None:
        return None if isinstance(node, ast.Constant) and node.value is None else _type(node, self.device)


def _optional_name(node: ast.expr) -> str | None:
    return None if isinstance(node, ast.Constant) and node.value is None else name_of(node)


def _axes(node: ast.Lambda) -> tuple[sympy.Symbol, ...]:
    return tuple(symbol(a.arg) for a in node.args.args)
