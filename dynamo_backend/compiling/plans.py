"""What of a graph is computed in which kernel, and in which order: importing, graph passes, fusion.

Layers that repeat are planned once. What came out of one of them is a loop of the host program (``roll.py``); where
that cannot be, it is written once for each layer (``unroll.py``), and where layers differ the whole graph is planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...codegen.host.build import build_host_program
from ...codegen.host.memory.liveness import peaks_of, storages
from ...codegen.host.steps.kernel_use import KernelUse
from ...ir.graph.graph import Graph
from ...ir.passes import GRAPH, Runner, run_passes
from ...runtime.log import say
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...scheduler.fusion.fusion import Fusion
from ..importing.graph_key import GraphKey
from ..importing.importer import import_graph
from ..repeats.layers import Layers, find_layers
from ..repeats.repeating import NotAlike, Repeating
from ..repeats.unroll import unroll
from .memory_limit import typical
from .pass_lists import context_of, pass_lists


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph as it was imported, after the passes, and fused, with launches shared and in order.

    Where it is not ``is_whole``, imported and rewritten were ``few`` of its layers, and what its report tells is of
    those. ``few`` is there where the fused graph, too, has no more.
    """

    imported: Graph
    graph: Graph
    fusion: Fusion
    is_whole: bool = True
    few: Repeating | None = None


@dataclass(frozen=True, slots=True)
class PlanSource:
    """A graph that is to be planned; ``given`` are inputs that nobody else holds."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    options: Options
    static: frozenset[int]
    given: tuple[str, ...]
    name: str
    timer: PhaseTimer
    run: Runner

    def plans(self, key: GraphKey | None, loops: bool) -> Iterator[Plan]:
        """The quickest to make first; the next one is for where that does not hold. The last one always does.

        Without a ``key``, and for somebody who looks at all stages, it is that of the whole graph; without ``loops``
        every layer is written out.
        """
        layers = None
        if key is not None and not self.options.shows_stages:
            with self.timer.phase("import"):
                layers = find_layers(self.gm, key)
        if layers is not None:
            yield from self.plans_of_layers(layers, loops)
        yield self.ordered(self.fused())

    def plans_of_layers(self, layers: Layers, loops: bool) -> Iterator[Plan]:
        called_after: dict[str, str] = {}
        plan = replace(self.fused(layers, called_after), is_whole=False)

        def few(graph: Graph) -> Repeating:
            return Repeating(graph, self.gm, layers, self.static, called_after)

        if loops:
            ordered = self.ordered(plan)
            with self.timer.phase("fuse"):
                repeating = few(ordered.fusion.graph)
                try:
                    loops = bool(repeating.window)
                except NotAlike:
                    loops = False
            if loops:
                say(self.options.log, "fusion", lambda: f"{self.name}: {layers.count} layers that repeat, as a loop")
                yield replace(ordered, few=repeating)
        with self.timer.phase("fuse"):
            try:
                whole = unroll(few(plan.fusion.graph))
            except NotAlike:
                whole = None
        found = "planned as one" if whole is not None else "planned one by one, since their kernels differ"
        say(self.options.log, "fusion", lambda: f"{self.name}: {layers.count} layers that repeat, {found}")
        if whole is not None:
            yield self.ordered(replace(plan, fusion=replace(plan.fusion, graph=whole)))

    def fused(self, layers: Layers | None = None, called_after: dict[str, str] | None = None) -> Plan:
        """The graph, or a few layers of it, fused; ``called_after`` is told what names are made of."""
        options, phase, lists = self.options, self.timer.phase, pass_lists()
        context = context_of(options)
        with phase("import"):
            imported = self.run.step(
                GRAPH, import_graph, self.gm, self.example_inputs, fallback_random=options.fallback_random,
                numerics=options.numerics, static=self.static, name=self.name,
                skipped=layers.skipped if layers is not None else {}, called_after=called_after,
            )  # fmt: skip
        with phase("passes"):
            graph = self.run(imported, lists.graph, context)
        with phase("fuse"):
            return Plan(imported, graph, self.run(Fusion(graph), lists.fuse, context))

    def ordered(self, plan: Plan) -> Plan:
        """With launches shared, in an order that holds less memory."""
        with self.timer.phase("fuse"):
            calls = self.run(plan.fusion, pass_lists().calls, context_of(self.options, self.given))
            return replace(plan, fusion=calls)


def planned_peak(gm: fx.GraphModule, options: Options, given: Collection[str] = ()) -> int:
    """The bytes that an ATen graph would hold at most at typical sizes, ``given`` inputs among them; nothing is
    compiled."""
    lists, context = pass_lists(), context_of(options, given)
    graph = import_graph(gm, fallback_random=options.fallback_random, numerics=options.numerics)
    graph = run_passes(lists.graph, graph, context)
    fusion = run_passes((*lists.fuse, *lists.calls), Fusion(graph), context)
    graph = fusion.graph
    program = build_host_program(graph, dict.fromkeys(fusion.functions, KernelUse("", ())))
    return typical(peaks_of(storages(program, given)), graph)
