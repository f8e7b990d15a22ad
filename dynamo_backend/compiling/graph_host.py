"""The host program around the kernels of a graph: built, passed over, written, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from ...codegen.host.build import build_host_program
from ...codegen.host.capture import CapturePlan, capture_plan
from ...codegen.host.steps.program import HostProgram
from ...runtime.compile.compilers import Compilers, workers_for
from ...runtime.gpu.capture import GRAPH_DEVICES
from ...runtime.host.executable import Boxed
from ...scheduler.calls.overwrite import taken_inputs
from ..aten_passes.views.negations import with_bits
from .compiled import LockLines, Program, keeper, with_captures
from .graph_kernels import Kernels, called, is_other, loaded_kernels, overridden, start_kernels, uses_of, variables_of
from .host_passes import HOST, HostContext
from .host_programs import CODE, HostCode, host_code
from .job import Job
from .kernels import KernelBuild, KernelPlan
from .pass_lists import pass_lists
from .plans import Plan
from .tuning import Tuning


@dataclass(frozen=True, slots=True)
class Hosted:
    """A host program, its code, and how its launches can be captured."""

    program: HostProgram
    code: HostCode
    capture: CapturePlan
    # Positions of the arguments that the program writes over, for which it has to have them alone.
    taken: tuple[int, ...] = ()


def built(job: Job, plan: Plan, tuning: Tuning) -> tuple[dict[str, KernelBuild], Hosted]:
    """The kernels of a graph, by function, and the host program around them."""
    made_by = KernelPlan(
        job.options, job.settings, job.store, job.timer, tuning, job.run, job.fresh, job.options.lock is not None
    )
    workers = workers_for(len(called(plan.fusion)), job.options.compile_workers)
    with Compilers(beside=tuning.budget is None, workers=workers) as compilers:
        started = start_kernels(plan.fusion, made_by, compilers)
        host = hosted(job, plan, started)
        kernels = {function: kernel.finish() for function, kernel in started.items()}
    if any(is_other(b, started[f]) for f, b in kernels.items()):
        host = hosted(job, plan, kernels)
    return kernels, host


def hosted(job: Job, plan: Plan, kernels: Kernels) -> Hosted:
    """The host program around kernels."""
    options, graph = job.options, plan.fusion.graph
    with job.timer.phase("host"):
        checked = {i.name for i in graph.inputs} if job.region else with_bits(job.gm, job.lazy)
        program = job.run.step(
            HOST, build_host_program, graph, uses_of(kernels), checked=checked, returned=job.saved
        )  # fmt: skip
        context = HostContext(graph, job.given, options.memory_limit)
        lists = pass_lists()
        program = job.run(program, lists.host, context)
        regions = {n: region.capture.reason for n, region in job.regions.items()}
        capture = capture_plan(graph, tuple(GRAPH_DEVICES), saved=job.saved, regions=regions)
        resolved = job.run(program, lists.text, context)
        if options.verify:
            job.run(program, lists.code, context)  # what is written when the program has been called often
        code = job.run.step(CODE, host_code, program, resolved, options, job.store, job.lines)
        return Hosted(program, code, capture, taken_inputs(graph, job.owned))


def loaded(
    job: Job,
    host: Hosted,
    kernels: Mapping[str, KernelBuild],
    constants: Mapping[str, Any],
    key: str,
    capture: CapturePlan,
) -> Boxed:
    """The function that runs the graph; what is made of it later is kept under ``key``, where there is one."""
    with job.timer.phase("load"):
        keep = keeper(job.store, key, job.name) if key else None
        loaded = loaded_kernels(kernels, job.options, job.store)
        call = host.code.load(loaded, job.named(constants), job.name, keep)
        return with_captures(call, capture, job.options, job.region, job.name, job.lazy, host.taken)


def program_of(job: Job, host: Hosted, kernels: Mapping[str, KernelBuild], lock: LockLines = ()) -> Program | None:
    """What is kept of the program, with the lines of a ``lock`` file; None where no other process can run it."""
    if any(b.code is None for b in kernels.values()):
        return None
    variables = variables_of(kernels)
    record = {
        **host.code.record(),
        "kernels": {variables[b.key]: b.key for b in kernels.values()},
        "launches": host.program.launches,
        "library_calls": host.program.library_calls,
        "overridden": overridden(kernels),
        "capture": asdict(host.capture),
        "lazy": [astuple(x) for x in job.lazy],
        "taken": [*host.taken],
        "devices": job.devices,
        **({"lock": [*lock]} if lock else {}),
    }
    return Program(record, tuple(b.code for b in kernels.values() if b.code is not None), host.code)
