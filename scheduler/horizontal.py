"""Horizontal fusion: calls that do not depend on one another and run equal functions become one call over a table.

The steps of an optimizer over hundreds of tensors, or the rotation of queries and of keys, are so one launch each.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy

from ..ir.graph import CallTensor, Graph, Library, Node, View, size_makers, sizes_read, uses
from .function import TensorFunction
from .function_table import FunctionTable
from .fuse import Fusion
from .generalise import Flat, flatten, with_sizes
from .in_place import Aliases, MayAlias, is_copy, write_in_place
from .passes.eliminate_dead import has_effect
from .scalars import split_scalars

# A function with scalars in it is taken apart where it is repeated, or at least so large.
LARGE_ELEMENTS = 1 << 15
# Results may wait for the last call of a table, or be made before their time, up to so many bytes together; for calls
# that stand close, only what the later ones read is bounded so.
MAX_WAITING_BYTES = 8 << 20
CLOSE = 6


def share_launches(fusion: Fusion, may_alias: MayAlias) -> Fusion:
    """A fused graph with results in place of what they are copied over, and with independent equal calls as one.

    ``may_alias`` tells whether an op may return memory that it was given.
    """
    graph, functions = _split(fusion.graph, fusion.functions)
    graph, functions = write_in_place(graph, functions, may_alias)
    graph, functions = _Tables(graph, functions, Aliases.of(graph, may_alias)).run()
    kernels = sum(isinstance(n, CallTensor) for n in graph.nodes)
    return Fusion(graph, functions, replace(fusion.report, kernels=kernels))


# --- scalars apart --------------------------------------------------------------------------------------------------


def _split(graph: Graph, functions: Mapping[str, TensorFunction]) -> tuple[Graph, dict[str, TensorFunction]]:
    """Functions of one row that only compute elements, without the scalars that they make: where that makes functions
    equal, lets many work on the elements, or a result be written over an input."""
    parts = {}
    for k, node in enumerate(graph.nodes):
        if isinstance(node, CallTensor):
            found = split_scalars(node, functions[node.function])
            if found is not None:
                parts[k] = found
    if not parts:
        return graph, dict(functions)
    hint = graph.symbols.hint
    kinds: dict[TensorFunction, int] = {}
    keys: dict[int, TensorFunction] = {}
    for k, found in parts.items():
        _, function = found[-1]
        flat = flatten(function)
        keys[k] = flat.function if flat is not None else function
        kinds[keys[k]] = kinds.get(keys[k], 0) + 1
    copied = {n.args[1].name for n in graph.nodes if isinstance(n, Library) and is_copy(n)}
    table = FunctionTable(functions)
    nodes: list[Node] = []
    for k, node in enumerate(graph.nodes):
        if k in parts and isinstance(node, CallTensor):
            large = max(hint(t.numel) for t in node.types) >= LARGE_ELEMENTS
            if kinds[keys[k]] > 1 or large or copied & set(node.names):
                nodes += [replace(c, function=table.enter(replace(f, name=node.function))) for c, f in parts[k]]
                continue
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)), table.used(nodes)


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tables:
    graph: Graph
    functions: Mapping[str, TensorFunction]
    aliases: Aliases
    needs: list[set[int]] = field(default_factory=list)
    makers: dict[str, int] = field(default_factory=dict)
    flats: dict[str, Flat | None] = field(default_factory=dict)

    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        groups = [g for g in self.candidates() if len(g) > 1]
        if not groups:
            return self.graph, dict(self.functions)
        self.needs = _order(self.graph, self.aliases)
        self.makers = {name: k for k, node in enumerate(self.graph.nodes) for name in node.names}
        chosen: list[list[int]] = []
        for group in groups:
            chosen += self.independent(group, chosen)
        if not chosen:
            return self.graph, dict(self.functions)
        return self.rebuilt(chosen)

    def candidates(self) -> list[list[int]]:
        """Positions of calls whose functions are equal, sizes of flat ones aside."""
        found: dict[object, list[int]] = {}
        for k, node in enumerate(self.graph.nodes):
            if isinstance(node, CallTensor) and node.count == 1:
                if node.function not in self.flats:
                    self.flats[node.function] = flatten(self.functions[node.function])
                flat = self.flats[node.function]
                what = flat.function if flat is not None else self.functions[node.function]
                into = tuple(
                    None if t is None else node.args.index(t) if t in node.args else -1 for t in node.into
                )  # fmt: skip
                found.setdefault((what, into, node.types[0].device), []).append(k)
        return list(found.values())

    def independent(self, group: list[int], chosen: list[list[int]]) -> list[list[int]]:
        """The group in parts of which no call depends on another, however the calls chosen before are joined."""
        reach = _reach(self.needs, chosen)
        result: list[list[int]] = []
        rest = group
        while len(rest) > 1:
            part: list[int] = rest[:1]
            left: list[int] = []
            for k in rest[1:]:
                (part if self.fits(k, part, reach) else left).append(k)
            if len(part) > 1:
                result.append(part)
                reach = _reach(self.needs, [*chosen, *result]) if left else reach
            rest = left
        return result

    def fits(self, k: int, part: list[int], reach: list[int]) -> bool:
        mask = sum(1 << p for p in part)
        if reach[k] & mask or any(reach[p] >> k & 1 for p in part):
            return False
        if k - part[0] <= CLOSE and self.late(k, part[0]) <= MAX_WAITING_BYTES:
            return True
        return self.waiting([*part, k]) <= MAX_WAITING_BYTES

    def late(self, k: int, first: int) -> int:
        """Bytes that call ``k`` reads and that were not there yet when call ``first`` ran: they would have to be made
        while its operands are still held."""
        node = self.graph.nodes[k]
        assert isinstance(node, CallTensor)
        total, hint = 0, self.graph.symbols.hint
        for name in dict.fromkeys(map(self.behind, node.args)):
            made = self.makers.get(name)
            if made is not None and made > first:
                maker = self.graph.nodes[made]
                kind = maker.types[maker.names.index(name)]
                total += hint(kind.nbytes) if kind is not None else 0
        return total

    def behind(self, name: str) -> str:
        """The tensor that a view looks at."""
        while (made := self.makers.get(name)) is not None and isinstance(view := self.graph.nodes[made], View):
            name = view.source
        return name

    def waiting(self, part: list[int]) -> int:
        hint = self.graph.symbols.hint
        total = 0
        for k in part:
            node = self.graph.nodes[k]
            assert isinstance(node, CallTensor)
            total += sum(hint(t.nbytes) for t, fresh in zip(node.types, node.fresh, strict=True) if fresh)
        return total

    # --- the new graph ----------------------------------------------------------------------------------------------

    def rebuilt(self, chosen: list[list[int]]) -> tuple[Graph, dict[str, TensorFunction]]:
        table = FunctionTable(self.functions)
        home = {k: g[0] for g in chosen for k in g}
        joined = {g[0]: self.joined([self.graph.nodes[k] for k in g], table) for g in chosen}
        last = {g[0]: g[-1] for g in chosen}
        units = [k for k in range(len(self.graph.nodes)) if home.get(k, k) == k]
        needs: dict[int, set[int]] = {k: set() for k in units}
        for k, before in enumerate(self.needs):
            own = home.get(k, k)
            needs[own] |= {home.get(b, b) for b in before} - {own}
        users: dict[int, list[int]] = {k: [] for k in units}
        for k in units:
            for b in needs[k]:
                users[b].append(k)
        waiting = {k: len(needs[k]) for k in units}
        ready = [(last.get(k, k), k) for k in units if waiting[k] == 0]
        heapq.heapify(ready)
        nodes: list[Node] = []
        while ready:
            _, k = heapq.heappop(ready)
            nodes.append(joined.get(k, self.graph.nodes[k]))
            for user in users[k]:
                waiting[user] -= 1
                if waiting[user] == 0:
                    heapq.heappush(ready, (last.get(user, user), user))
        assert len(nodes) == len(units), "calls over tables made a cycle"
        return replace(self.graph, nodes=tuple(nodes)), table.used(nodes)

    def joined(self, calls: list[Node], table: FunctionTable) -> CallTensor:
        members = [c for c in calls if isinstance(c, CallTensor)]
        first = members[0]
        flat = self.flats[first.function]
        function = self.functions[first.function]
        sizes = [c.sizes for c in members]
        if flat is not None and len({c.function for c in members}) > 1:
            counts = [self.elements(c) for c in members]
            total = sum(self.graph.symbols.hint(n) for n in counts)
            fixed = [int(n) if n.is_Integer else None for n in counts]
            function = with_sizes(replace(flat.function, name=function.name), fixed, total)
            sizes = [(n,) for n in counts]
        name = table.enter(replace(function, table=True))
        return CallTensor(
            tuple(n for c in members for n in c.names),
            tuple(t for c in members for t in c.types),
            name,
            tuple(a for c in members for a in c.args),
            tuple(s for given in sizes for s in given),
            tuple(dict.fromkeys(o for c in members for o in c.origins)),
            tuple(t for c in members for t in c.into),
            len(members),
        )

    def elements(self, call: CallTensor) -> sympy.Expr:
        """How many elements a call of a flat function has, in sizes of the graph."""
        flat = self.flats[call.function]
        assert flat is not None
        symbols = self.functions[call.function].symbols.symbols
        return flat.elements.xreplace(dict(zip(symbols, call.sizes, strict=True)))


def _order(graph: Graph, aliases: Aliases) -> list[set[int]]:
    """For each node those that must come before it: makers of what it reads, readers of what it overwrites, effects."""
    makers = {n: k for k, node in enumerate(graph.nodes) for n in node.names}
    size_of = size_makers(graph)
    readers: dict[str, list[int]] = {}
    needs: list[set[int]] = []
    effect: int | None = None
    for k, node in enumerate(graph.nodes):
        before = {makers[u] for u in uses(node) if u in makers}
        if size_of:
            before |= {makers[size_of[s]] for s in sizes_read(node) & size_of.keys() if size_of[s] in makers}
        written = [t for t in node.into if t is not None] if isinstance(node, CallTensor) else []
        if isinstance(node, Library) and has_effect(node):
            before |= set() if effect is None else {effect}
            effect = k
            written += [a.name for a in node.args[:1]] if is_copy(node) else list(uses(node))
        for base in {b for t in written for b in aliases[t]}:
            before.update(readers.get(base, ()))
        for base in {b for u in uses(node) for b in aliases[u]}:
            readers.setdefault(base, []).append(k)
        needs.append(before - {k})
    return needs


def _reach(needs: list[set[int]], joined: list[list[int]]) -> list[int]:
    """For each node the bit mask of all that must come before it, when the nodes of each list run as one."""
    home = {k: g for g in joined for k in g}
    reach = [0] * len(needs)
    # Joined nodes stand at different places of the order, so that one pass may not be enough.
    changed = True
    while changed:
        changed = False
        for k, before in enumerate(needs):
            mask = reach[k]
            for b in before:
                mask |= reach[b] | (1 << b)
                for other in home.get(b, ()):
                    mask |= reach[other] | (1 << other)
            for other in home.get(k, ()):
                mask |= reach[other] & ~(1 << k)
            if mask != reach[k]:
                reach[k], changed = mask, True
    return reach
