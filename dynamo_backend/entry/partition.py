"""How the graph that holds forward and backward is parted: what is saved for the backward and what is made again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from ...runtime.settings.options import Options
from ..aten_passes.attention.joint import recompute_scores
from ..aten_passes.attention.shifted_softmax import unshift_softmax
from ..aten_passes.loss.chunk_loss import chunk_losses
from ..aten_passes.rounding.maxima import recompute_maxima, save_compared
from ..aten_passes.share_nodes import share_nodes
from ..aten_passes.views.overwritten import keep_overwritten
from ..aten_passes.views.plain_views import straighten_views
from ..aten_passes.write import NodeWriter, give_results
from ..compiling.plans import planned_peak
from ..converters import CONVERTERS
from ..patterns.replace_patterns import replace_patterns

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default)
# Arguments of native_batch_norm_backward.
_RUNNING_MEAN, _RUNNING_VAR, _TRAIN = 3, 4, 7
# Forward and backward.
Parts: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
# Shares of what may be saved for the backward that are tried, in this order, until the graphs stay below a limit.
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0)


def partition(options: Options) -> Callable[..., Parts]:
    """The ``partition_fn`` of ``aot_autograd``: rewrites what decides of saving, computes equal things once, and then
    parts forward and backward by min-cut."""

    def part(joint: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Parts:
        unread = _unread(joint.graph)
        rewrite_whole(joint, options)
        decompose_log_softmax(joint)
        forget_running_statistics(joint)
        if options.numerics != "eager":
            renormalize(joint, rounded=options.target not in (None, "cpu"))
        straighten_views(joint.graph)
        joint.graph.eliminate_dead_code()
        share_nodes(joint.graph)
        recompute_scores(joint, options)
        keep_overwritten(joint, _backward(joint.graph))
        save_compared(joint.graph, _backward(joint.graph))
        with config.patch(cse=False):
            if options.memory_limit is not None:
                return within_limit(joint, inputs, options, settings, unread)
            return _parted(joint, inputs, settings, unread)

    return part


def rewrite_whole(gm: fx.GraphModule, options: Options) -> None:
    """The rewrites, in place, of graphs that are parted and of those that are not."""
    replace_patterns(gm)
    chunk_losses(gm, options)
    if options.numerics != "eager" and unshift_softmax(gm.graph):
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _parted(joint: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any], unread: Set[str]) -> Parts:
    parts: Parts = min_cut_rematerialization_partition(joint, inputs, **settings)
    save_copies(parts[0], settings["num_fwd_outputs"], unread)
    recompute_maxima(*parts)
    return parts


def _unread(graph: fx.Graph) -> set[str]:
    """What of the forward no gradient op reads, so that eager does not save it."""
    backward = {n for n in _backward(graph) if n.op != "output"}
    return {n.name for n in graph.nodes if n not in backward and backward.isdisjoint(n.users)}


def save_copies(forward: fx.GraphModule, results: int, unread: Set[str]) -> int:
    """Save copies of results that a caller may write over, as eager lets it; how many copies there are.

    Eager saves what the gradient ops of the forward read, and not the names in ``unread``. The min-cut may save a
    result instead and make those of it again, and attention is made again of what it gave; autograd refuses a backward
    where a result that was saved has been written.
    """
    (end,) = forward.graph.find_nodes(op="output")
    values = list(end.args[0])  # type: ignore[arg-type]
    returned = {v for v in values[:results] if isinstance(v, fx.Node) and v.op == "call_function"}
    copies = 0
    for k, saved in enumerate(values[results:], results):
        if saved in returned and saved.name in unread and isinstance(saved.meta.get("val"), torch.Tensor):
            # Before the inputs are written, which is the last that a graph does.
            with forward.graph.inserting_after(saved):
                copy = NodeWriter(forward.graph, saved).call(aten.clone.default, saved)
            # The backward is compiled for these strides; a part of something larger has others than its copy.
            pairs = zip(copy.meta["val"].stride(), saved.meta["val"].stride(), strict=True)
            if all(statically_known_true(a == b) for a, b in pairs):
                values[k] = copy
                copies += 1
            else:
                forward.graph.erase_node(copy)
    if copies:
        give_results(forward, values)
    return copies


def within_limit(
    joint: fx.GraphModule, inputs: Sequence[Any], options: Options, settings: dict[str, Any], unread: Set[str]
) -> Parts:
    """Forward and backward that stay below the limit of memory, with as little computed again as that takes; where
    nothing does, those that take least.

    How much may be saved is torch's activation memory budget; what that comes to is what our plans of both say.
    """
    assert options.memory_limit is not None
    least: tuple[int, Parts] | None = None
    for budget in BUDGETS:
        copy = fx.GraphModule(joint, copied_graph(joint.graph))
        with config.patch(activation_memory_budget=budget):
            parts = _parted(copy, inputs, settings, unread)
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
    return [n.name for n in places if not n.name.startswith(("primals", "tangents"))]


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """A graph of its own, with the nodes, results and metadata of another."""
    copy = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, known, return_output_node=True)
    assert isinstance(result, tuple)
    value, output = result
    copy.output(value).meta.update(output.meta)
    return copy


def decompose_log_softmax(gm: fx.GraphModule) -> int:
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
            out = NodeWriter(gm.graph, node)
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


def renormalize(gm: fx.GraphModule, rounded: bool = False) -> int:
    """Let activations after batch norms be differentiated from what the norm was given; how many were.

    The backward of the norm reads that anyway, so what was normalised, or its ReLU, is made of it again and not read.
    CPUs round the statistics that they save of half types, from which that cannot be made; ``rounded`` says that they
    do in a graph that was traced on one, but not where it is meant to run.
    """
    backward = _backward(gm.graph)
    done = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        through = node.args[0]
        if node.args[_TRAIN] is not True or not isinstance(through, fx.Node) or through not in backward:
            continue
        if str(through.target) not in CONVERTERS or through.users.keys() != {node}:
            continue
        for k, given in enumerate(through.args):
            norm = _norm_behind(given, through, rounded) if isinstance(given, fx.Node) else None
            if norm is None or norm.args[0] is not node.args[1] or norm.args[1] is not node.args[2]:
                continue
            with gm.graph.inserting_before(through):
                through.update_arg(k, _normalized(gm.graph, norm))
            done += 1
    if done:
        gm.graph.lint()
        gm.recompile()
    return done


def _norm_behind(node: fx.Node, reader: fx.Node, rounded: bool) -> fx.Node | None:
    """The batch norm, with statistics of the batch in full precision, whose result a node is, or is as far as a
    backward of ReLU can tell."""
    while node.target in _SAME or (
        node.target is aten.relu.default and reader.target is aten.threshold_backward.default
    ):
        if node.target is aten.relu.default and reader.args[2] != 0:
            return None
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    norm = node.args[0]
    assert isinstance(norm, fx.Node)
    if norm.target is not aten._native_batch_norm_legit_functional.default or norm.args[5] is not True:
        return None
    mean = norm.meta["val"][1]
    return norm if rounded or mean.dtype in (torch.float32, torch.float64) else None


def _normalized(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    """The result of a batch norm made of its operand and the statistics that it saves."""
    x, weight, bias = norm.args[:3]
    assert isinstance(x, fx.Node)
    out = NodeWriter(graph, x)
    parts = {n.args[1]: n for n in norm.users}
    kind, rank = x.meta["val"].dtype, x.meta["val"].dim()
    wide = torch.float32 if kind in (torch.bfloat16, torch.float16) else kind

    def spread(value: fx.Node) -> fx.Node:
        value = out.cast(value, wide)
        for _ in range(rank - 2):
            value = out.call(aten.unsqueeze.default, value, -1)
        return value

    mean, rstd = (parts[k] for k in (1, 2))
    value = out.call(aten.sub.Tensor, out.cast(x, wide), spread(mean))
    value = out.call(aten.mul.Tensor, value, spread(rstd))
    for op, operand in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        if isinstance(operand, fx.Node):
            value = out.call(op, value, spread(operand))
    again = [value, out.cast(value, kind)]
    for made in again:
        made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return again[-1]


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
