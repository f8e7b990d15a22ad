"""How many programs of a GPU kernel visit the same part of an array, and whether they run at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import sympy

from ...ir.expr.value import Index, Load, free_symbols
from ...ir.nest.kinds import BLOCK_KINDS
from ...ir.nest.loops import Access, Block, Buffer, Loop, LoopNest, Scope, blocks
from ...ir.oracle.text import index_text
from .places import place_of

# Programs that are gone through one by one; those behind them are taken to be like these.
_PROGRAMS = 1 << 15


@dataclass(frozen=True, slots=True)
class Sharing:
    """``programs`` visit the same part of an array, in so many ``rounds`` of programs that run at the same time."""

    programs: int = 1
    rounds: float = 1.0


def sharing_by_array(nest: LoopNest, at_once: int) -> dict[str, Sharing]:
    """How the programs of a scheduled nest share its arrays, ``at_once`` of which run at a time: of all accesses of an
    array what fewest programs share. Programs begin in the order of their numbers.

    Where data decide places, every program has its own.
    """
    buffers, found = nest.buffers, dict[str, Sharing]()
    known: dict[object, Sharing] = {}
    for block, outer in blocks(nest):
        # The first dimension of a grid is the one that runs fastest.
        programs = sorted((lp for lp in outer if lp.kind in BLOCK_KINDS), key=lambda lp: lp.kind.value, reverse=True)
        sites: list[Load | Access] = [*block.reads, *block.writes]
        for site in sites:
            buffer = buffers[site.buffer]
            if buffer.scope is not Scope.GLOBAL:
                continue
            place, decided = _place(nest, block, buffer, site.indices, programs)
            key = place, tuple(lp.var for lp in programs), decided
            if key not in known:
                known[key] = Sharing() if decided else _sharing(nest, place, programs, max(at_once, 1))
            least = found.get(buffer.name)
            if least is None or known[key].programs < least.programs:
                found[buffer.name] = known[key]
    return found


def _place(
    nest: LoopNest, block: Block, buffer: Buffer, indices: tuple[Index, ...], programs: list[Loop]
) -> tuple[sympy.Expr, bool]:
    """The first element that a program visits, and whether that is for data to say."""
    bindings = {a.var: b for a, b in zip(block.axes, block.bindings, strict=True)}
    place, decided, own = sympy.S.Zero, False, {lp.var for lp in programs}
    for index, stride in zip(indices, buffer.strides, strict=True):
        known = place_of(index)
        if known is None:
            named = free_symbols(Load("", (index,), index.dtype))
            decided |= any(s in own for v in named for s in bindings.get(v, v).free_symbols)
        else:
            place += known.xreplace(bindings) * stride
    sizes = {s: sympy.Integer(nest.symbols.hint(s)) for s in nest.symbols.symbols}
    others = {s: sympy.S.Zero for s in place.free_symbols if s not in own and s not in sizes}
    return place.xreplace({**sizes, **others}), decided


def _sharing(nest: LoopNest, place: sympy.Expr, programs: list[Loop], at_once: int) -> Sharing:
    extents = [max(nest.symbols.hint(lp.extent), 1) for lp in programs]
    total = math.prod(extents)
    moving = [n for n, lp in zip(extents, programs, strict=True) if lp.var in place.free_symbols]
    at = _function(place, programs)
    places = [at(*p) for p in islice(_numbers(extents), _PROGRAMS)]
    parts = len(set(places))
    # Beyond those that are gone through, what does not move is shared by all.
    sharing = total // parts if total <= _PROGRAMS else max(total // math.prod(moving), len(places) // parts)
    rounds = len({(p, k // at_once) for k, p in enumerate(places)}) / parts
    return Sharing(sharing, rounds)


def _numbers(extents: list[int]) -> Iterator[tuple[int, ...]]:
    return product(*map(range, extents))


def _function(place: sympy.Expr, programs: list[Loop]) -> Callable[..., Any]:
    names = ", ".join(lp.var.name for lp in programs)
    text = f"lambda {names}: {index_text(place, lambda s: s.name)}"
    made: Callable[..., Any] = eval(text, {"__builtins__": {}, "min": min, "max": max})
    return made
