"""What of a graph is computed in which kernel, and in which order: importing, graph passes, fusion.

Layers that repeat are planned once. What came out of one of them is a loop of the host program (``roll.py``); where
that cannot be, it is written once for each layer (``unroll.py``), and where layers differ the whole graph is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from torch import fx

from ...codegen.host.build import build_host_program
from ...codegen.host.memory.liveness import peaks_of, storages
from ...codegen.host.steps.ops import may_alias
from ...codegen.host.steps.program import KernelUse
from ...ir.graph.graph import Graph, IRModule
from ...ir.passes import PassManager
from ...ir.target import TargetOf
from ...runtime.log import say
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...runtime.timing import PhaseTimer
from ...scheduler.calls.horizontal import share_launches
from ...scheduler.calls.memory_order import order_for_memory
from ...scheduler.fusion.fuse import Fusion, fuse
from ...scheduler.passes import (  # fmt: skip
    GRAPH_PASSES,
    alias_copies,
    chain_products,
    collapse_one_hot,
    convert_layouts,
    decompose_contractions,
    decompose_convolutions,
    eliminate_common,
    multiply_points,
    rewrite_attention,
    rewrite_logsumexp,
    split_reductions,
    unroll_reductions,
)
from ..importing.graph_key import GraphKey
from ..importing.importer import import_graph
from ..repeats.layers import Layers, find_layers
from ..repeats.repeating import NotAlike, Repeating
from ..repeats.unroll import unroll
from .memory_limit import typical


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
        options, phase = self.options, self.timer.phase
        with phase("import"):
            imported = import_graph(
                self.gm, self.example_inputs, fallback_random=options.fallback_random, numerics=options.numerics,
                static=self.static, name=self.name, skipped=layers.skipped if layers is not None else {},
                called_after=called_after,
            )  # fmt: skip
        with phase("passes"):
            graph = run_passes(imported, options)
        with phase("fuse"):
            return Plan(imported, graph, fuse(graph, numerics=options.numerics, target_of=_targets(options)))

    def ordered(self, plan: Plan) -> Plan:
        """With launches shared, in an order that holds less memory."""
        with self.timer.phase("fuse"):
            fusion = share_launches(plan.fusion, may_alias)
            graph = order_for_memory(fusion.graph, may_alias, self.given, fusion.functions)
            return replace(plan, fusion=replace(fusion, graph=graph))


def planned_peak(gm: fx.GraphModule, options: Options, given: Collection[str] = ()) -> int:
    """The bytes that an ATen graph would hold at most at typical sizes, ``given`` inputs among them; nothing is
    compiled."""
    imported = import_graph(gm, fallback_random=options.fallback_random, numerics=options.numerics)
    fusion = share_launches(
        fuse(run_passes(imported, options), numerics=options.numerics, target_of=_targets(options)), may_alias
    )
    graph = order_for_memory(fusion.graph, may_alias, given, fusion.functions)
    program = build_host_program(graph, dict.fromkeys(fusion.functions, KernelUse("", ())))
    return typical(peaks_of(storages(program, given)), graph)


# Passes that ask what a machine can, or decide by its costs.
_ASKING = (
    convert_layouts, decompose_contractions, decompose_convolutions, multiply_points, rewrite_attention,
    rewrite_logsumexp, split_reductions, chain_products, unroll_reductions,
)  # fmt: skip


def run_passes(graph: Graph, options: Options) -> Graph:
    """The graph after every graph pass; dumped and verified as the options say."""
    # With eager's rounding, what these passes read through is rounded to half types where eager writes it.
    reading = (collapse_one_hot, rewrite_attention, rewrite_logsumexp)
    passes = [p for p in GRAPH_PASSES if options.numerics != "eager" or p not in reading]
    wrapped = [_GraphPass(p.__name__, _for_targets(p, options)) for p in passes]
    manager = PassManager(wrapped, options.dump_dir, verify=options.verify > 0)
    return manager.run(IRModule({graph.name: graph}, graph.name)).graph


def _for_targets(rewrite: Callable[..., Graph], options: Options) -> Callable[[Graph], Graph]:
    """The pass with what it asks for: the machines of this compilation, what ops do with memory."""
    if rewrite in (alias_copies, eliminate_common):
        return partial(rewrite, may_alias=may_alias)
    return partial(rewrite, target_of=_targets(options)) if rewrite in _ASKING else rewrite


def _targets(options: Options) -> TargetOf:
    """The machines of this compilation."""
    return cache(lambda device: target_for(device, options.target, options.threads))


@dataclass(frozen=True, slots=True)
class _GraphPass:
    """A rewrite of one graph as a pass over the module that holds it."""

    name: str
    rewrite: Callable[[Graph], Graph]

    def run(self, module: IRModule) -> IRModule:
        graph = self.rewrite(module.graph)
        return module if graph is module.graph else replace(module, functions={**module.functions, module.main: graph})
