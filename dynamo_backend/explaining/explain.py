"""``torch_mlc.explain``: compile a model as torch.compile does, and tell what became of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy

from ...codegen.host.memory.liveness import peaks_of, storages
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.write_out_loops import write_out_loops
from ...ir.graph.facts import places_of
from ...ir.graph.graph import CallTensor, Graph, Library, Origin
from ...ir.graph.regions import write_out_regions
from ...ir.graph.slices import NOTHING
from ...ir.target import Target, first_gpu
from ...runtime.compile.kernels import gpu_binary
from ...runtime.settings.options import OptionError, Options
from ...runtime.targets import named_target
from ...runtime.triton.compile import resource_report
from ...runtime.tuning.progress import trials_table
from ...scheduler.fusion.fusion import Fusion
from ...scheduler.numerics import NumericsByPlace, nearest
from ..compiling.compiled import CompiledGraph, Stages
from ..compiling.kernels import KernelBuild
from ..entry.backend import settings_of
from ..reports.flow import flow_of
from ..reports.graph_traffic import GraphTraffic, graph_traffic
from ..reports.library_time import library_seconds
from ..reports.model_report import Report
from ..reports.report import GraphReport, KernelReport, LibraryReport, MissedFusion, VariantReport
from ..reports.traffic import traffic_by
from ..variants.dispatch import shared_kernels
from .compiled_model import asked_of
from .compiled_run import run_and_compile


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    training: bool = False,
    dynamic: bool | None = None,
    target: str | None = None,
) -> Report:
    """Compile ``model`` for a call ``model(*inputs, **kwargs)`` and report every kernel, library call, fallback, missed
    fusion and graph break.

    ``mode``, ``options`` and ``dynamic`` are those of torch.compile; of what it has compiled for this backend already,
    they are the ones that it was given, unless they are given here. What is reported is what runs: the programs that
    such a call compiles. With ``options={"tune": 1}`` kernels are tuned, as they would be. No other cache is used.
    With ``training`` the backward of the sum of the outputs is compiled as well. ``target`` ("cuda:sm_90",
    "hip:gfx942") compiles for a GPU that need not be here, as if model and inputs were on it.

    The model runs once, by torch's ops. Buffers, arguments, gradients and random states are afterwards as they were,
    and so is what torch.compile has made of the model: nothing is compiled again. What the model's Python changes
    otherwise (a list that it appends to) stays changed.
    Raises: OptionError for settings that do not exist.
    """
    asked = asked_of(model)
    if mode is not None and options:
        raise OptionError(
            "torch.compile takes mode or options, and so does explain; "
            'mode="max-autotune" is options={"tune": 1}, mode="reduce-overhead" is options={"cuda_graphs": 1}'
        )
    if mode is None and options is None:
        mode, options = asked.mode, asked.options
    settings = settings_of(mode, options)
    if target is not None:
        settings = replace(settings, target=Options.resolve(None, {"target": target}, {}).target)
    settings = replace(settings, strict=False)
    begin = time.perf_counter()
    made = run_and_compile(
        asked.call, inputs, kwargs or {}, settings, asked.dynamic if dynamic is None else dynamic, training
    )
    captured = time.perf_counter() - begin - sum(c.timer.total for c in made.graphs)
    schedules = settings.schedules.items if settings.schedules is not None else ()
    compiled = [g for c in made.graphs for g in _with_regions(c)]
    taken = {name for c in compiled for name in c.overridden}
    unmatched = tuple(str(o) for o in schedules if str(o) not in taken)
    if isinstance(settings.numerics, NumericsByPlace):
        unused = settings.numerics.unused(made.places)
        near = [nearest(name, made.places).strip() for name in unused]
        unmatched += tuple(
            f"the entry {name!r} of numerics{f' ({told})' if told else ''}"
            for name, told in zip(unused, near, strict=True)
        )
    elsewhere = named_target(settings.gpu) if settings.gpu is not None else None
    return Report(tuple(report_of(c, elsewhere) for c in compiled), unmatched, max(captured, 0.0), made.breaks)


def _with_regions(compiled: CompiledGraph) -> list[CompiledGraph]:
    """A graph, then the bodies of its control flow and of theirs."""
    return [compiled, *(g for r in compiled.regions for g in _with_regions(r))]


def report_of(compiled: CompiledGraph, target: Target | None = None) -> GraphReport:
    """The report of a graph that was compiled with ``fresh=True``. ``target`` is the GPU of library calls, where that
    is not the one of the graph's kernels."""
    stages = compiled.stages
    assert stages is not None, "a graph from the cache has no stages to report"
    # Of layers that became a loop, every call is told of.
    fusion = replace(stages.fusion, graph=write_out_regions(stages.fusion.graph))
    stages = replace(stages, fusion=fusion)
    targets = dict.fromkeys(str(b.target) for b in stages.kernels.values())
    gpu = first_gpu(b.target for b in stages.kernels.values()) or target
    kernels, peaks = _kernels(stages), _peaks(stages.program)
    variants = tuple(VariantReport(v.condition, report_of(v.compiled, target), v.is_typical) for v in stages.variants)
    peaks = (*peaks, *(v.graph.peak_bytes for v in variants))
    traffic = graph_traffic(stages.fusion.graph, stages.fusion.functions, {k.name: k.traffic for k in kernels})
    kernels = tuple(replace(k, rows=traffic.rows[k.name]) if k.name in traffic.rows else k for k in kernels)
    return GraphReport(
        compiled.name,
        ", ".join(targets) or "cpu",
        kernels,
        _libraries(stages.fusion.graph, traffic, gpu),
        _missed(stages.fusion, stages.graph),
        sympy.Max(*peaks) if peaks else sympy.S.Zero,
        max((stages.graph.symbols.hint(p) for p in peaks), default=0),
        compiled.timer.seconds,
        traffic,
        compiled.text.text,
        compiled.python,
        stages.steps,
        compiled.recipe.results if compiled.recipe is not None else (),
        flow_of(stages.fusion.graph, stages.program),
        stages.decisions,
        variants,
        stages.proof,
        shared_kernels(stages.variants),
        _kept(stages.imported),
    )


def _kept(graph: Graph) -> tuple[str, ...]:
    """What keeps eager's numerics where others do not, each place once."""
    origins = (o for n in graph.nodes for o in getattr(n, "origins", ()) if o.keeps)
    told = (f"{', '.join(o.keeps)} of {o.op}{f' at {o.source}' if o.source else ''}" for o in origins)
    return tuple(dict.fromkeys(told))


def _peaks(program: HostProgram) -> tuple[sympy.Expr, ...]:
    """What a program holds at most; of one with steps that repeat, what it does where they are written out."""
    written = write_out_loops(program)
    return program.peaks if written is program else tuple(peaks_of(storages(written)))


def _kernels(stages: Stages) -> tuple[KernelReport, ...]:
    calls = [n for n in stages.fusion.graph.nodes if isinstance(n, CallTensor)]
    origins: dict[str, list[Origin]] = {}
    for call in calls:
        origins.setdefault(call.function, []).extend(call.origins)
    runs = Counter(call.function for call in calls)
    return tuple(_kernel(name, b, runs[name], origins[name]) for name, b in stages.kernels.items())


def _kernel(name: str, build: KernelBuild, calls: int, origins: list[Origin]) -> KernelReport:
    schedule, source, code = build.schedule, build.source, build.code
    binary = gpu_binary(code) if code is not None and code.language == "triton" else None
    resources = resource_report(binary) if binary is not None else None
    return KernelReport(
        name,
        calls,
        schedule.rule if schedule is not None else "",
        tuple(dict.fromkeys(o.op for o in origins)),
        _lines(origins),
        traffic_by(schedule.nest, build.target.machine, resources) if schedule is not None else None,
        source.language if source is not None else "",
        source.text if source is not None else "",
        build.definition,
        build.nest,
        schedule.nest if schedule is not None else None,
        schedule.trace if schedule is not None else None,
        build.error,
        tuple(dict.fromkeys(f"{o.op}: {o.note}" for o in origins if o.note)),
        build.target,
        resources,
        source,
        binary,
        str(build.choice) if build.choice is not None else "",
        tuple(trials_table(build.choice.outcome)) if build.choice is not None and build.choice.outcome else (),
    )


def _lines(origins: Iterable[Origin]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o.source for o in origins if o.source))


def _libraries(graph: Graph, traffic: GraphTraffic, target: Target | None) -> tuple[LibraryReport, ...]:
    found: dict[tuple[str, str], list[tuple[Library, int]]] = {}
    nodes = [n for n in graph.nodes if isinstance(n, Library) and n.target not in NOTHING]
    for n, moved in zip(nodes, traffic.calls, strict=True):
        found.setdefault((n.target, n.reason), []).append((n, moved))
    return tuple(
        LibraryReport(
            op, len(calls), reason, _lines(o for n, _ in calls for o in n.origins), sum(b for _, b in calls),
            sum(library_seconds(n, graph, b, target) for n, b in calls) if target is not None else None,
        )
        for (op, reason), calls in found.items()
    )  # fmt: skip


def _missed(fusion: Fusion, graph: Graph) -> tuple[MissedFusion, ...]:
    """What fusion refused, those that share the most bytes first; only what ended up in different kernels."""
    homes = places_of(fusion.graph)
    found: dict[tuple[str, str], MissedFusion] = {}
    for r in fusion.report.refusals:
        together = r.first in homes and r.second in homes and homes[r.first] == homes[r.second]
        if r.bytes and not together:
            found.setdefault((r.first, r.second), MissedFusion(r.first, r.second, r.reason, r.bytes))
    return tuple(found.values())
