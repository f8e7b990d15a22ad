"""One run of a graph as calls in their order: what each reads of the others, and the memory that is held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ...codegen.host.memory.liveness import storages
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.step import CallLibrary, Launch
from ...codegen.host.steps.write_out_loops import write_out_loops
from ...ir.graph.begun import passed_on
from ...ir.graph.graph import CallTensor, Graph, Input, Library, View, uses
from ...ir.graph.slices import NOTHING


@dataclass(frozen=True, slots=True)
class FlowCall:
    """One call: ``name`` is that of the kernel, or of the ATen op where ``is_library``.

    ``reads`` are the places, in ``calls`` of the flow, of the calls whose results it reads; ``inputs`` the inputs of
    the graph that it reads; ``lines`` the model lines that it comes from. ``held`` are the bytes that the program holds
    beyond its inputs while it runs, None where its steps are others than the calls of the graph. Sizes that are
    symbols count with their typical values.
    """

    name: str
    is_library: bool
    reads: tuple[int, ...] = ()
    inputs: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    held: int | None = None


@dataclass(frozen=True, slots=True)
class RunFlow:
    """The calls of a graph in the order in which they run; ``results`` are those of which the caller gets a result."""

    calls: tuple[FlowCall, ...] = ()
    results: tuple[int, ...] = ()


def flow_of(graph: Graph, program: HostProgram) -> RunFlow:
    """The flow of a fused graph whose regions are written out, and of the program that runs it."""
    reader = _FlowReader({i.name for i in graph.inputs if isinstance(i, Input)})
    for node in graph.nodes:
        match node:
            case View():
                reader.share(node.name, (node.source,))
            case Library(target=target) if target in NOTHING:
                for name in node.names:
                    reader.share(name, uses(node))
            case CallTensor() | Library():
                reader.call(node)
    given = {k for o in graph.outputs if isinstance(o, str) for k in reader.makers.get(o, ())}
    return RunFlow(_with_memory(reader.calls, program), tuple(sorted(given)))


@dataclass(slots=True)
class _FlowReader:
    """``makers`` are the calls that a value comes from: one, or of memory that several calls write, all of them."""

    inputs: set[str]
    calls: list[FlowCall] = field(default_factory=list)
    makers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # The input that a view looks at.
    given: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.given = {name: name for name in self.inputs}

    def share(self, name: str, sources: Sequence[str]) -> None:
        """A name for what others are, together."""
        self.makers[name] = tuple(sorted({k for s in sources for k in self.makers.get(s, ())}))
        self.given.update((name, self.given[s]) for s in sources if s in self.given)

    def call(self, node: CallTensor | Library) -> None:
        read = tuple(dict.fromkeys(uses(node)))
        at = len(self.calls)
        self.calls.append(
            FlowCall(
                node.function if isinstance(node, CallTensor) else node.target,
                isinstance(node, Library),
                tuple(sorted({k for name in read for k in self.makers.get(name, ())})),
                tuple(dict.fromkeys(self.given[n] for n in read if n in self.given and not self.makers.get(n))),
                tuple(dict.fromkeys(o.source for o in node.origins if o.source)),
            )
        )
        passed = passed_on(node) if isinstance(node, Library) else {}
        for name in node.names:
            self.makers[name] = (*self.makers.get(passed[name], ()), at) if name in passed else (at,)
        for target in node.into if isinstance(node, CallTensor) else ():
            if target is not None:  # who reads that memory later reads this call's result too
                self.makers[target] = (*self.makers.get(target, ()), at)


def _with_memory(calls: Sequence[FlowCall], program: HostProgram) -> tuple[FlowCall, ...]:
    """The calls with the bytes that are held at each."""
    written = write_out_loops(program)
    running = [number for number, step in enumerate(written.steps) if _runs(step)]
    if len(running) != len(calls):
        return tuple(calls)
    symbols, change = program.table, [0] * (len(written.steps) + 2)
    for s in storages(written):
        size = int(symbols.hint(s.nbytes))
        change[max(s.begin, 0)] += size
        change[s.end + 1] -= size
    held = [*accumulate(change)]
    return tuple(replace(call, held=held[number]) for call, number in zip(calls, running, strict=True))


def _runs(step: object) -> bool:
    return isinstance(step, Launch) or (isinstance(step, CallLibrary) and step.node.target not in NOTHING)
