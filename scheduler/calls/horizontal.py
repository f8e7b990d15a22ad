"""Horizontal fusion: calls that do not depend on one another and run equal functions become one call over a table.

The steps of an optimizer over hundreds of tensors, or the rotation of queries and of keys, are so one launch each.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...ir.function.function import TensorFunction
from ...ir.graph.begun import in_flight
from ...ir.graph.copies import is_copy
from ...ir.graph.effects import has_effect
from ...ir.graph.facts import aliases_of, makers_of, places_of
from ...ir.graph.graph import CallTensor, Graph, Library, Node, View, size_makers, sizes_read, uses
from ...ir.graph.sequences import sequence_of
from ...ir.graph.slices import MEMORY
from ...ir.target import TargetOf
from ..context import USUAL, PassContext
from ..cost.calls import CLOSE, LARGE_ELEMENTS, MAX_WAITING_BYTES, UNIFIED_BYTES, shares_rows
from ..decisions import LAUNCH, Alternative, place_key
from ..facts.dependences import Dependences
from ..functions.function_table import FunctionTable
from ..functions.generalise import Flat, flatten, with_sizes
from ..functions.scalars import split_scalars
from ..functions.unify import Families, has_rows, reads_columns, unify
from ..fusion.early_errors import checks_before_writes
from ..fusion.fusion import Fusion


def share_launches(fusion: Fusion, context: PassContext) -> Fusion:
    """Let equal calls that do not depend on one another be one call over a table."""
    if not context.tables:
        return fusion
    return fusion.having(*Tables(fusion.graph, fusion.functions, context.target_of, context).run())


# --- scalars apart --------------------------------------------------------------------------------------------------


def compute_scalars_apart(fusion: Fusion) -> Fusion:
    """Functions of one row that only compute elements, without the scalars that they make: where that makes functions
    equal, lets many work on the elements, or a result be written over an input."""
    graph, functions = fusion.graph, fusion.functions
    kinds: dict[TensorFunction, int] = {}
    known = {f: _parts_of(n, functions[f], kinds) for f, n in _first_calls(graph).items()}
    parts = {
        k: found
        for k, node in enumerate(graph.nodes)
        if isinstance(node, CallTensor) and not node.into and (found := known[node.function]) is not None
    }
    if not parts:
        return fusion
    hint = graph.symbols.hint
    repeats = Counter(found.kind for found in parts.values())
    copied = {n.args[1].name for n in graph.nodes if isinstance(n, Library) and is_copy(n)}
    table = FunctionTable(functions)
    nodes: list[Node] = []
    for k, node in enumerate(graph.nodes):
        if k in parts and isinstance(node, CallTensor):
            large = max(hint(t.numel) for t in node.types) >= LARGE_ELEMENTS
            if repeats[parts[k].kind] > 1 or large or copied & set(node.names):
                nodes += [replace(c, function=table.enter(f)) for c, f in parts[k].calls(node)]
                continue
        nodes.append(node)
    return fusion.having(replace(graph, nodes=tuple(nodes)), table.used(nodes))


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the calls of one function become; ``kind`` is equal where the functions of elements are, sizes aside."""

    pattern: tuple[tuple[CallTensor, TensorFunction], ...]
    kind: int

    def calls(self, node: CallTensor) -> list[tuple[CallTensor, TensorFunction]]:
        names = dict(zip(_named("result", node.names), node.names, strict=True))
        types = dict(zip(_named("result", node.names), node.types, strict=True))
        given = names | dict(zip(_named("argument", node.args), node.args, strict=True))
        return [
            (
                replace(c, names=tuple(names[n] for n in c.names), types=tuple(types[n] for n in c.names),
                        args=tuple(given[a] for a in c.args), sizes=node.sizes, origins=node.origins),
                f,
            )
            for c, f in self.pattern
        ]  # fmt: skip


def _named(what: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{what} {k}" for k in range(len(names)))


def _first_calls(graph: Graph) -> dict[str, CallTensor]:
    """One call of each function."""
    found: dict[str, CallTensor] = {}
    for node in graph.nodes:
        if isinstance(node, CallTensor):
            found.setdefault(node.function, node)
    return found


def _parts_of(call: CallTensor, function: TensorFunction, kinds: dict[TensorFunction, int]) -> _Shared | None:
    pattern = replace(call, names=_named("result", call.names), args=_named("argument", call.args), into=())
    parts = split_scalars(pattern, function)
    if parts is None:
        return None
    flat = flatten(parts[-1][1])
    kind = kinds.setdefault(flat.function if flat is not None else parts[-1][1], len(kinds))
    return _Shared(tuple((c, replace(f, name=call.function)) for c, f in parts), kind)


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tables:
    """Which calls become one, and the graph in which they are."""

    graph: Graph
    functions: Mapping[str, TensorFunction]
    target_of: TargetOf
    context: PassContext = USUAL
    needs: list[set[int]] = field(default_factory=list)
    # What each node needs, and what needs it, where the calls chosen so far are one.
    before: Dependences = field(default_factory=Dependences)
    after: Dependences = field(default_factory=Dependences)
    flats: dict[str, Flat | None] = field(default_factory=dict)

    def run(self) -> tuple[Graph, dict[str, TensorFunction]]:
        equal = [g for g in self.candidates() if len(g) > 1]
        rows, alike = ([g for g in self.alike(of_rows) if len(g) > 1] for of_rows in (True, False))
        # Those of rows have the equal ones among them.
        return self.chosen_of((rows, equal, alike))

    def chosen_of(self, kinds: Sequence[list[list[int]]]) -> tuple[Graph, dict[str, TensorFunction]]:
        """The graph where what is independent of each group of calls is one, the first kind of groups first."""
        if not any(kinds):
            return self.graph, dict(self.functions)
        self.needs = _order(self.graph)
        for k, checks in checks_before_writes(self.graph, self.functions).items():
            self.needs[k].update(checks)
        self.before, self.after = _closures(self.needs)
        chosen: list[list[int]] = []
        for groups in kinds:
            taken = {k for group in chosen for k in group}
            for group in groups:
                left = [k for k in group if k not in taken]
                chosen += self.independent(left) if len(left) > 1 else []
        if not chosen:
            return self.graph, dict(self.functions)
        return self.rebuilt(chosen)

    def candidates(self) -> list[list[int]]:
        """Positions of calls whose functions are equal, sizes of flat ones aside."""
        found: dict[object, list[int]] = {}
        kinds: dict[TensorFunction, int] = {}
        kind_of: dict[str, int] = {}
        for k, node, into in self.calls():
            name = node.function
            if name not in self.flats:
                flat = self.flats[name] = flatten(self.functions[name])
                kind_of[name] = kinds.setdefault(flat.function if flat else self.functions[name], len(kinds))
            found.setdefault((kind_of[name], into, node.types[0].device), []).append(k)
        return list(found.values())

    def alike(self, of_rows: bool) -> list[list[int]]:
        """Positions of calls whose functions are one where constants are sizes, and that are worth no launch each:
        element-wise ones, or those that reduce rows."""
        found: dict[object, list[int]] = {}
        families, types = Families(), self.graph.types()
        for k, node, into in self.calls():
            if has_rows(self.functions[node.function]) != of_rows:
                continue
            if of_rows and not shares_rows(self.target_of(node.types[0].device).machine):
                continue
            counted = node.types
            if reads_columns(self.functions[node.function]):  # what is summed is more than the sums, and has to wait
                counted = (*counted, *(types[a] for a in node.args))
            small = sum(self.graph.symbols.hint(t.nbytes) for t in counted) <= UNIFIED_BYTES
            if small and self.flats[node.function] is None:
                family = families.find(self.functions[node.function])
                if family is not None:
                    found.setdefault((family, into, node.types[0].device), []).append(k)
        return list(found.values())

    def calls(self) -> Iterator[tuple[int, CallTensor, tuple[int | None, ...]]]:
        """Calls of one row: their positions, and for each result the argument that it is written over, if any."""
        for k, node in enumerate(self.graph.nodes):
            if isinstance(node, CallTensor) and node.count == 1 and not self.functions[node.function].scatters:
                into = (None if t is None else node.args.index(t) if t in node.args else -1 for t in node.into)
                yield k, node, tuple(into)

    def independent(self, group: list[int]) -> list[list[int]]:
        """The group in parts of which no call depends on another, however the calls chosen before are joined."""
        held = {k: self.waiting(k) for k in group}
        least = min(held.values())
        result: list[list[int]] = []
        left = sum(1 << k for k in group)
        while left:
            first = (left & -left).bit_length() - 1
            part, waits = [first], held[first]
            free = left & ~(1 << first) & ~self.related(first)
            while free:
                low = free & -free
                k = low.bit_length() - 1
                far = k - first > CLOSE
                if far and waits + least > MAX_WAITING_BYTES:
                    break
                free ^= low
                if not self.fits(part, k):
                    continue
                if waits + held[k] <= MAX_WAITING_BYTES or (not far and self.late(k, first) <= MAX_WAITING_BYTES):
                    part.append(k)
                    waits += held[k]
                    free &= ~self.related(k)
            if len(part) > 1 and self.is_shared(part):
                result.append(part)
                for k in part[1:]:
                    self.before.unite(k, first)
                    self.after.unite(k, first)
            left &= ~sum(1 << k for k in part)
        return result

    def fits(self, part: list[int], k: int) -> bool:
        """Whether a call may be one with some that do not depend on it; a table has as many rows as there are."""
        return True

    def is_shared(self, part: list[int]) -> bool:
        """Whether calls that could be one are; by cost they always are."""
        if self.context.decider is None:
            return True
        names, hint = [self.graph.nodes[k].names[0] for k in part], self.graph.symbols.hint
        nbytes = sum(hint(t.nbytes) for k in part for t in self.graph.nodes[k].types if t is not None)
        chosen = self.context.decide(
            LAUNCH, lambda: place_key(self.graph, names, Fusion(self.graph, self.functions).module),
            (Alternative("shared"), Alternative("apart")), "shared", at=names[0], nbytes=nbytes,
            reason=f"{len(part)} calls",
        )  # fmt: skip
        return chosen == "shared"

    def related(self, k: int) -> int:
        """The mask of nodes that a call depends on or that depend on it."""
        return self.before.needs[k] | self.after.needs[k]

    def late(self, k: int, first: int) -> int:
        """Bytes that call ``k`` reads and that were not there yet when call ``first`` ran: they would have to be made
        while its operands are still held."""
        node = self.graph.nodes[k]
        assert isinstance(node, CallTensor)
        total, hint = 0, self.graph.symbols.hint
        for name in dict.fromkeys(map(self.behind, node.args)):
            made = places_of(self.graph).get(name)
            if made is not None and made > first:
                maker = self.graph.nodes[made]
                kind = maker.types[maker.names.index(name)]
                total += hint(kind.nbytes) if kind is not None else 0
        return total

    def behind(self, name: str) -> str:
        """The tensor that a view looks at."""
        while isinstance(view := makers_of(self.graph).get(name), View):
            name = view.source
        return name

    def waiting(self, k: int) -> int:
        """Bytes of the results of a call that have no memory yet."""
        node, hint = self.graph.nodes[k], self.graph.symbols.hint
        assert isinstance(node, CallTensor)
        return sum(hint(t.nbytes) for t, fresh in zip(node.types, node.fresh, strict=True) if fresh)

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
        elif len(different := list(dict.fromkeys(self.functions[c.function] for c in members))) > 1:
            unified = unify(different)
            assert unified is not None, "functions of one kind are not one"
            function = replace(unified.function, name=function.name)
            more = dict(zip(different, unified.values, strict=True))
            sizes = [(*c.sizes, *map(sympy.Integer, more[self.functions[c.function]])) for c in members]
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


def _order(graph: Graph) -> list[set[int]]:
    """For each node those that must come before it: makers of what it reads, readers of what it overwrites, effects."""
    makers, shared = places_of(graph), aliases_of(graph)
    size_of = size_makers(graph)
    readers: dict[str, list[int]] = {}
    needs: list[set[int]] = []
    effect: int | None = None
    flying = in_flight(graph)
    last: dict[str, int] = {}
    # Slices of one memory are written in any order, and whoever reads them names those that write.
    sliced = {
        name for node in graph.nodes if isinstance(node, Library) and node.target == MEMORY for name in node.names
    }
    for k, node in enumerate(graph.nodes):
        before = {makers[u] for u in uses(node) if u in makers}
        if size_of:
            before |= {makers[size_of[s]] for s in sizes_read(node) & size_of.keys() if size_of[s] in makers}
        if (sequence := sequence_of(node)) is not None:
            before |= {last[sequence]} if sequence in last else set()
            last[sequence] = k
        over = [t for t in node.into if t is not None] if isinstance(node, CallTensor) else []
        if isinstance(node, Library) and has_effect(node):
            before |= set() if effect is None else {effect}
            effect = k
            over += [a.name for a in node.args[:1]] if is_copy(node) else list(uses(node))
        for base in {b for t in over for b in shared[t]} - sliced:
            before.update(readers.get(base, ()))
        for base in {b for u in (*uses(node), *flying.get(k, ())) for b in shared[u]}:
            readers.setdefault(base, []).append(k)
        needs.append(before - {k})
    return needs


def _closures(needs: list[set[int]]) -> tuple[Dependences, Dependences]:
    """What nodes need, and what needs them."""
    before, after = Dependences.of(len(needs)), Dependences.of(len(needs))
    for k, on in enumerate(needs):
        before.depend(k, on)
    for k in reversed(range(len(needs))):
        for b in needs[k]:
            after.depend(b, (k,))
    return before, after
