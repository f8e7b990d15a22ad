"""One ATen graph to one function: the path of the design, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, TypeAlias

from torch import fx

from ...codegen.host.build import build_host_program
from ...codegen.host.capture import CapturePlan, capture_plan
from ...codegen.host.python.text import HostText
from ...codegen.host.steps.kernel_use import KernelUse
from ...codegen.host.steps.lines import Lines, with_lines
from ...codegen.host.steps.program import HostProgram
from ...codegen.kernel import KernelSource
from ...ir.graph.graph import CallTensor
from ...ir.passes import Runner
from ...ir.text.printer import show
from ...runtime.cache.fingerprint import key_of
from ...runtime.compile.compilers import Compilers, workers_for
from ...runtime.compile.fallback import AtenKernel
from ...runtime.compile.kernels import KIND_GRAPH, KernelStore, LoadedKernel, kernel_store_of, kernel_use, source_use
from ...runtime.counters import counters
from ...runtime.gpu.capture import GRAPH_DEVICES
from ...runtime.gpu.checks import launches_checked
from ...runtime.host.executable import Boxed
from ...runtime.host.lazy_bits import Lazy
from ...runtime.log import logger, say, trace_text
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...runtime.timing import PhaseTimer
from ...scheduler.fusion.fusion import Fusion
from ..aten_passes.context import AtenContext
from ..aten_passes.views.negations import lazy_inputs, with_bits
from ..caches.aot_key import shape_env
from ..caches.surroundings import kernel_settings, surroundings
from ..compiling.compiled import CompiledGraph, Program, Stages, keeper, stored_graph, told_capture, with_captures
from ..compiling.dumps import dump_graph
from ..compiling.host_passes import HOST_PASSES, HostContext, run_host_passes
from ..compiling.host_programs import HostCode, host_code
from ..compiling.kernels import KernelBuild, KernelPlan, StartedKernel, start_kernel
from ..compiling.pass_lists import pass_lists, runner_of
from ..compiling.plans import Plan, PlanSource
from ..compiling.tuning import Tuning, tuning_costs, tuning_of
from ..importing.graph_key import GraphKey, graph_key
from ..importing.regions import attribute, regions_of, taken_apart
from ..repeats.repeating import NotAlike
from ..repeats.roll import roll
from ..tracing.origins import lines_of

_LOG = logger(__name__)
# Kernels by the function that they are the code of.
_Kernels: TypeAlias = Mapping[str, KernelBuild] | Mapping[str, StartedKernel]


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options,
    static: Collection[int] = (),
    saved: int | None = None,
    given: Collection[str] = (),
    name: str = "main",
    run: Runner | None = None,
    load: bool = True,
    fresh: bool = False,
    repeats: bool = False,
    region: bool = False,
) -> CompiledGraph:
    """Compile an ATen graph of AOTAutograd.

    ``static`` are the positions of parameters among the inputs; results from ``saved`` on go to the backward graph
    alone; ``given`` are inputs that nobody else holds. With ``load=False`` nothing is loaded, so that a target that is
    not here can be compiled for; with ``fresh=True`` no cache is read or written and ``stages`` is there. Layers that
    repeat are then planned one by one, unless ``repeats`` asks for the very program that is run: ``stages`` are of the
    whole graph all the same.
    A ``region`` is called from another graph, and brings what it is given into the layout that it was traced with.
    Raises MemoryLimitError.
    """
    timer = PhaseTimer()
    run = run or runner_of(options, name)
    store = kernel_store_of(options, fresh=fresh)
    run(gm, pass_lists().aten, AtenContext(options))
    bodies: dict[int, CompiledGraph] = {}
    for node, body in regions_of(gm).items():
        if id(body) not in bodies:
            bodies[id(body)] = compile_graph(
                taken_apart(body), (), options=options, name=f"{name}.{node}", load=load, fresh=fresh,
                repeats=repeats, region=True,
            )  # fmt: skip
    regions = {node: bodies[id(body)] for node, body in regions_of(gm).items()}
    lazy = lazy_inputs(gm, region=region)
    with timer.phase("key"):
        outside = surroundings(options, _devices(gm))
    job = _Job(
        gm, example_inputs, options, frozenset(static), saved, tuple(given), name, load, fresh, repeats, region,
        regions, lazy, timer, run, store, kernel_settings(outside),
    )  # fmt: skip
    with timer.phase("key"):
        kind = "region" if region else f"whole, results saved from {saved}"
        places = enumerate(gm.graph.find_nodes(op="placeholder"))
        held = " ".join(str(k) for k, n in places if n.name in given)
        around = {
            **outside, "kind of graph": kind, "inputs that nobody else holds": held,
            "inputs that may come with bits": repr(lazy),  # gradients, and a backward may be as an inference graph is
            **({} if options.memory_limit is None else {"what a limit tells of": _model_text(gm)}),
        }  # fmt: skip
        key = graph_key(gm, example_inputs, static, around) if job.has_key else None
    stored = job.stored(key)
    if stored is not None:
        return stored
    counters.add("graph_cache_misses")
    say(options.log, "cache", lambda: f"{name}: {_why_missed(None if fresh else key, store)}")
    with store.lock(KIND_GRAPH, key.text if key is not None else "none"):
        return job.stored(key) or job.compile(key)


@dataclass(frozen=True, slots=True)
class _Job:
    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    options: Options
    static: frozenset[int]
    saved: int | None
    given: tuple[str, ...]
    name: str
    load: bool
    fresh: bool
    repeats: bool
    region: bool
    regions: Mapping[str, CompiledGraph]
    lazy: tuple[Lazy, ...]
    timer: PhaseTimer
    run: Runner
    store: KernelStore
    # What the code of each kernel depends on.
    settings: str

    @property
    def lines(self) -> Lines:
        """The lines of the model."""
        return lines_of(self.gm)

    @property
    def has_key(self) -> bool:
        """Whether all that decides the graph's code is known before it is compiled, and asked for."""
        schedules = self.options.schedules
        return (self.repeats or not self.fresh) and (schedules is None or schedules.content is not None)

    def compile(self, key: GraphKey | None) -> CompiledGraph:
        """The graph by the first of its plans that holds."""
        for plan in self.plans(key):
            try:
                made = self.compiled(plan, key)
            except NotAlike:
                say(self.options.log, "fusion", lambda: f"{self.name}: its layers cannot be a loop")
                continue
            if self.fresh and made.stages is None:
                (whole,) = self.plans(None)
                made = replace(made, stages=replace(self, load=False).compiled(whole, None).stages)
            return made
        raise AssertionError("the plan of the whole graph always holds")

    def plans(self, key: GraphKey | None) -> Iterator[Plan]:
        source = PlanSource(
            self.gm, self.example_inputs, self.options, self.static, self.given, self.name, self.timer, self.run
        )  # fmt: skip
        # A loop has one place in memory for all layers, and tells nobody of each.
        loops = not (self.options.tune or self.options.memory_limit is not None or self.region)
        return source.plans(key, loops)

    def compiled(self, plan: Plan, key: GraphKey | None) -> CompiledGraph:
        """Raises NotAlike where the program does not repeat as the plan says."""
        options, fusion = self.options, plan.fusion
        tuning = self.tuning(fusion)
        workers = workers_for(len(_called(fusion)), options.compile_workers)
        with Compilers(beside=tuning.budget is None, workers=workers) as compilers:
            started = self.start_kernels(fusion, tuning, compilers)
            hosted = self.hosted(plan, started)
            kernels = {function: kernel.finish() for function, kernel in started.items()}
        if any(_is_other(b, started[f]) for f, b in kernels.items()):
            hosted = self.hosted(plan, kernels)
        program, host, capture = hosted
        text = host.told
        stages = Stages(plan.imported, plan.graph, fusion, kernels, program) if plan.is_whole else None
        if options.dump_dir is not None:
            dump_graph(kernels, text, self.run)
        kept = self.program(kernels, program, host, capture)
        capture = told_capture(capture, self.lines)
        given = self.constants(plan.imported.constants)
        call = self.loaded(kernels, host, text, given, capture, key) if self.load else None
        stays = self.keep(key, kept)
        self.tell(program, text, plan)
        return self.with_named(
            CompiledGraph(
                self.name,
                text,
                call,
                self.timer,
                stages,
                _overridden(kernels),
                key=stays,
                kept=kept,
                capture=capture,
                python=with_lines(host.python, self.lines),
            )
        )

    def with_named(self, compiled: CompiledGraph) -> CompiledGraph:
        """The graph with the objects and bodies that it may name."""
        bodies = tuple({id(r): r for r in self.regions.values()}.values())
        return replace(compiled, regions=bodies, constants={**_constants(self.gm), **self.regions})

    def constants(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What library calls name: objects of the module, and bodies of control flow as functions."""
        return {**given, **{name: region.call for name, region in self.regions.items()}}

    def start_kernels(self, fusion: Fusion, tuning: Tuning, compilers: Compilers) -> dict[str, StartedKernel]:
        """The code of every function that the graph calls, found or begun."""
        plan = KernelPlan(self.options, self.settings, self.store, self.timer, tuning, self.fresh)
        found: dict[str, StartedKernel] = {}
        for node in fusion.graph.nodes:
            if isinstance(node, CallTensor) and node.function not in found:
                target = target_for(node.types[0].device, self.options.target, self.options.threads)
                function = fusion.functions[node.function]
                found[node.function] = start_kernel(function, target, plan, node.origins, compilers)
            elif isinstance(node, CallTensor):
                counters.add("kernels_shared")
        return found

    def hosted(self, plan: Plan, kernels: _Kernels) -> tuple[HostProgram, HostCode, CapturePlan]:
        """The host program around kernels, its code, and how its launches can be captured. Raises NotAlike."""
        graph = plan.fusion.graph
        with self.timer.phase("host"):
            variables = _variables(kernels)
            code = {f: _use(b, variables[b.key]) for f, b in kernels.items()}
            checked = {i.name for i in graph.inputs} if self.region else with_bits(self.gm, self.lazy)
            program = build_host_program(graph, code, checked=checked, returned=self.saved)
            if plan.few is not None:
                program = roll(program, plan.few)
                graph = replace(graph, inputs=plan.few.inputs)
            context = HostContext(graph, self.options.memory_limit, self.given, self.options.verify > 0)
            program = run_host_passes(HOST_PASSES, program, context)
            regions = {n: region.capture.reason for n, region in self.regions.items()}
            capture = capture_plan(graph, tuple(GRAPH_DEVICES), saved=self.saved, regions=regions)
            if plan.few is not None and capture.written:
                raise NotAlike  # what the layers that were left out write to would be missing
            host = host_code(program, self.options, self.store).of_model(self.lines)
            return program, host, capture

    def tuning(self, fusion: Fusion) -> Tuning:
        calls = _called(fusion)
        costs = tuning_costs({name: fusion.functions[name] for name in calls}, calls)
        return tuning_of(self.options, self.timer, costs, may_measure=self.load or self.fresh)

    def loaded(
        self,
        kernels: Mapping[str, KernelBuild],
        host: HostCode,
        told: HostText,
        constants: Mapping[str, Any],
        capture: CapturePlan,
        key: GraphKey | None,
    ) -> Boxed:
        with self.timer.phase("load"):
            variables = _variables(kernels)
            code = {variables[b.key]: self.loaded_kernel(b) for b in kernels.values()}
            keep = keeper(self.store, key.text, self.name) if key is not None and not self.fresh else None
            call = host.load(code, constants, self.name, keep, told)
            return with_captures(call, capture, self.options, self.region, self.name, self.lazy)

    def loaded_kernel(self, build: KernelBuild) -> LoadedKernel:
        if build.code is None:
            return LoadedKernel(AtenKernel(build.function), None, build.function.name)
        return self.store.load(build.code, checked=launches_checked(self.options.verify))

    # --- the cache --------------------------------------------------------------------------------------------------

    def stored(self, key: GraphKey | None) -> CompiledGraph | None:
        """The graph from memory or disk, with nothing imported, fused, lowered, scheduled or emitted."""
        if key is None or self.options.tune or self.fresh or self.options.shows_stages:
            return None
        given = self.constants(_constants(self.gm))
        found = stored_graph(
            key.text, options=self.options, name=self.name, constants=given, load=self.load, region=self.region,
            timer=self.timer, lines=self.lines,
        )  # fmt: skip
        return self.with_named(found) if found is not None else None

    def program(
        self, kernels: Mapping[str, KernelBuild], program: HostProgram, host: HostCode, capture: CapturePlan
    ) -> Program | None:
        """What is kept of the program; None where no other process can run it."""
        if any(b.code is None for b in kernels.values()):
            return None
        variables = _variables(kernels)
        record = {
            **host.record(),
            "kernels": {variables[b.key]: b.key for b in kernels.values()},
            "launches": program.launches,
            "library_calls": program.library_calls,
            "overridden": _overridden(kernels),
            "capture": asdict(capture),
            "lazy": [astuple(x) for x in self.lazy],
            "devices": _devices(self.gm),
        }
        return Program(record, tuple(b.code for b in kernels.values() if b.code is not None), host)

    def keep(self, key: GraphKey | None, kept: Program | None) -> str:
        """Put the program into the cache; its key, "" where it cannot be found again."""
        if key is None or kept is None or self.fresh:
            return ""
        with self.timer.phase("cache"):
            record = {**kept.record, "parts": dict(key.parts)}
            self.store.keep_graph(key.text, record, f"{self.name}: {kept.record['launches']} kernels")
        return key.text

    def tell(self, program: HostProgram, text: HostText, plan: Plan) -> None:
        counters.add("graphs_compiled")
        counters.add("kernel_calls", program.launches)
        counters.add("library_calls", program.library_calls)
        trace_text(f"mlc_host_program_{self.name}", text.text)
        _LOG.debug("host program of %s:\n%s", self.name, text.text)
        say(self.options.log, "output_code", lambda: f"host program of {self.name}:\n{text.text}")
        log = self.options.log
        say(log, "timing", lambda: f"{self.name}: {self.timer}")
        say(log, "cache", lambda: f"{self.name}: compiled, {program.launches} kernels")
        nodes = f"{plan.fusion.report.nodes} nodes in " if plan.is_whole else ""
        say(log, "fusion", lambda: f"{self.name}: {nodes}{program.launches} kernels{_decisions(plan.fusion)}")


def _decisions(fusion: Fusion) -> str:
    """What became one kernel, and what was refused, as indented lines."""
    functions = (f"\n{show(f).rstrip()}" for f in fusion.functions.values())
    refusals = (f"\n{r.first}, {r.second}: {r.reason} ({r.bytes} bytes)" for r in fusion.report.refusals)
    return "".join((*functions, *refusals)).replace("\n", "\n  ")


def _called(fusion: Fusion) -> Counter[str]:
    """How often each function is called."""
    return Counter(n.function for n in fusion.graph.nodes if isinstance(n, CallTensor))


def _devices(gm: fx.GraphModule) -> list[str]:
    """The devices of a graph's tensors that code is made for."""
    values = (n.meta.get("val") for n in gm.graph.nodes if n.op in ("placeholder", "call_function"))
    found = {str(v.device) for v in values if hasattr(v, "device")}
    return sorted(d for d in found if d.startswith(("cpu", "cuda")))


def _model_text(gm: fx.GraphModule) -> str:
    """The model's lines and sizes, which the message about a limit of memory has."""
    lines = lines_of(gm)
    told = [lines(k) for k in range(len(gm.graph.nodes))]
    env = shape_env()
    hints = getattr(env, "backed_var_to_val", None) or {}
    return key_of([*told, repr(sorted((str(s), str(v)) for s, v in hints.items()))])


def _why_missed(key: GraphKey | None, store: KernelStore) -> str:
    """What is told of a graph that no cache has: how it differs from the entry that is closest to it."""
    if key is None:
        return "not looked for in the cache"
    closest: tuple[str, ...] | None = None
    for record in store.graphs():
        differing = key.differing(record.get("parts", {}))
        if closest is None or len(differing) < len(closest):
            closest = differing
    if closest is None:
        return "not in the cache, which has no graph"
    if not closest:
        return "in the cache but not to be used: kernels of it are gone, or it is written anew"
    return f"not in the cache; the closest entry differs in {', '.join(closest)}"


def _overridden(kernels: Mapping[str, KernelBuild]) -> tuple[str, ...]:
    return tuple(str(b.override) for b in kernels.values() if b.override is not None)


def _variables(kernels: _Kernels) -> dict[str, str]:
    """The variable of each distinct kernel in the host program."""
    return {key: f"k{n}_" for n, key in enumerate(dict.fromkeys(b.key for b in kernels.values()))}


def _use(kernel: KernelBuild | StartedKernel, variable: str) -> KernelUse:
    names, table = [s.name for s in kernel.function.symbols.symbols], kernel.function.table
    match kernel:
        case StartedKernel(build=None, source=KernelSource() as source):
            return source_use(source, variable, tuple(names.index(s) for s in source.symbols), table=table)
        case StartedKernel(build=KernelBuild(code=code)) | KernelBuild(code=code):
            if code is not None:
                return kernel_use(code, variable, tuple(names.index(s) for s in code.symbols), table=table)
    return KernelUse(variable, tuple(range(len(names))), by_pointer=False, table=table)


def _is_other(build: KernelBuild, started: StartedKernel) -> bool:
    """Whether a kernel became something else than what was begun: ATen ops, or code with other tiles."""
    return started.build is None and (build.code is None or build.source is not started.source)


def _constants(gm: fx.GraphModule) -> dict[str, Any]:
    """The module's own tensors and sub-graphs, by the name of the node that reads them."""
    found: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            found[node.name] = attribute(gm, str(node.target))
    return found
