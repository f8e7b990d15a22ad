"""Reductions over the rows of a kernel whose other reductions run along them: one visit of the elements for both.

The gradient of a norm is of this kind: sums along each row for the gradient of its input, sums over all rows for those
of its weights, of the same elements. What a reduction over the rows gives is there when all rows have been visited, so
that nothing in the kernel may read it but what has no rows either: a conversion, a scale.
"""

from __future__ import annotations

import sympy

from ...ir.expr.value import Load, free_symbols
from ..cost.rows import FEW_ROWS, SHORT_ROW, held_sums, held_words, keeps_narrow, long_row, longest_row
from ..facts.fusion_nodes import FusionNode
from ..rules import Capability, can
from .group import Group
from .tiles import kept, reduced


def complete_reduction(group: Group, m: FusionNode, covered: set[int]) -> str | None:
    """Let a reduction over ``covered`` into a group whose reductions run over other dimensions, or say why not.

    Either it reduces over the rows, or those that are there do once rows and elements change places: elements are
    what lies together in memory.
    """
    domain = group.domain
    rows = set(domain.rows())
    if covered != rows or not rows:
        return f"{m.name} reduces over other dimensions"
    if group.has_scan:
        return f"{m.name} reduces over the rows of a scan"
    if group.is_split:
        return f"{m.name} reduces over the rows of a reduction that is split over programs"
    if m.ends and not _runs_along(m):
        sums = sum(len(p.names) for p in group.nodes if p.monoid is not None and p.name in group.cross)
        reason = _refusal(group, list(domain.rows()), list(domain.inner_order()), sums + len(m.names))
        if reason is None:
            group.cross.update(m.names)
        return reason
    turned = _turned(group) if _runs_along(m) else None
    if turned is None:
        return f"{m.name} reduces over other dimensions"
    sums = sum(len(p.names) for p in group.nodes if p.monoid is not None)
    reason = _refusal(group, list(domain.inner_order()), list(domain.rows()), sums)
    if reason is None:
        group.cross.update(turned)
        domain.inner = frozenset(covered)
    return reason


def complete_reader(group: Group, m: FusionNode, missing: list[sympy.Symbol], used: set[int]) -> str | None:
    """Let a node in that reads what a reduction over rows gives, if it has none of those itself."""
    others = [ld.buffer for ld in m.loads if ld.buffer in group.produced and ld.buffer not in group.cross]
    if m.monoid is not None or missing or others or used != set(kept(group)):
        return f"{m.name} needs the result of a reduction over rows of the kernel"
    group.cross.update(m.names)
    return None


def _refusal(group: Group, rows: list[int], inner: list[int], sums: int) -> str | None:
    """Why ``sums`` results for each element of a row cannot be kept beside it, if they cannot."""
    extents = [group.domain.size(dims) for dims in (rows, inner)]
    count, length = map(group.table.hint, extents)
    if length < SHORT_ROW or count < FEW_ROWS:
        return f"{count} rows of {length} elements are too few for sums along and across them at once"
    machine = group.target.machine
    if not can(group.target, Capability.KEEP_ROWS) and not (
        extents[1].is_Integer and length <= longest_row(machine) and sums * length <= held_sums(machine, length)
    ):
        return f"no program holds a row of {extents[1]} elements and {sums} sums over all rows"
    return None


def refuse_long_rows(group: Group) -> str | None:
    """Why the registers of a multiprocessor of a GPU do not hold a row and sums for each of its elements; None where
    they do: the sums, what is read, and, unless all that is read is narrow and is kept as it is, what waits for the
    result of each reduction of the row."""
    if not group.cross or can(group.target, Capability.KEEP_ROWS) or reduced(group):
        return None
    length = _padded(group)
    if length <= long_row(group.target.machine):
        return None
    reductions = [m for m in group.nodes if m.monoid is not None]
    read = {
        ld.buffer: ld.dtype
        for m in group.nodes
        for ld in m.loads
        if ld.buffer not in group.produced and _moves(group, m, ld)
    }
    across = sum(len(m.names) for m in reductions if m.name in group.cross)
    states = across if keeps_narrow(read.values()) else sum(len(m.names) for m in reductions)
    if length * (states + sum(kind.itemsize for kind in read.values()) / 4) > held_words(group.target.machine):
        return f"registers do not hold {length} elements of {', '.join(read)} and of {states} reductions"
    return None


def _padded(group: Group) -> int:
    """Lanes of a tile that holds a row."""
    return 1 << max(group.table.hint(group.domain.size(group.domain.inner_order())) - 1, 0).bit_length()


def _moves(group: Group, m: FusionNode, load: Load) -> bool:
    """Whether a load has a place of its own for each element of each row, or of many."""
    binding = group.bindings[m.name]
    dims = {d for v in free_symbols(load) for d in binding.get(v, ())}
    return bool(dims & (group.domain.inner or frozenset())) and bool(dims & set(group.domain.rows()))


def _turned(group: Group) -> set[str] | None:
    """What is there when all rows have been visited, once the group's reductions are over rows: their results and all
    that is made of those alone, once for each. None where they may not be, since something with elements reads one, or
    a node does not run over all elements."""
    if group.cross:
        return None
    whole, rows = set(group.domain.order), set(group.domain.rows())
    turned: set[str] = {n for p in group.nodes if p.monoid is not None for n in p.names}
    for p in sorted(group.nodes, key=lambda p: p.index):
        dims = {d for digits in group.bindings[p.name].values() for d in digits}
        inside = {ld.buffer for ld in p.loads if ld.buffer in group.produced}
        if turned.isdisjoint(inside):
            if not p.ends if p.monoid is not None else dims != whole:
                return None
        elif p.monoid is not None or dims != rows or not turned.issuperset(inside):
            return None
        else:
            turned.add(p.name)
    return turned


def _runs_along(m: FusionNode) -> bool:
    """Whether a reduction visits neighbours in memory one after the other, going by the last index of what it reads."""
    last = [ld.indices[-1] for ld in m.loads if len(ld.indices) > 1]
    reduced = set(m.reduce_axes)
    along = sum(isinstance(i, sympy.Expr) and bool(i.free_symbols & reduced) for i in last)
    return 2 * along > len(last)
