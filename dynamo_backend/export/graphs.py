"""Graphs of an exported function as planned host programs, with their kernels in a pool: the function's own, and the
bodies of its control flow, which become functions inside of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator

from ...codegen.host.bind_sizes import bind_sizes
from ...codegen.host.build import build_host_program
from ...codegen.host.export.control import COND, WHILE, InnerFunction
from ...codegen.host.export.draws import SEEDS
from ...codegen.host.export.emit import plan_export
from ...codegen.host.export.multiply import multiplied
from ...codegen.host.export.results import copied
from ...codegen.host.steps.kernel_use import Grid, KernelUse
from ...codegen.host.steps.lines import Lines
from ...codegen.host.steps.program import HostProgram
from ...codegen.host.steps.step import BindSize
from ...ir.errors import MlcError
from ...ir.expr.value import symbol
from ...ir.function.function import Callee
from ...ir.graph.graph import MADE_SIZE, CallTensor, Graph, Input, Library, TensorType, every_node
from ...ir.graph.slices import NOTHING
from ...ir.passes import Runner
from ...ir.target import Target
from ...runtime.compile.kernels import kernel_store_of
from ...runtime.settings.options import Options
from ...runtime.timing import PhaseTimer
from ..aten_passes.context import AtenContext
from ..caches.surroundings import kernel_settings
from ..compiling.graph_kernels import called, tuning_for
from ..compiling.host_passes import HOST
from ..compiling.job import Job
from ..compiling.kernels import KernelPlan, written, written_for_gpu
from ..compiling.pass_lists import pass_lists, runner_of
from ..compiling.plans import Plan, plan_of
from ..importing.graph_key import graph_key
from ..importing.regions import regions_of, taken_apart
from ..tracing.origins import origins_of
from .decompositions import export_decompositions
from .errors import ExportError, Unsupported
from .kernels import KernelPool, KernelText

# Calls that run nothing in a library: they name memory, or sizes.
_PLAIN = NOTHING | {MADE_SIZE, "aten::sym_size.int", SEEDS}
# Control flow that a library has no steps for.
_OTHERS = ("hop::while_loop_stack_output", "hop::scan", "hop::invoke_subgraph")
_INTO_OTHERS = "write it with torch.cond or while_loop, or as a loop of Python's, which torch.export unrolls"
_ON_GPU = (
    "what is taken is decided on the GPU, and the host of a library reads nothing back",
    "compute both and choose by torch.where, or export it for processors",
)
_NUMBERS = (
    "a body gives a number, and those of a library give tensors",
    "let it carry or return a tensor (torch.tensor(n), or x.new_full((), n))",
)


@dataclass(frozen=True, slots=True)
class PlannedBody:
    """A graph with its host program planned, the types of its ``results``, off which inputs its sizes are read
    (``bindings``), and what others are that it ``made`` of them."""

    graph: Graph
    host: HostProgram
    results: tuple[TensorType, ...]
    bindings: tuple[BindSize, ...]
    made: Mapping[sympy.Symbol, sympy.Expr]
    grids: Mapping[str, Grid]
    lines: Lines = field(repr=False)


@dataclass(slots=True)
class GraphMaker:
    """What the graphs of one function have in common. ``outside`` decides their code besides themselves; ``refusals``
    gathers what a library cannot do in any of them."""

    options: Options
    pool: KernelPool
    outside: Mapping[str, str]
    refusals: list[Unsupported] = field(default_factory=list)

    def planned(
        self,
        gm: fx.GraphModule,
        name: str,
        static: frozenset[int],
        run: Runner,
        carries: int | None = None,
    ) -> PlannedBody | None:
        """A graph after the passes over ATen graphs; None where it has something that is refused.

        A body of control flow has a number that it ``carries``: so many results lie as the first inputs do, which they
        become. All others are row-major. Raises ExportError for what has no place in a host program.
        """
        bodies = self.bodies(gm, name)
        timer, store = PhaseTimer(), kernel_store_of(self.options, fresh=True)
        job = Job(
            gm, (), self.options, static, None, (), name, False, True, carries is not None, {}, (), self.outside,
            kernel_settings(self.outside), timer, run, store, tables=not self.pool.on_gpu,
        )  # fmt: skip
        plan = plan_of(job, graph_key(gm, (), static, self.outside))
        graph = plan.fusion.graph
        types = graph.types()
        self.refuse_calls(graph, types)
        if self.refusals:
            return None
        uses, grids = self.kernels(plan, job)
        if self.refusals:
            return None
        results = tuple(types[str(o)] for o in graph.outputs)
        inputs = [i for i in graph.inputs if isinstance(i, Input)]
        strides = [i.type.strides for i in inputs[:carries]] if carries else None
        found = {n: b for n, b in bodies.items() if b is not None}
        try:
            host = plan_export(run.step(HOST, build_host_program, graph, uses), types, results, found, strides)
        except MlcError as error:
            raise ExportError(f"{name} cannot be exported: {error}") from error
        bindings, lost = bind_sizes(graph)
        wanted = {s for i in inputs for e in (*i.type.shape, *i.type.strides) for s in e.free_symbols}
        if missing := lost & wanted:
            told = ", ".join(sorted(s.name for s in missing))
            raise ExportError(f"{name}: no dimension of an input tells the size {told}")
        made = {symbol(n.names[0]): n.args[0] for n in graph.nodes if isinstance(n, Library) and n.target == MADE_SIZE}
        return PlannedBody(graph, host, results, tuple(bindings), made, grids, job.lines)

    # --- control flow -------------------------------------------------------------------------------------------------

    def bodies(self, gm: fx.GraphModule, name: str) -> dict[str, InnerFunction | None]:
        """What branches and loops call, by the nodes that read it; None for what is refused."""
        if self.pool.on_gpu:
            return {}
        found: dict[str, InnerFunction | None] = {}
        reads = {n.name: n for n in gm.graph.find_nodes(op="get_attr")}
        for node, body in regions_of(gm).items():
            calls = [u for u in reads[node].users if _full_name(u) in (COND, WHILE)]
            if calls:
                found[node] = self.inner(body, f"{name}.{node}", calls[0], reads[node])
        return found

    def inner(self, body: fx.GraphModule, name: str, call: fx.Node, read: fx.Node) -> InnerFunction | None:
        """A body that a node calls, and another reads for it."""
        target = _full_name(call)
        (end,) = body.graph.find_nodes(op="output")
        if not all(isinstance(v.meta.get("val"), torch.Tensor) for v in end.all_input_nodes) or not end.all_input_nodes:
            line = origins_of(call, target)[0].source
            self.refusals.append(Unsupported(target, line, *_NUMBERS))
            return None
        # The body of a loop makes what it is given anew.
        carries = len(call.args[2]) if target == WHILE and call.args[1] is read else 0  # type: ignore[arg-type]
        body = taken_apart(body, export_decompositions())
        run = runner_of(self.options, name)
        run(body, pass_lists().aten, AtenContext(self.options))
        before = len(self.refusals)
        planned = self.planned(body, name, frozenset(), run, carries)
        if planned is None or len(self.refusals) > before:
            return None
        return InnerFunction(
            planned.host, planned.graph.inputs, planned.results, planned.bindings, planned.made, planned.lines
        )

    # --- what is refused ----------------------------------------------------------------------------------------------

    def refuse_calls(self, graph: Graph, types: Mapping[str, TensorType]) -> None:
        """The calls of libraries that are left; products may be, and control flow whose bodies are there."""
        products = self.options.libraries == "cblas"
        for node, _ in every_node(graph):
            if not isinstance(node, Library) or node.target in _PLAIN or copied(node, types):
                continue
            if products and multiplied(node, types):
                continue
            reason, mend = self.why(node)
            if reason:
                origin = node.origins[0] if node.origins else None
                line = origin.source if origin is not None else ""
                self.refusals.append(Unsupported(node.target, line, reason, mend))

    def why(self, node: Library) -> tuple[str, str]:
        """Why a library cannot do a call, and how to mend it; "" where it can, or where its bodies have told why."""
        if node.target in _OTHERS:
            return node.reason, _INTO_OTHERS
        if node.target not in (COND, WHILE):
            return node.reason, ""
        return _ON_GPU if self.pool.on_gpu else ("", "")

    # --- kernels ------------------------------------------------------------------------------------------------------

    def kernels(self, plan: Plan, job: Job) -> tuple[dict[str, KernelUse], dict[str, Grid]]:
        """How the host program calls each function, by the names of kernels in the pool, as it calls those of a CPU;
        and the grids of kernels that are launched on a GPU."""
        fusion, options, pool = plan.fusion, self.options, self.pool
        tuning = tuning_for(fusion, options, job.timer, may_measure=False)
        made_by = KernelPlan(options, job.settings, job.store, job.timer, tuning, job.run, fresh=True)
        lines = {n.function: n.origins for n, _ in every_node(fusion.graph) if isinstance(n, CallTensor)}
        uses: dict[str, KernelUse] = {}
        grids: dict[str, Grid] = {}
        for function in called(fusion):
            what = fusion.functions.get(function) or fusion.given[function]
            try:
                texts = [_text(what, target, made_by, pool.on_gpu) for target in pool.targets]
            except MlcError as error:
                first = lines[function][0] if lines[function] else None
                ops = ", ".join(dict.fromkeys(o.op for o in lines[function])) or function
                line = first.source if first is not None else ""
                self.refusals.append(Unsupported(ops, line, str(error)))
                continue
            names, source = [s.name for s in what.symbols.symbols], texts[0].source
            assert all(t.source.symbols == source.symbols for t in texts), "kernels of all targets take the same"
            sizes, name = tuple(map(names.index, source.symbols)), pool.enter(texts)
            uses[function] = KernelUse(name, sizes, table=bool(what.table))
            grids[name] = Grid(source.grid, source.symbols, source.reach)
        return uses, grids


def _full_name(call: fx.Node) -> str:
    return f"hop::{call.target.name()}" if isinstance(call.target, HigherOrderOperator) else ""


def _text(function: Callee, target: Target, plan: KernelPlan, on_gpu: bool) -> KernelText:
    if not on_gpu:
        return KernelText(written(function, target, plan))
    text = written_for_gpu(function, target, plan)
    return KernelText(text.source, text)


__all__ = ["GraphMaker", "PlannedBody"]
