"""Several programs of one graph as one: the program in front of them, and what is told of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Protocol

from ...codegen.host.python.dispatch import print_dispatch
from ...ir.expr.size_regions import number_at
from ...runtime.counters import counters
from ...runtime.log import logger, say
from ...scheduler.regions.choose import REGIONS
from ..compiling.compiled import VARIANTS, CompiledGraph, LockLines, Program, Stages, Variant, dispatching
from ..compiling.job import Job
from ..compiling.plans import Plan
from .choose import PlannedVariants

_LOG = logger(__name__)


class Keeper(Protocol):
    """Where programs are kept."""

    def keep(self, kept: Program | None) -> str: ...


def with_dispatch(
    job: Job, cache: Keeper, plan: Plan, parted: PlannedVariants, made: Sequence[CompiledGraph], lock: LockLines = ()
) -> CompiledGraph:
    """The program that calls one of ``made`` by the sizes that it is given; ``lock`` are the lines of a lock file of
    the graph as a whole."""
    graph = plan.imported
    places = {i.name: k for k, i in enumerate(graph.inputs)}
    sizes = ", ".join(str(b.symbol) for b in parted.bound)
    head = f"{job.name}: one of {len(made)} programs by the size {sizes}; made by torch-mlc"
    text = print_dispatch(parted.tree, parted.bound, places, head)
    parts = [v.kept for v in made]
    record = {
        "text": text, "ops": {}, "constants": {}, "kernels": {}, "overridden": (), "lazy": [], "taken": [],
        "devices": job.devices, "capture": asdict(made[-1].capture), VARIANTS: [(v.name, v.key) for v in made],
        "launches": max((p.record["launches"] for p in parts if p is not None), default=0),
        "library_calls": max((p.record["library_calls"] for p in parts if p is not None), default=0),
        **({"lock": [*lock]} if lock else {}),
    }  # fmt: skip
    regions = [v.region.text for v in parted.variants]
    found = dispatching(
        job.name, record, tuple(made), key="", load=job.load, timer=job.timer, stages=_stages(job, plan, parted, made)
    )  # fmt: skip
    key = cache.keep(found.kept) if all(v.key for v in made) else ""
    counters.add("variants_compiled", len(made))
    _LOG.debug("programs of %s:\n%s", job.name, text)
    say(job.options.log, "output_code", lambda: f"programs of {job.name}:\n{text}")
    say(job.options.log, "fusion", lambda: f"{job.name}: {len(made)} programs: {'; '.join(regions)}")
    return replace(job.with_named(found), key=key)


def _stages(job: Job, plan: Plan, parted: PlannedVariants, made: Sequence[CompiledGraph]) -> Stages | None:
    """Those of the program that runs at typical sizes, with all programs."""
    hints = {s.symbol: s.hint for s in plan.imported.symbols.sizes}
    asked_for = {b.symbol: hints[b.symbol] or 1 for b in parted.bound}
    typical = number_at(parted.tree, asked_for)
    own = made[typical].stages
    if own is None:
        return None
    asked = job.decider.records if job.decider is not None else ()
    decisions = {d.name: d for d in asked if d.kind == REGIONS}
    for v in made:
        decisions.update({d.name: d for d in v.stages.decisions} if v.stages is not None else {})
    variants = tuple(
        Variant(p.region.text, v, k == typical)
        for k, (p, v) in enumerate(zip(parted.variants, made, strict=True))
    )  # fmt: skip
    return replace(
        own, imported=plan.imported, graph=plan.graph, decisions=tuple(decisions.values()), variants=variants,
        proof=parted.proof.text,
    )  # fmt: skip


def shared_kernels(variants: Sequence[Variant]) -> int:
    """How many kernels several variants have, each counted once."""
    stages = [v.compiled.stages for v in variants]
    keys = Counter(key for s in stages if s is not None for key in {k.key for k in s.kernels.values()})
    return sum(count > 1 for count in keys.values())
