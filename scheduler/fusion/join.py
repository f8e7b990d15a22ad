"""Taking a node into a group, or saying why it does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from ...ir.expr.value import Index, is_value
from ..facts.domain import Binding, Direction, bind_access
from ..facts.fusion_nodes import FusionNode, is_product
from . import cross, tiles
from .group import Group
from .reads import refuse_second_reads

MAX_NODES = 96


def join(group: Group, m: FusionNode) -> str | None:
    """Take a node in if it fits; None on success, else why not. Call on a copy: a refusal leaves refinements
    behind."""
    if len(group.nodes) >= MAX_NODES:
        return f"the kernel has {MAX_NODES} nodes already"
    binding: Binding = {}
    direction: Direction = {}
    splits = len(group.domain.splits)
    for ld in m.loads:
        if ld.buffer in group.produced:
            reason = _bind_to_node(group, m, ld.buffer, ld.indices, binding, direction)
            if reason is not None:
                return reason
    if not any(ld.buffer in group.produced for ld in m.loads):
        _bind_by_inputs(group, m, binding)
    products = [n.name for n in group.nodes if is_product(n)] if is_product(m) else []
    reason = _complete(group, m, binding, direction)
    if reason is None and products and len(group.domain.splits) > splits:
        return f"{m.name} and {products[0]} are products whose results have other dimensions"
    return reason


def rebuilt(nodes: Sequence[FusionNode], like: Group) -> Group | None:
    """A group of these nodes, taken in one by one; None where one does not fit."""
    trial = Group(like.table, like.device, like.target)
    trial.begin(nodes[0])
    for m in nodes[1:]:
        if join(trial, m) is not None:
            return None
    return trial if is_consistent(trial) else None


def is_consistent(group: Group) -> bool:
    """Whether every read inside the group is of the iteration that makes it: a producer may have joined after its
    reader."""
    seen: set[str] = set()
    for m in sorted(group.nodes, key=lambda m: m.index):
        for ld in m.loads:
            made = group.produced.get(ld.buffer)
            if made is None:
                continue
            if ld.buffer not in seen:
                return False
            binding, target = group.bindings[m.name], group.bindings[made.name]
            trial = group.domain.copy()
            learned = dict(binding)
            turned = [a in group.turned[made.name] for a in made.axes]
            direction = {a: a in group.turned[m.name] for a in binding}
            if not bind_access(
                trial, ld.indices, [target[a] for a in made.axes], m.extents, learned, turned, direction
            ):
                return False
            if len(trial.splits) != len(group.domain.splits):
                return False
        seen.update(m.names)
    return True


def _bind_to_node(
    group: Group, m: FusionNode, name: str, indices: tuple[Index, ...], binding: Binding, direction: Direction
) -> str | None:
    if any(is_value(i) for i in indices):
        return f"{m.name} gathers from {name}"
    mark = len(group.domain.splits)
    made = group.produced[name]
    turned = [a in group.turned[made.name] for a in made.axes]
    # Only a scan has to run in one direction; what else is read backward can be made so.
    either = direction if group.has_scan or m.scan_axis is not None else None
    if not bind_access(group.domain, indices, group.digits(name), m.extents, binding, turned, either):
        return f"{m.name} reads {name} at another position than it is made"
    group.refresh(mark, binding)
    return None


def _bind_by_inputs(group: Group, m: FusionNode, binding: Binding) -> None:
    """Line up with nodes that read the same tensors; best effort, since nothing depends on it but the shared
    reads."""
    for ld in m.loads:
        known = group.reads.get(ld.buffer)
        if known is None or any(is_value(i) for i in ld.indices):
            continue
        trial, attempt = group.copy(), dict(binding)
        if bind_access(trial.domain, ld.indices, list(known), m.extents, attempt):
            mark = len(group.domain.splits)
            group.domain = trial.domain
            binding.clear()
            binding.update(attempt)
            group.refresh(mark, binding)


def _complete(group: Group, m: FusionNode, binding: Binding, direction: Direction) -> str | None:
    """Bind the axes that the accesses left open, check the shape of the whole, and admit."""
    domain = group.domain
    for a in m.all_axes:
        if m.extents[a] == 1:
            binding[a] = ()
    used = {d for digits in binding.values() for d in digits}
    if _is_shared(binding):
        return f"two axes of {m.name} run along the same dimension"
    missing = [a for a in m.all_axes if a not in binding]
    if any(ld.buffer in group.cross for ld in m.loads):
        reason = cross.complete_reader(group, m, missing, used)
    elif m.scan_axis is not None:
        reason = _complete_scan(group, m, m.scan_axis, binding, missing, used)
        if reason is None and direction.get(m.scan_axis):
            reason = _turn(group, m, m.scan_axis, binding, direction)
    elif m.monoid is not None:
        reason = _complete_reduction(group, m, binding, missing, used)
    else:
        reason = _complete_pointwise(group, m, binding, missing, used)
    if reason is None and _is_shared(binding):
        reason = f"two axes of {m.name} run along the same dimension"
    if reason is not None:
        return reason
    if domain.inner is not None and group.splits(m) and not group.has_scan:
        group.is_split = True
    if group.is_split and (reason := _split_refusal(group, m, binding)) is not None:
        return reason
    group.admit(m, binding, direction)
    return refuse_second_reads(group) or cross.refuse_long_rows(group)


def _cut(group: Group, m: FusionNode, axes: list[sympy.Symbol], dims: list[int], binding: Binding) -> bool:
    mark = len(group.domain.splits)
    cut = group.domain.align([m.extents[a] for a in axes], dims)
    group.refresh(mark, binding)
    if cut is None:
        return False
    for a, digits in zip(axes, cut, strict=True):
        binding[a] = group.domain.refresh(digits, mark)
    return True


def _complete_pointwise(
    group: Group, m: FusionNode, binding: Binding, missing: list[sympy.Symbol], used: set[int]
) -> str | None:
    domain = group.domain
    rows = [d for d in domain.rows() if d not in used]
    inner = [d for d in domain.inner_order() if d not in used]
    whole = [d for d in domain.order if d not in used]
    if not missing:
        if not whole:
            return None
        if domain.inner is not None and not rows and len(inner) == len(domain.inner_order()):
            return None
        return f"{m.name} covers only a part of the loops"
    if not used and domain.inner is not None:
        if _cut(group, m, missing, domain.rows(), binding):
            return None
        whole = list(domain.order)
    if _cut(group, m, missing, whole, binding):
        return None
    if not whole and domain.inner is None and _may_extend(group, m, missing):
        # The nodes so far become rows, and this one runs over elements of theirs.
        domain.inner = frozenset(_extend(group, m, missing, binding))
        return None
    return f"the loops of {m.name} do not line up"


def _may_extend(group: Group, m: FusionNode, missing: list[sympy.Symbol]) -> bool:
    """The new axes must be the last ones, or the elements of a row would lie far apart."""
    bound = [k for k, a in enumerate(m.axes) if a not in missing and m.extents[a] != 1]
    return max(bound, default=-1) < m.axes.index(missing[0])


def _extend(group: Group, m: FusionNode, missing: list[sympy.Symbol], binding: Binding) -> list[int]:
    dims = [group.domain.add(m.extents[a]) for a in missing]
    for a, d in zip(missing, dims, strict=True):
        binding[a] = (d,)
    return dims


def _complete_reduction(
    group: Group, m: FusionNode, binding: Binding, missing: list[sympy.Symbol], used: set[int]
) -> str | None:
    domain = group.domain
    if domain.inner is not None:
        rows = [a for a in m.axes if a in missing]
        reduced = [a for a in m.reduce_axes if a in missing]
        if rows and not _cut(group, m, rows, [d for d in domain.rows() if d not in used], binding):
            return f"the rows of {m.name} do not line up"
        used = {d for digits in binding.values() for d in digits}
        if reduced and not _cut(group, m, reduced, [d for d in domain.inner_order() if d not in used], binding):
            return f"{m.name} reduces over other loops"
    elif missing and not _cut(group, m, missing, [d for d in domain.order if d not in used], binding):
        return f"the loops of {m.name} do not line up"
    covered = {d for a in m.reduce_axes for d in binding[a]}
    everything = {d for digits in binding.values() for d in digits}
    if everything != set(domain.order):
        return tiles.complete_reduction(group, m, covered, everything)
    if domain.inner is None:
        if not covered:
            return f"{m.name} reduces over nothing"
        group.set_inner(m, binding)
    elif covered != domain.inner:
        return cross.complete_reduction(group, m, covered)
    return None


def _complete_scan(
    group: Group, m: FusionNode, along: sympy.Symbol, binding: Binding, missing: list[sympy.Symbol], used: set[int]
) -> str | None:
    """A scan runs along the inner dimensions, all of them and in their order."""
    domain = group.domain
    if group.cross:
        return f"{m.name} scans along what others reduce over rows"
    if group.is_split:
        return f"{m.name} scans whole rows, and a reduction is split over programs"
    if domain.inner is None:
        if missing and not _cut(group, m, missing, [d for d in domain.order if d not in used], binding):
            return f"the loops of {m.name} do not line up"
    else:
        rows = [a for a in missing if a != along]
        if rows and not _cut(group, m, rows, [d for d in domain.rows() if d not in used], binding):
            return f"the rows of {m.name} do not line up"
        if along in missing and not _cut(
            group, m, [along], [d for d in domain.inner_order() if d not in used], binding
        ):
            return f"{m.name} scans along other loops"
    if {d for digits in binding.values() for d in digits} != set(domain.order):
        return f"{m.name} covers only a part of the loops"
    if domain.inner is None:
        group.set_inner(m, binding)
    if tuple(domain.inner_order()) != binding[along]:
        return f"{m.name} scans along other dimensions"
    return None


def _turn(group: Group, m: FusionNode, along: sympy.Symbol, binding: Binding, direction: Direction) -> str | None:
    """Let the loops of a scan that begins at the end of what the others make run the other way for all of them."""
    if group.has_scan:
        return f"{m.name} scans the other way"
    inner, whole = set(group.domain.inner_order()), binding[along]
    for p in group.nodes:
        axes = [a for a in p.all_axes if inner & set(group.bindings[p.name][a])]
        if any(group.bindings[p.name][a] != whole for a in axes):
            return f"{m.name} scans the other way than {p.name} has its axes"
        group.turned[p.name] = group.turned[p.name] ^ frozenset(axes)
    direction[along] = False
    for name, known in group.reads.items():
        group.reads[name] = [None if d is None or inner & set(d) else d for d in known]
    return None


def _split_refusal(group: Group, m: FusionNode, binding: Binding) -> str | None:
    """In a kernel whose reduction is split, the result exists only at the very end: for rows alone."""
    reduced = {n for p in group.nodes if p.monoid is not None for n in p.names}
    # A reduction that joins late makes the group split: then no earlier node may need another one's result.
    if group.cross:
        return f"{m.name} makes few rows of many elements, and others reduce over those rows"
    for p, at in (*((p, group.bindings[p.name]) for p in group.nodes), (m, binding)):
        if not any(ld.buffer in reduced for ld in p.loads):
            continue
        inner = group.domain.inner or frozenset()
        of_row = p.monoid is None and not any(d in inner for a in p.axes for d in at[a])
        if not of_row:
            return f"{p.name} needs the result of a reduction that is split over programs"
    return None


def _is_shared(binding: Binding) -> bool:
    """Whether two axes run along the same dimension."""
    return sum(len(d) for d in binding.values()) != len({d for digits in binding.values() for d in digits})
