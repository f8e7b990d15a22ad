"""``torch_mlc.compile`` and ``from_fx``: modules of the IR, printed and edited by hand, as functions of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx

from ...codegen.host.build import build_host_program
from ...ir.errors import MlcError
from ...ir.function.function import TensorFunction
from ...ir.graph.graph import (
    CallRegion,
    CallTensor,
    Graph,
    Input,
    IRModule,
    Library,
    SizeInput,
    TensorType,
    View,
    every_node,
)
from ...ir.graph.regions import write_out_regions
from ...ir.nest.loops import Buffer, LoopNest
from ...ir.passes import run_passes
from ...ir.target import Target
from ...ir.text.parser import parse
from ...ir.text.printer import show
from ...ir.verify.verify import verify
from ...runtime.compile import nest_kernel
from ...runtime.compile.arguments import CallError, Signature, without_bits
from ...runtime.compile.compilers import Compilers, workers_for
from ...runtime.compile.kernels import KernelStore, kernel_store_of
from ...runtime.compile.nest_kernel import NestKernel
from ...runtime.host.executable import Boxed
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...runtime.timing import PhaseTimer
from ...scheduler.functions.function_table import FunctionTable
from ...scheduler.fusion.fusion import Fusion
from ...scheduler.schedule.schedule import Schedule
from ..caches.surroundings import kernel_settings, surroundings
from ..compiling.graph_kernels import loaded_kernels, start_kernels, tuning_for, uses_of
from ..compiling.host_passes import HostContext
from ..compiling.host_programs import HostCode, host_code
from ..compiling.kernels import KernelBuild, KernelPlan
from ..compiling.pass_lists import context_of, pass_lists, runner_of
from ..importing.importer import import_graph

Tensor: TypeAlias = torch.Tensor


class ModuleError(MlcError):
    """A module cannot be compiled; the text names the function and says why."""


def from_fx(gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, name: str = "main") -> IRModule:
    """An ATen graph, as AOTAutograd and ``make_fx`` make them, as a module of one graph that is not fused yet.

    ``example_inputs`` stand in for placeholders without ``meta["val"]``. Raises ImportFailure.
    """
    graph = import_graph(gm, example_inputs, name=name)
    return IRModule({graph.name: graph}, graph.name)


def compile(
    what: IRModule | Graph | TensorFunction | Schedule | LoopNest | str,
    target: Target | str | None = None,
    *,
    options: Mapping[str, object] | None = None,
) -> CompiledModule | NestKernel:
    """Compile a module, a part of one, or the text of either (``torch_mlc.show``) to a function of tensors.

    A graph that calls tensor functions is compiled as it stands; one that does not is rewritten and fused first. A
    scheduled nest, ``s`` of ``s = torch_mlc.Schedule(nest)``, becomes a kernel.

    ``target`` is a ``Target``, "cpu", "cuda" (the GPU that is here), or the name of one that need not be here
    ("cuda:sm_90", "hip:gfx942"; it compiles, and cannot be called). By default it follows from a nest's loops, and from
    the devices of a graph. ``options`` are those of ``torch.compile`` for a graph.

    Raises: ParseError for what is no script, VerifyError for a module that is not sound, ModuleError, OptionError,
    KernelError under ``strict``; for a nest EmitError, TargetError, CpuCompileError or GpuCompileError.
    """
    found = parse(what) if isinstance(what, str) else what
    if isinstance(found, (Schedule, LoopNest)):
        if options:
            raise ModuleError("options are for graphs; a nest has its schedule, and is compiled as it stands")
        return nest_kernel.compile(found, target)
    given = dict(options or {})
    if target is not None and str(target) not in ("cpu", "cuda"):
        given["target"] = str(target)
    settings = Options.resolve(None, given, os.environ)
    device = "cuda" if str(target).partition(":")[0] in ("cuda", "hip") else "cpu"
    return _compiled(_module(found, device), settings)


def _module(found: IRModule | Graph | TensorFunction, device: str) -> IRModule:
    match found:
        case Graph():
            return IRModule({found.name: found}, found.name)
        case TensorFunction():
            return _calling(found, device)
    return found


def _calling(function: TensorFunction, device: str) -> IRModule:
    """A module whose graph calls a function once, with its inputs for its own."""

    def kind(b: Buffer) -> TensorType:
        return TensorType(b.shape, b.strides, b.dtype, device)

    over = tuple(o.buffer.name if o.buffer in function.inputs else None for o in function.outputs)
    made = tuple(o.buffer.name if at is None else f"{at}_after" for o, at in zip(function.outputs, over, strict=True))
    call = CallTensor(
        made, tuple(kind(o.buffer) for o in function.outputs), function.name, tuple(b.name for b in function.inputs),
        function.symbols.symbols, into=over if any(over) else (),
    )  # fmt: skip
    main = "main" if function.name != "main" else "call_main"
    inputs = tuple(Input(b.name, kind(b)) for b in function.inputs)
    return IRModule({main: Graph(main, inputs, (call,), made, function.symbols), function.name: function}, main)


def _compiled(module: IRModule, options: Options) -> CompiledModule:
    verify(module)
    module = _fused(module, options)
    verify(module)
    graph, lists = module.graph, pass_lists()
    fusion = Fusion(graph, _called(module))
    store, timer = kernel_store_of(options), PhaseTimer()
    tuning = tuning_for(fusion, options, timer, may_measure=False)
    settings = kernel_settings(surroundings(options, sorted({t.device for t in graph.types().values()})))
    plan = KernelPlan(options, settings, store, timer, tuning, run=runner_of(options, module.main))
    with Compilers(beside=True, workers=workers_for(len(fusion.functions), options.compile_workers)) as compilers:
        started = start_kernels(fusion, plan, compilers)
        kernels = {name: kernel.finish() for name, kernel in started.items()}
    program = run_passes(lists.host, build_host_program(graph, uses_of(kernels)), HostContext(graph))
    code = host_code(program, run_passes(lists.text, program, None), options, store)
    return CompiledModule(module, options, kernels, code, store)


def _fused(module: IRModule, options: Options) -> IRModule:
    """The module with every node of its graph a call; the very module where that is so."""
    graph = module.graph
    if all(isinstance(n, (CallTensor, CallRegion, Library, View)) for n, _ in every_node(graph)):
        return module
    graph = write_out_regions(graph)
    lists, context = pass_lists(), context_of(options)
    given = {n.names for n in graph.nodes if isinstance(n, CallTensor)}
    if not given:
        fusion = Fusion(run_passes(lists.graph, graph, context))
        return run_passes((*lists.fuse, *lists.calls), fusion, context).module
    # Who wrote calls by hand wants these; what is new gets names beside theirs.
    fusion, table = run_passes(lists.fuse, Fusion(graph), context), FunctionTable(_called(module))
    nodes = tuple(
        replace(n, function=table.enter(fusion.functions[n.function]))
        if isinstance(n, CallTensor) and n.names not in given
        else n
        for n in fusion.graph.nodes
    )
    return IRModule({module.main: replace(fusion.graph, nodes=nodes), **table.used(nodes)}, module.main)


def _called(module: IRModule) -> dict[str, TensorFunction]:
    """The functions that the module's graph calls. Raises ModuleError where one of them is no tensor function."""
    found: dict[str, TensorFunction] = {}
    for node, _ in every_node(module.graph):
        if isinstance(node, CallTensor):
            function = module.functions[node.function]
            if not isinstance(function, TensorFunction):
                kind = "nest" if isinstance(function, LoopNest) else "graph"
                raise ModuleError(
                    f"{module.main} calls {node.function}, which is a {kind}; a graph is compiled with tensor functions"
                )
            found[node.function] = function
    return found


@dataclass(frozen=True)
class CompiledModule:
    """A compiled graph: ``call(*inputs)`` takes the tensors that the graph does, in order, and returns its results, one
    where there is one, else a tuple.

    Sizes follow from the shapes and strides of the inputs. One that does not is passed by name: ``call(x, s1=8)``.
    Gradients are not recorded. ``module`` is what was compiled: a graph of calls, and their functions.
    """

    module: IRModule
    options: Options
    kernels: Mapping[str, KernelBuild]
    host: HostCode
    store: KernelStore

    def __repr__(self) -> str:
        return f"CompiledModule({self.module.main}, {len(self.kernels)} kernels)"

    def show(self) -> str:
        """The script of what was compiled."""
        return show(self.module)

    @cached_property
    def signature(self) -> Signature:
        """The tensors that the graph takes."""
        graph = self.module.graph
        tensors = (i for i in graph.inputs if isinstance(i, Input))
        inputs = tuple(Buffer(i.name, i.type.shape, i.type.strides, i.type.dtype) for i in tensors)
        return Signature(graph.name, inputs, graph.symbols)

    @cached_property
    def _call(self) -> Boxed:
        for name, build in self.kernels.items():
            if build.target.is_gpu:
                here = target_for("cuda")
                if (here.kind, here.arch) != (build.target.kind, build.target.arch):
                    raise CallError(f"{name} was compiled for {build.target} and this machine's GPU is {here}")
        loaded = loaded_kernels(self.kernels, self.options, self.store)
        return self.host.load(loaded, self.module.graph.constants, self.module.main)

    def __call__(self, *inputs: Tensor, **sizes: int) -> Any:
        """Run the graph. Raises CallError where arguments are missing, have no memory, or are of another dtype, shape,
        stride or device than the inputs of the graph."""
        graph, signature = self.module.graph, self.signature
        signature.count(inputs)
        types = [i.type for i in graph.inputs if isinstance(i, Input)]
        for b, t, kind in zip(signature.inputs, inputs, types, strict=True):
            signature.check(b, t, torch.device(kind.device))
        known = signature.sizes(inputs, sizes)
        tensors = iter(map(without_bits, inputs))
        given = [int(i.value.xreplace(known)) if isinstance(i, SizeInput) else next(tensors) for i in graph.inputs]
        with torch.no_grad():
            results = tuple(self._call(given))
        return results[0] if len(results) == 1 else results
