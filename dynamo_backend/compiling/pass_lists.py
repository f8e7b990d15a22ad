"""The declared lists of passes, each of which stands near its passes; read anew for every compilation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

from ...codegen.host.steps.program import HostProgram
from ...ir.function.function import TensorFunction
from ...ir.graph.graph import Graph
from ...ir.passes import Pass, Plain, Runner, run_passes
from ...ir.target import Target, has_kernels
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...scheduler import calls, passes
from ...scheduler.context import PassContext
from ...scheduler.cost.begun import Times
from ...scheduler.decisions import Decider
from ...scheduler.functions import lower
from ...scheduler.functions.context import FunctionContext
from ...scheduler.fusion import fuse
from ...scheduler.fusion.fusion import Fusion
from ..aten_passes import lists
from ..aten_passes.context import ATEN
from ..aten_passes.lists import AtenPasses
from ..patterns.replace_patterns import replace_patterns
from ..repeats.passes import LAYER_PASSES, FewLayers
from . import host_passes
from .host_passes import HostContext

# Where a graph has the steps that were taken before it was parted from another.
STEPS = "mlc_steps"


@dataclass(frozen=True, slots=True)
class PassLists:
    """Every pass of a compilation, in the order of the path: over ATen graphs of both directions, their parts, those
    for inference, each that is handed over, those with inputs that do not change, and each that is compiled; over
    graphs, from them to calls, over those, over each function, and over the host program."""

    joint: AtenPasses
    forward: AtenPasses
    backward: AtenPasses
    inference: AtenPasses
    part: AtenPasses
    frozen: AtenPasses
    aten: AtenPasses
    graph: tuple[Pass[Graph, PassContext], ...]
    fuse: tuple[Pass[Fusion, PassContext], ...]
    calls: tuple[Pass[Fusion, PassContext], ...]
    layers: tuple[Pass[Fusion, FewLayers], ...]
    function: tuple[Pass[TensorFunction, FunctionContext], ...]
    host: tuple[Pass[HostProgram, HostContext], ...]
    text: tuple[Pass[HostProgram, Any], ...]
    code: tuple[Pass[HostProgram, Any], ...]

    def __iter__(self) -> Iterator[tuple[str, tuple[Pass[Any, Any], ...]]]:
        """The lists by name."""
        return ((f.name, getattr(self, f.name)) for f in fields(self))


@dataclass(frozen=True, slots=True)
class UserPass:
    """A pass that a user has registered in a list: before or after the one that is named, or at the end."""

    level: str
    own: Pass[Any, Any]
    before: str | None = None
    after: str | None = None

    def among(self, passes: tuple[Pass[Any, Any], ...]) -> tuple[Pass[Any, Any], ...]:
        """A list with this pass in its place, at the end where the one beside it is gone."""
        places = [k for k, p in enumerate(passes) if p.name == (self.before or self.after)]
        place = len(passes) if not places else places[0] if self.before is not None else places[-1] + 1
        return (*passes[:place], self.own, *passes[place:])


# In the order in which they were registered.
USER_PASSES: list[UserPass] = []
_PATTERNS: AtenPasses = (Pass("replace_patterns", ATEN, Plain(replace_patterns)),)


def pass_lists() -> PassLists:
    """The lists as they are now."""
    made = PassLists(
        _PATTERNS + lists.JOINT_PASSES, lists.FORWARD_PASSES, lists.BACKWARD_PASSES,
        _PATTERNS + lists.INFERENCE_PASSES, lists.PART_PASSES, lists.FROZEN_PASSES, lists.ATEN_PASSES,
        passes.GRAPH_PASSES, fuse.FUSE_PASSES,
        calls.CALL_PASSES, LAYER_PASSES, lower.FUNCTION_PASSES, host_passes.HOST_PASSES, host_passes.TEXT_PASSES,
        host_passes.CODE_PASSES,
    )  # fmt: skip
    for user in tuple(USER_PASSES):
        made = replace(made, **{user.level: user.among(getattr(made, user.level))})
    return made


def runner_of(options: Options, name: str) -> Runner:
    """What runs the steps of the graph of a name as the settings ask for it."""
    return Runner(options.dump_dir / name if options.dump_dir is not None else None, options.verify > 0)


def context_of(
    options: Options,
    given: Collection[str] = (),
    decider: Decider | None = None,
    *,
    tables: bool = True,
    owned: Collection[str] = (),
) -> PassContext:
    """What passes over graphs and calls may ask of a compilation."""
    target_of = cache(partial(_target_of, options))
    return PassContext(options.numerics, target_of, given, options.copy_streams, tables, decider, owned, fused_time)


def fused_time(graph: Graph, context: PassContext) -> float:
    """Nanoseconds of a graph of which products may have been substituted, with all that follows done to it, and fused:
    of kernels and calls by what they move and multiply. Nobody is asked about decisions."""
    own = pass_lists()
    alone = replace(context, decider=None, fused_time=None)
    behind = [p.name for p in own.graph].index("substitute") + 1
    fused = run_passes(own.fuse, Fusion(run_passes(own.graph[behind:], graph, alone)), alone)
    types = fused.graph.types()
    machines = {t.device: context.target_of(t.device).machine for t in types.values() if has_kernels(t.device)}
    usual = next(iter(machines.values()), context.target_of("cpu").machine)
    times = Times(fused.graph, {**fused.functions, **fused.given}, usual, machines)
    return sum(map(times.of, fused.graph.nodes))


def _target_of(options: Options, device: str) -> Target:
    return target_for(device, options.target, options.threads, options.cpu_products, options.libraries)
