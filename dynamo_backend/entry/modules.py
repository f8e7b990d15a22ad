"""``torch_mlc.compile`` and ``from_fx``: modules of the IR, printed and edited by hand, as functions of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ...codegen.host.build import build_host_program
from ...ir.errors import MlcError
from ...ir.function.function import Callee, TensorFunction
from ...ir.graph.constants import digest_of, laid_out
from ...ir.graph.graph import (
    CallRegion,
    CallTensor,
    Constant,
    Graph,
    Input,
    IRModule,
    Library,
    Node,
    SizeInput,
    TensorType,
    View,
    every_node,
)
from ...ir.graph.regions import write_out_regions
from ...ir.nest.loops import Buffer, LoopNest
from ...ir.passes import Runner, StepRecord
from ...ir.target import Target
from ...ir.text.parser import parse
from ...ir.text.printer import show
from ...ir.verify.verify import verify
from ...runtime.compile import nest_kernel
from ...runtime.compile.arguments import CallError, Signature, without_bits
from ...runtime.compile.compilers import Compilers, workers_for
from ...runtime.compile.kernels import kernel_store_of
from ...runtime.compile.nest_kernel import NestKernel
from ...runtime.host.executable import Boxed
from ...runtime.plain_text import counted
from ...runtime.pool.pool import POOL
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...runtime.timing import PhaseTimer
from ...scheduler.functions.function_table import FunctionTable
from ...scheduler.fusion.fusion import CALLS, Fusion
from ...scheduler.schedule.schedule import Schedule
from ..caches.surroundings import kernel_settings, surroundings
from ..compiling.graph_kernels import called, loaded_kernels, start_kernels, tuning_for, uses_of
from ..compiling.host_passes import HOST, HostContext
from ..compiling.host_programs import CODE, HostCode, host_code
from ..compiling.kernels import KernelBuild, KernelPlan, scheduled
from ..compiling.pass_lists import context_of, pass_lists, runner_of
from ..importing.importer import import_graph


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
    constants: Mapping[str, object] | None = None,
) -> CompiledModule | NestKernel:
    """Compile a module, a part of one, or the text of either (``torch_mlc.show``) to a function of tensors.

    A graph that calls functions is compiled as it stands; one that does not is rewritten and fused first. A tensor
    function gets a schedule, and a nest, called or alone (``s`` of ``s = torch_mlc.Schedule(nest)``), is a kernel with
    the loops that it has.

    ``target`` is a ``Target``, "cpu", "cuda" (the GPU that is here), or the name of one that need not be here
    ("cuda:sm_90", "hip:gfx942"; it compiles, and cannot be called). By default it follows from a nest's loops, and from
    the devices of a graph. ``options`` are those of ``torch.compile`` for a graph. ``constants`` are, by name, the
    tensors and other objects of the model that a text tells of and cannot hold; what it tells of a tensor is checked.

    Raises: ParseError for what is no script, VerifyError for a module that is not sound, ModuleError, OptionError,
    KernelError under ``strict``; for a nest EmitError, TargetError, CpuCompileError or GpuCompileError.
    """
    found = parse(what) if isinstance(what, str) else what
    if isinstance(found, (Schedule, LoopNest)):
        if options or constants:
            raise ModuleError(
                "options and constants are for graphs; a nest has its schedule, and is compiled as it stands"
            )
        return nest_kernel.compile(found, target)
    given = dict(options or {})
    if target is not None and str(target) not in ("cpu", "cuda"):
        given["target"] = str(target)
    settings = Options.resolve(None, given, os.environ)
    POOL.spare = settings.cpu_pool
    device = "cuda" if str(target).partition(":")[0] in ("cuda", "hip") else "cpu"
    return _compiled(_with_constants(_module(found, device), constants or {}), settings)


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


def _with_constants(module: IRModule, given: Mapping[str, object]) -> IRModule:
    """The module with the objects that its constants name. Raises ModuleError where one is missing, or another."""
    graph = module.graph
    for name in given:
        if name not in graph.constants:
            raise ModuleError(f"{graph.name} has no constant {name!r}; it has {', '.join(graph.constants) or 'none'}")
    constants = {name: _object(graph.name, name, c, given.get(name, c.value)) for name, c in graph.constants.items()}
    return replace(module, functions={**module.functions, module.main: replace(graph, constants=constants)})


def _object(graph: str, name: str, constant: Constant, value: object) -> Constant:
    kind = constant.kind
    wanted = f"the constant {name!r} of {graph}"
    if value is None:
        what = f"a {kind}" if isinstance(kind, str) else _told(kind)
        raise ModuleError(f"{wanted} is not in the text: give {what}, constants={{{name!r}: …}}")
    if isinstance(kind, str):
        return Constant.of(value)
    if not isinstance(value, Tensor) or value.dtype is not kind.dtype.torch or [*value.shape] != [*kind.shape]:
        here = f"{value.dtype} of {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
        raise ModuleError(f"{wanted} is {_told(kind)}, not {here}")
    if constant.contents and digest_of(value) != constant.contents:
        mend = "give the tensor that was printed, or take sha256=… out of the text"
        raise ModuleError(f"{wanted} has other elements than those that the text tells of: {mend}")
    return Constant.of(value, kind)


def _told(kind: TensorType) -> str:
    return f"{kind.dtype.value} of {[*kind.shape]}"


def _compiled(module: IRModule, options: Options) -> CompiledModule:
    verify(module)
    run = runner_of(options, module.main)
    fusion = _fused(module, options, run)
    module, graph, lists = fusion.module, fusion.graph, pass_lists()
    verify(module)
    store, timer = kernel_store_of(options), PhaseTimer()
    tuning = tuning_for(fusion, options, timer, may_measure=False)
    settings = kernel_settings(surroundings(options, sorted({t.device for t in graph.types().values()})))
    plan = KernelPlan(options, settings, store, timer, tuning, run)
    with Compilers(beside=True, workers=workers_for(len(called(fusion)), options.compile_workers)) as compilers:
        started = start_kernels(fusion, plan, compilers)
        kernels = {name: kernel.finish() for name, kernel in started.items()}
    context = HostContext(graph)
    program = run(run.step(HOST, build_host_program, graph, uses_of(kernels)), lists.host, context)
    resolved = run(program, lists.text, context)
    code = run.step(CODE, host_code, program, resolved, options, store)
    return CompiledModule(module, plan, kernels, code, tuple(run.steps))


def _fused(module: IRModule, options: Options, run: Runner) -> Fusion:
    """The module with every node of its graph a call."""
    lists, context, given = pass_lists(), context_of(options), _given(module)
    graph = replace(module.graph, name=module.main)
    if all(isinstance(n, (CallTensor, CallRegion, Library, View)) for n, _ in every_node(graph)):
        return run.step(CALLS, name_by_hand, Fusion(graph, given=given), {})
    graph = write_out_regions(graph)
    if not given:
        fusion = Fusion(run(graph, lists.graph, context))
        return run(run(fusion, lists.fuse, context), lists.calls, context)
    # Who wrote calls by hand wants these; what is new gets names beside theirs.
    away = {name: f"{name}.given" for name in given}
    nodes = (replace(n, function=away[n.function]) if isinstance(n, CallTensor) else n for n in graph.nodes)
    apart = Fusion(replace(graph, nodes=tuple(nodes)), given={away[name]: f for name, f in given.items()})
    return run.step(CALLS, name_by_hand, run(apart, lists.fuse, context), {a: name for name, a in away.items()})


def name_by_hand(fusion: Fusion, names: Mapping[str, str]) -> Fusion:
    """The functions that were given take these names, or keep theirs, and stand among the others; new ones make way."""
    given = {names.get(name, name): f for name, f in fusion.given.items()}
    nests = {name: f for name, f in given.items() if isinstance(f, LoopNest)}
    table = FunctionTable({name: f for name, f in given.items() if isinstance(f, TensorFunction)}, nests)

    def named(graph: Graph) -> Graph:
        nodes: list[Node] = []
        for node in graph.nodes:
            if isinstance(node, CallTensor):
                function = fusion.functions.get(node.function)
                name = names.get(node.function, node.function) if function is None else table.enter(function)
                node = replace(node, function=name)
            elif isinstance(node, CallRegion):
                node = replace(node, region=named(node.region))
            nodes.append(node)
        return replace(graph, nodes=tuple(nodes))

    graph = named(fusion.graph)
    return replace(fusion, graph=graph, functions=table.used(n for n, _ in every_node(graph)), given=nests)


def _given(module: IRModule) -> dict[str, Callee]:
    """What the module's graph calls. Raises ModuleError for a graph, which is no kernel."""
    found: dict[str, Callee] = {}
    for node, _ in every_node(module.graph):
        if isinstance(node, CallTensor):
            function = module.functions[node.function]
            if isinstance(function, Graph):
                raise ModuleError(
                    f"{module.main} calls {node.function}, which is a graph; write its nodes in its place"
                )
            found[node.function] = function
    return found


def _in_memory(constant: Constant) -> object:
    """What a program runs with: a tensor is on its device, in its layout."""
    kind, value = constant.kind, constant.value
    if isinstance(kind, str):
        return value
    return laid_out(value.detach().to(kind.device), [int(s) for s in kind.strides])


@dataclass(frozen=True)
class CompiledModule:
    """A compiled graph: ``call(*inputs)`` takes the tensors that the graph does, in order, and returns its results, one
    where there is one, else a tuple.

    Sizes follow from the shapes and strides of the inputs. One that does not is passed by name: ``call(x, s1=8)``.
    Gradients are not recorded. ``module`` is what was compiled: a graph of calls, and their functions and
    nests; ``steps`` is what was done to make it, as ``torch_mlc.explain`` has it of a model.
    """

    module: IRModule
    plan: KernelPlan = field(repr=False)
    kernels: Mapping[str, KernelBuild]
    host: HostCode
    steps: tuple[StepRecord, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return f"CompiledModule({self.module.main}, {counted(len(self.kernels), 'kernel')})"

    def show(self) -> str:
        """The script of what was compiled."""
        return show(self.module)

    def scheduled(self) -> IRModule:
        """The module with each function as the loops that its kernel is made of, to be printed, edited and compiled."""
        plan = replace(self.plan, run=Runner())
        nests = {name: self._loops(b, plan) for name, b in self.kernels.items()}
        return replace(self.module, functions={**self.module.functions, **nests})

    @staticmethod
    def _loops(build: KernelBuild, plan: KernelPlan) -> LoopNest:
        if build.schedule is not None:
            return build.schedule.nest
        return scheduled(build.function, build.target, plan)

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
        loaded = loaded_kernels(self.kernels, self.plan.options, self.plan.store)
        constants = {name: _in_memory(c) for name, c in self.module.graph.constants.items()}
        return self.host.load(loaded, constants, self.module.main)

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
