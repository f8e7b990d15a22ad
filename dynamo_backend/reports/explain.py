"""``torch_mlc.explain``: compile a model and tell what became of it, without running the result."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...codegen.host import HostProgram
from ...ir.graph import CallTensor, Graph, Library, Origin
from ...ir.slices import NOTHING
from ...runtime.gpu import resource_report
from ...runtime.kernels import gpu_binary
from ...runtime.options import Options
from ...scheduler.fuse import Fusion
from ..capture import capture
from ..compile import compile_graph
from ..compiled import CompiledGraph, Stages
from ..fake_device import on_fake_device, retarget
from ..kernels import KernelBuild
from ..partition import saved_inputs
from ..rewrites.merge_products import merge_products
from .graph_traffic import GraphTraffic, graph_traffic
from .report import GraphReport, KernelReport, LibraryReport, MissedFusion, Report
from .traffic import traffic_of


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    training: bool = False,
    dynamic: bool | None = False,
    target: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Report:
    """Compile ``model`` for ``inputs`` and report every kernel, library call, fallback and missed fusion.

    The model runs once, by eager ops, to be traced. With ``training`` the backward of the sum of its outputs is
    compiled as well; ``dynamic`` is that of torch.compile. ``target`` ("cuda:sm_90", "hip:gfx942") compiles for a GPU
    that need not be here, as if model and inputs were on it. ``options`` are those of torch.compile. No cache is used.
    """
    settings = Options.resolve(None, options, os.environ)
    if target is not None:
        settings = replace(settings, target=Options.resolve(None, {"target": target}, {}).target)
    settings = replace(settings, strict=False)
    begin = time.perf_counter()
    graphs = _graphs(model, inputs, dynamic, training, settings)
    captured = time.perf_counter() - begin
    for gm in graphs if settings.numerics != "eager" else ():
        merge_products(gm)
    names = _names(len(graphs), training)
    given = [saved_inputs(gm) if training and k % 2 else () for k, gm in enumerate(graphs)]
    compiled = [
        compile_graph(gm, (), options=settings, name=name, load=False, fresh=True, given=saved)
        for gm, name, saved in zip(graphs, names, given)
    ]
    schedules = settings.schedules.items if settings.schedules is not None else ()
    compiled = [g for c in compiled for g in _with_regions(c)]
    taken = {name for c in compiled for name in c.overridden}
    return Report(tuple(map(report_of, compiled)), tuple(str(o) for o in schedules if str(o) not in taken), captured)


def _with_regions(compiled: CompiledGraph) -> list[CompiledGraph]:
    """A graph, then the bodies of its control flow and of theirs."""
    return [compiled, *(g for r in compiled.regions for g in _with_regions(r))]


def _graphs(
    model: Callable[..., Any], inputs: Sequence[Any], dynamic: bool | None, training: bool, settings: Options
) -> list[fx.GraphModule]:
    """The ATen graphs of a model, on the GPU that the target names where it names one and nothing is on a GPU yet."""
    target = settings.target
    elsewhere = target not in (None, "cpu") and not any(isinstance(t, torch.Tensor) and t.is_cuda for t in inputs)
    if elsewhere and not training and isinstance(model, torch.nn.Module):
        model, inputs = on_fake_device(model, inputs, "cuda")
    graphs = capture(model, inputs, dynamic=dynamic, training=training, options=settings)
    if elsewhere:
        # Autograd's engine cannot run the backward of fakes on a device that torch was not built for.
        retarget(graphs, "cuda")
    return graphs


def _names(count: int, training: bool) -> list[str]:
    if not training:
        return [f"graph {k}" if count > 1 else "graph" for k in range(count)]
    return [f"{'forward' if k % 2 == 0 else 'backward'}{f' {k // 2}' if count > 2 else ''}" for k in range(count)]


def report_of(compiled: CompiledGraph) -> GraphReport:
    """The report of a graph that was compiled with ``fresh=True``."""
    stages = compiled.stages
    assert stages is not None, "a graph from the cache has no stages to report"
    targets = dict.fromkeys(str(b.target) for b in stages.kernels.values())
    kernels = _kernels(stages)
    traffic = graph_traffic(stages.fusion.graph, stages.fusion.functions, {k.name: k.traffic for k in kernels})
    return GraphReport(
        compiled.name,
        ", ".join(targets) or "cpu",
        kernels,
        _libraries(stages.fusion.graph, traffic),
        _missed(stages.fusion, stages.graph),
        stages.program.peak_bytes,
        _typical_peak(stages.program, stages.graph),
        compiled.timer.seconds,
        traffic,
        compiled.text.text,
        compiled.python,
    )


def _typical_peak(program: HostProgram, graph: Graph) -> int:
    return max((graph.symbols.hint(p) for p in program.peaks), default=0)


def _kernels(stages: Stages) -> tuple[KernelReport, ...]:
    calls = [n for n in stages.fusion.graph.nodes if isinstance(n, CallTensor)]
    origins: dict[str, list[Origin]] = {}
    for call in calls:
        origins.setdefault(call.function, []).extend(call.origins)
    runs = Counter(call.function for call in calls)
    return tuple(_kernel(name, b, runs[name], origins[name]) for name, b in stages.kernels.items())


def _kernel(name: str, build: KernelBuild, calls: int, origins: list[Origin]) -> KernelReport:
    schedule, source, code = build.schedule, build.source, build.code
    return KernelReport(
        name,
        calls,
        schedule.rule if schedule is not None else "",
        tuple(dict.fromkeys(o.op for o in origins)),
        _lines(origins),
        traffic_of(schedule.nest) if schedule is not None else None,
        source.language if source is not None else "",
        source.text if source is not None else "",
        build.function,
        build.nest,
        schedule.nest if schedule is not None else None,
        schedule.trace if schedule is not None else None,
        build.error,
        tuple(dict.fromkeys(f"{o.op}: {o.note}" for o in origins if o.note)),
        build.target,
        resource_report(gpu_binary(code)) if code is not None and code.language == "triton" else None,
    )


def _lines(origins: Iterable[Origin]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o.source for o in origins if o.source))


def _libraries(graph: Graph, traffic: GraphTraffic) -> tuple[LibraryReport, ...]:
    found: dict[tuple[str, str], list[tuple[Library, int]]] = {}
    nodes = [n for n in graph.nodes if isinstance(n, Library) and n.target not in NOTHING]
    for n, moved in zip(nodes, traffic.calls, strict=True):
        found.setdefault((n.target, n.reason), []).append((n, moved))
    return tuple(
        LibraryReport(op, len(calls), reason, _lines(o for n, _ in calls for o in n.origins), sum(b for _, b in calls))
        for (op, reason), calls in found.items()
    )


def _missed(fusion: Fusion, graph: Graph) -> tuple[MissedFusion, ...]:
    """What fusion refused, those that share the most bytes first; only what ended up in different kernels."""
    homes = {name: k for k, node in enumerate(fusion.graph.nodes) for name in node.names}
    found: dict[tuple[str, str], MissedFusion] = {}
    for r in fusion.report.refusals:
        together = r.first in homes and r.second in homes and homes[r.first] == homes[r.second]
        if r.bytes and not together:
            found.setdefault((r.first, r.second), MissedFusion(r.first, r.second, r.reason, r.bytes))
    return tuple(found.values())
