"""Reading the script text of expressions, types and library arguments back; the inverse of ``printer_expr``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, ModularIndexing

from ..errors import IRError
from ..expr.dtypes import DType
from ..expr.monoid import MONOIDS, Monoid, associative
from ..expr.ops import OPS
from ..expr.role import Role
from ..expr.symbols import Size, SymbolTable
from ..expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, symbol
from ..graph.graph import ArgumentRef, ConstantRef, OpRef, Ref
from ..nest.loops import Buffer, Scope, contiguous_strides
from .printer_expr import INDEX_FUNCTIONS, result_type

_DTYPES = {d.value: d for d in DType}
_ROLES = {r.value: r for r in Role}
_INDEX_CALLS = {**INDEX_FUNCTIONS, "CeilDiv": CeilDiv}


class ParseError(IRError):
    """The text is no script; says what was read and where."""


def fail(node: ast.AST, wanted: str) -> ParseError:
    """An error at a piece of syntax."""
    line = getattr(node, "lineno", None)
    where = f"line {line}, column {getattr(node, 'col_offset', 0) + 1}: " if line else ""
    return ParseError(f"{where}expected {wanted}, found {ast.unparse(node)!r}")


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    raise fail(node, "a name")


def string(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise fail(node, "a string")


def items(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, (ast.Tuple, ast.List)):
        return node.elts
    raise fail(node, "a list")


def call_of(node: ast.expr) -> tuple[str, list[ast.expr], dict[str, ast.expr]]:
    """Function name (dotted), positional and keyword arguments."""
    if not isinstance(node, ast.Call):
        raise fail(node, "a call")
    return ast.unparse(node.func), node.args, {k.arg or "": k.value for k in node.keywords}


def options(given: dict[str, ast.expr], at: ast.AST, *known: str) -> dict[str, ast.expr]:
    """Keyword arguments, none of them unknown."""
    for k in given:
        if k not in known:
            raise fail(at, f"one of the options {', '.join(known) or '(none)'}, not {k}")
    return given


# --- index expressions ----------------------------------------------------------------------------------------------


def index(node: ast.expr) -> sympy.Expr:
    """An index expression."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return sympy.Integer(value)
        case ast.Name():
            return symbol(node.id)
        case ast.UnaryOp(op=ast.USub()) | ast.BinOp(op=ast.Mult()):
            return sympy.Mul(*_factors(node))
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return sympy.Add(*_terms(node))
        case ast.BinOp(op=ast.FloorDiv()):
            return FloorDiv(index(node.left), index(node.right))
        case ast.BinOp(op=ast.Mod()):
            return ModularIndexing(index(node.left), sympy.S.One, index(node.right))
        case ast.BinOp(op=ast.Pow()):
            return sympy.Pow(index(node.left), index(node.right))
        case ast.Call():
            return _index_call(node)
    raise fail(node, "an index expression")


def _index_call(node: ast.Call) -> sympy.Expr:
    name, args, _ = call_of(node)
    if name == "symbol":
        return symbol(string(args[0]))
    raw = name.startswith("raw.")
    kind = _INDEX_CALLS.get(name.removeprefix("raw."))
    if kind is None:
        raise fail(node, f"one of {', '.join(_INDEX_CALLS)}")
    inner = [index(a) for a in args]
    return kind(*inner, evaluate=False) if raw else kind(*inner)


# Chains are built at once: sympy distributes a number over a sum when it meets the two alone.
def _factors(node: ast.expr) -> list[sympy.Expr]:
    match node:
        case ast.BinOp(op=ast.Mult()):
            return [*_factors(node.left), *_factors(node.right)]
        case ast.UnaryOp(op=ast.USub()):
            if isinstance(node.operand, ast.Constant):
                return [-index(node.operand)]
            return [sympy.S.NegativeOne, *_factors(node.operand)]
    return [index(node)]


def _terms(node: ast.expr) -> list[sympy.Expr]:
    match node:
        case ast.BinOp(op=ast.Add()):
            return [*_terms(node.left), *_terms(node.right)]
        case ast.BinOp(op=ast.Sub()):
            return [*_terms(node.left), sympy.Mul(sympy.S.NegativeOne, *_factors(node.right))]
    return [index(node)]


# --- types ----------------------------------------------------------------------------------------------------------


def dtype(node: ast.expr) -> DType:
    name = name_of(node)
    if name not in _DTYPES:
        raise fail(node, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def indices_of(node: ast.expr) -> list[ast.expr]:
    """The items between the brackets of a subscript."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


def tensor(node: ast.expr) -> dict[str, Any]:
    """``float32[…]`` or ``tensor(…)``: shape, strides, dtype and whatever else is said."""
    if isinstance(node, ast.Subscript):
        shape = tuple(index(e) for e in indices_of(node.slice))
        return {"shape": shape, "strides": contiguous_strides(shape), "dtype": dtype(node.value)}
    name, args, given = call_of(node)
    if name != "tensor" or len(args) != 2:
        raise fail(node, "a type: float32[n, m] or tensor(float32, [n, m], …)")
    shape = tuple(index(e) for e in items(args[1]))
    rest = {k: literal(v) for k, v in given.items() if k != "strides"}
    options(given, node, "strides", "device", "scope", "align")
    strides = tuple(index(e) for e in items(given["strides"])) if "strides" in given else contiguous_strides(shape)
    return {"shape": shape, "strides": strides, "dtype": dtype(args[0]), **rest}


def literal(node: ast.expr) -> Any:
    """A Python number, string, bool or None; ``float("nan")`` and the infinities."""
    match node:
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str() as text)]):
            return float(text)
        case ast.Dict():
            return {literal(k): literal(v) for k, v in zip(node.keys, node.values) if k is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise fail(node, "a literal") from None


def argument(node: ast.expr) -> Any:
    """An argument of a library call."""
    match node:
        case ast.Tuple():
            return tuple(argument(e) for e in node.elts)
        case ast.List():
            return [argument(e) for e in node.elts]
        case ast.Dict():
            return {argument(k): argument(v) for k, v in zip(node.keys, node.values) if k is not None}
        case ast.Name() if node.id in _DTYPES:
            return _DTYPES[node.id]
        case ast.Attribute(value=ast.Name(id="torch")):
            value = getattr(torch, node.attr, None)
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
            raise fail(node, "a dtype, layout or memory format of torch")
        case ast.Call() if ast.unparse(node.func) != "float":
            return _argument_call(node)
    return literal(node)


def _argument_call(node: ast.Call) -> Any:
    name, args, _ = call_of(node)
    match name:
        case "ref":
            return Ref(string(args[0]))
        case "constant":
            return ConstantRef(string(args[0]))
        case "argument":
            return ArgumentRef(string(args[0]))
        case "op":
            return OpRef(string(args[0]))
        case "size":
            return index(args[0])
        case "slice":
            return slice(*map(argument, args))
        case "complex":
            return complex(literal(args[0]), literal(args[1]))
        case "torch.device":
            return torch.device(string(args[0]))
    raise fail(node, "ref, constant, op, size, slice, complex or torch.device")


# --- value expressions ----------------------------------------------------------------------------------------------


class ExprReader:
    """Value expressions, given the element types of the tensors that they load and the names defined above them."""

    def __init__(self, dtypes: Mapping[str, DType]) -> None:
        self.dtypes = dtypes
        self.lets: dict[str, Expr] = {}

    def indices(self, node: ast.expr) -> tuple[Index, ...]:
        return tuple(self.index(e) for e in indices_of(node))

    def index(self, node: ast.expr) -> Index:
        """An index, which is a value where it can be nothing else (a gather)."""
        match node:
            case ast.Name() if node.id in self.lets:
                return self.lets[node.id]
            case ast.Subscript():
                return self.value(node)
            case ast.Call() if self._is_value_call(node):
                return self.value(node)
        return index(node)

    @staticmethod
    def _is_value_call(node: ast.Call) -> bool:
        name = ast.unparse(node.func)
        return name in OPS or name in _DTYPES or name in ("cast", "stored", "select", "index", "var", "load")

    def value(self, node: ast.expr) -> Expr:
        match node:
            case ast.Name() if node.id in self.lets:
                return self.lets[node.id]
            case ast.Subscript():
                buffer = self._buffer(node.value)
                if buffer not in self.dtypes:
                    raise fail(
                        node, f"a tensor that is defined above; write load({ast.unparse(node)}, dtype) otherwise"
                    )
                return Load(buffer, self.indices(node.slice), self.dtypes[buffer])
            case ast.Call():
                return self._call(node)
        raise fail(node, "a value")

    def _buffer(self, node: ast.expr) -> str:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "buffer":
            return string(node.args[0])
        return name_of(node)

    def _call(self, node: ast.Call) -> Expr:
        name, args, given = call_of(node)
        options(given, node, "dtype")
        match name, args:
            case "cast" | "stored", [value, kind]:
                return Cast(self.value(value), dtype(kind), name == "stored")
            case "select", [condition, if_true, if_false]:
                return Select(self.value(condition), self.value(if_true), self.value(if_false))
            case "index", [value, kind]:
                return IndexValue(index(value), dtype(kind))
            case "var", [value, kind]:
                return Var(string(value), dtype(kind))
            case "load", [ast.Subscript() as value, kind]:
                return Load(self._buffer(value.value), self.indices(value.slice), dtype(kind))
            case _, [value] if name in _DTYPES:
                return Const(literal(value), _DTYPES[name])
        values = tuple(self.value(a) for a in args)
        result = dtype(given["dtype"]) if "dtype" in given else result_type(name, values)
        if result is None:
            raise fail(node, f"a function of the table, with dtype= where it needs one, not {name!r}")
        return Call(name, values, result)


# --- heads and statements of functions ------------------------------------------------------------------------------


def parameters(node: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    pairs = []
    for arg in node.args.args:
        if arg.annotation is None:
            raise fail(arg, "a parameter with its type")
        pairs.append((arg.arg, arg.annotation))
    return pairs


def assignment(node: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    return (node.targets[0], node.value) if isinstance(node, ast.Assign) and len(node.targets) == 1 else None


def function_name(node: ast.expr) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def sizes_of(body: list[ast.stmt]) -> tuple[SymbolTable, list[ast.stmt]]:
    """The size declarations at the top, and the rest."""
    sizes: list[Size] = []
    for k, node in enumerate(body):
        pair = assignment(node)
        if pair is None or function_name(pair[1]) != "size":
            return SymbolTable(tuple(sizes)), body[k:]
        _, _, given = call_of(pair[1])
        given = options(given, node, "lower", "upper", "divisor", "hint")
        sizes.append(Size(symbol(name_of(pair[0])), **{k: literal(v) for k, v in given.items()}))
    return SymbolTable(tuple(sizes)), []


def monoid_of(node: ast.expr, exprs: ExprReader) -> Monoid:
    if isinstance(node, ast.Call) and function_name(node) == "associative":
        return associative(*map(exprs.value, node.args))
    name = name_of(node)
    if name not in MONOIDS:
        raise fail(node, f"one of the monoids {', '.join(MONOIDS)}, or associative(…)")
    return MONOIDS[name]


def buffer_of(name: str, node: ast.expr, scope: Scope) -> Buffer:
    kind = tensor(node)
    if "device" in kind:
        raise fail(node, "a buffer's type, which has no device")
    return Buffer(name, **{**kind, "scope": Scope(kind["scope"]) if "scope" in kind else scope})


def role_of(given: Mapping[str, ast.expr]) -> Role | None:
    """The role that the options of a stage or block name."""
    if "role" not in given:
        return None
    name = name_of(given["role"])
    if name not in _ROLES:
        raise fail(given["role"], f"one of the roles {', '.join(_ROLES)}")
    return _ROLES[name]
