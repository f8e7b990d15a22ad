"""What of a graph is computed in which kernel, and in which order: importing, graph passes, fusion.

Layers that repeat are planned once. What came out of one of them is a region that is called for all, which the host
program has as a loop; where that cannot be, it is written once for each layer, and where layers differ the whole graph
is planned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from torch import fx

from ...codegen.host.build import build_host_program
from ...codegen.host.memory.liveness import peaks_of, storages
from ...codegen.host.steps.kernel_use import KernelUse
from ...ir.graph.graph import Graph
from ...ir.passes import GRAPH, run_passes
from ...runtime.log import say
from ...runtime.settings.options import Options
from ...scheduler.fusion.fusion import Fusion
from ..importing.graph_key import GraphKey
from ..importing.importer import import_graph
from ..repeats.layers import Layers, find_layers
from ..repeats.passes import FewLayers
from ..repeats.repeating import NotAlike
from .job import Job
from .memory_limit import typical
from .pass_lists import context_of, pass_lists
from .tuning import ByRules


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph as it was imported, after the passes, and fused, with launches shared and in order.

    Where it is not ``is_whole``, imported and rewritten were a few of its layers, and what its report tells is of
    those; the fused graph has all.
    """

    imported: Graph
    graph: Graph
    fusion: Fusion
    is_whole: bool = True
    layers: Layers | None = None
    # By kernel and target: the schedules of its kernels that rules have made already. Of other kernels none are known.
    by_rules: ByRules = field(default_factory=dict, init=False, repr=False, compare=False)


def plan_of(job: Job, key: GraphKey | None) -> Plan:
    """The plan of a graph, from a few of its layers where it has more that are alike.

    Without a ``key``, and for somebody who looks at all stages, the whole graph is planned. Where a graph is tuned, has
    a limit of memory or is a region, every layer is written out: a loop has one place in memory for all layers, and
    tells nobody of each.
    """
    layers = None
    if key is not None and not job.options.shows_stages:
        with job.timer.phase("import"):
            layers = find_layers(job.gm, key)
    found = _plan_of_layers(job, layers) if layers is not None else None
    return found or _ordered(job, _fused(job))


def _plan_of_layers(job: Job, layers: Layers) -> Plan | None:
    """None where what came out of the layers is not alike."""
    options, called_after = job.options, job.called_after
    plan = replace(_fused(job, layers), is_whole=False, layers=layers)
    few = FewLayers(job.gm, layers, job.static, called_after)
    found, told = None, ""
    if not (options.tune is True or options.memory_limit is not None or job.region):
        found, told = _of_all(job, _ordered(job, plan), few), "as a loop"
    if found is None and (written := _of_all(job, plan, replace(few, in_regions=False))) is not None:
        found, told = _ordered(job, written), "planned as one"
    if found is None:
        told = "planned one by one, since their kernels differ"
    say(options.log, "fusion", lambda: f"{job.name}: {layers.count} layers that repeat, {told}")
    return found


def _of_all(job: Job, plan: Plan, few: FewLayers) -> Plan | None:
    """The plan of a few layers as one of all; None where those are not alike."""
    with job.timer.phase("fuse"):
        try:
            return replace(plan, fusion=job.run(plan.fusion, pass_lists().layers, few))
        except NotAlike:
            return None


def _fused(job: Job, layers: Layers | None = None) -> Plan:
    """The graph, or a few layers of it, fused; the job is told what names are made of."""
    job.called_after.clear()
    options, phase, lists = job.options, job.timer.phase, pass_lists()
    context = context_of(options, decider=job.decider)
    with phase("import"):
        imported = job.run.step(
            GRAPH, import_graph, job.gm, job.example_inputs, fallback_random=options.fallback_random,
            numerics=options.numerics, libraries=options.libraries == "aten", static=job.static, name=job.name,
            skipped=layers.skipped if layers is not None else {}, called_after=job.called_after, decider=job.decider,
            region=job.within, target_of=context.target_of,
        )  # fmt: skip
    with phase("passes"):
        graph = job.run(imported, lists.graph, context)
    with phase("fuse"):
        return Plan(imported, graph, job.run(Fusion(graph), lists.fuse, context))


def _ordered(job: Job, plan: Plan) -> Plan:
    """With launches shared, in an order that holds less memory."""
    with job.timer.phase("fuse"):
        context = context_of(job.options, job.given, job.decider, tables=job.tables, owned=job.owned)
        return replace(plan, fusion=job.run(plan.fusion, pass_lists().calls, context))


def planned_peak(gm: fx.GraphModule, options: Options, given: Collection[str] = ()) -> int:
    """The bytes that an ATen graph would hold at most at typical sizes, ``given`` inputs among them; nothing is
    compiled."""
    lists, context = pass_lists(), context_of(options, given)
    libraries = options.libraries == "aten"
    graph = import_graph(
        gm, fallback_random=options.fallback_random, numerics=options.numerics, libraries=libraries,
        target_of=context.target_of,
    )  # fmt: skip
    graph = run_passes(lists.graph, graph, context)
    fusion = run_passes((*lists.fuse, *lists.calls), Fusion(graph), context)
    graph = fusion.graph
    program = build_host_program(graph, dict.fromkeys(fusion.functions, KernelUse("", ())))
    return typical(peaks_of(storages(program, given)), graph)
