"""A softmax that a model writes out, and its gradient as autograd writes it, become torch's: ``e / sum e`` of
``e = exp(scores - number of the row)``; and with ``exp(sink - that number)`` added to the sum, a softmax over the
scores and the sink, whose last probability is dropped.

Autograd flows back through the sum and through the largest score of the row, with a mask of where that is. All of it
adds up to a softmax's gradient (``gradient_terms``), in which no mask is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..joint_graph import backward_of
from ..write import NodeWriter, tidy
from .gradient_terms import EXPONENTIAL, EXTRA, GIVEN, OF_EXTRA, OF_SCORES, TOTAL, ZERO, TermForm, Terms, forms_of
from .joint_match import unaliased

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _WrittenSoftmax:
    """``result`` is ``exponentials / total``; those are of ``scores``. ``extra`` is what is added to their sum, the
    exponential of ``sink`` less what the scores are less, or of its negative where ``sink`` is None."""

    result: fx.Node
    exponentials: fx.Node
    total: fx.Node
    scores: fx.Node
    shift: fx.Node
    extra: fx.Node | None
    sink: fx.Node | None


def unite_softmax(graph: fx.Graph) -> int:
    """Rewrite, in place, every softmax that is written out in a graph of forward and backward; how many there were."""
    backward, done = backward_of(graph), 0
    for target in (aten.div.Tensor, aten.mul.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            found = None if node in backward else _find(node)
            if found is not None and _rewrite(graph, found, backward):
                done += 1
    if done:
        tidy(graph)
    return done


# --- finding ----------------------------------------------------------------------------------------------------------


def _find(node: fx.Node) -> _WrittenSoftmax | None:
    """The softmax that a quotient is."""
    exponentials, total = node.args[:2]
    if node.target is aten.mul.Tensor:
        inverse = [a for a in node.args if isinstance(a, fx.Node) and a.target is aten.reciprocal.default]
        if len(inverse) != 1:
            return None
        exponentials, total = next(a for a in node.args if a is not inverse[0]), inverse[0].args[0]
    if not isinstance(exponentials, fx.Node) or not isinstance(total, fx.Node) or node.kwargs:
        return None
    if exponentials.target is not aten.exp.default:
        return None
    pair = _difference(exponentials.args[0])
    if pair is None or not _of_rows(pair[1]):
        return None
    scores, shift = pair
    if scores is None or scores.meta["val"].shape[:-1] != shift.meta["val"].shape[:-1]:
        return None
    types = {n.meta["val"].dtype for n in (node, scores, exponentials, total)}
    if len(types) != 1 or scores.meta["val"].shape != node.meta["val"].shape or _of_rows(scores):
        return None
    if _is_sum(total, exponentials):
        return _WrittenSoftmax(node, exponentials, total, scores, shift, None, None)
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    for part, extra in (total.args, total.args[::-1]):
        if not isinstance(extra, fx.Node) or not _is_sum(part, exponentials) or extra.target is not aten.exp.default:
            continue
        of = _difference(extra.args[0])
        if of is not None and unaliased(of[1]) is unaliased(shift) and (of[0] is None or _is_beside(of[0], shift)):
            return _WrittenSoftmax(node, exponentials, total, scores, shift, extra, of[0])
    return None


def _difference(node: Any) -> tuple[fx.Node | None, fx.Node] | None:
    """What a node is less than what, None for zero."""
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    match node.target, node.args:
        case aten.sub.Tensor, (fx.Node() as a, fx.Node() as b):
            return a, b
        case aten.neg.default, (fx.Node() as b,):
            return None, b
    return None


def _is_sum(node: Any, exponentials: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.sum.dim_IntList or node.args[0] is not exponentials:
        return False
    rank = node.meta["val"].dim()
    return [d % rank for d in node.args[1]] == [rank - 1] and node.args[2:] == (True,)  # type: ignore[union-attr]


def _of_rows(node: fx.Node) -> bool:
    """Whether a tensor has one number a row."""
    shape = node.meta["val"].shape
    return len(shape) > 0 and statically_known_true(shape[-1] == 1)


def _is_beside(sink: fx.Node, shift: fx.Node) -> bool:
    """Whether a sink is of the rows of what is subtracted, or of some dimensions of theirs."""
    a, b = sink.meta["val"], shift.meta["val"]
    return a.dtype is b.dtype and _of_rows(sink) and a.dim() <= b.dim()


# --- writing ----------------------------------------------------------------------------------------------------------


def _rewrite(graph: fx.Graph, found: _WrittenSoftmax, backward: set[fx.Node]) -> bool:
    columns = found.scores.meta["val"].shape[-1]
    factors: dict[fx.Node, Terms] = {found.exponentials: EXPONENTIAL, found.total: TOTAL}
    if found.extra is not None:
        factors[found.extra] = EXTRA
    for given in _candidates(found, backward):
        forms = forms_of(graph.nodes, factors, {given: GIVEN}, columns, found.extra is not None)
        of_scores = [n for n, f in forms.items() if f == OF_SCORES and _is_like(n, found.scores)]
        if of_scores:
            _write(graph, found, given, forms, of_scores)
            return True
    return False


def _candidates(found: _WrittenSoftmax, backward: set[fx.Node]) -> Iterator[fx.Node]:
    """What may be the gradient of the result: what is divided by the sum, or multiplied by its inverse, on its way
    back."""
    seen = set()
    stack = [found.total]
    while stack:
        for user in stack.pop().users:
            if user.target in (aten.reciprocal.default, aten.detach.default, aten.alias.default):
                stack.append(user)
            elif user.target in (aten.div.Tensor, aten.mul.Tensor) and user in backward:
                for given in user.all_input_nodes:
                    if given in backward and given not in seen and _is_like(given, found.scores):
                        seen.add(given)
                        yield given


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    a, b = node.meta["val"], other.meta["val"]
    return a.dtype is b.dtype and a.shape == b.shape


def _write(
    graph: fx.Graph, found: _WrittenSoftmax, given: fx.Node, forms: dict[fx.Node, TermForm], of_scores: list[fx.Node]
) -> None:
    scores, dtype, dim = found.scores, found.scores.meta["val"].dtype, found.scores.meta["val"].dim() - 1
    of_sink = [n for n, f in forms.items() if found.sink is not None and f == OF_EXTRA and _is_like(n, found.shift)]
    place = {n: k for k, n in enumerate(graph.nodes)}
    write, back = NodeWriter(graph, found.result), NodeWriter(graph, of_scores[0])
    with graph.inserting_before(found.total):
        if found.extra is None:
            result = softmax = write.call(aten._softmax.default, scores, dim, False)
        else:
            if found.sink is None:
                value = scores.meta["val"]
                like = {"dtype": dtype, "device": value.device}
                sink = write.call(aten.full.default, [*_sizes(write, scores)[:-1], 1], 0.0, **like)
            else:
                sink = write.call(aten.expand.default, found.sink, [*_sizes(write, scores)[:-1], 1])
            joined = write.call(aten.cat.default, [scores, sink], dim)
            softmax = write.call(aten._softmax.default, joined, dim, False)
            result = write.call(aten.slice.Tensor, softmax, dim, 0, -1)
    with graph.inserting_before(min((*of_scores, *of_sink), key=place.__getitem__)):
        flow = given
        if found.extra is not None:
            sizes = _sizes(back, softmax)
            flow = back.call(aten.slice_backward.default, given, sizes, dim, 0, -1, 1)
        start = back.call(aten._softmax_backward_data.default, flow, softmax, dim, dtype)
        parts = {"scores": start}
        if found.extra is not None:
            parts["scores"] = back.call(aten.slice.Tensor, start, dim, 0, -1)
            parts["sink"] = back.call(aten.slice.Tensor, start, dim, -1, 2**63 - 1)
    for node in of_scores:
        write.replace(node, parts["scores"])
    for node in of_sink:
        write.replace(node, parts["sink"])
    _drop_zeros(forms)
    write.replace(found.result, result)


def _drop_zeros(forms: dict[fx.Node, TermForm]) -> None:
    """Let gradients that nothing is added to be themselves."""
    for node, form in forms.items():
        for user in [u for u in node.users if form == ZERO and u not in forms and u.target is aten.add.Tensor]:
            others = [a for a in user.args if a is not node]
            if len(others) == 1 and not user.kwargs and isinstance(others[0], fx.Node) and _is_like(user, others[0]):
                user.replace_all_uses_with(others[0])


def _sizes(write: NodeWriter, like: fx.Node) -> list[Any]:
    return [
        n if isinstance(n, int) else write.call(aten.sym_size.int, like, d)
        for d, n in enumerate(like.meta["val"].shape)
    ]


__all__ = ["unite_softmax"]
