"""Training of attention keeps two numbers a row: the graph that holds forward and backward is rewritten, before it is
parted, such that the backward makes probabilities again from scores, the largest of their row, and the logarithm of
the sum of exponentials below it. Their sum would do if scores were small; but where a model puts the lowest number
that there is for every score of a row, the logarithm would be lost in it.

A softmax between two products (whatever stands between scores and softmax) is followed to the products and to
everything that its probabilities become. What the backward reads of them becomes ``exp(score - top - log_total)``,
element by element, so that no reduction is left in it but products; the sum over a row of probabilities times their
gradients is that of the output times its gradient, since the output is linear in the probabilities. Scores and what is
made of them are marked to be computed again, and dropout draws its numbers again, of a seed that is kept. From there
the backend sees plain operations: which of them become one kernel is decided where they are fused.
Sources: Dao et al. 2022; Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import torch
from torch import fx

from ....ir.target import has_kernels
from ..context import AtenContext
from .joint_match import KeptError, Site
from .joint_write import rewrite

aten = torch.ops.aten


def recompute_scores(joint: fx.GraphModule, context: AtenContext) -> int:
    """Rewrite, in place, every attention of a graph of forward and backward; how many there were.

    Common nodes have been united before: what is computed twice afterwards is so on purpose. Where a softmax stands
    between products and keeps its probabilities, the note ``mlc_note`` of the product that reads them says why.
    """
    options, done = context.options, 0
    for node in list(joint.graph.find_nodes(op="call_function", target=aten._softmax.default)):
        device = node.meta["val"].device.type
        on_gpu = device != "cpu" or options.gpu is not None
        found = Site(joint.graph, node, on_gpu, draws=not options.fallback_random)
        if not has_kernels(device) or not found.scores:
            continue
        try:
            found.match()
        except KeptError as no:
            for product in found.readers[:1]:
                product.meta["mlc_note"] = f"probabilities are kept for the backward: {no}"
            continue
        rewrite(found)
        done += 1
    if done:
        joint.graph.lint()
        joint.recompile()
    return done


__all__ = ["recompute_scores"]
