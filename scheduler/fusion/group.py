"""Groups of nodes that will share a kernel, and the one operation on them: taking a node in, or saying why not."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Index, is_value
from ...ir.target import Target
from ..cost.programs import is_split
from ..facts.domain import Binding, Digits, Direction, Domain, axes_in_row, backward, bind_access
from ..facts.fusion_nodes import FusionNode
from ..rules import Capability, can
from . import cross, tiles
from .reads import refuse_second_reads

MAX_NODES = 96


@dataclass(slots=True)
class Group:
    """Nodes in topological order, and each one's axes as digits over the shared domain.

    ``reads`` holds, for tensors made elsewhere, the digits of each of their dimensions where a node reads them
    plainly.
    """

    table: SymbolTable
    device: str
    target: Target
    domain: Domain = field(default_factory=Domain)
    nodes: list[FusionNode] = field(default_factory=list)
    bindings: dict[str, Binding] = field(default_factory=dict)
    # The axes of nodes that run backward: those of what a scan from the end reads, or is read as.
    turned: dict[str, frozenset[sympy.Symbol]] = field(default_factory=dict)
    produced: dict[str, FusionNode] = field(default_factory=dict)
    reads: dict[str, list[Digits | None]] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    is_split: bool = False
    # Results of reductions over the rows, and what is made of those: there when all rows have been visited.
    cross: set[str] = field(default_factory=set)

    def copy(self) -> Group:
        return Group(
            self.table, self.device, self.target, self.domain.copy(), list(self.nodes),
            dict(self.bindings), dict(self.turned), dict(self.produced), dict(self.reads), set(self.tensors),
            self.is_split, set(self.cross),
        )  # fmt: skip

    def take(self, trial: Group) -> None:
        """Become what a successful trial on a copy has become."""
        for name in ("domain", "nodes", "bindings", "turned", "produced", "reads", "tensors", "is_split", "cross"):
            setattr(self, name, getattr(trial, name))

    @property
    def has_scan(self) -> bool:
        return any(m.scan_axis is not None for m in self.nodes)

    def is_inner(self, m: FusionNode) -> bool:
        """Whether a node is computed once an element rather than once a row (reductions count as elements here)."""
        if self.domain.inner is None or m.monoid is not None:
            return True
        binding = self.bindings[m.name]
        return any(d in self.domain.inner for a in m.axes for d in binding[a])

    def begin(self, m: FusionNode) -> None:
        """The first node sets the domain: its own axes, a dimension each, unit axes left out."""
        binding: Binding = {}
        for a in m.all_axes:
            extent = m.extents[a]
            binding[a] = () if extent == 1 else (self.domain.add(extent),)
        if m.monoid is not None:
            self._set_inner(m, binding)
        self._admit(m, binding, {})

    def join(self, m: FusionNode) -> str | None:
        """Take a node in if it fits; None on success, else why not. Call on a copy: a refusal leaves refinements
        behind."""
        if len(self.nodes) >= MAX_NODES:
            return f"the kernel has {MAX_NODES} nodes already"
        binding: Binding = {}
        direction: Direction = {}
        for ld in m.loads:
            if ld.buffer in self.produced:
                reason = self._bind_member(m, ld.buffer, ld.indices, binding, direction)
                if reason is not None:
                    return reason
        if not any(ld.buffer in self.produced for ld in m.loads):
            self._bind_by_inputs(m, binding)
        return self._complete(m, binding, direction)

    # --- steps of join ------------------------------------------------------------------------------------------------

    def _digits(self, name: str) -> list[Digits | None]:
        made = self.produced[name]
        return [self.bindings[made.name][a] for a in made.axes]

    def _bind_member(
        self, m: FusionNode, name: str, indices: tuple[Index, ...], binding: Binding, direction: Direction
    ) -> str | None:
        if any(is_value(i) for i in indices):
            return f"{m.name} gathers from {name}"
        mark = len(self.domain.splits)
        made = self.produced[name]
        turned = [a in self.turned[made.name] for a in made.axes]
        # Only a scan has to run in one direction; what else is read backward can be made so.
        either = direction if self.has_scan or m.scan_axis is not None else None
        if not bind_access(self.domain, indices, self._digits(name), m.extents, binding, turned, either):
            return f"{m.name} reads {name} at another position than it is made"
        self._refresh(mark, binding)
        return None

    def _bind_by_inputs(self, m: FusionNode, binding: Binding) -> None:
        """Line up with nodes that read the same tensors; best effort, since nothing depends on it but the shared
        reads."""
        for ld in m.loads:
            known = self.reads.get(ld.buffer)
            if known is None or any(is_value(i) for i in ld.indices):
                continue
            trial, attempt = self.copy(), dict(binding)
            if bind_access(trial.domain, ld.indices, list(known), m.extents, attempt):
                mark = len(self.domain.splits)
                self.domain = trial.domain
                binding.clear()
                binding.update(attempt)
                self._refresh(mark, binding)

    def _refresh(self, mark: int, binding: Binding) -> None:
        """Bring all digits up to date after refinements."""
        if len(self.domain.splits) == mark:
            return
        refresh = self.domain.refresh
        for a, digits in binding.items():
            binding[a] = refresh(digits, mark)
        # New ones in their place: copies of the group share what they hold.
        self.bindings = {name: {a: refresh(d, mark) for a, d in b.items()} for name, b in self.bindings.items()}
        for name, known in self.reads.items():
            self.reads[name] = [None if d is None else refresh(d, mark) for d in known]

    def _complete(self, m: FusionNode, binding: Binding, direction: Direction) -> str | None:
        """Bind the axes that the accesses left open, check the shape of the whole, and admit."""
        domain = self.domain
        for a in m.all_axes:
            if m.extents[a] == 1:
                binding[a] = ()
        used = {d for digits in binding.values() for d in digits}
        if _is_shared(binding):
            return f"two axes of {m.name} run along the same dimension"
        missing = [a for a in m.all_axes if a not in binding]
        if any(ld.buffer in self.cross for ld in m.loads):
            reason = cross.complete_reader(self, m, missing, used)
        elif m.scan_axis is not None:
            reason = self._complete_scan(m, m.scan_axis, binding, missing, used)
            if reason is None and direction.get(m.scan_axis):
                reason = self._turn(m, m.scan_axis, binding, direction)
        elif m.monoid is not None:
            reason = self._complete_reduction(m, binding, missing, used)
        else:
            reason = self._complete_compute(m, binding, missing, used)
        if reason is None and _is_shared(binding):
            reason = f"two axes of {m.name} run along the same dimension"
        if reason is not None:
            return reason
        if domain.inner is not None and self._splits(m) and not self.has_scan:
            self.is_split = True
        if self.is_split and (reason := self._split_refusal(m, binding)) is not None:
            return reason
        self._admit(m, binding, direction)
        return refuse_second_reads(self) or cross.refuse_long_rows(self)

    def _cut(self, m: FusionNode, axes: list[sympy.Symbol], dims: list[int], binding: Binding) -> bool:
        mark = len(self.domain.splits)
        cut = self.domain.align([m.extents[a] for a in axes], dims)
        self._refresh(mark, binding)
        if cut is None:
            return False
        for a, digits in zip(axes, cut, strict=True):
            binding[a] = self.domain.refresh(digits, mark)
        return True

    def _complete_compute(
        self, m: FusionNode, binding: Binding, missing: list[sympy.Symbol], used: set[int]
    ) -> str | None:
        domain = self.domain
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
            if self._cut(m, missing, domain.rows(), binding):
                return None
            whole = list(domain.order)
        if self._cut(m, missing, whole, binding):
            return None
        if not whole and domain.inner is None and self._may_extend(m, missing):
            # The nodes so far become rows, and this one runs over elements of theirs.
            domain.inner = frozenset(self._extend(m, missing, binding))
            return None
        return f"the loops of {m.name} do not line up"

    def _may_extend(self, m: FusionNode, missing: list[sympy.Symbol]) -> bool:
        """The new axes must be the last ones, or the elements of a row would lie far apart."""
        bound = [k for k, a in enumerate(m.axes) if a not in missing and m.extents[a] != 1]
        return max(bound, default=-1) < m.axes.index(missing[0])

    def _extend(self, m: FusionNode, missing: list[sympy.Symbol], binding: Binding) -> list[int]:
        dims = [self.domain.add(m.extents[a]) for a in missing]
        for a, d in zip(missing, dims, strict=True):
            binding[a] = (d,)
        return dims

    def _complete_reduction(
        self, m: FusionNode, binding: Binding, missing: list[sympy.Symbol], used: set[int]
    ) -> str | None:
        domain = self.domain
        if domain.inner is not None:
            rows = [a for a in m.axes if a in missing]
            reduced = [a for a in m.reduce_axes if a in missing]
            if rows and not self._cut(m, rows, [d for d in domain.rows() if d not in used], binding):
                return f"the rows of {m.name} do not line up"
            used = {d for digits in binding.values() for d in digits}
            if reduced and not self._cut(m, reduced, [d for d in domain.inner_order() if d not in used], binding):
                return f"{m.name} reduces over other loops"
        elif missing and not self._cut(m, missing, [d for d in domain.order if d not in used], binding):
            return f"the loops of {m.name} do not line up"
        covered = {d for a in m.reduce_axes for d in binding[a]}
        everything = {d for digits in binding.values() for d in digits}
        if everything != set(domain.order):
            return tiles.complete_reduction(self, m, covered, everything)
        if domain.inner is None:
            if not covered:
                return f"{m.name} reduces over nothing"
            self._set_inner(m, binding)
        elif covered != domain.inner:
            return cross.complete_reduction(self, m, covered)
        return None

    def _complete_scan(
        self, m: FusionNode, along: sympy.Symbol, binding: Binding, missing: list[sympy.Symbol], used: set[int]
    ) -> str | None:
        """A scan runs along the inner dimensions, all of them and in their order."""
        domain = self.domain
        if self.cross:
            return f"{m.name} scans along what others reduce over rows"
        if self.is_split:
            return f"{m.name} scans whole rows, and a reduction is split over programs"
        if domain.inner is None:
            if missing and not self._cut(m, missing, [d for d in domain.order if d not in used], binding):
                return f"the loops of {m.name} do not line up"
        else:
            rows = [a for a in missing if a != along]
            if rows and not self._cut(m, rows, [d for d in domain.rows() if d not in used], binding):
                return f"the rows of {m.name} do not line up"
            if along in missing and not self._cut(
                m, [along], [d for d in domain.inner_order() if d not in used], binding
            ):
                return f"{m.name} scans along other loops"
        if {d for digits in binding.values() for d in digits} != set(domain.order):
            return f"{m.name} covers only a part of the loops"
        if domain.inner is None:
            self._set_inner(m, binding)
        if tuple(domain.inner_order()) != binding[along]:
            return f"{m.name} scans along other dimensions"
        return None

    def _turn(self, m: FusionNode, along: sympy.Symbol, binding: Binding, direction: Direction) -> str | None:
        """Let the loops of a scan that begins at the end of what the others make run the other way for all of them."""
        if self.has_scan:
            return f"{m.name} scans the other way"
        inner, whole = set(self.domain.inner_order()), binding[along]
        for p in self.nodes:
            axes = [a for a in p.all_axes if inner & set(self.bindings[p.name][a])]
            if any(self.bindings[p.name][a] != whole for a in axes):
                return f"{m.name} scans the other way than {p.name} has its axes"
            self.turned[p.name] = self.turned[p.name] ^ frozenset(axes)
        direction[along] = False
        for name, known in self.reads.items():
            self.reads[name] = [None if d is None or inner & set(d) else d for d in known]
        return None

    def _set_inner(self, m: FusionNode, binding: Binding) -> None:
        over = m.reduce_axes if m.scan_axis is None else (m.scan_axis,)
        self.domain.inner = frozenset(d for a in over for d in binding[a])

    def _splits(self, m: FusionNode) -> bool:
        """Whether a reduction is split over programs: what needs its result for each element has another kernel."""
        # Where no rule can, the pass split_reductions has split what is worth it already.
        if m.monoid is None or m.scan_axis is not None or not can(self.target, Capability.SPLIT_SUMS):
            return False
        rows = self.table.hint(self.domain.size(self.domain.rows()))
        inner = self.table.hint(self.domain.size(self.domain.inner_order()))
        return is_split(self.target.machine, rows, inner)

    def _split_refusal(self, m: FusionNode, binding: Binding) -> str | None:
        """In a kernel whose reduction is split, the result exists only at the very end: for rows alone."""
        reduced = {n for p in self.nodes if p.monoid is not None for n in p.names}
        # A reduction that joins late makes the group split: then no earlier node may need another one's result.
        if self.cross:
            return f"{m.name} makes few rows of many elements, and others reduce over those rows"
        for p, at in (*((p, self.bindings[p.name]) for p in self.nodes), (m, binding)):
            if not any(ld.buffer in reduced for ld in p.loads):
                continue
            inner = self.domain.inner or frozenset()
            of_row = p.monoid is None and not any(d in inner for a in p.axes for d in at[a])
            if not of_row:
                return f"{p.name} needs the result of a reduction that is split over programs"
        return None

    def _admit(self, m: FusionNode, binding: Binding, direction: Direction) -> None:
        self.nodes.append(m)
        self.bindings[m.name] = binding
        turned = self.turned[m.name] = frozenset(a for a, is_back in direction.items() if is_back and a in binding)
        for name in m.names:
            self.produced[name] = m
            self.tensors.add(name)
        for ld in m.loads:
            self.tensors.add(ld.buffer)
            if ld.buffer not in self.produced and ld.buffer not in self.reads:
                self.reads[ld.buffer] = [_place(i, m.extents, binding, turned) for i in ld.indices]


def _is_shared(binding: Binding) -> bool:
    """Whether two axes run along the same dimension."""
    return sum(len(d) for d in binding.values()) != len({d for digits in binding.values() for d in digits})


def _place(
    index: Index, extents: dict[sympy.Symbol, sympy.Expr], binding: Binding, turned: frozenset[sympy.Symbol]
) -> Digits | None:
    """The digits over which an axis of what is read runs forward; None where it does otherwise."""
    if is_value(index):
        return None
    if index == 0:
        return ()
    if index.is_Add and (axes := axes_in_row(index, extents)) is not None:
        # A product's rows, which readers see as two dimensions.
        if not turned.isdisjoint(axes) or any(a not in binding for a in axes):
            return None
        return tuple(d for a in axes for d in binding[a])
    axis = index if index.is_Symbol else backward(index, extents)
    return binding.get(axis) if axis is not None and (axis in turned) != index.is_Symbol else None
