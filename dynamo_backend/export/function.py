"""One function of a library: the path of every graph, as far as texts of kernels and the host program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...codegen.export.library import ExportedFunction, TensorSpec
from ...codegen.host.bind_sizes import bind_sizes
from ...codegen.host.build import build_host_program
from ...codegen.host.export.draws import SEEDS
from ...codegen.host.export.emit import ExportedHost, emit_export, plan_export
from ...codegen.host.export.multiply import multiplied
from ...codegen.host.export.pointers import PointersOf, pointers_of
from ...codegen.host.export.results import copied, row_major
from ...codegen.host.steps.kernel_use import Grid, KernelUse
from ...codegen.host.steps.lines import ALL, with_lines
from ...codegen.host.steps.program import HostProgram
from ...ir.errors import MlcError
from ...ir.expr.value import symbol
from ...ir.function.function import Callee
from ...ir.graph.graph import MADE_SIZE, CallTensor, Graph, Input, Library, TensorType, every_node
from ...ir.graph.slices import NOTHING
from ...ir.target import Target
from ...runtime.compile.kernels import kernel_store_of
from ...runtime.frozen.recipe import OpCall
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ...scheduler.fusion.fusion import Fusion
from ..aten_passes.context import AtenContext
from ..aten_passes.frozen.part import part
from ..caches.surroundings import kernel_settings, surroundings
from ..compiling.graph_kernels import called, tuning_for
from ..compiling.host_passes import HOST
from ..compiling.job import Job, devices_of
from ..compiling.kernels import KernelPlan, written, written_for_gpu
from ..compiling.pass_lists import pass_lists, runner_of
from ..compiling.plans import Plan, plan_of
from ..importing.graph_key import graph_key
from ..tracing.fake_device import retarget
from .errors import ExportError, Unsupported, refuse
from .kernels import KernelPool, KernelText
from .program import ModelProgram
from .sizes import SizesOf, guards_of
from .targets import ExportTargets

# Calls that run nothing in a library: they name memory, or sizes.
_PLAIN = NOTHING | {MADE_SIZE, "aten::sym_size.int", SEEDS}


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
    pointers: Mapping[str, PointersOf] = field(default_factory=dict, repr=False)

    def exported(
        self, places: Mapping[str, int], entry: str, scratch: Mapping[str, sympy.Expr]
    ) -> tuple[ExportedFunction, ExportedHost]:
        """The function, printed, where weights lie at ``places``, by the names that the model has for them; ``scratch``
        are bytes that kernels want beside."""
        program = self.program
        weights = {given: places[name] for given, name in program.weights.items() if name in places}
        sizes = [b.symbol for b in self.sizes.bindings]
        try:
            host = emit_export(self.host, entry, inputs=program.inputs, weights=weights, sizes=sizes, scratch=scratch)
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


def build_function(
    program: ModelProgram, options: Options, frozen: Mapping[str, str], pool: KernelPool, targets: ExportTargets
) -> Built:
    """The host program of a program of ``torch.export``, with its kernels in the pool.

    ``frozen`` are the weights, by the names of placeholders, that no function of the model writes to: what is computed
    of these alone is a weight itself. Raises ExportError with everything that a library cannot do.
    """
    gm, name = program.gm, program.name
    device = _placed(program, targets)
    run = runner_of(options, name)
    lists = pass_lists()
    nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    context = AtenContext(options, None, frozen=frozenset(frozen))
    run(gm, (*lists.inference, *lists.part, *lists.frozen), context)
    _fold(program, {nodes[given]: target for given, target in frozen.items()}, context)
    run(gm, lists.aten, context)
    timer, store = PhaseTimer(), kernel_store_of(options, fresh=True)
    outside = surroundings(options, [device])
    places = {n.name: k for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    static = frozenset(places[given] for given in program.weights)
    job = Job(
        gm, (), options, static, None, (), name, False, True, False, {}, (), outside, kernel_settings(outside), timer,
        run, store, tables=not targets.on_gpu,
    )  # fmt: skip
    plan = plan_of(job, graph_key(gm, (), static, outside))
    refuse(name, _refused(plan.fusion, job, options.libraries == "cblas"))
    uses, grids = _kernels(plan, job, pool)
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
    sizes = SizesOf.of(bindings, inputs, program.ranges, made)
    pointers = pointers_of(host, frozenset(program.inputs), grids) if targets.on_gpu else {}
    return Built(program, host, results, graph, sizes, job.lines, pointers)


def _placed(program: ModelProgram, targets: ExportTargets) -> str:
    """The device of a program's tensors, where that is the one of its kernels. One that was exported on the host is
    taken to a GPU: its graph, for weights are written from where they are."""
    devices, name = devices_of(program.gm), program.name
    if not targets.on_gpu:
        if devices and devices != ["cpu"]:
            raise ExportError(
                f"{name} has tensors on {', '.join(devices)}, and the library is for processors: export it on the CPU, "
                "or name a GPU among the targets (cuda:sm_90)"
            )
        return "cpu"
    if len(devices) > 1:
        raise ExportError(
            f"{name} has tensors on {' and '.join(devices)}; those of a library for GPUs are on one device"
        )
    _own_fakes(program)
    retarget([program.gm], "cuda:0")
    return "cuda:0"


def _own_fakes(program: ModelProgram) -> None:
    """Fake tensors of the graph's own: those of the exported program stay where they are."""
    found: dict[int, FakeTensor] = {}

    def own(fake: FakeTensor) -> FakeTensor:
        if id(fake) not in found:
            with fake.fake_mode:
                found[id(fake)] = fake.detach()
        return found[id(fake)]

    for gm in program.gm.modules():
        for node in gm.graph.nodes if isinstance(gm, fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(FakeTensor, own, node.meta["val"])


def _fold(program: ModelProgram, sources: Mapping[Any, str], context: AtenContext) -> None:
    """Let what is computed of weights that do not change be weights."""
    parted = part(program.gm, sources, context.target) if sources else None
    nodes = program.gm.graph.find_nodes(op="placeholder")
    if parted is not None:
        recipe, _ = parted
        recipe = replace(recipe, calls=tuple(_where_weights_are(c, program) for c in recipe.calls))
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


def _where_weights_are(call: OpCall, program: ModelProgram) -> OpCall:
    """A call of a recipe with devices that are those of the weights, wherever the code will run."""
    device = next((t.device for t in program.tensors.values()), torch.device("cpu"))
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: device, (call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs)


def _refused(fusion: Fusion, job: Job, products: bool) -> list[Unsupported]:
    """The calls of libraries that are left; those of ``products`` may be."""
    found, types = [], fusion.graph.types()
    for node, _ in every_node(fusion.graph):
        if isinstance(node, Library) and node.target not in _PLAIN and not copied(node, types):
            if products and multiplied(node, types):
                continue
            origin = node.origins[0] if node.origins else None
            found.append(Unsupported(node.target, origin.source if origin is not None else "", node.reason))
    return found


def _kernels(plan: Plan, job: Job, pool: KernelPool) -> tuple[dict[str, KernelUse], dict[str, Grid]]:
    """How the host program calls each function, by the names of kernels in the pool, as it calls those of a CPU; and
    the grids of kernels that are launched on a GPU."""
    fusion, options = plan.fusion, job.options
    tuning = tuning_for(fusion, options, job.timer, may_measure=False)
    made_by = KernelPlan(options, job.settings, job.store, job.timer, tuning, job.run, fresh=True)
    lines = {n.function: n.origins for n, _ in every_node(fusion.graph) if isinstance(n, CallTensor)}
    uses, grids, refusals = {}, {}, []
    for function in called(fusion):
        what = fusion.functions.get(function) or fusion.given[function]
        try:
            texts = [_text(what, target, made_by, pool.on_gpu) for target in pool.targets]
        except MlcError as error:
            first = lines[function][0] if lines[function] else None
            ops = ", ".join(dict.fromkeys(o.op for o in lines[function])) or function
            refusals.append(Unsupported(ops, first.source if first is not None else "", str(error)))
            continue
        names, source = [s.name for s in what.symbols.symbols], texts[0].source
        assert all(t.source.symbols == source.symbols for t in texts), "kernels of all targets take the same"
        sizes, name = tuple(map(names.index, source.symbols)), pool.enter(texts)
        uses[function] = KernelUse(name, sizes, table=bool(what.table))
        grids[name] = Grid(source.grid, source.symbols, source.reach)
    refuse(job.name, refusals)
    return uses, grids


def _text(function: Callee, target: Target, plan: KernelPlan, on_gpu: bool) -> KernelText:
    if not on_gpu:
        return KernelText(written(function, target, plan))
    text = written_for_gpu(function, target, plan)
    return KernelText(text.source, text)


__all__ = ["Built", "build_function"]
