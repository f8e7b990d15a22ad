"""Reading the script text of tensor functions back; the inverse of ``printer.Script.function``."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import sympy

from ..expr.monoid import Monoid
from ..expr.role import Role
from ..expr.value import symbol
from ..function.function import Dim, Output, Stage, TensorFunction
from ..nest.loops import Buffer, Scope
from .parser_expr import (
    ExprReader,
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
)
from .printer_expr import is_let

_DIMS = ("row", "inner", "extra")


def read_function(node: ast.FunctionDef, given: Mapping[str, ast.expr]) -> TensorFunction:
    """The tensor function of a definition under ``@function``. Raises ParseError."""
    inputs: list[Buffer] = []
    buffers: dict[str, Buffer] = {}
    for name, given_type in parameters(node):
        if function_name(given_type) == "output":
            buffers[name] = buffer_of(name, call_of(given_type)[1][0], Scope.GLOBAL)
        else:
            inputs.append(buffer_of(name, given_type, Scope.GLOBAL))
    symbols, body = sizes_of(node.body)
    dims: dict[str, list[Dim]] = {kind: [] for kind in _DIMS}
    while body and (pair := assignment(body[0])) and (kind := function_name(pair[1])) in _DIMS:
        dims[kind].append(Dim(symbol(name_of(pair[0])), index(call_of(pair[1])[1][0])))
        body = body[1:]
    reader = _StageReader(ExprReader({b.name: b.dtype for b in inputs}))
    written = {**{b.name: b for b in inputs}, **buffers}
    stages: list[Stage] = []
    outputs: list[Output] = []
    for statement in body:
        match statement:
            case ast.Pass():
                continue
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=places)]) if name in written:
                indices = tuple(index(e) for e in (places.elts if isinstance(places, ast.Tuple) else [places]))
                outputs.append(Output(written[name], name_of(statement.value), indices))
            case _:
                stage = reader.stage(statement)
                stages += [] if stage is None else [stage]
    rows, inner, extra = (tuple(dims[kind]) for kind in _DIMS)
    table = bool(literal(given["table"])) if "table" in given else False
    return TensorFunction(node.name, rows, inner, tuple(inputs), tuple(outputs), tuple(stages), symbols, extra, table)


class _StageReader:
    def __init__(self, exprs: ExprReader) -> None:
        self.dtypes = dict(exprs.dtypes)
        self.exprs = ExprReader(self.dtypes)

    def stage(self, statement: ast.stmt) -> Stage | None:
        """A stage; None for a name of a part of one."""
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_let(name):
                self.exprs.lets[name] = self.exprs.value(value)
                return None
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
                results = tuple(map(name_of, names))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                results = (name,)
            case ast.Expr(value=value):
                results = ()
            case _:
                raise fail(statement, "a stage, or out[…] = result")
        stage = self.read(results, value)
        self.exprs.lets.clear()
        self.dtypes.update({r: v.dtype for r, v in zip(stage.results, stage.values)})
        return stage

    def read(self, results: tuple[str, ...], node: ast.expr) -> Stage:
        kind, args, given = call_of(node)
        role = role_of(options(given, node, "role"))
        match kind, args:
            case "compute", [at, value]:
                return self.made(results, [value], at, None, role=role)
            case "reduce", [how, at, over, values]:
                combined = None if isinstance(over, ast.Name) and over.id == "inner" else _symbols(over)
                return self.made(results, items(values), at, self.monoid(how), over=combined, role=role)
            case "scan", [how, at, values]:
                return self.made(results, items(values), at, self.monoid(how), scan=True, role=role)
            case "scatter", [how, into, at, value, places]:
                monoid = None if isinstance(how, ast.Constant) else self.monoid(how)
                return self.made(results, [value, *items(places)], at, monoid, into=name_of(into), role=role)
        raise fail(node, "compute(axes, value), reduce(monoid, axes, over, (values,)), scan(monoid, axes, (values,)) "
                         "or scatter(monoid, result, axes, value, (places,))")  # fmt: skip

    def monoid(self, node: ast.expr) -> Monoid:
        return monoid_of(node, self.exprs)

    def made(
        self,
        results: tuple[str, ...],
        values: list[ast.expr],
        at: ast.expr,
        monoid: Monoid | None,
        *,
        over: tuple[sympy.Symbol, ...] | None = None,
        scan: bool = False,
        into: str = "",
        role: Role | None,
    ) -> Stage:
        axes, points = None, False
        match at:
            case ast.Name(id="rows" | "points" as where):
                points = where == "points"
            case _:
                axes = _symbols(at)
        read = tuple(map(self.exprs.value, values))
        return Stage(results, read, points, monoid, (), axes, over, scan, into, role)


def _symbols(node: ast.expr) -> tuple[sympy.Symbol, ...]:
    return tuple(symbol(name_of(e)) for e in items(node))
