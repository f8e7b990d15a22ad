"""cache_window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.value import Expr, Load, free_symbols, index_exprs, loads, rewrite, symbol, walk
from ....ir.nest.loops import Axis, Block, Buffer, Loop, LoopNest, Node, Scope, Statement, Store, contiguous_strides
from ....ir.nest.loops import blocks as all_blocks
from ...error import ScheduleError
from ..analysis.dependence import accesses
from ..analysis.tree import blocks_under, find_block, fresh, linear_part, replace_node
from .copies import free_name, in_range, statement_values, under_choice


def cache_window(nest: LoopNest, block: str, buffer: str, order: Sequence[str]) -> tuple[LoopNest, list[str]]:
    """Read an operand of a sliding window through a copy of each place that the windows cover, made once for all of
    them; returns the name of the copying block.

    Rewrites::

                                                            for w in range(n + 2):
                                                                A_window[w] = A[w - 1] if 1 <= w < n + 1 else 0
        for i in range(n):                                  for i in range(n):
            for r in range(3):                        ->        for r in range(3):
                C[i] += (A[i + r - 1]                               C[i] += A_window[i + r] * B[r]
                         if 1 <= i + r < n + 1 else 0) * B[r]

    What is copied is the largest part of the block's values that loads ``buffer`` and uses axes in sums (``i + r``,
    ``2 * i + 3 * r``) only: what is computed of an element, and the guard of a padded border, so that reading a window
    needs none. Each sum is one dimension of the copy, as long as the sum reaches; other axes are dimensions of their
    own. ``order`` names for each dimension one of its axes, outermost first. The copy is of everything, before all
    else; ``compute_at`` makes it the part that one iteration of a loop needs.

    Requires: such a part, of an input of the nest, that is all that the block reads of it and that no condition
    outside of it keeps in range; ``order`` names an axis of each dimension once.
    Raises: ScheduleError.    Source: the padding stage of Halide's and TVM's convolution schedules; line buffers.
    """
    asked = f"cache_window({block}, {buffer}, {list(order)})"
    node, _ = find_block(nest, block, asked)
    written = {name for b, _ in all_blocks(nest) for name in accesses(b).written}
    if buffer in written or all(p.name != buffer for p in nest.params):
        raise ScheduleError(asked, f"{buffer} is no input of the nest", nest, block)
    part = _part(nest, node, buffer)
    dimensions = _dimensions(node, part) if part is not None else []
    if part is None or all(len(d.axes) == 1 for d in dimensions):
        raise ScheduleError(asked, f"{buffer} is not read at a sum of axes alone", nest, block, "pack copies it")
    extents = {a.var: a.extent for a in node.axes}
    values = [v for s in node.body for v in statement_values(s)]
    if any(under_choice(v, part) for v in values) and not in_range(nest, part, extents):
        raise ScheduleError(
            asked, f"{buffer} is read where a condition holds, and elsewhere perhaps out of range", nest, block
        )
    chosen = [next((d for d in dimensions if name in {a.name for a in d.axes}), None) for name in order]
    if None in chosen or len(chosen) != len(dimensions) or len({d.var for d in chosen if d}) != len(dimensions):
        names = ", ".join(" + ".join(a.name for a in d.axes) for d in dimensions)
        raise ScheduleError(asked, f"the dimensions of the copy are {names}", nest, block)
    own = [d for d in chosen if d is not None]
    name = free_name({b.name for b in (*nest.params, *nest.locals)}, f"{buffer}_window")
    dims = {a.var: a.dim for a in node.axes}
    axes = tuple(Axis(d.var, d.extent, dim=dims[d.var]) for d in own)
    shape = tuple(a.extent for a in axes)
    made = Buffer(name, shape, contiguous_strides(shape), part.dtype, Scope.LOCAL)
    load = Load(name, tuple(d.at for d in own), part.dtype)

    def leaf(e: Expr) -> Expr | None:
        return load if e == part else None

    def statement(s: Statement) -> Statement:
        if isinstance(s, Store):
            return replace(s, value=rewrite(s.value, leaf))
        return replace(s, values=tuple(rewrite(v, leaf) for v in s.values))

    statements = tuple(map(statement, node.body))
    if any(ld.buffer == buffer for s in statements for v in statement_values(s) for ld in loads(v)):
        raise ScheduleError(asked, f"it reads {buffer} in several ways", nest, block)
    moved = rewrite(part, lambda _: None, lambda i: _in_places(i, dimensions))
    copier = free_name({b.name for b, _ in all_blocks(nest)}, f"{block}_{buffer}")
    taken: set[str] = set()
    loops = []
    for a in axes:
        loops.append(symbol(fresh(nest, f"{copier}_{a.var.name}", taken)))
        taken.add(loops[-1].name)
    copy: Node = Block(copier, axes, tuple(loops), (Store(name, tuple(a.var for a in axes), moved),))
    for var, a in zip(reversed(loops), reversed(axes), strict=True):
        copy = Loop(var, a.extent, (copy,))
    body = replace_node(nest.body, node, lambda _: (replace(node, body=statements),))
    root = next(k for k, n in enumerate(body) if any(b.name == block for b in blocks_under(n)))
    return replace(nest, body=(*body[:root], copy, *body[root:]), locals=(*nest.locals, made)), [copier]


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One dimension of a copy: the place ``at`` (at least 0) that the block reads, in its axes, and how many there
    are. ``var`` is its name in the copying block."""

    axes: tuple[sympy.Symbol, ...]
    at: sympy.Expr
    extent: sympy.Expr

    @property
    def var(self) -> sympy.Symbol:
        return self.axes[0]


def _part(nest: LoopNest, block: Block, buffer: str) -> Expr | None:
    """The sub-expression that loads the buffer and sums most axes in its indices; the largest of several."""
    best: tuple[int, Expr | None] = (0, None)
    for s in block.body:
        for v in statement_values(s):
            for e in walk(v):
                if any(ld.buffer == buffer for ld in loads(e)):
                    count = sum(len(d.axes) > 1 for d in _dimensions(block, e))
                    best = (count, e) if count > best[0] else best
    return best[1]


def _dimensions(block: Block, part: Expr) -> list[_Dimension]:
    used = free_symbols(part)
    extents = {a.var: a.extent for a in block.axes if a.var in used}
    indices = [sympy.expand(i) for i in index_exprs(part) if i.free_symbols & extents.keys()]
    found, left = [], dict(extents)
    for sums in _sums(indices, extents):
        at = sympy.Add(*(c * v for v, c in sums.items()))
        back = sympy.Add(*(-c * (extents[v] - 1) for v, c in sums.items() if c.could_extract_minus_sign()))
        at = sympy.expand(at + back)
        reach = sympy.Add(*(abs(c) * (extents[v] - 1) for v, c in sums.items()))
        order = [v for v in extents if v in sums]
        found.append(_Dimension(tuple(order), at, sympy.expand(reach + 1)))
        for v in sums:
            del left[v]
    return [*found, *(_Dimension((v,), v, e) for v, e in left.items())]


def _sums(indices: Sequence[sympy.Expr], axes: Iterable[sympy.Symbol]) -> list[dict[sympy.Symbol, sympy.Expr]]:
    """Groups of axes that stand in the indices with one set of constant factors only."""
    groups: list[set[sympy.Symbol]] = []
    for i in indices:
        mine = i.free_symbols & set(axes)
        touching = [g for g in groups if g & mine]
        groups = [g for g in groups if not g & mine] + [mine.union(*touching)]
    result = []
    for g in groups:
        factors = {_factors(i, g) for i in indices if i.free_symbols & g}
        (first,) = factors if len(factors) == 1 else (None,)
        if len(g) > 1 and first is not None:
            result.append(dict(first))
    return result


def _factors(index: sympy.Expr, group: set[sympy.Symbol]) -> tuple[tuple[sympy.Symbol, sympy.Expr], ...] | None:
    """What each axis of a group is multiplied with; None where one is not, or not by a constant."""
    found = []
    rest = index
    for v in sorted(group, key=lambda s: s.name):
        parts = linear_part(rest, v)
        if parts is None or not parts[0].is_Integer or parts[0] == 0:
            return None
        found.append((v, parts[0]))
        rest = parts[1]
    return tuple(found)


def _in_places(index: sympy.Expr, dimensions: Sequence[_Dimension]) -> sympy.Expr:
    """An index of the part with each sum replaced by its dimension."""
    for d in dimensions:
        if len(d.axes) > 1 and index.free_symbols & set(d.axes):
            first = d.axes[0]
            factor = sympy.expand(d.at).coeff(first)
            index = sympy.expand(index - d.at + d.var) if factor else index
    return index
