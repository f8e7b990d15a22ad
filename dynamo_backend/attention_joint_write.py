"""How the backward of an attention that ``attention_joint_match`` has found makes its probabilities again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .attention_joint_match import Site
from .chunk_loss_write import Writer
from .random_ops import DRAW_SEEDS, UNIFORM
from .rounding import keep_rounding

aten = torch.ops.aten

# How the partitioner is told what only the backward computes.
_TAG, _IN_BACKWARD = "partitioner_tag", "must_be_in_backward"


def rewrite(site: Site) -> None:
    """Probabilities of the backward from scores and row statistics, and the softmax's gradient."""
    out, start, gradient = site.readers[0], site.start, site.gradient
    assert start is not None and gradient is not None
    scores = site.softmax.args[0]
    assert isinstance(scores, fx.Node)
    wide = torch.float64 if scores.meta["val"].dtype is torch.float64 else torch.float32
    write = Writer(site.graph, site.softmax)
    for node in site.dropouts:
        _write_dropout(site, node)
    _round_sources(site)
    copies = _repeated(site.graph, [*site.made, *site.drawn], {})
    with site.graph.inserting_before(out.next):
        z = write.cast(scores, wide)
        top = write.call(aten.amax.default, z, [-1], True)
        shifted = write.call(aten.exp.default, write.call(aten.sub.Tensor, z, top))
        total = write.call(aten.sum.dim_IntList, shifted, [-1], True)
        lse = write.call(aten.add.Tensor, top, write.call(aten.log.default, total))
        if site.empty is not None:  # not NaN, so that it tells of them
            nothing = write.call(aten.eq.Scalar, top, -float("inf"))
            lse = write.call(aten.where.self, nothing, top, lse)
        lse.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        wide_scores = write.cast(copies[scores], wide)
        difference = write.call(aten.sub.Tensor, wide_scores, lse)
        again = write.call(aten.exp.default, difference)
        made = [wide_scores, difference, again]
        if site.empty is not None:
            nothing = write.call(aten.eq.Scalar, lse, -float("inf"))
            again = write.call(aten.where.self, nothing, write.call(aten.zeros_like.default, again), again)
            made += [nothing, *again.all_input_nodes, again]
        probabilities = write.cast(again, site.softmax.meta["val"].dtype)
    for node in (*made, probabilities):
        node.meta[_TAG] = _IN_BACKWARD
    known = {site.softmax: probabilities, **{n: copies[n] for n in site.drawn}}
    if site.empty is not None:
        known[site.empty] = nothing
    copies |= _repeated(site.graph, [*site.weights, *site.zeros], known)
    for node, copy in copies.items():
        for user in list(node.users):
            if user in site.backward and user is not start:
                user.replace_input_with(node, copy)
    write = Writer(site.graph, start)
    with site.graph.inserting_before(start):
        delta = write.call(aten.mul.Tensor, write.cast(gradient, wide), write.cast(out, wide))
        delta = write.call(aten.sum.dim_IntList, delta, [-1], True)
        shape = [
            n if isinstance(n, int) else write.call(aten.sym_size.int, lse, d)
            for d, n in enumerate(lse.meta["val"].shape)
        ]
        delta = write.call(aten.view.default, delta, shape)
        flow = write.call(aten.sub.Tensor, write.cast(start.args[0], wide), delta)  # type: ignore[arg-type]
        flow = write.cast(write.call(aten.mul.Tensor, again, flow), start.meta["val"].dtype)
    start.replace_all_uses_with(flow)
    for node in (start, *reversed(site.weights)):
        if not node.users:
            site.graph.erase_node(node)


def _write_dropout(site: Site, node: fx.Node) -> None:
    """A dropout as factors of numbers that follow from a seed, which is kept."""
    x, p = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(p, (int, float))
    write = Writer(site.graph, site.softmax)
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


def _repeated(graph: fx.Graph, nodes: Iterable[fx.Node], known: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copies of nodes that the backward computes, of one another where they read one another."""
    place = {n: k for k, n in enumerate(graph.nodes)}
    copies, last = dict(known), max(known.values(), key=place.__getitem__, default=None)
    for node in sorted(set(nodes) - known.keys(), key=place.__getitem__):
        after = node if last is None or place[node] > place[last] else last
        with graph.inserting_after(after):
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
        copy.meta[_TAG] = _IN_BACKWARD
        copies[node] = copy
        if last is not None:
            last = copy
            place[copy] = place[after]
    return copies
