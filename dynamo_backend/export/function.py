"""One function of a library: the path of every graph, as far as texts of kernels and the host program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...codegen.export.library import ExportedFunction, TensorSpec
from ...codegen.host.bind_sizes import bind_sizes
from ...codegen.host.build import build_host_program
from ...codegen.host.export.emit import ExportedHost, emit_export, plan_export
from ...codegen.host.export.results import copied, row_major
from ...codegen.host.steps.lines import ALL, with_lines
from ...codegen.host.steps.program import HostProgram
from ...codegen.kernel import KernelSource
from ...ir.errors import MlcError
from ...ir.expr.value import symbol
from ...ir.graph.graph import MADE_SIZE, CallTensor, Graph, Input, Library, TensorType, every_node
from ...ir.graph.slices import NOTHING
from ...ir.target import Target
from ...runtime.compile.kernels import kernel_store_of, source_use
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...scheduler.fusion.fusion import Fusion
from ..aten_passes.context import AtenContext
from ..aten_passes.frozen.part import part
from ..caches.surroundings import kernel_settings, surroundings
from ..compiling.graph_kernels import called, tuning_for
from ..compiling.host_passes import HOST
from ..compiling.job import Job, devices_of
from ..compiling.kernels import KernelPlan, written
from ..compiling.pass_lists import pass_lists, runner_of
from ..compiling.plans import Plan, plan_of
from ..importing.graph_key import graph_key
from .errors import ExportError, Unsupported, refuse
from .program import ModelProgram
from .sizes import SizesOf, guards_of

# Calls that run nothing in a library: they name memory, or sizes.
_PLAIN = NOTHING | {MADE_SIZE, "aten::sym_size.int"}


@dataclass(slots=True)
class KernelPool:
    """The kernels of a model, each once, under names that differ; of each the texts for all ``targets``."""

    targets: tuple[Target, ...]
    sources: dict[str, tuple[KernelSource, ...]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def enter(self, sources: Sequence[KernelSource]) -> str:
        """The name under which the pool has a kernel, of its texts for the targets."""
        source, plain = sources[0], "\n".join(_renamed(s.text, s.name, "") for s in sources)
        if plain not in self._names:
            name = next(
                n for k in range(len(self.sources) + 1) if (n := source.name + f"_{k}" * (k > 0)) not in self.sources
            )
            self.sources[name] = tuple(replace(s, name=name, text=_renamed(s.text, s.name, name)) for s in sources)
            self._names[plain] = name
        return self._names[plain]


def _renamed(text: str, name: str, to: str) -> str:
    # Functions of its own are called after it: @relu.main, @relu.0.member.
    return re.sub(rf"@{re.escape(name)}(?!\w)", f"@{to}", text.replace(f"; {name} for ", f"; {to} for ", 1))


@dataclass(frozen=True, slots=True)
class Built:
    """A function before it is printed: weights have no places yet. ``weights`` gives the model's names of the graph's
    inputs that are weights."""

    program: ModelProgram
    host: HostProgram
    types: tuple[TensorType, ...]
    graph: Graph
    sizes: SizesOf
    lines: Any = field(repr=False)

    def exported(self, places: Mapping[str, int], entry: str) -> tuple[ExportedFunction, ExportedHost]:
        """The function, printed, where weights lie at ``places``, by the names that the model has for them."""
        program = self.program
        weights = {given: places[name] for given, name in program.weights.items() if name in places}
        sizes = [b.symbol for b in self.sizes.bindings]
        try:
            host = emit_export(self.host, entry, inputs=program.inputs, weights=weights, sizes=sizes)
        except MlcError as error:
            raise ExportError(f"{program.name} cannot be exported: {error}") from error
        host = replace(host, launches=tuple(with_lines(line, self.lines, ALL) for line in host.launches))
        kinds = {i.name: i.type for i in self.graph.inputs if isinstance(i, Input)}
        seen = self.sizes.seen
        inputs = tuple(
            TensorSpec(n, kinds[n].dtype, seen(kinds[n].shape), seen(kinds[n].strides)) for n in program.inputs
        )
        results = tuple(
            TensorSpec(n, t.dtype, seen(t.shape), seen(row_major(t.shape)))
            for n, t in zip(program.results, self.types, strict=True)
        )
        (arena,) = seen((host.arena,))
        return ExportedFunction(
            program.name, inputs, results, self.sizes.symbols, self.sizes.ranges,
            guards_of(program.conditions, self.sizes), arena, entry, host.text,
        ), host  # fmt: skip


def build_function(program: ModelProgram, options: Options, frozen: Mapping[str, str], pool: KernelPool) -> Built:
    """The host program of a program of ``torch.export``, with its kernels in the pool.

    ``frozen`` are the weights, by the names of placeholders, that no function of the model writes to: what is computed
    of these alone is a weight itself. Raises ExportError with everything that a library cannot do.
    """
    gm, name = program.gm, program.name
    if (devices := devices_of(gm)) and devices != ["cpu"]:
        raise ExportError(f"{name} has tensors on {', '.join(devices)}; libraries are for CPUs: export it on the CPU")
    run = runner_of(options, name)
    lists = pass_lists()
    nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    context = AtenContext(options, None, frozen=frozenset(frozen))
    run(gm, (*lists.inference, *lists.part, *lists.frozen), context)
    _fold(program, {nodes[given]: target for given, target in frozen.items()}, context)
    run(gm, lists.aten, context)
    timer, store = PhaseTimer(), kernel_store_of(options, fresh=True)
    outside = surroundings(options, ["cpu"])
    places = {n.name: k for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    static = frozenset(places[given] for given in program.weights)
    job = Job(
        gm, (), options, static, None, (), name, False, True, False, {}, (), outside, kernel_settings(outside), timer,
        run, store,
    )  # fmt: skip
    plan = plan_of(job, graph_key(gm, (), static, outside))
    refuse(name, _refused(plan.fusion, job))
    uses = _kernels(plan, job, pool)
    graph = plan.fusion.graph
    types = graph.types()
    results = tuple(types[str(o)] for o in graph.outputs)
    host = run.step(HOST, build_host_program, graph, uses)
    try:
        host = plan_export(host, types, results)
    except MlcError as error:
        raise ExportError(f"{name} cannot be exported: {error}") from error
    bindings, lost = bind_sizes(graph)
    wanted = {
        s
        for i in graph.inputs
        if isinstance(i, Input)
        for e in (*i.type.shape, *i.type.strides)
        for s in e.free_symbols
    }
    if missing := lost & wanted:
        told = ", ".join(sorted(s.name for s in missing))
        raise ExportError(f"{name}: no dimension of an input tells the size {told}")
    inputs = {n: k for k, n in enumerate(program.inputs)}
    made = {symbol(n.names[0]): n.args[0] for n in graph.nodes if isinstance(n, Library) and n.target == MADE_SIZE}
    return Built(program, host, results, graph, SizesOf.of(bindings, inputs, program.ranges, made), job.lines)


def _fold(program: ModelProgram, sources: Mapping[Any, str], context: AtenContext) -> None:
    """Let what is computed of weights that do not change be weights."""
    parted = part(program.gm, sources, context.target) if sources else None
    nodes = program.gm.graph.find_nodes(op="placeholder")
    if parted is not None:
        recipe, _ = parted
        made = [n for n in nodes if n.name not in program.weights and n.name not in program.inputs]
        values = recipe.values([program.tensors[name] for name in recipe.names])
        for node, value in zip(made, values, strict=True):
            name = f"{program.name}.{node.name}"
            program.weights[node.name], program.tensors[name] = name, value
    for node in nodes:
        if node.name in program.weights and not node.users:
            del program.weights[node.name]
            program.gm.graph.erase_node(node)
    program.gm.recompile()


def _refused(fusion: Fusion, job: Job) -> list[Unsupported]:
    """The calls of libraries that are left."""
    found, types = [], fusion.graph.types()
    for node, _ in every_node(fusion.graph):
        if isinstance(node, Library) and node.target not in _PLAIN and not copied(node, types):
            origin = node.origins[0] if node.origins else None
            found.append(Unsupported(node.target, origin.source if origin is not None else "", node.reason))
    return found


def _kernels(plan: Plan, job: Job, pool: KernelPool) -> dict[str, Any]:
    """How the host program calls each function, by the names of kernels in the pool."""
    fusion, options = plan.fusion, job.options
    tuning = tuning_for(fusion, options, job.timer, may_measure=False)
    made_by = KernelPlan(options, job.settings, job.store, job.timer, tuning, job.run, fresh=True)
    lines = {n.function: n.origins for n, _ in every_node(fusion.graph) if isinstance(n, CallTensor)}
    uses, refusals = {}, []
    for function in called(fusion):
        what = fusion.functions.get(function) or fusion.given[function]
        try:
            sources = [written(what, target, made_by) for target in pool.targets]
        except MlcError as error:
            first = lines[function][0] if lines[function] else None
            ops = ", ".join(dict.fromkeys(o.op for o in lines[function])) or function
            refusals.append(Unsupported(ops, first.source if first is not None else "", str(error)))
            continue
        names, source = [s.name for s in what.symbols.symbols], sources[0]
        assert all(s.symbols == source.symbols for s in sources), "kernels of all targets take the same"
        sizes = tuple(map(names.index, source.symbols))
        uses[function] = source_use(source, pool.enter(sources), sizes, table=what.table)
    refuse(job.name, refusals)
    return uses


__all__ = ["Built", "KernelPool", "build_function"]
