"""How the graph that holds forward and backward is parted: what is saved for the backward and what is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from ..runtime.options import Options
from .chunk_loss import chunk_losses
from .chunk_loss_write import Writer
from .converters import CONVERTERS
from .share_nodes import share_nodes

aten = torch.ops.aten
# Arguments of native_batch_norm_backward.
_RUNNING_MEAN, _RUNNING_VAR, _TRAIN = 3, 4, 7


def partition(options: Options) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """The ``partition_fn`` of ``aot_autograd``: rewrites what decides of saving, computes equal things once, and then
    parts forward and backward by min-cut."""

    def part(joint: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        chunk_losses(joint, options)
        open_log_softmax(joint)
        forget_running_statistics(joint)
        joint.graph.eliminate_dead_code()
        share_nodes(joint.graph)
        with config.patch(cse=False):
            parts: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
                joint, inputs, **settings
            )
        return parts

    return part


def open_log_softmax(gm: fx.GraphModule) -> int:
    """Write log-softmaxes as element-wise ops and reductions of their rows, and the results not to be saved; how many.

    What reads them then makes them of the logits and two numbers a row: a loss, forward and backward, reads logits,
    which a product has written anyway, and no log-probabilities are written. Those that something needs in memory
    stay: results of the graph, and what library calls read.
    """
    backward = _backward(gm.graph)
    nodes = [
        n
        for n in gm.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
        if n not in backward and not backward.isdisjoint(n.users) and _is_passing(n)
    ]
    for node in nodes:
        x, dim, *_ = node.args
        with gm.graph.inserting_before(node):
            out = Writer(gm.graph, node)
            kind = node.meta["val"].dtype
            wide = torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
            shifted = out.cast(x, wide)  # type: ignore[arg-type]
            shifted = out.call(aten.sub.Tensor, shifted, out.call(aten.amax.default, shifted, [dim], True))
            total = out.call(aten.sum.dim_IntList, out.call(aten.exp.default, shifted), [dim], True)
            result = out.call(aten.sub.Tensor, shifted, out.call(aten.log.default, total))
            rounded = out.cast(result, kind)
        for made in (result, rounded):
            made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        out.replace(node, rounded)
        gm.graph.erase_node(node)
    if nodes:
        gm.graph.lint()
        gm.recompile()
    return len(nodes)


def forget_running_statistics(gm: fx.GraphModule) -> None:
    """Do not give running statistics to backwards of batch norm that use those of the batch.

    Autograd names them all the same, so that the updated ones would be results, kept for the backward, and could not be
    written where the old ones are.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[_TRAIN] is True:
            node.update_arg(_RUNNING_MEAN, None)
            node.update_arg(_RUNNING_VAR, None)


def _backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that what flows into the backward reaches."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith("tangents") if node.op == "placeholder" else not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_passing(node: fx.Node) -> bool:
    """Whether everything that reads a log-softmax is computed by kernels of ours, and its rows have elements."""
    if any(statically_known_true(n == 0) for n in node.meta["val"].shape):
        return False
    return all(user.op == "call_function" and str(user.target) in CONVERTERS for user in node.users)
