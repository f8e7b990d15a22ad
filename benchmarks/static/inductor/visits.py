"""The arrays that a kernel of Inductor's visits, told from its text: places in memory are computed for a few programs.

Inductor writes places as arithmetic of program numbers, ranges and sizes. What is computed of data is not known; an
access whose place is such has as many elements as its tile.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_mlc.runtime.model.work import ArrayTraffic

from .calls import Array

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
# Bytes of the widest access of a warp.
_WIDEST = 512
# Programs that are looked at: so many in a row at so many places of a grid.
_RUN, _PLACES = 8, 3


class _Data:
    """What nobody knows before the kernel runs, of a shape."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape


@dataclass(frozen=True, slots=True)
class _Pointer:
    name: str
    place: Any = 0


@dataclass(slots=True)
class _Visits:
    """Of one array by one program: places of all visits together, the elements that they add up to, and the elements
    that lie together in one of them; ``decided`` by data."""

    places: list[Any] = field(default_factory=list)
    read: int = 0
    written: int = 0
    together: int | None = None
    decided: bool = False

    @property
    def touched(self) -> int:
        known = int(np.unique(np.concatenate(self.places)).size) if self.places else 0
        return max(known, self.read, self.written) if self.decided else known


def arrays_of(
    text: str, name: str, values: Mapping[str, Any], arrays: Mapping[str, Array], grid: Sequence[int], at_once: int
) -> tuple[ArrayTraffic, ...]:
    """The arrays of a kernel as its programs visit them; ``values`` are its numbers by name, constants among them."""
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    shape = [max(int(n), 1) for n in (*grid, 1, 1, 1)[:3]]
    programs = shape[0] * shape[1] * shape[2]
    # Some in a row, since neighbours may visit different arrays, and the last one, which may have less to do.
    places = (programs * k // _PLACES + n for k in range(_PLACES) for n in range(_RUN))
    sample = sorted({programs - 1, *(k for k in places if k < programs)})
    shares = [1 / programs if k == programs - 1 else (1 - 1 / programs) / (len(sample) - 1) for k in sample]
    shares = [1.0] if programs == 1 else shares
    seen = []
    for k in sample:
        program = _Program((k % shape[0], k // shape[0] % shape[1], k // (shape[0] * shape[1])), shape, dict(values))
        program.names |= {a: _Pointer(a) for a in arrays}
        program.body(function.body)
        seen.append(program.visits)
    return tuple(_traffic(a, [s.get(n) for s in seen], shares, programs, at_once) for n, a in arrays.items())


def _traffic(
    array: Array, sample: Sequence[_Visits | None], shares: Sequence[float], programs: int, at_once: int
) -> ArrayTraffic:
    """The visits of all programs, of which those of the sample stand for ``shares``."""
    known = [v for v in sample if v is not None]
    if not known:
        return ArrayTraffic(0, 0, 0)
    visits = [(v.read, v.written, v.touched) if v is not None else (0, 0, 0) for v in sample]
    read, written, touched = (sum(n * s for n, s in zip(of, shares, strict=True)) for of in zip(*visits, strict=True))
    whole = min(touched * programs, array.elements)
    sharing = max(round(touched * programs / whole), 1) if whole else 1
    alike = (
        len(sample) > 1 and sample[0] is not None and sample[1] is not None and _first(sample[0]) == _first(sample[1])
    )
    # Programs that follow one another share at the same time, others as the rounds of programs pass.
    rounds = sharing / at_once if alike else min(sharing, programs / at_once)
    together = min((v.together for v in known if v.together is not None), default=None)
    size, parts = array.itemsize, programs / sharing
    return ArrayTraffic(
        round(whole * size), round(read * parts * size), round(written * parts * size), sharing, max(rounds, 1.0),
        None if together is None else min(together * size, _WIDEST),
    )  # fmt: skip


def _first(visits: _Visits) -> Any:
    return int(visits.places[0].flat[0]) if visits.places else None


@dataclass(slots=True)
class _Program:
    """One program's numbers while its statements are gone through."""

    program: tuple[int, int, int]
    shape: Sequence[int]
    names: dict[str, Any]
    visits: dict[str, _Visits] = field(default_factory=dict)

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for s in statements:
            match s:
                case ast.For():
                    bounds = [self.value(a) for a in s.iter.args] if isinstance(s.iter, ast.Call) else []
                    for k in range(*(int(b) for b in bounds)):
                        self.bind(s.target, k)
                        self.body(s.body)
                case ast.If():
                    test = self.value(s.test)
                    self.body(s.body if isinstance(test, _Data) or bool(test) else s.orelse)
                case ast.Assign(targets=[target]):
                    self.bind(target, self.value(s.value))
                case ast.AnnAssign(value=value) if value is not None:
                    self.bind(s.target, self.value(value))
                case ast.AugAssign(target=ast.Name(id=name)) if type(s.op) in _BINARY:
                    self.names[name] = self.binary(type(s.op), self.names[name], self.value(s.value))
                case ast.Expr():
                    self.value(s.value)

    def bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            for t in target.elts:
                self.bind(t, _Data(getattr(value, "shape", ())))

    def value(self, e: ast.expr) -> Any:
        match e:
            case ast.Constant():
                return e.value
            case ast.Name():
                return self.names.get(e.id, _Data())
            case ast.UnaryOp(op=ast.USub()):
                inner = self.value(e.operand)
                return inner if isinstance(inner, _Data) else -inner
            case ast.UnaryOp(op=ast.Invert() | ast.Not()):
                inner = self.value(e.operand)
                return inner if isinstance(inner, _Data) else np.logical_not(inner)
            case ast.BinOp() if type(e.op) in _BINARY:
                return self.binary(type(e.op), self.value(e.left), self.value(e.right))
            case ast.Compare(ops=[op]) if type(op) in _COMPARE:
                return _of(_COMPARE[type(op)], self.value(e.left), self.value(e.comparators[0]))
            case ast.Attribute(attr="shape"):
                return tuple(getattr(self.value(e.value), "shape", ()))
            case ast.Subscript():
                return self.subscript(e)
            case ast.Tuple() | ast.List():
                return tuple(self.value(x) for x in e.elts)
            case ast.IfExp():
                test = self.value(e.test)
                return self.value(e.body if isinstance(test, _Data) or bool(test) else e.orelse)
            case ast.Call():
                return self.call(e)
        return _Data()

    def binary(self, op: type[ast.operator], a: Any, b: Any) -> Any:
        if isinstance(a, _Pointer):
            return _Pointer(a.name, self.binary(op, a.place, b))
        return _of(_BINARY[op], a, b)

    def subscript(self, e: ast.Subscript) -> Any:
        value = self.value(e.value)
        index = e.slice.elts if isinstance(e.slice, ast.Tuple) else [e.slice]
        if all(isinstance(i, ast.Slice) or (isinstance(i, ast.Constant) and i.value is None) for i in index):
            axes = tuple(slice(None) if isinstance(i, ast.Slice) else None for i in index)
            made = np.empty(value.shape, bool)[axes] if isinstance(value, _Data) else np.asarray(value)[axes]
            return _Data(made.shape) if isinstance(value, _Data) else made
        return _Data(getattr(value, "shape", ()))

    def call(self, e: ast.Call) -> Any:
        name = e.func.attr if isinstance(e.func, ast.Attribute) else e.func.id if isinstance(e.func, ast.Name) else ""
        if name == "to" and isinstance(e.func, ast.Attribute):
            return self.value(e.func.value)
        given = [self.value(a) for a in e.args]
        match name:
            case "program_id":
                return self.program[int(given[0])]
            case "num_programs":
                return self.shape[int(given[0])]
            case "arange":
                return np.arange(int(given[0]), int(given[1]), dtype=np.int64)
            case "full" if not isinstance(given[1], _Data):
                return np.full(given[0], given[1])
            case "zeros" | "full":
                return _Data(given[0])
            case "broadcast_to":
                if isinstance(given[0], _Data):
                    return _Data(tuple(given[1]))
                return np.broadcast_to(given[0], given[1])
            case "load":
                mask = (
                    given[1]
                    if len(given) > 1
                    else next((self.value(k.value) for k in e.keywords if k.arg == "mask"), None)
                )
                return self.visit(given[0], mask, "read")
            case "store":
                self.visit(given[0], given[2] if len(given) > 2 else None, "written")
                return _Data()
            case "atomic_add":
                self.visit(given[0], given[2] if len(given) > 2 else None, "read")
                self.visit(given[0], given[2] if len(given) > 2 else None, "written")
                return _Data()
            case "where" if not any(isinstance(g, _Data) for g in given):
                return np.where(*given)
            case "minimum" | "min" if len(given) == 2 and not any(isinstance(g, _Data) for g in given):
                return np.minimum(*given)
            case "maximum" | "max" if len(given) == 2 and not any(isinstance(g, _Data) for g in given):
                return np.maximum(*given)
        shapes = [np.shape(g) if not isinstance(g, _Data) else g.shape for g in given if not isinstance(g, _Pointer)]
        return _Data(_together(shapes))

    def visit(self, pointer: Any, mask: Any, kind: str) -> Any:
        if not isinstance(pointer, _Pointer):
            return _Data()
        found, place = self.visits.setdefault(pointer.name, _Visits()), pointer.place
        # What a mask of data lets through is taken to be all.
        known = True if mask is None or isinstance(mask, _Data) else mask
        if isinstance(place, _Data):
            elements, found.decided = int(np.prod(_together([place.shape, np.shape(known)]), dtype=np.int64)), True
            shape = place.shape
        else:
            places, lanes = np.broadcast_arrays(np.asarray(place), np.asarray(known, dtype=bool))
            shape = places.shape
            chosen = np.unique(places[lanes])
            elements = int(chosen.size)
            if elements:
                found.places.append(chosen)
            if elements > 1:
                runs = 1 + int(np.count_nonzero(np.diff(chosen) != 1))
                found.together = min(elements // runs, found.together or elements)
        if kind == "read":
            found.read += elements
        else:
            found.written += elements
        return _Data(shape)


def _of(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if isinstance(a, (_Data, _Pointer)) or isinstance(b, (_Data, _Pointer)):
        return _Data(_together([getattr(x, "shape", ()) for x in (a, b) if not isinstance(x, _Pointer)]))
    try:
        return function(a, b)
    except (TypeError, ZeroDivisionError):
        return _Data()


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(tuple(int(n) for n in s) for s in shapes)) if shapes else ()
    except ValueError:
        return max(shapes, key=len)
