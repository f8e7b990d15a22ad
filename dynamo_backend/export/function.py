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
from ...codegen.host.export.emit import ExportedHost, emit_export
from ...codegen.host.export.pointers import PointersOf, pointers_of
from ...codegen.host.export.results import row_major
from ...codegen.host.steps.lines import ALL, with_lines
from ...codegen.host.steps.program import HostProgram
from ...ir.errors import MlcError
from ...ir.graph.graph import Graph, Input, TensorType
from ...runtime.frozen.recipe import OpCall
from ...runtime.settings.options import Options
from ..aten_passes.context import AtenContext
from ..aten_passes.frozen.part import part
from ..caches.surroundings import surroundings
from ..compiling.job import devices_of
from ..compiling.pass_lists import pass_lists, runner_of
from ..tracing.fake_device import retarget
from .errors import ExportError, refuse
from .graphs import GraphMaker
from .kernels import KernelPool
from .program import ModelProgram
from .sizes import SizesOf, guards_of
from .targets import ExportTargets


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
    places = {n.name: k for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    static = frozenset(places[given] for given in program.weights)
    maker = GraphMaker(options, pool, surroundings(options, [device]))
    planned = maker.planned(gm, name, static, run)
    refuse(name, maker.refusals)
    assert planned is not None
    inputs = {n: k for k, n in enumerate(program.inputs)}
    sizes = SizesOf.of(planned.bindings, inputs, program.ranges, planned.made)
    pointers = pointers_of(planned.host, frozenset(program.inputs), planned.grids) if targets.on_gpu else {}
    return Built(program, planned.host, planned.results, planned.graph, sizes, planned.lines, pointers)


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


__all__ = ["Built", "build_function"]
