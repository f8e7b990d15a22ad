"""Groups of nodes that will share a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Index, is_value
from ...ir.target import Target
from ..cost.programs import is_split
from ..facts.domain import Binding, Digits, Direction, Domain, axes_in_row, backward
from ..facts.fusion_nodes import FusionNode
from ..rules import Capability, can


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
    # Reductions of which it was decided whether they are split over programs, whatever their cost.
    decided: Mapping[str, bool] = field(default_factory=dict)

    def copy(self) -> Group:
        return Group(
            self.table, self.device, self.target, self.domain.copy(), list(self.nodes),
            dict(self.bindings), dict(self.turned), dict(self.produced), dict(self.reads), set(self.tensors),
            self.is_split, set(self.cross), self.decided,
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
            self.set_inner(m, binding)
        self.admit(m, binding, {})

    def digits(self, name: str) -> list[Digits | None]:
        made = self.produced[name]
        return [self.bindings[made.name][a] for a in made.axes]

    def refresh(self, mark: int, binding: Binding) -> None:
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

    def set_inner(self, m: FusionNode, binding: Binding) -> None:
        over = m.reduce_axes if m.scan_axis is None else (m.scan_axis,)
        self.domain.inner = frozenset(d for a in over for d in binding[a])

    def splits(self, m: FusionNode) -> bool:
        """Whether a reduction is split over programs: what needs its result for each element has another kernel."""
        # Where no rule can, the pass split_reductions has split what is worth it already.
        if m.monoid is None or m.scan_axis is not None or not can(self.target, Capability.SPLIT_SUMS):
            return False
        if m.name in self.decided:
            return self.decided[m.name]
        rows = self.table.hint(self.domain.size(self.domain.rows()))
        inner = self.table.hint(self.domain.size(self.domain.inner_order()))
        return is_split(self.target.machine, rows, inner)

    def admit(self, m: FusionNode, binding: Binding, direction: Direction) -> None:
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
