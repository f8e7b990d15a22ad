"""How the graph that holds forward and backward is parted: what is saved for the backward and what is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.aot_autograd import get_aot_graph_name
from torch._functorch.partitioners import min_cut_rematerialization_partition

from ...ir.passes import Runner
from ...runtime.settings.options import Options
from ..aten_passes.context import AtenContext
from ..aten_passes.joint_graph import is_primal, is_tangent, unread_in
from ..compiling.pass_lists import STEPS, pass_lists, runner_of
from ..compiling.plans import planned_peak

# Forward and backward.
Parts: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
# Shares of what may be saved for the backward that are tried, in this order, until the graphs stay below a limit.
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0)


def partition(options: Options) -> Callable[..., Parts]:
    """The ``partition_fn`` of ``aot_autograd``: rewrites what decides of saving, and then parts forward and backward by
    min-cut."""

    def part(joint: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Parts:
        run = runner_of(options, get_aot_graph_name())
        context = AtenContext(options, results=settings["num_fwd_outputs"], unread=unread_in(joint.graph))
        run(joint, pass_lists().joint, context)
        with config.patch(cse=False):
            if options.memory_limit is not None:
                parts = within_limit(joint, inputs, context, settings, run)
            else:
                parts = _parted(joint, inputs, context, settings, run)
        parts[0].meta[STEPS] = run.steps
        return parts

    return part


def _parted(
    joint: fx.GraphModule, inputs: Sequence[Any], context: AtenContext, settings: dict[str, Any], run: Runner
) -> Parts:
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **settings)
    lists = pass_lists()
    run(forward, lists.forward, context)
    run(backward, lists.backward, replace(context, forward=forward))
    return forward, backward


def within_limit(
    joint: fx.GraphModule, inputs: Sequence[Any], context: AtenContext, settings: dict[str, Any], run: Runner
) -> Parts:
    """Forward and backward that stay below the limit of memory, with as little computed again as that takes; where
    nothing does, those that take least.

    How much may be saved is torch's activation memory budget; what that comes to is what our plans of both say.
    """
    options = context.options
    assert options.memory_limit is not None
    least: tuple[int, Parts] | None = None
    for budget in BUDGETS:
        copy = fx.GraphModule(joint, copied_graph(joint.graph))
        with config.patch(activation_memory_budget=budget):
            parts = _parted(copy, inputs, context, settings, run)
        peak = max(planned_peak(parts[0], options), planned_peak(parts[1], options, saved_inputs(parts[1])))
        if least is None or peak < least[0]:
            least = peak, parts
        if peak <= options.memory_limit:
            break
    assert least is not None
    return least[1]


def saved_inputs(backward: fx.GraphModule) -> list[str]:
    """What a backward is given that its forward made: neither arguments of the forward nor gradients of its results."""
    places = [n for n in backward.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    return [n.name for n in places if not is_tangent(n) and not is_primal(n)]


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """A graph of its own, with the nodes, results and metadata of another."""
    copy = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, known, return_output_node=True)
    assert isinstance(result, tuple)
    value, output = result
    copy.output(value).meta.update(output.meta)
    return copy
