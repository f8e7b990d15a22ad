"""``associative_scan`` with a function of the user's: its graph becomes the ``combine`` of a monoid.

The function sees slices of the operands and must treat their elements alike. Tensors that it reads besides, which are
the same at each position of the scan, travel in the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy

from ....ir.expr.monoid import associative
from ....ir.expr.value import (
    Expr,
    IndexValue,
    Load,
    Var,
    always_rounded,
    cast,
    is_value,
    rewrite,
    substitute_index,
    symbol,
)
from ....ir.graph.facts import makers_of
from ....ir.graph.graph import Compute, Graph, Input, TensorType, View
from ....scheduler.context import PassContext
from ....scheduler.facts.fusion_nodes import simplify_value
from ....scheduler.passes import widen
from ..context import ImportContext, Tensor
from ..registry import NoConversion, converter
from ..terms import axes
from .scans import scan

# A tensor besides the states, by its number, and where it is read.
_Place: TypeAlias = tuple[int, tuple[sympy.Expr, ...]]


@converter("hop.associative_scan")
def associative_scan(
    ctx: ImportContext, body: Any, xs: Sequence[Tensor], additional: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    kind = ctx.type(0)
    if any(x.shape != kind.shape for x in xs):
        raise NoConversion("a scan of operands of several shapes")
    reader = _Reader(widen(ctx.body(), PassContext(ctx.numerics)), len(xs), len(kind.shape) - 1)
    definition = reader.definition()
    at = axes(len(kind.shape))
    # Slices have all axes but the first.
    moved = {symbol(f"i{k}"): at[k + 1] for k in range(len(at) - 1)}
    lifted = [ctx.load(x, at) for x in xs]
    for number, indices in reader.besides:
        lifted.append(ctx.at(additional[number], tuple(i.xreplace(moved) for i in indices)))
    monoid = associative(*definition)
    states = scan(ctx, monoid, monoid.lift(*lifted), kind, 0)
    return tuple(ctx.compute(states[k], ctx.type(k), ctx.name(k)) for k in range(len(xs)))


@dataclass(slots=True)
class _Reader:
    """The graph of a combination of slices with ``rank`` axes: inputs are ``count`` components of the earlier state, as
    many of the later one, then tensors besides."""

    graph: Graph
    count: int
    rank: int
    besides: list[_Place] = field(default_factory=list)
    inputs: dict[str, tuple[int, TensorType]] = field(default_factory=dict)

    def definition(self) -> tuple[Expr, ...]:
        """The components of the combination, then those that only travel. Raises NoConversion."""
        given = [i for i in self.graph.inputs if isinstance(i, Input)]
        self.inputs = {i.name: (k, i.type) for k, i in enumerate(given)}
        results: list[Expr] = []
        for name in self.graph.outputs:
            if not isinstance(name, str):
                raise NoConversion("a combination that gives something else than tensors")
            made = self.element(name, axes(self.rank))
            # States are kept in the type in which they are computed.
            results.append(always_rounded(simplify_value(cast(made, made.dtype.compute))))
        kinds = [given[2 * self.count + number].type.dtype.compute for number, _ in self.besides]
        return (*results, *(Var(f"b{self.count + k}", kind) for k, kind in enumerate(kinds)))

    def element(self, name: str, indices: tuple[Any, ...]) -> Expr:
        """One element of a tensor of the graph, as a function of states."""
        if any(is_value(i) for i in indices):
            raise NoConversion("a combination that gathers")
        if name in self.inputs:
            return self._given(name, indices)
        node = makers_of(self.graph)[name]
        match node:
            case Compute():
                value = substitute_index(node.value, dict(zip(node.axes, indices, strict=True)))
                return rewrite(value, self._leaf)
            case View():
                moved = dict(zip(node.axes, indices, strict=True))
                return self.element(node.source, tuple(i if is_value(i) else i.xreplace(moved) for i in node.indices))
        op = node.origins[0].op if node.origins else name
        raise NoConversion(f"a combination by {op}, which is no function of single elements")

    def _leaf(self, e: Expr) -> Expr | None:
        if isinstance(e, Load):
            return self.element(e.buffer, e.indices)
        if isinstance(e, IndexValue):
            raise NoConversion("a combination that depends on positions")
        return None

    def _given(self, name: str, indices: tuple[sympy.Expr, ...]) -> Expr:
        number, kind = self.inputs[name]
        if number < 2 * self.count:
            elsewhere = (a != b for a, b, n in zip(indices, axes(self.rank), kind.shape, strict=True) if n != 1)
            if any(elsewhere):
                raise NoConversion("a combination that reads other elements")
            name = f"{'ab'[number // self.count]}{number % self.count}"
        else:
            place = (number - 2 * self.count, indices)
            if {s for i in indices for s in i.free_symbols} - set(axes(self.rank)):
                raise NoConversion("a combination that reads a tensor at a place that a size decides")
            if place not in self.besides:
                self.besides.append(place)
            name = f"b{self.count + self.besides.index(place)}"
        return cast(Var(name, kind.dtype.compute), kind.dtype, when_stored=True)
