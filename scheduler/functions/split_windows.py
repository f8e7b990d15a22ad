"""Read an input in the dimensions that windows slide along, where it has several of them in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy

from ...ir.expr.value import Expr, Load, is_value, loads, rewrite
from ...ir.expr.windows import MOST_TAPS
from ...ir.function.function import Stage, TensorFunction
from ...ir.function.sums import has_windows
from ...ir.nest.loops import Buffer
from ...ir.verify.function import FUNCTION_RULES


def split_windows(function: TensorFunction) -> TensorFunction:
    """Dimensions of inputs are split where taps of a stage that has no windows slide in them at several paces.

    A product makes an image as rows of pixels, and what convolves it reads ``in0[c, 28*y + x]``. Rewrites::

        t0, = reduce(sum, [c, y, x], [r, s], (mul(in0[c, 28*y + x + 28*r + s - 29], in1[c, r, s]),))
        ->  t0, = reduce(sum, [c, y, x], [r, s], (mul(in0[c, y + r - 1, x + s - 1], in1[c, r, s]),))

    with ``in0`` of shape ``[64, 28, 28]`` instead of ``[64, 784]``: the same memory. Where a place does not tell which
    row it is of, the dimension stays. The rows of several images, ``in0[28*n + y + r, x + s, c]``, are told apart too.
    """
    written = {o.buffer.name for o in function.outputs}
    for stage in function.stages:
        taps = {d.var for d in function.over_of(stage)}
        if not _are_few(function, stage) or has_windows(function, stage):
            continue
        for name in sorted({ld.buffer for v in stage.values for ld in loads(v)} - function.made - written):
            for find in (_paces, _rows):
                changed = function
                while (split := _Split.of(changed, name, stage, taps, find)) is not None:
                    changed = split.applied(changed)
                if changed is not function and not any(fault for rule in FUNCTION_RULES for fault in rule(changed)):
                    function = changed
    return function


def _are_few(function: TensorFunction, stage: Stage) -> bool:
    """Whether a stage has a fixed number of taps, no more than windows have."""
    taps = sympy.Mul(*(d.extent for d in function.over_of(stage)))
    return bool(taps.is_Integer and 1 < taps <= MOST_TAPS)


@dataclass(frozen=True, slots=True)
class _Split:
    """Dimension ``dim`` of an input as two, the inner one of ``size`` elements."""

    buffer: Buffer
    dim: int
    size: sympy.Expr

    @classmethod
    def of(
        cls, function: TensorFunction, name: str, stage: Stage, taps: set[sympy.Symbol], find: _Find
    ) -> _Split | None:
        """The outermost split of an input by one of the sizes that ``find`` tells for an index."""
        (buffer,) = (b for b in function.inputs if b.name == name)
        everywhere = list(_loads_of(function, name))
        (own,) = (s for s in function.stages if s.results == stage.results)
        mine = [ld for v in own.values for ld in loads(v) if ld.buffer == name]
        along = {d.var: d.extent for d in function.axes_of(own)}
        for dim, extent in enumerate(buffer.shape):
            if any(is_value(ld.indices[dim]) for ld in everywhere):
                continue
            hint = function.symbols.hint
            paces = {p for ld in mine for p in find(ld, ld.indices[dim], taps, along) if p != extent}
            for size in sorted(paces, key=lambda p: (-hint(p), str(p))):
                if _divided(extent, size) is not None:
                    return cls(buffer, dim, size)
        return None

    def applied(self, function: TensorFunction) -> TensorFunction:
        dim, size, shape, strides = self.dim, self.size, self.buffer.shape, self.buffer.strides
        buffer = replace(
            self.buffer,
            shape=(*shape[:dim], shape[dim] / size, size, *shape[dim + 1 :]),
            strides=(*strides[:dim], strides[dim] * size, strides[dim], *strides[dim + 1 :]),
        )

        def read(e: Expr) -> Expr | None:
            if not isinstance(e, Load) or e.buffer != buffer.name or len(e.indices) == len(buffer.shape):
                return None
            return replace(e, indices=(*e.indices[:dim], *_halves(e.indices[dim], size), *e.indices[dim + 1 :]))

        stages = tuple(replace(s, values=tuple(rewrite(v, read) for v in s.values)) for s in function.stages)
        inputs = tuple(buffer if b.name == buffer.name else b for b in function.inputs)
        return replace(function, stages=stages, inputs=inputs)


def _loads_of(function: TensorFunction, name: str) -> Iterator[Load]:
    return (ld for ld in function.loads if ld.buffer == name)


# The sizes of an inner dimension that an index of a load tells, where taps move and axes of results.
_Find: TypeAlias = Callable[[Load, Any, set[sympy.Symbol], Mapping[sympy.Symbol, sympy.Expr]], set[sympy.Expr]]


def _rows(
    load: Load, index: sympy.Expr, taps: set[sympy.Symbol], along: Mapping[sympy.Symbol, sympy.Expr]
) -> set[sympy.Expr]:
    """The rows of an image, where a window slides along those of several: the load reads along all taps, and the axis
    that counts images moves the index past all places where a window begins."""
    if not taps <= set().union(*(i.free_symbols for i in load.indices if isinstance(i, sympy.Expr))):
        return set()
    moves = _moves(index)
    mine = [v for v in moves if v in along]
    if len(mine) != 2 or len(taps & moves.keys()) != 1 or len(moves) != 3:
        return set()
    for outer, inner in (mine, mine[::-1]):
        if (moves[outer] - moves[inner] * (along[inner] - 1)).is_positive and moves[outer] != 1:
            return {moves[outer]}
    return set()


def _moves(index: sympy.Expr) -> dict[sympy.Symbol, sympy.Expr]:
    """How far each symbol moves an index that is linear in it."""
    expanded = sympy.expand(index)
    found = {v: expanded.coeff(v) for v in index.free_symbols}
    return {v: c for v, c in found.items() if c != 0 and v not in (expanded - c * v).free_symbols}


def _paces(
    load: Load, index: sympy.Expr, taps: set[sympy.Symbol], along: Mapping[sympy.Symbol, sympy.Expr]
) -> set[sympy.Expr]:
    """How far a tap and an axis move an index together: numbers of places, or sizes that vary."""
    moves = _moves(index)
    return {sympy.gcd(moves[tap], moves[v]) for tap in taps & moves.keys() for v in moves.keys() - taps} - {sympy.S.One}


def _halves(index: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """An index as ``size`` times one and another."""
    outer: sympy.Expr = sympy.S.Zero
    inner: sympy.Expr = sympy.S.Zero
    for term in sympy.Add.make_args(sympy.expand(index)):
        whole = _divided(term, size)
        if term.is_Integer and size.is_Integer:  # the nearest, for windows that begin in front of the first place
            whole = sympy.Integer(round(int(term) / int(size)))
        outer += whole or 0
        inner += term - (whole or 0) * size
    return outer, inner


def _divided(term: sympy.Expr, size: sympy.Expr) -> sympy.Expr | None:
    """How many times ``size`` a term is, None where not a whole number of times."""
    quotient = term / size
    return quotient if sympy.denom(quotient) == 1 else None


__all__ = ["split_windows"]
