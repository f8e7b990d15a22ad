"""Fusion: partition a graph into kernels and library calls.

Greedy in topological order. Each node joins the group with which it shares the most bytes, if its loops line up with
the group's and no path leads from the group through another node back to it; groups that a node brings together are
united where possible. Producers that cost less to compute than to read back are computed again in each reader.
Nothing is matched by pattern: what fuses follows from the index expressions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import sympy

from ...ir.graph.graph import CallTensor, Graph, Library, Node, size_makers, sizes_read, uses
from ...ir.graph.sequences import sequence_of
from ...ir.passes import Pass, run_passes
from ..context import USUAL, PassContext
from ..cost.programs import MANY_ELEMENTS, is_split
from ..decisions import Alternative, place_key, text_key
from ..facts.dependences import Dependences, last_bits, set_bits
from ..facts.fusion_nodes import FusionNode, build_fusion_nodes, drop_dead, fusion_node_sizes
from ..facts.views import ViewMap, views_of
from ..rules import Capability, can
from .assemble import assemble
from .chains import outline_chains
from .fusion import CALLS, ONLY_CALLS, Fusion, FusionReport, Refusal
from .group import Group
from .join import MAX_NODES, is_consistent, join, rebuilt
from .rematerialize import apply_repeats, choose_repeats
from .repeat_rows import repeat_rows
from .scatter import outline_scatters

# Kernels of so few elements are gathered into one, up to so many nodes.
TINY_ELEMENTS, MAX_TINY = 16, 32
# So many groups are tried for a node, those that share most with it; of groups that it cannot join because something
# lies between, so many of the last are reported for each tensor.
MOST_TRIED, MOST_TOLD = 48, 4


@dataclass(slots=True)
class _Unit:
    """A node of the graph of groups: a group or a library call; neither where the group has become part of another."""

    group: Group | None
    node: Library | CallTensor | None


@dataclass(slots=True)
class _Fuser:
    graph: Graph
    views: ViewMap
    context: PassContext
    units: list[_Unit] = field(default_factory=list)
    order: Dependences = field(default_factory=Dependences)
    # Which unit makes a tensor; the mask of the groups that read it.
    maker: dict[str, int] = field(default_factory=dict)
    readers: dict[str, int] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    # The results that tell sizes which the data decide.
    makers_of_sizes: dict[sympy.Symbol, str] = field(default_factory=dict)
    # The last call of each sequence, which keeps its order.
    last: dict[str, int] = field(default_factory=dict)
    # Reductions that are split over programs, or not, other than by cost.
    split: dict[str, bool] = field(default_factory=dict)
    # Pairs of nodes that are to stay in different groups.
    apart: list[tuple[str, str]] = field(default_factory=list)

    def run(self, nodes: list[FusionNode]) -> None:
        table = self.graph.symbols
        self.sizes = {n: table.hint(t.nbytes) for n, t in self.graph.types().items()}
        self.makers_of_sizes = size_makers(self.graph)
        pending = {m.index: m for m in nodes}
        for index, node in enumerate(self.graph.nodes):
            if isinstance(node, (Library, CallTensor)):
                self._library(node)
            elif index in pending:
                self._place(pending[index])
        self._gather_tiny()

    def _gather_tiny(self) -> None:
        """Independent point-wise kernels so small that the call is their cost (counters, scalars) become one."""
        hosts: list[int] = []
        for at, unit in enumerate(self.units):
            if unit.group is None or not self._is_tiny(unit.group):
                continue
            for host in hosts[-MOST_TRIED:]:
                kept = self.units[host].group
                if kept is not None and len(kept.nodes) < MAX_TINY and self._try_unite(host, at):
                    hosts.remove(host)
                    break
            hosts.append(at)

    def _is_tiny(self, group: Group) -> bool:
        hint = self.graph.symbols.hint
        return all(m.monoid is None and hint(m.types[0].numel) <= TINY_ELEMENTS for m in group.nodes)

    def _library(self, node: Library | CallTensor) -> None:
        names = {self.views.base(u) for u in uses(node)}
        if self.makers_of_sizes:
            names |= {self.makers_of_sizes[s] for s in sizes_read(node) & self.makers_of_sizes.keys()}
        at = self.order.add(self._makers(names))
        if (sequence := sequence_of(node)) is not None:
            self.order.depend(at, [self.last[sequence]] if sequence in self.last else [])
            self.last[sequence] = at
        self.units.append(_Unit(None, node))
        self.maker.update(dict.fromkeys(node.names, at))

    def _makers(self, names: set[str]) -> list[int]:
        return [self.maker[n] for n in names if n in self.maker]

    def _place(self, m: FusionNode) -> None:
        reads = {ld.buffer for ld in m.loads}
        if self.makers_of_sizes:
            reads |= {self.makers_of_sizes[s] for s in fusion_node_sizes(m) & self.makers_of_sizes.keys()}
        self._decide_split(m)
        for at in self._candidates(reads):
            if self._try_join(m, reads, at):
                self._unite(m, reads, at)
                return
        device = m.types[0].device
        group = Group(self.graph.symbols, device, self.context.target_of(device), decided=self.split)
        group.begin(m)
        at = self.order.add()
        self.units.append(_Unit(group, None))
        self._register(m, reads, at)
        self._unite(m, reads, at)

    def _register(self, m: FusionNode, reads: set[str], at: int) -> None:
        self.order.depend(at, self._makers(reads))
        for name in reads:
            self.readers[name] = self.readers.get(name, 0) | 1 << at
        self.maker.update(dict.fromkeys(m.names, at))

    def _candidates(self, reads: set[str]) -> list[int]:
        """Groups that make or read what this node reads, those that share the most bytes first."""
        score: dict[int, int] = {}
        largest = max((self.sizes.get(n, 0) for n in reads), default=0)
        blocked = self.order.blocked(self._makers(reads))
        for name in reads:
            size = self.sizes.get(name, 0)
            made = self.maker.get(name)
            if made is not None and self.units[made].group is not None:
                # A write saved as well as a read.
                score[made] = score.get(made, 0) + 2 * size
            if size * 4 >= largest:
                readers = self.readers.get(name, 0)
                for reader in (*last_bits(readers & blocked, MOST_TOLD), *set_bits(readers & ~blocked)):
                    if reader != made:
                        score[reader] = score.get(reader, 0) + size
        return sorted(score, key=lambda at: (-score[at], -at))[:MOST_TRIED]

    def _try_join(self, m: FusionNode, reads: set[str], at: int) -> bool:
        unit = self.units[at]
        assert unit.group is not None
        reason = self._conflict(m, reads, at)
        if reason is None:
            trial = unit.group.copy()
            reason = join(trial, m) or self._decided_apart(unit.group, m, reads & unit.group.tensors)
            if reason is None:
                unit.group.take(trial)
                self._register(m, reads, at)
                return True
        self._refuse(unit.group.nodes[-1].name, m.name, reason, reads & unit.group.tensors)
        return False

    def _conflict(self, m: FusionNode, reads: set[str], at: int) -> str | None:
        group = self.units[at].group
        assert group is not None
        if m.types[0].device != group.device:
            return f"they are on {group.device} and {m.types[0].device}"
        if len(group.nodes) >= MAX_NODES:
            return f"the kernel has {MAX_NODES} nodes already"
        for name in reads:
            made = self.maker.get(name)
            if made is not None and made != at and self.order.is_needed(at, by=made):
                between = self.units[made].node
                what = between.names[0] if between is not None else name
                return f"{what} lies between them"
        return None

    def _decided_apart(self, group: Group, m: FusionNode, shared: set[str], kind: str = "fuse") -> str | None:
        """Why a node does not join a group that it could join: somebody chose so. By cost what shares bytes is
        together."""
        if self.context.decider is None:
            return None
        first, nbytes = group.nodes[0], sum(self.sizes.get(n, 0) for n in shared)
        once, launch = nbytes / group.target.machine.bandwidth, group.target.machine.launch
        chosen = self.context.decide(
            kind, lambda: place_key(self.graph, (first.name, m.name), back=1),
            (Alternative("together", once), Alternative("apart", 2 * once + launch)), "together",
            at=m.name, nbytes=nbytes, reason=f"{m.name} and {first.name} share {nbytes} bytes", beside=first.name,
        )  # fmt: skip
        if chosen == "together":
            return None
        self.apart.append((first.name, m.name))
        return "it was decided otherwise"

    def _stays_apart(self, one: Group, other: Group) -> bool:
        """Whether nodes of two groups were decided to stay apart."""
        return any(
            (a in one.produced and b in other.produced) or (b in one.produced and a in other.produced)
            for a, b in self.apart
        )

    def _decide_split(self, m: FusionNode) -> None:
        """Whether a reduction of many elements to few results is split over programs, so that nothing which needs its
        result can join it."""
        target, hint = self.context.target_of(m.types[0].device), self.graph.symbols.hint
        if self.context.decider is None or m.monoid is None or m.scan_axis is not None:
            return
        rows, elements = hint(m.types[0].numel), hint(sympy.Mul(*(m.extents[a] for a in m.reduce_axes)))
        if elements < MANY_ELEMENTS or not can(target, Capability.SPLIT_SUMS):
            return
        by_cost = is_split(target.machine, rows, elements)
        nbytes = sum(self.sizes.get(ld.buffer, 0) for ld in m.loads)
        # All that go over the same rows are decided alike: one that is split keeps the others of its kernel so.
        told = (*map(str, (rows, elements)), m.types[0].device, *sorted({ld.dtype.value for ld in m.loads}))
        chosen = self.context.decide(
            "split", lambda: text_key(told), (Alternative("split"), Alternative("whole")),
            "split" if by_cost else "whole", at=m.name, nbytes=nbytes, reason=f"{rows} rows of {elements} elements",
        )  # fmt: skip
        if (chosen == "split") is not by_cost:
            self.split[m.name] = chosen == "split"

    def _refuse(self, first: str, second: str, reason: str, shared: set[str]) -> None:
        self.refusals.append(Refusal(first, second, reason, sum(self.sizes.get(n, 0) for n in shared)))

    def _unite(self, m: FusionNode, reads: set[str], at: int) -> None:
        """Bring the groups that make the other operands of ``m`` into its group."""
        for name in sorted(reads):
            other = self.maker.get(name)
            if other is None or other == at or self.units[other].group is None:
                continue
            if self._try_unite(other, at):
                continue

    def _try_unite(self, source: int, target: int) -> bool:
        a, b = self.units[source], self.units[target]
        assert a.group is not None and b.group is not None
        if a.group.device != b.group.device:
            return False
        if not self.order.may_unite(source, target) or self._stays_apart(a.group, b.group):
            return False
        merged = sorted([*a.group.nodes, *b.group.nodes], key=lambda m: m.index)
        large, small = (a, b) if len(a.group.nodes) >= len(b.group.nodes) else (b, a)
        assert large.group is not None and small.group is not None
        trial = _united(large.group, small.group) or rebuilt(merged, a.group)
        if trial is None:
            return False
        shared = a.group.tensors & b.group.tensors
        if self._decided_apart(a.group, b.group.nodes[-1], shared, "unite"):
            return False
        trial.nodes.sort(key=lambda m: m.index)
        moved, read = (
            [n for m in a.group.nodes for n in m.names],
            {ld.buffer for m in a.group.nodes for ld in m.loads},
        )
        b.group.take(trial)
        a.group = None
        self.order.unite(source, target)
        self.maker.update(dict.fromkeys(moved, target))
        for name in read | set(self.makers_of_sizes.values()):
            readers = self.readers.get(name, 0)
            if readers >> source & 1:
                self.readers[name] = readers & ~(1 << source) | 1 << target
        return True


def _united(large: Group, small: Group) -> Group | None:
    """The nodes of ``small`` taken into a copy of ``large`` one by one."""
    trial = large.copy()
    for m in small.nodes:
        if join(trial, m) is not None:
            return None
    return trial if is_consistent(trial) else None


def partition(fusion: Fusion, context: PassContext) -> Fusion:
    """Every node that is no call yet into calls of fused tensor functions, in an order that respects dependences.

    Source: the planner's objective is that of MetaFlow and of XLA's multi-output fusion (bytes, recompute, launches);
    the search here is greedy.
    """
    graph = fusion.graph
    views = views_of(graph)
    nodes, outside = build_fusion_nodes(graph, views)
    fuser = _Fuser(graph, views, context)
    fuser.run(nodes)
    groups = [u.group for u in fuser.units if u.group is not None]
    repeats = choose_repeats(groups, outside, fuser.sizes, graph, context)
    if repeats:
        nodes = drop_dead(apply_repeats(nodes, repeats, graph.symbols), outside)
        fuser = _Fuser(graph, views, context)
        fuser.run(nodes)
    groups = [u.group for u in fuser.units if u.group is not None]
    for group in repeat_rows(groups, outside, fuser.sizes, graph, context):
        next(u for u in fuser.units if u.group is group).group = None
    units: list[Group | Library | CallTensor] = []
    for u in fuser.units:
        if u.group is not None:
            units.append(u.group)
        elif u.node is not None:
            units.append(u.node)
    calls, functions = assemble(graph, views, units, outside)
    refusals = tuple(sorted(fuser.refusals, key=lambda r: -r.bytes))
    report = FusionReport(fusion.report.nodes + len(nodes), refusals)
    return replace(fusion, graph=_with_nodes(graph, calls), functions={**fusion.functions, **functions}, report=report)


def _with_nodes(graph: Graph, nodes: list[Node]) -> Graph:
    return Graph(graph.name, graph.inputs, tuple(nodes), graph.outputs, graph.symbols, graph.constants)


# From a graph to one of calls, in the order in which they run.
FUSE_PASSES: tuple[Pass[Fusion, PassContext], ...] = (
    Pass("outline_chains", CALLS, outline_chains),
    Pass("outline_scatters", CALLS, outline_scatters),
    Pass("partition", CALLS, partition, leaves=(ONLY_CALLS,)),
)


def fuse(graph: Graph, context: PassContext = USUAL) -> Fusion:
    """Partition ``graph`` into calls of fused tensor functions and of libraries."""
    return run_passes(FUSE_PASSES, Fusion(graph), context)


__all__ = ["FUSE_PASSES", "Fusion", "FusionReport", "Refusal", "fuse", "partition"]
