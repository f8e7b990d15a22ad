"""The declared lists of passes, each of which stands near its passes; read anew for every compilation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ...codegen.host.steps.ops import may_alias
from ...codegen.host.steps.program import HostProgram
from ...ir.graph.graph import Graph
from ...ir.passes import Pass, Runner
from ...ir.target import Target
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...scheduler import calls, passes
from ...scheduler.context import PassContext
from ...scheduler.functions import lower
from ...scheduler.functions.function import TensorFunction
from ...scheduler.fusion import fuse
from ...scheduler.fusion.fusion import Fusion
from ..aten_passes import lists
from ..aten_passes.lists import AtenPasses
from . import host_passes
from .host_passes import HostContext

# Where a graph has the steps that were taken before it was parted from another.
STEPS = "mlc_steps"


@dataclass(frozen=True, slots=True)
class PassLists:
    """Every pass of a compilation, in the order of the path: over ATen graphs of both directions, their parts, those
    for inference, each that is handed over and each that is compiled; over graphs, from them to calls, over those, over
    each function, and over the host program."""

    joint: AtenPasses
    forward: AtenPasses
    backward: AtenPasses
    inference: AtenPasses
    part: AtenPasses
    aten: AtenPasses
    graph: tuple[Pass[Graph, PassContext], ...]
    fuse: tuple[Pass[Fusion, PassContext], ...]
    calls: tuple[Pass[Fusion, PassContext], ...]
    function: tuple[Pass[TensorFunction, TensorFunction], ...]
    host: tuple[Pass[HostProgram, HostContext], ...]

    def __iter__(self) -> Iterator[tuple[str, tuple[Pass[Any, Any], ...]]]:
        """The lists by name."""
        return ((f.name, getattr(self, f.name)) for f in fields(self))


def pass_lists() -> PassLists:
    """The lists as they are now."""
    return PassLists(
        lists.JOINT_PASSES, lists.FORWARD_PASSES, lists.BACKWARD_PASSES, lists.INFERENCE_PASSES, lists.PART_PASSES,
        lists.ATEN_PASSES, passes.GRAPH_PASSES, fuse.FUSE_PASSES, calls.CALL_PASSES, lower.FUNCTION_PASSES,
        host_passes.HOST_PASSES,
    )  # fmt: skip


def runner_of(options: Options, name: str) -> Runner:
    """What runs the steps of the graph of a name as the settings ask for it."""
    return Runner(options.dump_dir / name if options.dump_dir is not None else None, options.verify > 0)


def context_of(options: Options, given: Collection[str] = ()) -> PassContext:
    """What passes over graphs and calls may ask of a compilation."""
    return PassContext(options.numerics, partial(_target_of, options), may_alias, given)


def _target_of(options: Options, device: str) -> Target:
    return target_for(device, options.target, options.threads)
