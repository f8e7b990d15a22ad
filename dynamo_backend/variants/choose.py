"""Into which programs a graph with a symbolic size is parted: it is planned for a few regions, and predicted times of
the plans say which are worth it, and where one takes over from the other.

A plan compiles nothing. Nor does anything here ask torch about a size, so that no guard comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import sympy
from torch._ops import HigherOrderOperator

from ...codegen.host.bind_sizes import bind_sizes
from ...codegen.host.steps.step import BindSize
from ...ir.expr.size_regions import ANYWHERE, SizeRegion, Tree, regions_of
from ...ir.expr.symbols import Size, SymbolTable
from ...ir.graph.graph import TensorType
from ...ir.text.structure import structural_key
from ...runtime.log import logger
from ...runtime.settings.values import ValueRefused, parse_regions
from ...scheduler.cost.regions import FEW, is_short, least_saved
from ...scheduler.decisions import Alternative, Decider, text_key
from ...scheduler.regions.choose import ONE, REGIONS, Cuts, cuts_of, grouped, tree_of
from ...scheduler.regions.proof import Proof, RegionError, prove
from ..compiling.job import Job
from ..compiling.pass_lists import context_of, runner_of
from ..compiling.plans import Plan, plan_of
from ..importing.graph_key import GraphKey
from ..locking.graph_lock import OpenLock
from ..locking.lock_text import LockError
from .times import PlanTimes

_LOG = logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedVariant:
    """One program of a graph that is to be: for which sizes, its plan, and its section of a lock file."""

    region: SizeRegion
    job: Job
    plan: Plan
    lock: OpenLock | None = None


@dataclass(frozen=True, slots=True)
class PlannedVariants:
    """The programs of a graph, one for each leaf of ``tree``; ``bound`` says where the sizes are read that its
    conditions speak of."""

    tree: Tree
    proof: Proof
    bound: tuple[BindSize, ...]
    variants: tuple[PlannedVariant, ...]


def planned_variants(
    job: Job, key: GraphKey | None, plan: Plan, lock: OpenLock | None = None
) -> PlannedVariants | None:
    """The programs of a graph with some ``plan`` for all sizes; None where that one is enough. ``lock`` is the graph's
    section of a lock file. Raises LockError."""
    if job.options.regions == 0 or not _may_part(job, plan, lock):
        return None
    planner = _Planner(job, key, plan, lock)
    given = planner.sizes()
    if not given:
        return None
    size, bind = planner.leading(given)
    cuts = job.options.regions
    try:
        if isinstance(cuts, Cuts):
            chosen = planner.by_hand(size, cuts)
        else:
            chosen = planner.by_cost(size)
        if chosen is None:
            return None
        tree, variants = chosen
        regions = regions_of(tree)
        proof = prove(regions, SymbolTable((size,)))
    except RegionError as error:
        _LOG.warning("%s has one program for all sizes: %s", job.name, error)
        return None
    for variant in variants:
        if why := differs_outside(plan, variant):
            _LOG.warning("%s has one program for all sizes: for %s %s", job.name, variant.region.text, why)
            return None
    return PlannedVariants(tree, proof, (bind,), variants)


def _may_part(job: Job, plan: Plan, lock: OpenLock | None) -> bool:
    """Whether one graph may become several programs. What is called from another graph is parted with that, a limit of
    memory is about the sizes at hand, and what is tuned is one program. So is what calls higher-order ops, whose bodies
    are traced for the sizes of the call."""
    options = lock.asked if lock is not None else job.options
    if options.memory_limit is not None or options.tune or options.schedules is not None:
        return False
    if job.region or job.regions or any(isinstance(n.target, HigherOrderOperator) for n in job.gm.graph.nodes):
        return False
    return bool(plan.imported.symbols.sizes)


@dataclass(slots=True)
class _Planner:
    job: Job
    key: GraphKey | None
    plan: Plan
    lock: OpenLock | None

    def sizes(self) -> list[tuple[Size, BindSize]]:
        """The sizes of tensors that an argument tells as they are."""
        graph = self.plan.imported
        used = {s for t in graph.types().values() for e in (*t.shape, *t.strides) for s in e.free_symbols}
        known = {s.symbol: s for s in graph.symbols.sizes}
        bound, _ = bind_sizes(self.plan.fusion.graph)
        return [(known[b.symbol], b) for b in bound if b.symbol in used and b.symbol in known]

    def leading(self, given: list[tuple[Size, BindSize]]) -> tuple[Size, BindSize]:
        """The size that the time of the graph depends on most."""
        if len(given) == 1:
            return given[0]
        times = PlanTimes(self.job, self.plan)
        typical = {s.symbol: s.hint or 64 for s, _ in given}

        def weight(size: Size) -> float:
            here = typical[size.symbol]
            more, less = (times.at({**typical, size.symbol: n}) for n in (8 * here, max(here // 8, 1)))
            return more / less if isfinite(more) and less else 0.0

        return max(given, key=lambda g: weight(g[0]))

    def by_hand(
        self, size: Size, cuts: Cuts, others: Sequence[SizeRegion] = ()
    ) -> tuple[Tree, tuple[PlannedVariant, ...]] | None:
        """The regions that somebody asked for, as far as there are such sizes."""
        tree = tree_of(size, cuts)
        regions = regions_of(tree)
        if len(regions) == 1:
            return None
        return tree, tuple(self.variant(r, k, others) for k, r in enumerate(regions))

    def by_cost(self, size: Size) -> tuple[Tree, tuple[PlannedVariant, ...]] | None:
        """The regions that are worth a program each, unless somebody decided otherwise."""
        if (text := self.locked()) is not None:
            return self.as_locked(size, text)
        whole = PlanTimes(self.job, self.plan)
        cuts = Cuts()
        regions = regions_of(tree_of(size, cuts))
        typical = [r.narrowed(size).hint or 1 for r in regions]
        machine = whole.machine
        worth = [not is_short(whole.at({size.symbol: n}), machine) for n in typical]
        if len(regions) == 1 or not any(worth):
            return None
        home = _region_of_hint(size, regions)
        times = [self.times(region, k) if k != home and worth[k] else whole for k, region in enumerate(regions)]

        def time_at(number: int, value: int) -> float:
            only = regions[number].value_of(size)
            if only is not None and times[number] is not whole and value != only:
                return inf
            return times[number].at({size.symbol: value})

        groups = grouped(typical, time_at, least_saved(machine), home)
        found = cuts_of(size, cuts, groups, typical, time_at, least_saved(machine))
        seconds = [sum(time_at(g.home, typical[k]) for g in groups for k in range(g.first, g.end))]
        one = sum(whole.at({size.symbol: n}) for n in typical)
        ways = [Alternative(ONE, one)] + ([Alternative(str(found), seconds[0])] if len(groups) > 1 else [])
        if self.decide(ways, f"at {size.symbol} = {', '.join(map(str, typical))}") == ONE:
            return None
        tree = tree_of(size, found)
        final = regions_of(tree)
        if len(final) != len(groups):
            return None
        return tree, tuple(self.kept(size, g.home, regions, times, r, k) for k, (g, r) in enumerate(zip(groups, final)))

    def locked(self) -> str | None:
        """The way of a lock file that is used."""
        ways = self.lock.ways if self.lock is not None else None
        return ways.way(REGIONS, self.plan.imported.name, "") if ways is not None else None

    def as_locked(self, size: Size, text: str) -> tuple[Tree, tuple[PlannedVariant, ...]] | None:
        """The regions that a lock file has. Raises LockError."""
        assert self.lock is not None and self.lock.ways is not None
        self.decide([Alternative(ONE)] + ([Alternative(text)] if text != ONE else []), "")
        if text == ONE:
            return None
        try:
            cuts = parse_regions(text)
        except ValueRefused:
            cuts = None
        others = (ANYWHERE, *regions_of(tree_of(size, Cuts())))
        found = self.by_hand(size, cuts, others) if isinstance(cuts, Cuts) else None
        if found is None:
            where = self.lock.ways.told(self.plan.imported.name)
            raise LockError(
                f"{where} has {REGIONS} {text!r}, which parts no sizes of {size.symbol}: write the file again"
            )
        return found

    def decide(self, ways: list[Alternative], reason: str) -> str:
        """Which of several ways to take; the last is that of costs."""
        return context_of(self.job.options, decider=self.job.decider).decide(
            REGIONS, lambda: text_key((structural_key(self.plan.imported),)), ways, ways[-1].name,
            at=self.plan.imported.name, reason=reason,
        )  # fmt: skip

    def kept(
        self,
        size: Size,
        home: int,
        regions: tuple[SizeRegion, ...],
        times: list[PlanTimes],
        region: SizeRegion,
        number: int,
    ) -> PlannedVariant:
        """The variant for a region: planned already, unless its sizes are others now."""
        found = times[home]
        if found.plan is self.plan or regions[home].value_of(size) == region.value_of(size):
            return PlannedVariant(region, found.job, found.plan, self.lock_of(region))
        return self.variant(region, number)

    def times(self, region: SizeRegion, number: int) -> PlanTimes:
        variant = self.variant(region, number)
        return PlanTimes(variant.job, variant.plan)

    def variant(self, region: SizeRegion, number: int, others: Sequence[SizeRegion] = ()) -> PlannedVariant:
        """The plan for a region; that for one of some ``others``, where a lock file that is used has it so."""
        job = self.job
        name = f"{job.name}_sizes{number}"
        asked = job.decider
        lock = self.lock_of(region)
        ways, options = (lock.ways, lock.options) if lock is not None else (None, job.options)
        own = Decider(asked.by_hand, asked.measured, asked.recorded, ways) if asked is not None else None
        within = self.lock.planned_for(region, others, self.plan.imported.symbols) if self.lock else region
        run = runner_of(options, name)
        job = replace(job, within=within, name=name, run=run, decider=own, options=options, locked=ways)
        return PlannedVariant(region, job, plan_of(job, self.key), lock)

    def lock_of(self, region: SizeRegion) -> OpenLock | None:
        """The section of a lock file for a region. Raises LockError."""
        return self.lock.of_program(region, self.plan.imported.symbols) if self.lock is not None else None


def _region_of_hint(size: Size, regions: Iterable[SizeRegion]) -> int | None:
    """The region in which the size is now, where the plan for all sizes is as good there as one of its own: not where
    the size is small for sure, which products go by."""
    for k, region in enumerate(regions):
        if size.hint is not None and region.holds({size.symbol: size.hint}):
            known = region.narrowed(size)
            alike = region.value_of(size) is None and (known.upper is None or known.upper >= FEW)
            return k if alike and known.hint == size.hint else None
    return None


def differs_outside(plan: Plan, variant: PlannedVariant) -> str:
    """What callers would see of a variant otherwise than of the plan for all sizes; "" where nothing is: types, strides
    and aliases of results, the inputs, and which of them are written."""
    whole, own = plan.fusion.graph, variant.plan.fusion.graph
    fixed = _fixed(whole.symbols, variant.region)
    if len(whole.outputs) != len(own.outputs):
        return f"it has {len(own.outputs)} results instead of {len(whole.outputs)}"
    if [i.name for i in whole.inputs] != [i.name for i in own.inputs]:
        return "it has other inputs"
    types, others = whole.types(), own.types()
    for k, (a, b) in enumerate(zip(whole.outputs, own.outputs, strict=True)):
        one, other = types.get(str(a)), others.get(str(b))
        if (one is None) != (other is None) or (one is not None and other is not None and _differ(one, other, fixed)):
            return f"result {k} is {_told(other)} instead of {_told(one)}"
    return ""


def _fixed(table: SymbolTable, region: SizeRegion) -> dict[sympy.Basic, sympy.Basic]:
    values = {s.symbol: region.value_of(s) for s in table.sizes}
    return {s: sympy.Integer(v) for s, v in values.items() if v is not None}


def _differ(one: TensorType, other: TensorType, fixed: dict[sympy.Basic, sympy.Basic]) -> bool:
    def sizes(kind: TensorType) -> list[sympy.Basic]:
        return [e.xreplace(fixed) for e in (*kind.shape, *kind.strides)]

    return (one.dtype, one.device) != (other.dtype, other.device) or sizes(one) != sizes(other)


def _told(kind: TensorType | None) -> str:
    if kind is None:
        return "no tensor"
    return f"{kind.dtype.value}[{', '.join(map(str, kind.shape))}] with strides {', '.join(map(str, kind.strides))}"
