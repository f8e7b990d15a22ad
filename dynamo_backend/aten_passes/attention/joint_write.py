"""How the backward of an attention that ``joint_match`` has found makes its probabilities again."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..random_ops import DRAW_SEEDS, UNIFORM
from ..rounding.rounding import keep_rounding
from ..views.plain_views import order_of
from ..write import IN_BACKWARD, TAG, NodeWriter, copied_for_backward
from .joint_match import TURNS, VIEWS, Site
from .write_sinks import narrow, write_sums

aten = torch.ops.aten

# Views that copy where the layout does not allow a view.
_SHAPED = (aten.view.default, aten._unsafe_view.default, aten.alias.default)
_COPIES = (aten.clone.default, aten.reshape.default)


def rewrite(site: Site) -> None:
    """Probabilities of the backward from scores and row statistics, and the softmax's gradient."""
    out, start, gradient = site.readers[0], site.start, site.gradient
    assert start is not None and gradient is not None
    scores, sink = site.operand, site.sink
    wide = torch.float64 if scores.meta["val"].dtype is torch.float64 else torch.float32
    write = NodeWriter(site.graph, site.softmax)
    for node in site.dropouts:
        _write_dropout(site, node)
    _round_sources(site)
    _copy_again(site)
    copies = copied_for_backward(site.graph, [*site.made, *site.drawn], {})
    if sink is not None:
        with site.graph.inserting_before(sink.kept):
            top, shifted, total, _ = write_sums(write, scores, sink.sink, wide)
            weights = write.cast(write.call(aten.div.Tensor, shifted, total), sink.kept.meta["val"].dtype)
    with site.graph.inserting_before(out.next):
        if sink is None:
            z = write.cast(scores, wide)
            top = write.call(aten.amax.default, z, [-1], True)
            shifted = write.call(aten.exp.default, write.call(aten.sub.Tensor, z, top))
            total = write.call(aten.sum.dim_IntList, shifted, [-1], True)
        log_total = write.call(aten.log.default, total)
        for kept in (top, log_total):
            kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        wide_scores = write.cast(copies[scores], wide)
        difference = write.call(aten.sub.Tensor, wide_scores, top)
        reduced = write.call(aten.sub.Tensor, difference, log_total)
        again = write.call(aten.exp.default, reduced)
        made = [wide_scores, difference, reduced, again]
        if site.empty is not None:
            nothing = write.call(aten.eq.Scalar, top, -float("inf"))
            again = write.call(aten.where.self, nothing, write.call(aten.zeros_like.default, again), again)
            made += [nothing, *again.all_input_nodes, again]
        probabilities = write.cast(again, site.result.meta["val"].dtype)
    for node in (*made, probabilities):
        node.meta[TAG] = IN_BACKWARD
    known = {site.result: probabilities, **{n: copies[n] for n in site.drawn}}
    if site.empty is not None:
        known[site.empty] = nothing
    copies |= copied_for_backward(site.graph, [*site.weights, *site.zeros], known)
    for node, copy in copies.items():
        for user in list(node.users):
            if user in site.backward and user is not start:
                user.replace_input_with(node, copy)
    write = NodeWriter(site.graph, start)
    with site.graph.inserting_before(start):
        delta = write.call(aten.mul.Tensor, write.cast(gradient, wide), write.cast(_as_handed_on(site), wide))
        delta = write.call(aten.sum.dim_IntList, delta, [-1], True)
        shape = [
            n if isinstance(n, int) else write.call(aten.sym_size.int, top, d)
            for d, n in enumerate(top.meta["val"].shape)
        ]
        delta = write.call(aten.view.default, delta, shape)
        flow = write.call(aten.sub.Tensor, write.cast(site.given(), wide), delta)
        flow = write.cast(write.call(aten.mul.Tensor, again, flow), start.meta["val"].dtype)
        if sink is not None:
            share = write.call(aten.sub.Tensor, narrow(sink.sink), top)
            share = write.call(aten.exp.default, write.call(aten.sub.Tensor, share, log_total))
            of_sink = write.call(aten.neg.default, write.call(aten.mul.Tensor, share, delta))
            for part, is_kept in sink.parts(start) or []:
                part.replace_all_uses_with(write.cast(flow if is_kept else of_sink, part.meta["val"].dtype))
    if sink is None:
        start.replace_all_uses_with(flow)
    else:
        sink.kept.replace_all_uses_with(weights)
        site.graph.eliminate_dead_code()
        return
    for node in (start, *reversed(site.weights)):
        if not node.users:
            site.graph.erase_node(node)


def _write_dropout(site: Site, node: fx.Node) -> None:
    """A dropout as factors of numbers that follow from a seed, which is kept."""
    x, p = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(p, (int, float))
    write = NodeWriter(site.graph, site.softmax)
    write.place = {k: node.meta[k] for k in write.place if k in node.meta}
    with site.graph.inserting_before(node):
        value = x.meta["val"]
        sizes = [n if isinstance(n, int) else write.call(aten.sym_size.int, x, d) for d, n in enumerate(value.shape)]
        seeds = write.call(DRAW_SEEDS, 1, value.device)
        seeds.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        numbers = write.call(UNIFORM, seeds, 0, sizes)
        mask = write.call(aten.lt.Scalar, numbers, 1.0 - p)
        chosen = write.call(aten.mul.Tensor, x, mask)
        scaled = write.call(aten.mul.Tensor, chosen, 0.0 if p == 1 else 1.0 / (1.0 - p))
    results = {n.args[1]: n for n in node.users}
    for k, made in ((0, scaled), (1, mask)):
        if k in results:
            results[k].replace_all_uses_with(made)
            site.graph.erase_node(results[k])
    site.graph.erase_node(node)
    site.weights = [n for n in site.weights if n is not node and n is not results[0]] + [chosen, scaled]
    site.drawn += [numbers, mask]


def _round_sources(site: Site) -> None:
    """Let half-typed values be read as they are stored, where two results have to be made of the very same.

    Scores are made of operands that are saved for the backward, where a difference of scores is a factor of
    probabilities: they would no longer be those whose sum the forward took. And the gradient of the output is in
    both terms of that of the scores, which cancel. Tensor cores take operands of products rounded as it is.
    """
    made = set(site.made)
    assert site.gradient is not None
    keep_rounding(site.gradient)
    for node in site.made:
        if site.on_gpu and node in site.scores:
            continue
        for source in set(node.all_input_nodes) - made:
            keep_rounding(source)


def _copy_again(site: Site) -> None:
    """Let the backward read queries, keys and values where a projection has put them.

    A product asks for matrices of its own layout, so that heads behind rows, or shared by groups, are copied in front
    of it. Kernels of ours read through such a copy. The partitioner, to which all that is as large is the same, would
    save it, and the forward would write it.
    """
    operands = [a for product in (*site.scores, site.readers[0]) for a in product.args if a not in site.weights]
    stack, seen, copies = operands, set(site.made), []
    while stack:
        node = stack.pop()
        if isinstance(node, fx.Node) and node not in seen and node.target in (*VIEWS, *TURNS):
            seen.add(node)
            stack += node.all_input_nodes
            copies += [node] if node.target in _COPIES else []
    while copies:  # and whatever looks at them
        node = copies.pop()
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        copies += [u for u in node.users if u.target in (*VIEWS, *TURNS) and u.target not in _COPIES]


def _as_handed_on(site: Site) -> fx.Node:
    """The output as the backward is to read it: where the forward hands on a copy in another order of dimensions, read
    off that, so that only the copy is in memory."""
    out = site.readers[0]
    steps, node = [out], out
    while node.target is not aten.clone.default:
        following = [u for u in node.users if u not in site.backward]
        if len(following) != 1 or following[0].target not in (*VIEWS, *TURNS, aten.clone.default):
            return out
        node = following[0]
        steps.append(node)
    turns = [n for n in steps[1:-1] if n.target in (aten.transpose.int, aten.permute.default)]
    before = steps[len(steps) - len(turns) - 2]
    if (
        not turns
        or turns != steps[-1 - len(turns) : -1]
        or any(n.target not in _SHAPED for n in steps[1 : -1 - len(turns)])
    ):
        return out
    order = list(range(before.meta["val"].dim()))
    for turn in turns:
        order = [order[d] for d in order_of(turn, len(order))]
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    write = NodeWriter(site.graph, site.start)
    back = write.call(aten.permute.default, node, [order.index(d) for d in range(len(order))])
    back = write.call(aten.clone.default, back, memory_format=torch.contiguous_format)
    sizes = [
        n if isinstance(n, int) else write.call(aten.sym_size.int, out, d) for d, n in enumerate(out.meta["val"].shape)
    ]
    back = write.call(aten.view.default, back, sizes)
    for made in (back.args[0], back):
        made.meta[TAG] = IN_BACKWARD
    return back
