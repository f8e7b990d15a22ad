"""From a fused graph to the steps of its host program.

Sizes are bound from the arguments, results allocated when they are first needed and freed after their last use, kernels
launched and libraries called in the order of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from ...ir.graph.begun import in_flight, is_begun
from ...ir.graph.facts import names_in
from ...ir.graph.graph import (
    CONSTANT,
    MADE_SIZE,
    CallRegion,
    CallTensor,
    Compute,
    Graph,
    Input,
    Library,
    Node,
    Reduction,
    Ref,
    Scan,
    Scatter,
    TensorType,
    View,
    refs,
    uses,
)
from ...ir.graph.regions import handed_on, write_out_regions
from ...ir.graph.slices import JOINED, MEMORY
from ..kernel import EmitError
from .bind_sizes import bind_sizes, sizes_of_steps
from .memory.blocks import results_in_blocks
from .memory.liveness import peaks_of, storages
from .owners import Owners
from .steps.kernel_use import KernelUse
from .steps.lines import place_text
from .steps.ops import users_op
from .steps.program import HostProgram
from .steps.step import (
    Allocate,
    BindSize,
    CallLibrary,
    CheckLayout,
    Free,
    HostStep,
    Launch,
    MakeView,
    Repeat,
    Return,
    Reuse,
    WriteOver,
)

# Ops whose results have the strides that their fake versions promise; the others are looked at after each call.
SURE = frozenset(
    {"aten::mm.default", "aten::addmm.default", "aten::bmm.default", "aten::baddbmm.default",
     "aten::embedding_dense_backward.default", "mlc::seeds", CONSTANT, "aten::sym_size.int"}
)  # fmt: skip

# The op of torch for a call of an op that writes to its arguments: what they hold after it are results.
MUTATES = "hop::auto_functionalized_v2"

# The op by which torch writes a part of a storage.
WRITE_BACK = "aten::as_strided_scatter.default"

PRODUCTS = frozenset({"aten::mm.default", "aten::addmm.default"})
# Ops that write a result in whatever strides it is given (torch's ``out``).
WRITE_INTO = PRODUCTS | {"aten::bmm.default", "aten::baddbmm.default"}


def build_host_program(
    graph: Graph, uses_of: Mapping[str, KernelUse], *, checked: Collection[str] = (), returned: int | None = None
) -> HostProgram:
    """The program of a fused graph; ``uses_of`` gives the compiled code of each tensor function.

    The arguments that are ``checked`` are brought into the layout of their types, should they have another. The first
    ``returned`` results (None: all) are the caller's, who takes them in the layout in which ops give them.
    Raises EmitError where a size can be read from no argument.
    """
    if any(isinstance(n, CallRegion) and not _is_loop(n.region) for n in graph.nodes):
        graph = write_out_regions(graph)
    saved = graph.outputs[returned:] if returned is not None else ()
    program = _Builder(graph, uses_of, frozenset(checked), frozenset(o for o in saved if isinstance(o, str))).build()
    return replace(program, table=graph.symbols, returned=returned)


@dataclass(slots=True)
class _Builder:
    graph: Graph
    uses_of: Mapping[str, KernelUse]
    checked: Set[str] = frozenset()
    # Results that compiled code reads in the layout of their types: those that are saved for the backward.
    saved: frozenset[str] = frozenset()
    steps: list[HostStep] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    owners: Owners = field(default_factory=Owners)
    # Dead memory by type, allocated by us and shared with nobody.
    spare: dict[TensorType, list[str]] = field(default_factory=dict)
    # Symbols that no argument gives: sizes decided by data, read from the results of the calls that decide them.
    unbound: set[sympy.Symbol] = field(default_factory=set)
    # What begun work reads until each wait.
    flying: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # The node at hand, and the names that are not forgotten.
    at: int = 0
    kept: set[str] = field(default_factory=set)
    # What results of regions are called in the program, and what leaves it in each call of one.
    called: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def build(self) -> HostProgram:
        graph = self.graph
        tensors = {i.name: i.type for i in graph.inputs if isinstance(i, Input)}
        binding, self.unbound = bind_sizes(graph)
        self.steps += binding
        self.walk()
        self.steps.append(Return(tuple(self.left.get(o, o) if isinstance(o, str) else o for o in graph.outputs)))
        if self.unbound and (missing := self.unbound & sizes_of_steps(graph)):
            lost = ", ".join(sorted(s.name for s in missing))
            raise EmitError(f"{graph.name}: no argument and no result gives the size {lost}")
        steps = tuple(s.renamed(self.name) for s in self.steps) if self.called else tuple(self.steps)
        names, sizes = tuple(i.name for i in graph.inputs), tuple(b.symbol for b in binding)
        program = HostProgram(graph.name, names, tensors, steps, sizes)
        return (
            program
            if any(isinstance(s, Repeat) for s in steps)
            else replace(program, peaks=peaks_of(storages(program)))
        )

    def name(self, name: str) -> str:
        return self.called.get(name, name)

    def walk(self) -> None:
        """The steps of the nodes, with what is done before them for the inputs."""
        graph = self.graph
        self.flying = in_flight(graph)
        last, kept = self.last, self.kept = (
            self.last_uses(),
            self.kept | {o for o in graph.outputs if isinstance(o, str)},
        )
        regions = [n for n in graph.nodes if isinstance(n, CallRegion)]
        of_calls = {name for n in regions for row in n.taken for name in row}
        tensors = {i.name: i.type for i in graph.inputs if isinstance(i, Input) and i.name not in of_calls}
        for name in tensors:
            self.owners.bind(name, name)
        unused = tuple(n for n in tensors if n not in last and n not in kept)
        if unused:
            self.steps.append(Free(unused))
        self.steps += [MakeView(n, tensors[n], n, sympy.S.Zero) for n in _storages(graph) if n in last]
        checks = [CheckLayout(name, kind) for name, kind in tensors.items() if name in last and name in self.checked]
        for at, node in enumerate(graph.nodes):
            self.at = at
            if checks and not _precedes_checks(node):
                self.steps += checks
                checks = []
            self.node(node)
            done = dict.fromkeys((*uses(node), *node.names, *self.flying.get(at, ())))
            names = [n for n in done if last.get(n, at) == at and n not in kept]
            self.free([n for n in names if n in self.owners.of])
        self.steps += checks

    def last_uses(self) -> dict[str, int]:
        """The position of the last node that reads each name; what begun work is given is read until the wait."""
        last: dict[str, int] = {}
        flying = self.flying
        for at, node in enumerate(self.graph.nodes):
            last.update(dict.fromkeys((*uses(node), *flying.get(at, ())), at))
        last.update(dict.fromkeys(flying.get(len(self.graph.nodes), ()), len(self.graph.nodes)))
        return last

    def node(self, node: Any) -> None:
        comment = place_text(node.origins)
        match node:
            case CallTensor():
                self.call(node, comment)
            case Library():
                self.library(node, comment)
            case View(name, kind, source, _, _, offset):
                self.steps.append(MakeView(name, kind, source, offset))
                self.owners.bind(name, self.owners.of[source])
            case CallRegion():
                self.region(node)
            case Compute() | Reduction() | Scan() | Scatter():
                raise EmitError(f"{self.graph.name}: {node.names[0]} was not fused into any function")

    def library(self, node: Library, comment: str) -> None:
        if node.target == MEMORY:
            self.allocate(node.names[0], node.types[0])  # type: ignore[arg-type]
            return
        if node.target == JOINED:
            memory = node.args[0].name
            self.steps.append(WriteOver(node.names[0], memory))
            self.owners.bind(node.names[0], self.owners.of[memory])
            return
        over = self.dead_addend(node) or self.padded_memory(node)
        if node.target == MUTATES:
            node = replace(node, kwargs=(*node.kwargs, ("_only_clone_these_bases", self.kept_bases(node))))
        self.steps.append(CallLibrary(node, comment, over, () if over else self.blocks(node)))
        for used in uses(node):
            # An op may return or keep what it is given, so memory that a library saw is not used again.
            self.owners.ours.pop(self.owners.memory(used), None)
        if over:
            self.owners.bind(node.names[0], self.owners.of[over])
            if over not in refs(node.args):
                self.owners.products[over] = node.types[0]  # type: ignore[assignment]
                self.free([over])
            return
        for name, result in zip(node.names, node.types, strict=True):
            if result is not None:
                self.owners.bind(name, name)
                self.bind_result(name, result)
                if node.target in PRODUCTS:
                    self.owners.products[name] = result
                # Nobody may look at what was begun before it has been waited for, and nobody of ours does
                # at what is only returned, or at a result that is not needed, which some ops leave empty.
                read = name in self.last or name in self.saved
                if read and node.target not in SURE and not is_begun(node):
                    self.steps.append(CheckLayout(name, result, users_op(node)))

    def dead_addend(self, node: Library) -> str:
        """What a product is added to, where that is a product's result that nobody else reads; else ""."""
        if node.target != "aten::addmm.default" or node.kwargs or not isinstance(node.args[0], Ref):
            return ""
        name = node.args[0].name
        owner = self.owners.of.get(name, "")
        alone = self.owners.shares.get(owner) == 1 and node.args[0] not in node.args[1:]
        return name if alone and self.is_last(name) and self.owners.products.get(owner) == node.types[0] else ""

    def padded_memory(self, node: Library) -> str:
        """The name of memory in which a product is to write rows that begin further apart than they are long; else
        ""."""
        kind = node.types[0] if node.target in WRITE_INTO else None
        if kind is None or not _has_padded_rows(kind):
            return ""
        name = f"{node.names[0]} memory"
        self.steps.append(Allocate(name, kind))
        self.owners.bind(name, name)
        return name

    def blocks(self, node: Library) -> tuple[TensorType, ...]:
        """The results of an op that may be blocks of the CPU's pool; none where data decide how large they are."""
        sizes = {s for t in node.types if t is not None for e in (*t.shape, *t.strides) for s in e.free_symbols}
        return () if sizes & self.unbound else results_in_blocks(node)

    def kept_bases(self, node: Library) -> tuple[int, ...]:
        """Which of the tensors that an op writes to are to be copied first: all but memory of ours that is not read
        any more."""
        bases = dict(node.kwargs)["_all_bases"]
        names = [b.name for b in bases if isinstance(b, Ref)]
        others = [*refs(node.args), *refs(tuple(v for k, v in node.kwargs if k != "_all_bases"))]
        return tuple(
            k
            for k, b in enumerate(bases)
            if not (isinstance(b, Ref) and self.is_spent(b.name) and names.count(b.name) == 1 and b.name not in others)
        )

    def is_spent(self, name: str) -> bool:
        """Whether a tensor lies in memory that we allocated, that nothing else looks at, and that nobody reads after
        the node at hand."""
        owner = self.owners.of.get(name, "")
        alone = sum(o == owner for o in self.owners.of.values()) == 1
        return alone and self.is_last(name) and owner in self.owners.ours

    def call(self, node: CallTensor, comment: str) -> None:
        use = self.uses_of[node.function]
        tensors: list[str] = []
        sizes: list[sympy.Expr] = []
        for one in node.calls():
            tensors += one.args
            for name, kind, target in zip(one.names, one.types, one.into or (None,) * len(one.names), strict=True):
                if target is None:
                    self.allocate(name, kind)
                    tensors.append(name)
                    continue
                if name in self.last or name in self.kept:
                    self.steps.append(WriteOver(name, target))
                    self.owners.bind(name, self.owners.of[target])
                if target not in one.args:
                    tensors.append(target)
            sizes += [one.sizes[k] for k in use.sizes]
        self.steps.append(Launch(use, tuple(tensors), tuple(sizes), node.types[0].device, comment, node.count))

    def region(self, node: CallRegion) -> None:
        """Steps that repeat. Memory that is carried is that of the steps, as far as it was the program's and stays so
        from call to call."""
        self.forget_spare()
        node = replace(node, region=write_out_regions(node.region))
        outputs = [str(o) for o in node.region.outputs]
        handed, known = handed_on(node), self.owners
        begun = [(p, a) for p, _, a in handed if known.is_alone(a) and self.is_handed_over(node, a)]
        ours, products = {p for p, a in begun if a in known.ours}, {p for p, a in begun if a in known.products}
        while True:
            body = self.body(node, ours, products)
            alone = [(p, o) for p, o, _ in handed if body.owners.is_alone(o)]
            mine = {p for p, o in alone if p in ours and o in body.owners.ours}
            made = {p for p, o in alone if p in products and o in body.owners.products}
            if (mine, made) == (ours, products):
                break
            ours, products = mine, made
        names = self.names_of(node)
        self.steps.append(self.repeat(node, body, names))
        self.unbound &= body.unbound
        for given in (*node.carried, *node.shared):
            known.share(given)  # it may be what the region gives, too
        for given in node.carried:
            if self.is_handed_over(node, given):
                known.release(given)
        for result, output in zip(node.names, outputs[: len(node.carried)], strict=False):
            known.bind(result, result)
            self.called[result] = names[output]
            for made_by, own in ((body.owners.ours, known.ours), (body.owners.products, known.products)):
                if output in made_by and body.owners.is_alone(output):
                    own[result] = made_by[output]

    def body(self, node: CallRegion, ours: Collection[str], products: Collection[str]) -> _Builder:
        """The steps of one call, which forgets what it is given for itself, and what is carried."""
        region, carries = node.region, len(node.carried)
        types, taken = region.types(), dict(zip((i.name for i in region.inputs[carries:]), node.taken, strict=False))
        checked = {p for p, row in taken.items() if not self.checked.isdisjoint(row)}
        kept = zip(region.outputs[carries:], node.kept, strict=True)
        saved = {o for o, row in kept if not self.saved.isdisjoint(row)} | {*region.outputs[:carries]}
        body = _Builder(region, self.uses_of, checked, frozenset(map(str, saved)))
        body.kept = {i.name for i in region.inputs[carries + len(taken) :]}
        body.kept |= {p for p, row in taken.items() if not self.kept.isdisjoint(row)}
        body.unbound = self.unbound.copy()
        body.owners.ours, body.owners.products = {p: types[p] for p in ours}, {p: types[p] for p in products}
        body.walk()
        body.forget_spare()
        for output in map(str, region.outputs[carries:]):
            body.owners.share(output)
        return body

    def repeat(self, node: CallRegion, body: _Builder, names: Mapping[str, str]) -> Repeat:
        """The step of a region; what leaves the program in each call stands in the order of its results."""
        region, carries = node.region, len(node.carried)
        inputs, outputs = [names[i.name] for i in region.inputs], [names[str(o)] for o in region.outputs]
        taken = dict(zip(inputs[carries:], node.taken, strict=False))
        rows = dict(zip(outputs[carries:], node.kept, strict=True))
        rows |= {p: row for p, row in taken.items() if not self.kept.isdisjoint(row)}
        left = {o: k for k, o in reversed([*enumerate(self.graph.outputs)]) if isinstance(o, str)}
        order = sorted(rows, key=lambda n: min(left.get(one, len(left)) for one in rows[n]))
        kept = {n: tuple(f"{n} {k}" for k in range(node.times)) for n in order}
        for n, each in kept.items():
            self.left.update(zip(rows[n], each, strict=True))
        carried = tuple((names[p], names[o], self.name(a)) for p, o, a in handed_on(node))
        steps = tuple(s.renamed(lambda n: names.get(n, n)) for s in body.steps)
        return Repeat(steps, node.times, taken, kept, carried)

    def names_of(self, node: CallRegion) -> dict[str, str]:
        """What the names of a region are in the program: their own where nothing else is called so, but what is handed
        over keeps its name, and what calls have for themselves is called as the first has it."""
        inputs, carries = [i.name for i in node.region.inputs], len(node.carried)
        known = (names_in(self.graph) - {*node.names}) | {*self.called.values()}
        found = {}
        for name in (n for inner in node.region.nodes for n in inner.names):
            found[name] = name
            while found[name] in known:
                found[name] = f"{node.region.name} {found[name]}"
        for name, given in zip(inputs, node.carried, strict=False):
            found[name] = self.name(given) if self.is_handed_over(node, given) else f"{name} now"
        own = (row[0] for row in node.taken)
        return found | dict(zip(inputs[carries:], (*own, *map(self.name, node.shared)), strict=True))

    def is_handed_over(self, node: CallRegion, name: str) -> bool:
        """Whether nobody but the calls of a region needs something that they carry."""
        return self.is_last(name) and name not in node.shared and node.carried.count(name) == 1

    def is_last(self, name: str) -> bool:
        """Whether nobody needs something behind the node at hand."""
        return self.last[name] == self.at and name not in self.kept

    def bind_result(self, name: str, kind: TensorType) -> None:
        """Read the sizes that a result is the first to tell."""
        for dim, extent in enumerate(kind.shape):
            if extent in self.unbound:
                self.unbound.discard(extent)
                self.steps.append(BindSize(extent, name, dim))

    def allocate(self, name: str, kind: TensorType) -> None:
        spare = self.spare.get(kind)
        if spare:
            self.steps.append(Reuse(name, spare.pop()))
        else:
            self.steps.append(Allocate(name, kind))
        self.owners.bind(name, name)
        self.owners.ours[name] = kind

    def free(self, names: list[str]) -> None:
        gone = []
        for name in names:
            owner = self.owners.release(name)
            kind = self.owners.ours.get(owner)
            if owner == name and kind is not None and not self.owners.shares[owner] and self.wanted(kind):
                # The name stays bound until its memory is taken over.
                self.spare.setdefault(kind, []).append(name)
                del self.owners.ours[name]
                continue
            gone.append(name)
        if gone:
            self.steps.append(Free(tuple(gone)))

    def forget_spare(self) -> None:
        """No memory waits for who takes it over, which steps that repeat would do only once."""
        spare = tuple(name for names in self.spare.values() for name in names)
        self.spare.clear()
        if spare:
            self.steps.append(Free(spare))

    def wanted(self, kind: TensorType) -> bool:
        """Whether the very next allocations include one of this type, so that keeping it raises no peak."""
        for node in self.graph.nodes[self.at + 1 : self.at + 2]:
            if isinstance(node, CallTensor) and kind in node.types:
                return len(self.spare.get(kind, ())) < node.types.count(kind)
        return False


def _is_loop(region: Graph) -> bool:
    """Whether the calls of a region may be steps that repeat: what is looked at before anything runs, and what is read
    until another call waits for it, are each call's own."""
    return not _storages(region) and not in_flight(region).get(len(region.nodes))


def _storages(graph: Graph) -> list[str]:
    """Inputs into which overlapping arguments are written back: whole storages, longer than the fake ones may have
    been, which end with the last element that an argument has."""
    given = {i.name for i in graph.inputs if isinstance(i, Input)}
    targets = [n.args[0].name for n in graph.nodes if isinstance(n, Library) and n.target == WRITE_BACK]
    return [name for name in dict.fromkeys(targets) if name in given]


def _has_padded_rows(kind: TensorType) -> bool:
    *_, (_, rows), (length, step) = [(sympy.S.One, sympy.S.Zero), *zip(kind.shape, kind.strides, strict=True)]
    return bool(step == 1 and length != 1 and rows.is_Integer and length.is_Integer and rows > length)


def _precedes_checks(node: Node) -> bool:
    """Whether a node reads no tensor, and may make the sizes of inputs."""
    return isinstance(node, Library) and node.target in (MADE_SIZE, "mlc::seeds")
