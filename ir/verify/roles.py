"""Proofs of the roles that stages of tensor functions have: what a pass has said of a stage is so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import sympy

from ..expr.monoid import ATTENTION, SUM
from ..expr.product import factors
from ..expr.role import Role
from ..expr.value import Cast, Expr, Select, free_symbols, loads
from ..function.function import Stage, TensorFunction
from ..function.sums import has_taps, has_windows, is_product
from ..nest.loops import AxisKind, DimKind, LoopNest, Update, blocks
from .expr import Fault

_MAKES_WEIGHTS = (Role.SCORE, Role.WEIGHT)
_REDUCES = (Role.STATE, Role.WEIGHTED_SUM, Role.WEIGHT_TOTAL)


def roles_hold(function: TensorFunction) -> Iterator[Fault]:
    """Every stage is what its role says; of attention all stages have one."""
    known = {d.var for d in function.dims}
    for stage in function.stages:
        if stage.role is not None and {*(stage.axes or ()), *(stage.over or ())} <= known:
            for holds, told in _FACTS.get(stage.role, ()):
                if not holds(function, stage):
                    yield Fault(stage, f"it is no {stage.role.value}: {told}", "leave out role=, or say what it is")
    said = [s for s in function.stages if s.role is not None and s.role.is_of_attention]
    if not said:
        return
    for stage in function.stages:
        if stage.role is None or not stage.role.is_of_attention:
            yield Fault(stage, "it has no role, and other stages have", "say what it does, or leave out all roles")
    made = _Made(function)
    if not any(s.role is Role.SCORE for s in said) or not any(s.role in _REDUCES for s in said):
        yield Fault(function, "stages have roles of attention, and none makes scores or none combines what is made of "
                              "them", "leave out all roles")  # fmt: skip
    for k, stage in enumerate(function.stages):
        if stage.role is not None and stage.role in _PROOFS and {*(stage.axes or ()), *(stage.over or ())} <= known:
            says = _PROOFS[stage.role](stage, made)
            if says is None and stage.role is Role.RESULT:
                late = any(s.role in (*_REDUCES, *_MAKES_WEIGHTS) for s in function.stages[k:])
                says = "what stands below still makes or combines scores" if late else None
            if says is not None:
                yield Fault(
                    stage, f"it is no {stage.role.value}: {says}", f"make it one, or say role= otherwise ({_ALL})"
                )


# Of sums, what has to hold of a role, and what is told where it does not.
_Fact: TypeAlias = tuple[Callable[[TensorFunction, Stage], bool], str]
_PRODUCT: _Fact = (is_product, "it sums no product of two operands that are read along the sum")
_WINDOWS: _Fact = (has_windows, "it combines no taps of windows that slide along its results")
_TAPS: _Fact = (has_taps, "no window slides along its sum for each of a few taps")
_FACTS: dict[Role, tuple[_Fact, ...]] = {
    Role.PRODUCT: (_PRODUCT,),
    Role.LIBRARY_PRODUCT: (_PRODUCT,),
    Role.POOLING: (_WINDOWS,),
    Role.CONVOLUTION: (_PRODUCT, _WINDOWS),
    Role.TAP_SUM: (_TAPS,),
    Role.FILTER_GRADIENT: (_PRODUCT, _TAPS),
}

# The dimensions that results of a role have, and those that it combines over.
_ROW, _INNER, _EXTRA = DimKind.ROW, DimKind.INNER, DimKind.EXTRA
_DIMENSIONS: dict[Role, tuple[set[DimKind], set[DimKind]]] = {
    Role.ROW_TOTAL: ({_ROW}, {_EXTRA}),
    Role.SCORE: ({_ROW, _INNER}, {_EXTRA}),
    Role.WEIGHT: ({_ROW, _INNER}, set()),
    Role.STATE: ({_ROW, _EXTRA}, {_INNER}),
    Role.WEIGHTED_SUM: ({_ROW, _EXTRA}, {_INNER}),
    Role.WEIGHT_TOTAL: ({_ROW, _INNER}, {_ROW, _INNER}),
    Role.RESULT: (set(DimKind), set()),
}


def roles_of_blocks_hold(nest: LoopNest) -> Iterator[Fault]:
    """The block of a stage has the dimensions that its role has, and combines over those of its role."""
    for block, _ in blocks(nest):
        if block.role is None:
            continue
        if _PRODUCT in _FACTS.get(block.role, ()):
            summed = {a.var for a in block.axes if a.kind is AxisKind.REDUCTION and a.extent != 1}
            for s in block.body:
                # A schedule may have put a guard around the product.
                if isinstance(s, Update) and len(_read_along(s.values[0], summed)) < 2:
                    yield Fault(block, f"{block.name} is no {block.role.value}: {_PRODUCT[1]}", "leave out role=")
        kept, over = _DIMENSIONS.get(block.role, (set(DimKind), set(DimKind)))
        for axis in block.axes:
            does, allowed = ("has", kept) if axis.kind is AxisKind.SPATIAL else ("combines over", over)
            if axis.dim not in allowed:
                says = f"{block.name} is no {block.role.value}: it {does} {axis.var}, dim={axis.dim.value}"
                yield Fault(axis, says, "another dim= of the axis, or another role= of the block")


_ALL = ", ".join(r.value for r in Role)


class _Made:
    """Which role makes a result, and the dimensions by their parts."""

    def __init__(self, function: TensorFunction) -> None:
        self.function = function
        self.roles = {r: s.role for s in function.stages for r in s.results}
        self.rows = {d.var for d in function.rows}
        self.keys = {d.var for d in function.inner}
        self.features = {d.var for d in function.extra}

    def axes(self, stage: Stage) -> set[sympy.Symbol]:
        return {d.var for d in self.function.axes_of(stage)}

    def over(self, stage: Stage) -> set[sympy.Symbol]:
        return {d.var for d in self.function.over_of(stage)}

    def read(self, value: Expr) -> set[Role | None]:
        """The roles of the results that a value is made of."""
        return {self.roles[ld.buffer] for ld in loads(value) if ld.buffer in self.roles}


def _score(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is not SUM:
        return "a score is a sum"
    over = made.over(stage)
    if not over or not over <= made.features:
        return "a score is summed over features, which are extra dimensions"
    if not made.keys <= made.axes(stage) or not made.axes(stage) <= made.rows | made.keys:
        return "a score is made for each row and key"
    # A single feature is read at zero.
    sides = _read_along(stage.values[0], {d.var for d in made.function.over_of(stage) if d.extent != 1})
    return None if len(sides) >= 2 else "a score sums a product of two loads along the features"


def _weight(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is not None:
        return "a weight is computed point by point"
    if not made.axes(stage) <= made.rows | made.keys:
        return "a weight is computed for each row and key, and has no features"
    return (
        None
        if made.read(stage.values[0]) <= {*_MAKES_WEIGHTS, Role.ROW_TOTAL}
        else "it reads what is combined over keys"
    )


def _state(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is not ATTENTION:
        return "the state is that of the attention monoid"
    if made.over(stage) != made.keys or made.axes(stage) & made.keys:
        return "the state is combined over all keys"
    if not made.read(stage.values[0]) & {*_MAKES_WEIGHTS}:
        return "its first value is made of no score"
    return "a score has no features" if free_symbols(stage.values[0]) & made.features else None


def _weighted_sum(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is not SUM:
        return "a weighted sum is a sum"
    if made.over(stage) != made.keys or made.axes(stage) & made.keys:
        return "a weighted sum is combined over all keys"
    parts = _factors(stage.values[0])
    weights = [f for f in parts if made.read(f) & {*_MAKES_WEIGHTS} and not free_symbols(f) & made.features]
    vectors = [f for f in parts if f not in weights and any(True for _ in loads(f))]
    return None if weights and vectors else "it sums no product of a weight with a vector"


def _weight_total(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is not SUM:
        return "a total of weights is a sum"
    points = made.axes(stage) | made.over(stage)
    if not made.over(stage) or points != made.rows | made.keys:
        return "a total of weights is combined over some of the rows and keys, for each of the others"
    return None if made.read(stage.values[0]) & {*_MAKES_WEIGHTS} else "it sums no weight"


def _row_total(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is None:
        return "a total of a row combines its elements"
    if not made.axes(stage) <= made.rows or not made.over(stage) or not made.over(stage) <= made.features:
        return "a total of a row is combined over features, once for each row"
    return "it reads a result" if any(made.read(v) for v in stage.values) else None


def _result(stage: Stage, made: _Made) -> str | None:
    if stage.monoid is not None:
        return "a result is computed point by point"
    return (
        "it reads what is there for each row and key alone" if made.read(stage.values[0]) & {*_MAKES_WEIGHTS} else None
    )


def _read_along(value: Expr, over: set[sympy.Symbol]) -> list[Expr]:
    """The factors of a value that are read along some axes; those that are read at all where there are none."""
    found: list[Expr] = []
    for parts in (factors(value), _factors(value)):
        read = [f for f in parts if any(True for _ in loads(f))]
        found = [f for f in read if over & free_symbols(f)] if over else read
        if len(found) > 1:
            break  # a choice may be a factor itself
    return found


def _factors(value: Expr) -> list[Expr]:
    """The factors of a value, through what rounds it and what keeps positions outside from counting."""
    if isinstance(value, Cast):
        return _factors(value.value)
    if isinstance(value, Select):
        return _factors(value.if_true)
    parts = factors(value)
    return parts if len(parts) == 1 else [f for p in parts for f in _factors(p)]


_PROOFS: dict[Role, Callable[[Stage, _Made], str | None]] = {
    Role.ROW_TOTAL: _row_total,
    Role.SCORE: _score,
    Role.WEIGHT: _weight,
    Role.STATE: _state,
    Role.WEIGHTED_SUM: _weighted_sum,
    Role.WEIGHT_TOTAL: _weight_total,
    Role.RESULT: _result,
}
