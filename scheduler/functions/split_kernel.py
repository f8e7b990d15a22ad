"""A reduction over programs and a second kernel that combines them: ``rfactor`` across kernels, for any monoid.

Programs do not combine results. So a first kernel reduces pieces, each to a state of its own, and a second one combines
the states by the same monoid. How many pieces there are, and of which axes, is the caller's to say (``Cut``, or a
``Split`` as it is). What both halves of a ``Reduction`` of a graph are is said by ``partial`` and ``combined``; the
second half of a tensor function, with what follows the reductions, by ``halves``. Source: Suriana et al. 2017,
"Parallel associative reductions in Halide".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.monoid import Monoid
from ...ir.expr.value import (
    Expr,
    Index,
    IndexValue,
    Load,
    Select,
    call,
    rename_loads,
    rewrite,
    substitute_index,
    symbol,
)
from ...ir.expr.value import loads as _loads
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.graph.graph import CallTensor, Reduction, TensorType
from ...ir.nest.loops import contiguous_strides


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis in two: ``parts`` pieces of ``size`` iterations; ``is_exact`` where no piece has a tail."""

    parts: sympy.Expr
    size: sympy.Expr
    is_exact: bool


def whole(extent: sympy.Expr) -> Cut:
    """Every iteration of an axis a piece."""
    return Cut(extent, sympy.S.One, True)


@dataclass(frozen=True, slots=True)
class Split:
    """What is reduced as ``pieces`` of ``own`` iterations: ``place`` is each axis of the whole in terms of these, and
    ``inside`` the conditions under which that is a place of the whole."""

    pieces: tuple[Dim, ...]
    own: tuple[Dim, ...]
    place: Mapping[sympy.Symbol, sympy.Expr]
    inside: tuple[Expr, ...] = ()

    def moved(self, places: Mapping[sympy.Symbol, sympy.Expr]) -> Split:
        """With places for other axes too."""
        return replace(self, place={**places, **self.place})

    def values(self, monoid: Monoid, values: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """A state of the whole as that of pieces, the identity where that is no place of the whole."""
        moved = tuple(substitute_index(v, self.place) for v in values)
        for condition in self.inside:
            moved = guarded(monoid, condition, moved)
        return moved


def guarded(monoid: Monoid, condition: Expr, values: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """A state under a condition, else the identity."""
    identity = monoid.identity(tuple(v.dtype for v in values))
    return tuple(Select(condition, v, e) for v, e in zip(values, identity, strict=True))


def below(index: sympy.Expr, limit: sympy.Expr) -> Expr:
    """Whether an index is less than another."""
    return call("lt", IndexValue(index, DType.INT64), IndexValue(limit, DType.INT64))


def numbered(letter: str, start: int = 0) -> Iterator[sympy.Symbol]:
    """Symbols of a letter and numbers."""
    return (symbol(f"{letter}{k}") for k in count(start))


def split_axes(
    axes: Sequence[Dim], cuts: Sequence[Cut | None], pieces: Iterable[sympy.Symbol], own: Iterable[sympy.Symbol]
) -> Split:
    """Axes with a cut for each; those with none are each piece's own. ``pieces`` and ``own`` give the new symbols."""
    over, inside = iter(pieces), iter(own)
    outer: list[Dim] = []
    inner: list[Dim] = []
    place: dict[sympy.Symbol, sympy.Expr] = {}
    tails: list[Expr] = []
    for axis, cut in zip(axes, cuts, strict=True):
        index: sympy.Expr = sympy.S.Zero
        if cut is not None:
            outer.append(Dim(next(over), cut.parts))
            index = outer[-1].var * cut.size
        if cut is None or cut.size != 1:
            inner.append(Dim(next(inside), axis.extent if cut is None else cut.size))
            index = index + inner[-1].var
        place[axis.var] = index
        if cut is not None and not cut.is_exact:
            tails.append(below(index, axis.extent))
    return Split(tuple(outer), tuple(inner), place, tuple(tails))


# --- reductions of a graph --------------------------------------------------------------------------------------------


def partial(
    node: Reduction, names: tuple[str, ...], split: Split, kept: Sequence[Dim], values: tuple[Expr, ...] | None = None
) -> Reduction:
    """The pieces of a reduction: results have the axes of the pieces, then those ``kept``. ``values`` are given where
    they are not just those of the whole in other places."""
    dims = (*split.pieces, *kept)
    shape = tuple(d.extent for d in dims)
    types = tuple(replace(t, shape=shape, strides=contiguous_strides(shape)) for t in node.types)
    values = split.values(node.monoid, node.values) if values is None else values
    over, sizes = tuple(d.var for d in split.own), tuple(d.extent for d in split.own)
    return Reduction(names, types, tuple(d.var for d in dims), over, sizes, node.monoid, values, node.origins)


def combined(
    node: Reduction, pieces: Reduction, over: Sequence[Dim], where: tuple[Index, ...], there: Expr | None = None
) -> Reduction:
    """The whole from its pieces: ``where`` those of a result lie, as they are counted by ``over``, and whether one is
    ``there``."""
    states: tuple[Expr, ...] = tuple(
        Load(name, where, t.dtype) for name, t in zip(pieces.names, pieces.types, strict=True)
    )
    states = states if there is None else guarded(node.monoid, there, states)
    axes, shape = tuple(d.var for d in over), tuple(d.extent for d in over)
    return replace(node, reduce_axes=axes, reduce_shape=shape, values=states)


# --- tensor functions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Halves:
    """``first`` reads the inputs of the whole and gives its other results and, behind them, ``partial`` states of the
    pieces. ``second`` reads these, and then inputs of the whole, of which ``taken`` are the places; ``last`` are those
    of its results among the results of the whole."""

    first: TensorFunction
    second: TensorFunction
    partial: int
    taken: tuple[int, ...]
    last: tuple[int, ...]

    def calls(self, call: CallTensor, suffix: str) -> tuple[CallTensor, CallTensor]:
        """A call of the whole as calls of the two; states are named after the first result, with a suffix."""
        sizes = dict(zip(self.first.symbols.symbols, call.sizes, strict=True))
        rest = [k for k in range(len(call.names)) if k not in self.last]
        states = [o.buffer for o in self.first.outputs[len(rest) :]]
        names = tuple(f"{call.names[self.last[0]]}_{suffix}{k}" for k in range(len(states)))
        types = tuple(
            TensorType(
                tuple(e.xreplace(sizes) for e in b.shape), tuple(e.xreplace(sizes) for e in b.strides), b.dtype,
                call.types[0].device,
            )
            for b in states
        )  # fmt: skip
        first = replace(
            call, names=(*(call.names[k] for k in rest), *names), types=(*(call.types[k] for k in rest), *types),
            function=self.first.name,
        )  # fmt: skip
        second = replace(
            call, names=tuple(call.names[k] for k in self.last), types=tuple(call.types[k] for k in self.last),
            args=(*names, *(call.args[k] for k in self.taken)), function=self.second.name,
        )  # fmt: skip
        return first, second


def halves(
    function: TensorFunction,
    first: TensorFunction,
    stages: Sequence[Stage],
    pieces: Sequence[Dim],
    kept: Sequence[Dim],
    name: str,
    lead: int = 0,
) -> Halves:
    """A function in two, of which ``first`` is there. The second has the reductions among ``stages`` from their states,
    which are the last outputs of the first, and the other stages, which are made of those.

    ``kept`` are the dimensions of its results, and its rows. States have the axes of the pieces behind the first
    ``lead`` of those.
    """
    rows = tuple(Dim(symbol(f"i{k}"), d.extent) for k, d in enumerate(kept))
    inner = tuple(Dim(symbol(f"r{k}"), d.extent) for k, d in enumerate(pieces))
    here = tuple(d.var for d in rows)
    at = (*here[:lead], *(d.var for d in inner), *here[lead:])
    moved: dict[sympy.Symbol, sympy.Expr] = dict(zip((d.var for d in kept), here, strict=True))
    made = {r for s in stages for r in s.results}
    last = tuple(k for k, o in enumerate(function.outputs) if o.result in made)
    states = [o.buffer for o in first.outputs[len(function.outputs) - len(last) :]]
    read = {ld.buffer for s in stages if s.monoid is None for v in s.values for ld in _loads(v)}
    taken = tuple(k for k, b in enumerate(function.inputs) if b.name in read)
    given = tuple(replace(b, name=f"in{k}") for k, b in enumerate(states))
    names = {function.inputs[k].name: f"in{len(given) + j}" for j, k in enumerate(taken)}
    waiting = iter(given)

    def leaf(e: Expr) -> Expr | None:  # stages may have had the dimensions in other orders
        return Load(e.buffer, here, e.dtype) if isinstance(e, Load) and e.buffer in made else None

    # What else the whole makes leaves no gaps in the numbers: halves that do the same are equal.
    results = {r: f"t{k}" for k, r in enumerate(r for s in stages for r in s.results)}

    def again(stage: Stage) -> Stage:
        own = tuple(results[r] for r in stage.results)
        if stage.monoid is not None:
            values: tuple[Expr, ...] = tuple(Load(b.name, at, b.dtype) for _, b in zip(stage.results, waiting))
            return replace(stage, results=own, values=values, inner=True, axes=None, over=None, role=None)
        values = tuple(
            rename_loads(rewrite(v, leaf, lambda i: i.xreplace(moved)), names | results) for v in stage.values
        )
        return replace(stage, results=own, values=values, inner=False, axes=None, role=None)

    outputs = tuple(
        Output(replace(o.buffer, name=f"out{k}"), results[o.result], tuple(i.xreplace(moved) for i in o.indices))
        for k, o in enumerate(function.outputs[k] for k in last)
    )
    inputs = (*given, *(replace(function.inputs[k], name=names[function.inputs[k].name]) for k in taken))
    second = TensorFunction(name, rows, inner, inputs, outputs, tuple(map(again, stages)), function.symbols)
    return Halves(first, second, len(states), taken, last)
