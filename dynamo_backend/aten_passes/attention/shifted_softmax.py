"""A softmax of what is left when the largest of its row has been subtracted is the softmax itself, which does that.

Many models write both, for the sake of a softmax that does not. The scores would have to be there before the largest
is known, and could be no attention's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..write import tidy
from .gradient_terms import OF_SCORES, PROBABILITY, forms_of
from .joint_match import unaliased

aten = torch.ops.aten


def unshift_softmax(graph: fx.Graph) -> int:
    """Let softmaxes and their logarithms read what the largest of each row is subtracted from, in place; how many did.

    The same bits in full precision, rows of infinities and NaN among them; narrow types lose a rounding.
    """
    done = 0
    for op in (aten._softmax.default, aten._log_softmax.default):
        for node in graph.find_nodes(op="call_function", target=op):
            source = node.args[0]
            if source.target is not aten.sub.Tensor or source.kwargs:
                continue
            scores, shift = source.args
            if isinstance(scores, fx.Node) and _is_largest(shift, scores, node.args[1]):
                node.update_arg(0, scores)
                if op is aten._softmax.default:
                    _stop_at_largest(node)
                done += 1
    if done:
        tidy(graph)
    return done


def _stop_at_largest(softmax: fx.Node) -> None:
    """Let what flows back through what was subtracted be nothing: gradients of scores add up to zero in a row."""
    graph, shape = softmax.graph, softmax.meta["val"].shape
    if softmax.args[1] % len(shape) != len(shape) - 1:  # type: ignore[operator]
        return
    names = {n for n in graph.nodes if unaliased(n) is softmax}
    starts = [n for n in graph.find_nodes(op="call_function", target=aten._softmax_backward_data.default)
              if n.args[1] in names]  # fmt: skip
    for start in starts:
        forms = forms_of(graph.nodes, dict.fromkeys(names, PROBABILITY), {start: OF_SCORES}, shape[-1], extra=False)
        for node, form in forms.items():
            same = form == OF_SCORES and node.target is aten.add.Tensor
            if same and node.meta["val"].dtype is start.meta["val"].dtype:
                node.replace_all_uses_with(start)


def _is_largest(shift: Any, scores: fx.Node, dim: int) -> bool:
    """Whether a value is the largest of each row of scores, in a dimension of one element."""
    shift = unaliased(shift)
    if not isinstance(shift, fx.Node):
        return False
    if shift.target is operator.getitem and shift.args[1] == 0:
        shift = shift.args[0]
        is_found = shift.target is aten.max.dim
    else:
        is_found = shift.target is aten.amax.default
    if not is_found or len(shift.args) < 3 or shift.args[0] is not scores or shift.args[2] is not True:
        return False
    rank = scores.meta["val"].dim()
    dims = shift.args[1] if isinstance(shift.args[1], (list, tuple)) else [shift.args[1]]
    return [d % rank for d in dims] == [dim % rank]
