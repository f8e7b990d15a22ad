"""One ATen graph to one function: the path of the design, in order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import fx

from ...codegen.host.steps.lines import with_lines
from ...ir.errors import MlcError
from ...ir.passes import Runner
from ...ir.text.printer import show
from ...runtime.compile.kernels import kernel_store_of
from ...runtime.counters import counters
from ...runtime.log import logger, say, trace_text
from ...runtime.plain_text import counted
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...scheduler.decisions import DecisionError, DecisionRecord
from ...scheduler.error import ScheduleError
from ...scheduler.fusion.fusion import Fusion
from ...scheduler.regions.choose import REGIONS
from ..aten_passes.context import AtenContext
from ..aten_passes.rounding.numerics import wholly_kept
from ..aten_passes.views.negations import lazy_inputs
from ..caches.surroundings import kernel_settings, surroundings
from ..compiling.compiled import CompiledGraph, LockLines, Stages, told_capture
from ..compiling.graph_host import Hosted, built, loaded, program_of
from ..compiling.graph_kernels import overridden, tuning_for
from ..compiling.job import Job, devices_of
from ..compiling.pass_lists import pass_lists, runner_of
from ..compiling.plans import Plan, plan_of
from ..compiling.tuning import by_default
from ..importing.regions import regions_of, taken_apart
from ..locking.decided import condition_text, decided_programs, planned_text
from ..locking.decided import decided as lines_of_lock
from ..locking.graph_lock import GraphLock, OpenLock
from ..searching.search import GraphSearch
from ..variants.choose import PlannedVariants, planned_variants
from ..variants.dispatch import with_dispatch
from .graph_cache import GraphCache

_LOG = logger(__name__)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    static: Collection[int] = (),
    saved: int | None = None,
    given: Collection[str] = (),
    owned: Collection[str] = (),
    name: str = "main",
    run: Runner | None = None,
    load: bool = True,
    fresh: bool = False,
    region: bool = False,
    decided: tuple[DecisionRecord, ...] = (),
    lock: GraphLock | None = None,
) -> CompiledGraph:
    """Compile an ATen graph of AOTAutograd.

    ``static`` are the positions of parameters among the inputs; results from ``saved`` on go to the backward graph
    alone; ``given`` are inputs that nobody else holds, and ``owned`` those of them that may be written over, which is
    made sure of at each call. ``run`` has run the graph's steps so far. With ``load=False``
    nothing is loaded, so that a target that is not here can be compiled for; with ``fresh=True`` no cache is read or
    written, and ``stages`` is there. A ``region`` is called from another graph, and brings what it is given into the
    layout that it was traced with. ``decided`` is what passes before have decided. ``lock`` is the graph's part of a
    lock file, where settings name one. Raises MemoryLimitError and LockError.
    """
    run = run or runner_of(options, name)
    run(gm, pass_lists().aten, AtenContext(options))
    options = wholly_kept(gm, options)
    regions = _compiled_regions(gm, options, name, load, fresh, lock)
    timer = PhaseTimer()
    opened = None
    if lock is not None and options.lock is not None:
        with timer.phase("lock"):
            opened = lock.open(gm, options, devices_of(gm))
        options = opened.options
    else:
        options = replace(options, lock=None)
    with timer.phase("key"):
        outside = surroundings(options, devices_of(gm))
    job = Job(
        gm, example_inputs, options, frozenset(static), saved, tuple(given), name, load, fresh, region, regions,
        lazy_inputs(gm, region=region), outside, kernel_settings(outside), timer, run,
        kernel_store_of(options, fresh=fresh), locked=opened.ways if opened is not None else None,
        owned=tuple(owned),
    )  # fmt: skip
    if opened is not None:
        opened.names.made_of = job.called_after
    cache = GraphCache.of(job, opened.key if opened is not None else "")
    known = cache.find()
    if known is None:
        with cache.lock():
            known = cache.find() or _locked(job, cache, decided, opened)
    if opened is not None:
        with timer.phase("lock"):
            opened.settle(known.lock, [v.lock for v in known.variants])
    return known


def _locked(job: Job, cache: GraphCache, decided: tuple[DecisionRecord, ...], opened: OpenLock | None) -> CompiledGraph:
    """The graph compiled as a lock file has it, where one is used."""
    try:
        return _compiled(job, cache, decided, opened)
    except MlcError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (DecisionError, ScheduleError)):
            cause = cause.__cause__
        if opened is None or opened.ways is None or cause is None:
            raise
        raise opened.unfollowed(cause) from error


def _compiled_regions(
    gm: fx.GraphModule, options: Options, name: str, load: bool, fresh: bool, lock: GraphLock | None
) -> dict[str, CompiledGraph]:
    """The bodies of a graph's control flow by the nodes that read them, each compiled once."""
    found: dict[int, CompiledGraph] = {}
    reads = {n.name: n for n in gm.graph.find_nodes(op="get_attr")}
    for node, body in regions_of(gm).items():
        if id(body) not in found:
            apart = taken_apart(body)
            found[id(body)] = compile_graph(
                apart, (), options=options, name=f"{name}.{node}", load=load, fresh=fresh, region=True,
                lock=lock.within(reads[node], apart) if lock is not None else None,
            )  # fmt: skip
    return {node: found[id(body)] for node, body in regions_of(gm).items()}


def _compiled(
    job: Job, cache: GraphCache, decided: tuple[DecisionRecord, ...], opened: OpenLock | None
) -> CompiledGraph:
    """Kernels, the host program around them, and the function that runs both; or several, by the sizes that are for
    each."""
    search = GraphSearch.of(job, cache.key, may_measure=job.load or job.fresh)
    with closing(search):
        search.search()
        job = replace(job, decider=search.decider)
        plan = plan_of(job, cache.key)
        parted = planned_variants(job, cache.key, plan, opened)
        if parted is not None:
            made = [
                _made(v.job, v.plan, decided, search, cache.of_variant(k), v.lock)
                for k, v in enumerate(parted.variants)
            ]  # fmt: skip
            return with_dispatch(job, cache, plan, parted, made, _told_programs(job, plan, parted, decided, opened))
        return _made(job, plan, decided, search, cache, opened)


def _made(
    job: Job,
    plan: Plan,
    decided: tuple[DecisionRecord, ...],
    search: GraphSearch,
    cache: GraphCache,
    opened: OpenLock | None,
) -> CompiledGraph:
    """A plan as a program that runs."""
    options = replace(job.options, tune_budget=search.left)
    tuning = tuning_for(
        plan.fusion, options, job.timer, may_measure=job.load or job.fresh, by_rules=plan.by_rules
    )  # fmt: skip
    if not search.uses_schedules(job.decider):
        tuning = by_default(tuning)
    kernels, host = built(job, plan, tuning)
    if not search.race(plan, host, kernels, tuning):
        kernels, host = built(job, plan, by_default(tuning))
    tuning.tell(str(search))
    stages = Stages(
        plan.imported, plan.graph, plan.fusion, kernels, host.program, tuple(job.run.steps),
        (*decided, *(job.decider.records if job.decider is not None else ())), plan.layers,
    )  # fmt: skip
    capture = told_capture(host.capture, job.lines)
    lock = _told_lock(job, stages, opened)
    kept = program_of(job, host, kernels, lock)
    constants = {name: c.value for name, c in plan.imported.constants.items()}
    call = loaded(job, host, kernels, constants, cache.text, capture) if job.load else None
    key = cache.keep(kept)
    _tell(job, host, plan)
    return job.with_named(
        CompiledGraph(
            job.name,
            host.code.told,
            call,
            job.timer,
            stages,
            overridden(kernels),
            key=key,
            kept=kept,
            capture=capture,
            python=with_lines(host.code.python, job.lines),
            lock=lock,
        )
    )


def _told_programs(
    job: Job, plan: Plan, parted: PlannedVariants, decided: tuple[DecisionRecord, ...], opened: OpenLock | None
) -> LockLines:
    """What a lock file says of a graph of several programs, beside what it says of each; nothing without one."""
    if opened is None:
        return ()
    with job.timer.phase("lock"):
        asked = job.decider.records if job.decider is not None else ()
        records = (*decided, *(r for r in asked if r.kind == REGIONS))
        table = plan.imported.symbols
        programs = {
            condition_text(v.region, table): planned_text(v.job.within, table) if v.job.within != v.region else ""
            for v in parted.variants
        }
        return tuple(decided_programs(records, opened.names, programs, opened.settings))


def _told_lock(job: Job, stages: Stages, opened: OpenLock | None) -> LockLines:
    """What a lock file says of a graph; nothing without one."""
    if opened is None:
        return ()
    if opened.is_of_program:  # what was decided before is told of the graph, not of each of its programs
        own = job.decider.records if job.decider is not None else ()
        stages = replace(stages, decisions=tuple(r for r in own if r.kind != REGIONS))
    with job.timer.phase("lock"):
        return tuple(lines_of_lock(stages, opened.names, job.gm, job.saved, opened.settings))


def _tell(job: Job, host: Hosted, plan: Plan) -> None:
    program, text, log, name = host.program, host.code.told.text, job.options.log, job.name
    counters.add("graphs_compiled")
    counters.add("kernel_calls", program.launches)
    counters.add("library_calls", program.library_calls)
    trace_text(f"mlc_host_program_{name}", text)
    _LOG.debug("host program of %s:\n%s", name, text)
    say(log, "output_code", lambda: f"host program of {name}:\n{text}")
    say(log, "timing", lambda: f"{name}: {job.timer}")
    say(log, "cache", lambda: f"{name}: compiled, {counted(program.launches, 'kernel')}")
    nodes = f"{plan.fusion.report.nodes} nodes in " if plan.is_whole else ""
    say(log, "fusion", lambda: f"{name}: {nodes}{counted(program.launches, 'kernel')}{_decisions(plan.fusion)}")


def _decisions(fusion: Fusion) -> str:
    """What became one kernel, and what was refused, as indented lines."""
    functions = (f"\n{show(f).rstrip()}" for f in fusion.functions.values())
    refusals = (f"\n{r.first}, {r.second}: {r.reason} ({r.bytes} bytes)" for r in fusion.report.refusals)
    return "".join((*functions, *refusals)).replace("\n", "\n  ")
