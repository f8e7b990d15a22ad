"""A fused tensor function: the stages that one kernel computes, over one shared domain, before any loop order is
chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy

from ..expr.monoid import Monoid
from ..expr.origin import Origin
from ..expr.role import Role
from ..expr.symbols import SymbolTable
from ..expr.value import Expr, Load, loads
from ..nest.loops import Axis, AxisKind, Buffer, DimKind, LoopNest


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of the domain."""

    var: sympy.Symbol
    extent: sympy.Expr


@dataclass(frozen=True, slots=True)
class Stage:
    """One node. A stage without a monoid defines one result per point of the rows, or of rows and inner dimensions
    if ``inner``, which is always so where nothing else depends on it.

    With a monoid it combines ``values`` (a lifted state) over the inner dimensions into one result a component for
    each row. Loads name inputs of the function, indexed in their own shape, or results of earlier stages, indexed by
    the symbols of the dimensions that those have.

    With ``scan`` it combines along the inner dimensions in order, and has a result for each of their points: the state
    up to there.

    With ``into``, the name of an earlier stage's result that leaves the function, it has no result of its own: at every
    point of ``axes`` its first value is combined with (or, without a monoid, takes the place of) the element of that
    result whose place the other values are, one a dimension.

    ``axes`` (the dimensions of the results) and ``over`` (those that a monoid combines over) are given where this is
    not so: a product that feeds another, a sum over rows beside one over elements.

    ``role`` is what the pass that made the function knows of the stage.
    """

    results: tuple[str, ...]
    values: tuple[Expr, ...]
    inner: bool
    monoid: Monoid | None = None
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    axes: tuple[sympy.Symbol, ...] | None = None
    over: tuple[sympy.Symbol, ...] | None = None
    scan: bool = False
    into: str = ""
    role: Role | None = None

    def __post_init__(self) -> None:
        if self.axes is not None or (self.monoid is not None and not self.scan):
            object.__setattr__(self, "inner", True)  # so that stages that do the same are equal


@dataclass(frozen=True, slots=True)
class Output:
    """A result that leaves the kernel: where each point of the domain goes. The value is cast to the buffer's type."""

    buffer: Buffer
    result: str
    indices: tuple[sympy.Expr, ...]


@dataclass(frozen=True, slots=True)
class TensorFunction:
    """A kernel to be: names are canonical, so that equal functions of different places are equal values.

    ``rows`` and ``inner`` are the dimensions, outermost first; ``extra`` those that only stages with ``axes`` or
    ``over`` of their own have. Every stage's names are unique in the function. An output whose buffer is an input is
    written in place. With ``table`` the kernel takes rows of arguments and does the work of one call for each row.
    """

    name: str = field(compare=False)
    rows: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Output, ...]
    stages: tuple[Stage, ...]
    symbols: SymbolTable = SymbolTable()
    extra: tuple[Dim, ...] = ()
    table: bool = False

    @property
    def dims(self) -> tuple[Dim, ...]:
        return (*self.rows, *self.inner, *self.extra)

    @property
    def dims_by_kind(self) -> dict[DimKind, tuple[Dim, ...]]:
        return {DimKind.ROW: self.rows, DimKind.INNER: self.inner, DimKind.EXTRA: self.extra}

    def axis(self, dim: Dim, kind: AxisKind = AxisKind.SPATIAL) -> Axis:
        """A dimension as an axis of a block."""
        return Axis(dim.var, dim.extent, kind, next(k for k, dims in self.dims_by_kind.items() if dim in dims))

    @property
    def made(self) -> frozenset[str]:
        """The names of the results of all stages: what else is loaded is an input."""
        return frozenset(r for s in self.stages for r in s.results)

    @property
    def loads(self) -> Iterator[Load]:
        """Every load of its stages, those inside the indices of others included."""
        return (e for s in self.stages for v in s.values for e in loads(v))

    @property
    def scatters(self) -> bool:
        """Whether a stage writes where data say."""
        return any(s.into for s in self.stages)

    @property
    def params(self) -> tuple[Buffer, ...]:
        """The buffers that a call passes: inputs, then outputs that are not inputs."""
        return (*self.inputs, *(o.buffer for o in self.outputs if o.buffer not in self.inputs))

    def axes_of(self, stage: Stage) -> tuple[Dim, ...]:
        """The dimensions of a stage's results."""
        if stage.axes is not None:
            return self.named(stage.axes)
        at_points = stage.inner and (stage.monoid is None or stage.scan)
        return (*self.rows, *self.inner) if at_points else self.rows

    def over_of(self, stage: Stage) -> tuple[Dim, ...]:
        """The dimensions that a stage combines over; none without a monoid."""
        if stage.monoid is None or stage.scan or stage.into:
            return ()
        return self.inner if stage.over is None else self.named(stage.over)

    def named(self, symbols: tuple[sympy.Symbol, ...]) -> tuple[Dim, ...]:
        """Dimensions by their symbols."""
        by_var = {d.var: d for d in self.dims}
        return tuple(by_var[s] for s in symbols)


# What a kernel is the code of: a function, or loops that somebody has written or scheduled by hand.
Callee: TypeAlias = TensorFunction | LoopNest
