"""Which nodes of a fused graph stand before which, what memory each looks at and makes, and what an order of them holds
at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from ...ir.graph.begun import in_flight, is_wait
from ...ir.graph.copies import COPY
from ...ir.graph.effects import written
from ...ir.graph.facts import aliases_of, places_of
from ...ir.graph.graph import CONSTANT, CallTensor, Input, Library, Node, View, uses
from ...ir.graph.sequences import sequence_of
from ...ir.graph.slices import JOINED
from ..fusion.early_errors import checks_before_writes
from ..fusion.fusion import Fusion

SEEDS = "mlc::seeds"


@dataclass(slots=True)
class CallFlow:
    """Nodes by position: what stands before and after each, and which memory, by number, it looks at and makes."""

    before: list[set[int]]
    after: list[set[int]]
    looks: list[list[int]]
    makes: list[list[int]]
    # By memory: bytes (none of what others hold), who looks at it, and whether it is there from the beginning, or to
    # the end.
    nbytes: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, fusion: Fusion, given: Collection[str]) -> CallFlow:
        """What is read stands before what writes over it, checks of data before what writes over inputs, and random
        calls and collectives in their order. What a collective is given is read until the wait for it. ``given`` are
        inputs whose memory goes when they are read last."""
        graph = fusion.graph
        nodes, hint = graph.nodes, graph.symbols.hint
        shared, made_at, flying = aliases_of(graph), places_of(graph), in_flight(graph)
        flow = cls([set() for _ in nodes], [set() for _ in nodes], [[] for _ in nodes], [[] for _ in nodes])
        flow.kept = {flow.number(base) for base in shared.leaving}
        for i in graph.inputs:
            if isinstance(i, Input) and i.name in given:
                base = flow.number(i.name)
                flow.given.add(base)
                flow.nbytes[base] = hint(i.type.nbytes)
        over: dict[int, int] = {}
        last: dict[str, int] = {}
        for k, node in enumerate(nodes):
            read = uses(node)
            flow.follow(k, (made_at[u] for u in read if u in made_at))
            seen = (*read, *flying[k]) if k in flying else read
            bases = list(dict.fromkeys([flow.number(b) for u in seen for b in shared[u]]))
            if over:
                flow.follow(k, (over[base] for base in bases if base in over))
            for base in {flow.number(b) for t in written(node) for b in shared[t]}:
                flow.follow(k, flow.readers[base])
                over[base] = k
            for base in bases:
                flow.readers[base].append(k)
            flow.looks[k] = bases
            # Seeds come from the generator that the calls of a random sequence draw from.
            sequence = "random" if isinstance(node, Library) and node.target == SEEDS else sequence_of(node)
            if sequence is not None:
                flow.follow(k, (last[sequence],) if sequence in last else ())
                last[sequence] = k
            for name, nbytes in made_by(node, hint):
                base = flow.number(name)
                flow.makes[k].append(base)
                flow.nbytes[base] = nbytes
        for k, checks in checks_before_writes(graph, fusion.functions).items() if fusion.functions else ():
            flow.follow(k, checks)
        return flow

    def number(self, base: str) -> int:
        """The number of some memory, named as it was when it was made."""
        found = self.numbers.setdefault(base, len(self.numbers))
        if found == len(self.nbytes):
            self.nbytes.append(0)
            self.readers.append([])
        return found

    def follow(self, at: int, earlier: Iterable[int]) -> None:
        for k in earlier:
            if k != at:
                self.before[at].add(k)
                self.after[k].add(at)

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes held at once."""
        nbytes, kept = self.nbytes, self.kept
        left = [len(readers) for readers in self.readers]
        now = most = sum([nbytes[base] for base in self.given])
        for k in order:
            for base in self.makes[k]:
                now += nbytes[base]
            most = max(most, now)
            for base in self.looks[k]:
                left[base] -= 1
                if not left[base] and base not in kept:
                    now -= nbytes[base]
            for base in self.makes[k]:
                if not self.readers[base] and base not in kept:
                    now -= nbytes[base]
        return most

    def least(self) -> int:
        """No order holds less: what a node makes and looks at is there at once."""
        nbytes = self.nbytes
        both = ({*made, *read} for made, read in zip(self.makes, self.looks, strict=True))
        return max((sum([nbytes[base] for base in bases]) for bases in both), default=0)


def made_by(node: Node, hint: Callable[[sympy.Expr], int]) -> list[tuple[str, int]]:
    """The names that a node makes memory for, and its bytes."""
    match node:
        case View():
            return []
        case CallTensor():
            new = zip(node.names, node.types, node.fresh, strict=True)
            return [(name, hint(kind.nbytes)) for name, kind, fresh in new if fresh]
        case Library(target=target) if target in (CONSTANT, COPY, JOINED) or is_wait(node):
            return []
        case Library():
            return [(n, hint(t.nbytes)) for n, t in zip(node.names, node.types, strict=True) if t is not None]
    return []
