"""Groups of calls that run block by block of rows: a library's products, and the kernels before, between and behind.

A product of many rows and a kernel that goes on with its result visit all of the result twice in memory. Where every
call of a group makes its rows of nothing but the same rows of what the others make, one function can stand for all of
them. Its rule (``rules/cpu/row_blocks.py``) goes over blocks of rows: the library multiplies a block into scratch, and
what follows finds it in a cache. A result that nobody else reads never exists as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...ir.graph.facts import makers_of, places_of, users_of
from ...ir.graph.graph import CallTensor, Graph, Library, Node, TensorType, View, uses
from ...ir.nest.loops import contiguous_strides
from ...ir.target import has_kernels
from ..context import PassContext
from ..cost.products.contraction_cpu import Between, gain_of_blocks, rows_of_block
from ..decisions import Alternative, place_key
from ..facts.order import in_order
from ..facts.row_products import RowProduct, row_product
from ..functions.function_table import FunctionTable
from ..fusion.fusion import Fusion
from ..fusion.outlined import without_idle_views
from .row_group import RowGroupWriter, Unfit


def block_rows(fusion: Fusion, context: PassContext) -> Fusion:
    """Let products and the kernels around them run for blocks of rows, where that is cheaper."""
    graph, table = fusion.graph, FunctionTable(fusion.functions)
    done: set[str] = set()
    changed = False
    while (found := _next_group(graph, table, context, done)) is not None:
        graph = _replaced(graph, found, table)
        changed = True
    return fusion.having(graph, table.used(graph.nodes)) if changed else fusion


@dataclass(frozen=True, slots=True)
class _Group:
    """Positions of calls that become one, and the writer of their function."""

    positions: tuple[int, ...]
    writer: RowGroupWriter


def _next_group(graph: Graph, table: FunctionTable, context: PassContext, done: set[str]) -> _Group | None:
    finder: _GroupFinder | None = None
    for at, node in enumerate(graph.nodes):
        if not isinstance(node, Library) or not node.names or node.names[0] in done:
            continue
        product = row_product(graph, node)
        if product is None or not has_kernels(product.type.device):
            continue
        done.add(node.names[0])
        target = context.target_of(product.type.device)
        if not target.gemm:
            continue
        finder = finder or _GroupFinder(graph, table)
        found = finder.best(at, product, context)
        if found is not None:
            return found
    return None


def _replaced(graph: Graph, group: _Group, table: FunctionTable) -> Graph:
    """The graph with one call in the place of a group."""
    call, function = group.writer.write()
    call = replace(call, function=table.enter(function))
    nodes: list[Node] = [n for k, n in enumerate(graph.nodes) if k not in group.positions]
    at = group.positions[-1] + 1 - len(group.positions)
    nodes[at:at] = [*group.writer.before.values(), call, *group.writer.behind]
    # Views of results stand behind the one call now; those of what is not there any more are read by nobody.
    made = {*call.names, *(i.name for i in graph.inputs)}
    for node in nodes:
        if not isinstance(node, View) or node.source in made:
            made.update(node.names)
    nodes = [n for n in nodes if not isinstance(n, View) or n.source in made]
    ordered = in_order(graph, nodes)
    return replace(ordered, nodes=without_idle_views(ordered.nodes, ordered))


@dataclass(slots=True)
class _GroupFinder:
    graph: Graph
    table: FunctionTable
    types: dict[str, TensorType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.types = self.graph.types()

    def best(self, at: int, product: RowProduct, context: PassContext) -> _Group | None:
        """The group that begins around a product, of those that grow call by call, that gains most."""
        machine = context.target_of(product.type.device).machine
        hint = self.graph.symbols.hint
        positions: tuple[int, ...] = (at,)
        best, gained = None, 0.0
        # The same whatever it gains.
        most, most_gained, time = None, -math.inf, 0.0
        refused: set[int] = set()
        while True:
            following = next((k for k in self.neighbours(positions, product) if k not in refused), None)
            if following is None:
                return self.decided(at, best, most, time, most_gained, context)
            grown = tuple(sorted((*positions, following)))
            writer = self.writer(grown)
            if writer is None:
                # What stands between may join first.
                refused.add(following)
                continue
            positions, refused = grown, set()
            between = [
                Between(hint(self.types[n].nbytes), reads, kept, n in writer.products)
                for n, (reads, kept) in writer.between().items()
            ]
            width = sum(hint(sympy.Mul(*self.types[n].shape[1:])) * 4 for n in writer.between())
            size = rows_of_block(hint(product.rows), width, machine)
            flops = [2.0 * hint(p.rows) * hint(p.depth) * hint(p.columns) for p in writer.products.values()]
            leaving = max((hint(self.types[n].nbytes) for n in writer.kept), default=0)
            gain = gain_of_blocks(size, flops, between, leaving, machine)
            if gain > gained:
                best, gained = _Group(positions, writer), gain
            if gain > most_gained:
                most, most_gained, time = _Group(positions, writer), gain, sum(flops) / machine.matmul

    def decided(
        self, at: int, best: _Group | None, most: _Group | None, time: float, gain: float, context: PassContext
    ) -> _Group | None:
        """The group around a product that runs in blocks, by cost the ``best``; ``most`` is what else would, which
        takes ``time`` call by call."""
        group = best or most
        if group is None or context.decider is None:
            return best
        graph, hint = self.graph, self.graph.symbols.hint
        name = graph.nodes[at].names[0]
        chosen = context.decide(
            "row-blocks", lambda: place_key(graph, (name,), Fusion(graph, self.table.functions).module),
            (Alternative("calls", time), Alternative("blocks", time - gain)), "calls" if best is None else "blocks",
            at=name, nbytes=sum(hint(self.types[n].nbytes) for n in group.writer.between()),
            reason=f"{len(group.positions)} calls",
        )  # fmt: skip
        return group if chosen == "blocks" else None

    def neighbours(self, positions: Sequence[int], product: RowProduct) -> Iterator[int]:
        """Calls that read what a group makes, then those that make what it reads."""
        nodes, makers = self.graph.nodes, places_of(self.graph)
        for k in positions:
            for name in nodes[k].names:
                yield from (u for u in self.readers(name) if u not in positions and self.may_join(u, product))
        for k in positions:
            for name in uses(nodes[k]):
                maker = makers.get(self.base(name))
                if maker is not None and maker not in positions and self.may_join(maker, product):
                    yield maker

    def may_join(self, at: int, product: RowProduct) -> bool:
        node = self.graph.nodes[at]
        if isinstance(node, Library):
            other = row_product(self.graph, node)
            return other is not None and other.rows == product.rows
        if not isinstance(node, CallTensor) or node.count != 1 or any(t is not None for t in node.into):
            return False
        return all(t.device == product.type.device for t in node.types)

    def readers(self, name: str) -> Iterator[int]:
        """The positions of what reads a tensor, by views that are all of it too."""
        for k in users_of(self.graph).get(name, ()):
            node = self.graph.nodes[k]
            if isinstance(node, View) and self.is_whole(node):
                yield from self.readers(node.name)
            else:
                yield k

    def base(self, name: str) -> str:
        """What a view that is all of something is a view of."""
        made = makers_of(self.graph).get(name)
        return self.base(made.source) if isinstance(made, View) and self.is_whole(made) else name

    def is_whole(self, view: View) -> bool:
        source, kind = self.types[view.source], view.type
        return (
            view.offset == 0
            and kind.dtype is source.dtype
            and all(t.strides == contiguous_strides(t.shape) for t in (source, kind))
            and sympy.expand(source.numel - kind.numel) == 0
        )

    def writer(self, positions: tuple[int, ...]) -> RowGroupWriter | None:
        """What writes the function of a group; None where it is none."""
        first, last = positions[0], positions[-1]
        inside = {n for k in positions for n in self.graph.nodes[k].names}
        reached = set(inside)
        for k in range(first, last + 1):
            node = self.graph.nodes[k]
            if k in positions:
                continue
            if not isinstance(node, View) and not self.stays(node):
                return None  # it may write what the group reads
            if not reached.isdisjoint(uses(node)):
                reached.update(node.names)
        # Whoever depends on the group is read by none of it, but for views of what it makes.
        outside = reached - inside
        for k in positions:
            for name in uses(self.graph.nodes[k]):
                if name in outside and self.base(name) not in inside:
                    return None
        kept = {n for n in inside if self.is_kept(n, positions)}
        writer = RowGroupWriter(self.graph, self.types, self.table.functions, positions, self.base, kept)
        try:
            writer.collect()
        except Unfit:
            return None
        return writer

    def stays(self, node: Node) -> bool:
        if isinstance(node, CallTensor):
            return all(t is None for t in node.into)
        return isinstance(node, Library) and row_product(self.graph, node) is not None

    def is_kept(self, name: str, positions: Sequence[int]) -> bool:
        """Whether something outside of a group needs a result of it."""
        leaving = {o for o in self.graph.outputs if isinstance(o, str)}
        if name in leaving:
            return True
        for k in users_of(self.graph).get(name, ()):
            node = self.graph.nodes[k]
            if isinstance(node, View) and self.is_whole(node):
                if self.is_kept(node.name, positions):
                    return True
            elif k not in positions:
                return True
        return False


__all__ = ["block_rows"]
