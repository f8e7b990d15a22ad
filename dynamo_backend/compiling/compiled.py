"""A graph that was compiled: what it is made of, what is kept of it, and how it is loaded again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ...codegen.host.capture import CapturePlan
from ...codegen.host.python.dispatch import variable
from ...codegen.host.python.text import HostText
from ...codegen.host.steps.lines import Lines, places_in, with_lines
from ...codegen.host.steps.program import HostProgram
from ...ir.graph.graph import Graph
from ...ir.passes import StepRecord
from ...runtime.compile.kernels import KernelCode, KernelStore, kernel_store_of
from ...runtime.counters import counters
from ...runtime.frozen.kept import FrozenProgram
from ...runtime.frozen.recipe import Recipe
from ...runtime.gpu.capture import graph_device
from ...runtime.gpu.checks import launches_checked
from ...runtime.host.cuda_graphs import graphed
from ...runtime.host.executable import Boxed, load_program
from ...runtime.host.lazy_bits import Lazy, with_memory_of
from ...runtime.host.own_memory import with_own_memory
from ...runtime.log import say, trace_text
from ...runtime.plain_text import counted
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...scheduler.decisions import DecisionRecord
from ...scheduler.fusion.fusion import Fusion
from ..repeats.layers import Layers
from .host_programs import HostCode, Keep, stored_host_code
from .kernels import KernelBuild

# Lines of a graph's section of a lock file.
LockLines: TypeAlias = tuple[str, ...]
# Where the record of a program in front of several has their names and keys, by their numbers.
VARIANTS = "variants"


@dataclass(frozen=True, slots=True)
class Variant:
    """One program of a graph that has several: for the sizes that are as ``condition`` says; whether typical sizes are
    among them."""

    condition: str
    compiled: CompiledGraph
    is_typical: bool = False


@dataclass(frozen=True, slots=True)
class Stages:
    """Every stage of a graph that was compiled here: what reports are made of.

    Of layers that repeat, ``imported`` and ``graph`` have a few; ``fusion`` calls the kernels of all. ``steps`` are the
    record: what was done, in order; ``decisions`` what costs or others decided, where that was asked for. ``layers``
    says what a few layers stand for.

    A graph with ``variants`` runs one of those by its sizes, as ``proof`` says exactly one. Then ``imported`` and
    ``graph`` are those for all sizes, and ``fusion``, ``kernels`` and ``program`` those of the typical variant.
    """

    imported: Graph
    graph: Graph
    fusion: Fusion
    kernels: Mapping[str, KernelBuild]
    program: HostProgram
    steps: tuple[StepRecord, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    layers: Layers | None = None
    variants: tuple[Variant, ...] = ()
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """What the cache keeps of a graph: its record, plain JSON, and the code of its kernels; ``variants`` are the
    programs that it calls by its sizes, each with a key of its own."""

    record: Mapping[str, Any] = field(repr=False)
    kernels: tuple[KernelCode, ...] = field(repr=False)
    host: HostCode = field(repr=False)
    variants: tuple[Program, ...] = field(default=(), repr=False)

    @property
    def places(self) -> set[int]:
        """The nodes of the graph whose lines its texts name."""
        if self.variants:
            return set().union(*(v.places for v in self.variants))
        native = self.record.get("native")
        texts = [self.record, *([native["parts"], native["rescues"]] if native else [])]
        launches = native["launches"] if native else ()
        return places_in((*(t["text"] for t in texts), *launches, self.record["capture"]["reason"]))

    def finished(self) -> Program:
        """With machine code of the host program, where it is to have that once it is called often."""
        if self.variants:
            return replace(self, variants=tuple(v.finished() for v in self.variants))
        host = self.host.finished()
        return Program({**self.record, **host.record()}, self.kernels, host)

    @property
    def codes(self) -> tuple[KernelCode, ...]:
        """All machine code, each once."""
        codes = (c for c in (*self.kernels, self.host.code, self.host.support) if c is not None)
        return tuple({c.key: c for c in codes}.values())


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """``call`` runs the graph (boxed); None where it was compiled for a machine that is not this one.

    ``stages`` is None where the program came from the cache, and where layers became a loop that nobody asked about.
    ``overridden`` names the user's schedules that were taken. ``variants`` are the programs that it calls by its sizes.
    ``regions`` are the bodies of its control flow, each compiled by itself; ``constants`` are the objects and the
    bodies that its calls may name.
    ``key`` is that of the program in the cache, "" where it is not there. ``kept`` is all that another process needs to
    run it; None where ATen ops run in place of a kernel. ``capture`` tells how its launches can be
    captured, ``python`` what of a host program that was to be native is not, and why. ``recipe`` makes the last inputs
    of ``call``, which do not change between calls. ``lock`` are the lines of its section of a lock file, where one is
    asked for.
    """

    name: str
    text: HostText
    call: Boxed | None
    timer: PhaseTimer
    stages: Stages | None = field(default=None, repr=False)
    overridden: tuple[str, ...] = ()
    regions: tuple[CompiledGraph, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict, repr=False)
    key: str = ""
    kept: Program | None = field(default=None, repr=False)
    capture: CapturePlan = CapturePlan("it was not looked at")
    python: str = ""
    recipe: Recipe | None = field(default=None, repr=False)
    variants: tuple[CompiledGraph, ...] = field(default=(), repr=False)
    lock: LockLines = field(default=(), repr=False)

    @property
    def is_self_contained(self) -> bool:
        """Whether the program can be loaded without the graph that it was compiled from."""
        return bool(self.key) and not self.text.constants and all(v.is_self_contained for v in self.variants)


def stored_graph(
    key: str,
    *,
    options: Options,
    name: str,
    constants: Mapping[str, Any] | None = None,
    load: bool = True,
    region: bool = False,
    timer: PhaseTimer | None = None,
    store: KernelStore | None = None,
    lines: Lines,
) -> CompiledGraph | None:
    """The graph of a key from memory or disk, or a ``store``, with nothing imported, fused, lowered, scheduled or
    emitted. ``lines`` are those of the model at hand."""
    timer = timer or PhaseTimer()
    store = store or kernel_store_of(options)
    with timer.phase("cache"):
        record = store.graph(key)
        if record is None:
            return None
        if VARIANTS in record:
            return _stored_variants(
                record, key, options=options, name=name, constants=constants, load=load, timer=timer, store=store,
                lines=lines,
            )  # fmt: skip
        codes = {variable: store.code(kernel) for variable, kernel in record["kernels"].items()}
        host = stored_host_code(record, options, store, lines)
    if host is None or any(code is None for code in codes.values()):
        return None
    told = host.told
    call, capture = None, told_capture(CapturePlan(**record["capture"]), lines)
    if load:
        with timer.phase("load"):
            how = {"checked": launches_checked(options.verify), "early": options.early_launches}
            kernels = {v: store.load(c, **how) for v, c in codes.items() if c is not None}
            called = host.load(kernels, constants or {}, name, keeper(store, key, name))
            lazy = tuple(Lazy(*x) for x in record["lazy"])
            call = with_captures(called, capture, options, region, name, lazy, record["taken"])
    counters.add("graph_cache_hits")
    counters.add("kernel_calls", record["launches"])
    counters.add("library_calls", record["library_calls"])
    trace_text(f"mlc_host_program_{name}", told.text)
    say(options.log, "cache", lambda: f"{name}: program of {counted(record['launches'], 'kernel')} found")
    say(options.log, "timing", lambda: f"{name}: {timer}")
    taken, kept = tuple(record["overridden"]), Program(record, tuple(c for c in codes.values() if c is not None), host)
    return CompiledGraph(
        name, told, call, timer, overridden=taken, key=key, kept=kept, capture=capture, lock=_lock_of(record)
    )


def _stored_variants(
    record: Mapping[str, Any], key: str, *, name: str, load: bool, timer: PhaseTimer, **how: Any
) -> CompiledGraph | None:
    """The program in front of several, with all of these; None where one of them is gone."""
    variants = tuple(stored_graph(k, name=n, load=load, timer=timer, **how) for n, k in record[VARIANTS])
    if not all(variants):
        return None
    return dispatching(name, record, tuple(v for v in variants if v is not None), key=key, load=load, timer=timer)


def dispatching(
    name: str,
    record: Mapping[str, Any],
    variants: tuple[CompiledGraph, ...],
    *,
    key: str,
    load: bool,
    timer: PhaseTimer,
    stages: Stages | None = None,
) -> CompiledGraph:
    """The program that calls one of some ``variants`` by the sizes that it is given, out of its ``record``."""
    text = HostText(record["text"], {}, {})
    calls = {variable(k): v.call for k, v in enumerate(variants)}
    call = load_program(text, {n: c for n, c in calls.items() if c is not None}, {}, name) if load else None
    parts = tuple(v.kept for v in variants if v.kept is not None)
    kept = Program(record, (), HostCode(text), parts) if len(parts) == len(variants) else None
    # What it tells of itself is what all of them tell.
    told = HostText("\n".join([text.text, *(v.text.text for v in variants)]), {}, {})
    python = "; ".join(dict.fromkeys(v.python for v in variants if v.python))
    taken = tuple(dict.fromkeys(o for v in variants for o in v.overridden))
    return CompiledGraph(
        name, told, call, timer, stages, taken, key=key, kept=kept, capture=variants[-1].capture, python=python,
        variants=variants, lock=_lock_of(record),
    )  # fmt: skip


def _lock_of(record: Mapping[str, Any]) -> LockLines:
    return tuple(map(str, record.get("lock", ())))


def with_values(call: Boxed, recipe: Recipe | None, name: str) -> Boxed:
    """The program as it is called from outside: what does not change between calls is given to it here."""
    return call if recipe is None else FrozenProgram(call, recipe, name)


def told_capture(plan: CapturePlan, lines: Lines) -> CapturePlan:
    """With the lines of the model at hand in its reason."""
    return replace(plan, reason=with_lines(plan.reason, lines))


def keeper(store: KernelStore, key: str, name: str) -> Keep:
    """What puts a host program in its new form into the record of its graph."""
    return lambda host: store.amend_graph(key, host.record(), f"{name}: native host program")


def with_captures(
    call: Boxed, plan: CapturePlan, options: Options, region: bool, name: str, lazy: Sequence[Lazy],
    taken: Collection[int],
) -> Boxed:  # fmt: skip
    """The program as the settings ask for it, which is given what it was traced with, and has the arguments that are
    ``taken`` for itself. A region is captured with the graph that calls it."""
    if options.cuda_graphs and not region:
        if launches_checked(options.verify) and plan.device.startswith("cuda"):
            plan = CapturePlan("each launch is waited for (MLC_VERIFY, CUDA_LAUNCH_BLOCKING)")
        elif not options.cuda_graph_copies:
            plan = replace(plan, saved=0)
        call = graphed(call, plan, graph_device, options.cuda_graph_shapes, name)
    return with_own_memory(with_memory_of(call, lazy), taken)
