"""The oracle of tensor functions: what each stage is at each of its points, by definition.

No loop order is chosen: every point is computed by itself from inputs and the results of stages above, an element of
an expression at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import sympy

from ..expr.monoid import Monoid, State
from ..expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, cast, is_value
from ..function.function import Dim, Stage, TensorFunction
from .arrays import Array, Arrays, OracleError, by_name, logical, poison, size
from .ops import converter, function, scalar
from .text import index_text


def run_function(function: TensorFunction, inputs: Arrays, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Run a tensor function and return its outputs by name.

    ``inputs`` gives logical arrays by name, or in the order of the function's inputs; a one-dimensional array where the
    buffer has another rank is its storage. ``sizes`` gives every size symbol by name. What nothing writes is NaN, or
    garbage where the type has none.

    Raises:
        OracleError: an index out of range, a missing or misshapen input.
    """
    given = by_name(inputs, [b.name for b in function.inputs], function.name)
    arrays: dict[str, Array] = {}
    for b in function.inputs:
        if b.name not in given:
            raise OracleError(f"{function.name}: no input for parameter {b.name!r}")
        arrays[b.name] = logical(b, given[b.name], tuple(size(e, sizes) for e in b.shape), sizes)
    run = _FunctionRun(function, arrays, {s: size(s, sizes) for s in function.symbols.symbols})
    with np.errstate(all="ignore"):
        for stage in function.stages:
            if not stage.into:
                run.stage(stage)
        written = run.outputs()
        for stage in function.stages:
            if stage.into:
                run.scatter(stage, written)
    return written


class _FunctionRun:
    def __init__(self, function: TensorFunction, arrays: dict[str, Array], sizes: Mapping[sympy.Symbol, int]) -> None:
        self.function = function
        self.arrays = arrays
        self.sizes = sizes

    def points(self, dims: tuple[Dim, ...]) -> Iterator[dict[sympy.Symbol, int]]:
        """Every point of some dimensions, those of the function in its order."""
        ordered = [d for d in self.function.dims if d in dims]
        for at in product(*(range(_number(d.extent, self.sizes)) for d in ordered)):
            yield dict(zip((d.var for d in ordered), at, strict=True))

    def stage(self, stage: Stage) -> None:
        axes, over = self.function.axes_of(stage), self.function.over_of(stage)
        shape = tuple(_number(d.extent, self.sizes) for d in axes)
        made = [poison(shape, v.dtype) for v in stage.values]
        if stage.scan:
            axes, over = self.function.rows, self.function.inner
        for at in self.points(axes):
            if stage.monoid is None:
                made[0][self.place(stage, at)] = self.values(stage, at)[0]
                continue
            state = _state(stage.monoid.identity(tuple(v.dtype for v in stage.values)))
            for inside in self.points(over):
                state = _combined(stage.monoid, stage.values, state, self.values(stage, at | inside))
                if stage.scan:
                    self.keep(stage, made, at | inside, state)
            if not stage.scan:
                self.keep(stage, made, at, state)
        self.arrays.update(zip(stage.results, made, strict=True))

    def keep(self, stage: Stage, made: list[Array], at: Mapping[sympy.Symbol, int], state: list[Any]) -> None:
        for array, value in zip(made, state, strict=True):
            array[self.place(stage, at)] = value

    def place(self, stage: Stage, at: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
        return tuple(at[d.var] for d in self.function.axes_of(stage))

    def values(self, stage: Stage, at: Mapping[sympy.Symbol, int]) -> list[Any]:
        point = _Point({**self.sizes, **at}, self.arrays, {})
        return [point.value(v) for v in stage.values]

    def outputs(self) -> dict[str, Array]:
        """What leaves the function, where it goes; over an input, what is not written stays."""
        makers = {r: (s, v) for s in self.function.stages for r, v in zip(s.results, s.values, strict=True)}
        written: dict[str, Array] = {}
        for o in self.function.outputs:
            shape = tuple(_number(e, self.sizes) for e in o.buffer.shape)
            known = self.arrays.get(o.buffer.name)
            array = poison(shape, o.buffer.dtype) if known is None else known.copy()
            stage, value = makers[o.result]
            for at in self.points(self.function.axes_of(stage)):
                point = _Point({**self.sizes, **at}, self.arrays, {})
                result = Load(o.result, tuple(d.var for d in self.function.axes_of(stage)), value.dtype)
                array[point.inside(o.buffer.name, o.indices, array)] = point.value(cast(result, o.buffer.dtype))
            written[o.buffer.name] = array
        return written

    def scatter(self, stage: Stage, written: dict[str, Array]) -> None:
        """Points in the order of the stage's axes, each of which finds what those before have left."""
        buffer = next(o.buffer for o in self.function.outputs if o.result == stage.into)
        array = written[buffer.name]
        value, places = cast(stage.values[0], buffer.dtype), stage.values[1:]
        for at in self.points(self.function.axes_of(stage)):
            point = _Point({**self.sizes, **at}, self.arrays, {})
            where = point.inside(buffer.name, places, array)
            found = [point.value(value)]
            if stage.monoid is not None:
                found = _combined(stage.monoid, (value,), [array[where]], found)
            array[where] = found[0]


def _combined(monoid: Monoid, values: tuple[Expr, ...], state: list[Any], found: list[Any]) -> list[Any]:
    old: State = tuple(Var(f"old{k}", v.dtype) for k, v in enumerate(values))
    new: State = tuple(Var(f"new{k}", v.dtype) for k, v in enumerate(values))
    known = {v.name: x for v, x in zip((*old, *new), (*state, *found), strict=True)}  # type: ignore[union-attr]
    point = _Point({}, {}, known)
    return [point.value(e) for e in monoid.combine(old, new)]


def _state(identity: tuple[Const, ...]) -> list[Any]:
    return [scalar(c.value, c.dtype) for c in identity]


class _Point:
    """Expressions at one point: where its dimensions are, and the values that have names there."""

    def __init__(self, at: Mapping[sympy.Symbol, int], arrays: Mapping[str, Array], known: Mapping[str, Any]) -> None:
        self.at = at
        self.arrays = arrays
        self.known = known
        # What is shared is computed once; the expression is kept, so that its id is its own.
        self._computed: dict[int, tuple[Expr, Any]] = {}

    def inside(self, name: str, indices: tuple[Index, ...], array: Array) -> tuple[int, ...]:
        """A place in an array. Raises OracleError where it lies outside."""
        place = tuple(int(self.value(i)) if is_value(i) else _number(i, self.at) for i in indices)
        if len(place) != array.ndim or not all(0 <= i < n for i, n in zip(place, array.shape, strict=True)):
            raise OracleError(f"{name}[{', '.join(map(str, place))}], whose shape is {array.shape}")
        return place

    def value(self, e: Expr) -> Any:
        if id(e) not in self._computed:
            self._computed[id(e)] = e, self._value(e)
        return self._computed[id(e)][1]

    def _value(self, e: Expr) -> Any:
        match e:
            case Load():
                array = self.arrays[e.buffer]
                return array[self.inside(e.buffer, e.indices, array)]
            case Const():
                return scalar(e.value, e.dtype)
            case Var():
                return self.known[e.name]
            case IndexValue():
                return e.dtype.numpy.type(_number(e.index, self.at))
            case Cast():
                return converter(e.value.dtype, e.dtype)(self.value(e.value))
            case Call():
                of = e.args[0].dtype if e.args else e.dtype
                return function(e.fn, of, e.dtype)(*map(self.value, e.args))
            case Select():
                return self.value(e.if_true if self.value(e.condition) else e.if_false)


def _number(expr: sympy.Expr, at: Mapping[sympy.Symbol, int]) -> int:
    symbols, compute = _compiled(expr)
    return int(compute(*(at[s] for s in symbols)))


@lru_cache(maxsize=4096)
def _compiled(expr: sympy.Expr) -> tuple[tuple[sympy.Symbol, ...], Any]:
    symbols = tuple(sorted(expr.free_symbols, key=str))
    names = {s: f"x{k}" for k, s in enumerate(symbols)}
    return symbols, eval(f"lambda {', '.join(names.values())}: {index_text(expr, names.__getitem__)}")
