"""A softmax over scores and one more number a row, whose probability is dropped, becomes one over the scores alone with
that number's exponential added to the sum: a sink, which takes weight and has no value.

Models write it as ``softmax(cat([scores, sink], -1), -1)[..., :-1]``. Then rows of one more element would be in memory,
and no function of the scores would be what a product weighs values by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..write import NodeWriter, tidy
from .gradient_terms import is_zero

aten = torch.ops.aten

_SAME = (aten.alias.default, aten.detach.default)


@dataclass(frozen=True, slots=True)
class Sink:
    """``kept`` are the probabilities of ``scores`` in a softmax over those and ``sink``, in front of them or behind."""

    softmax: fx.Node
    kept: fx.Node
    scores: fx.Node
    sink: fx.Node
    first: bool

    @property
    def others(self) -> set[fx.Node]:
        """What reads the softmax, but for its kept part, by whatever name."""
        stack, found = [self.softmax], set()
        while stack:
            for user in stack.pop().users:
                if user.target in _SAME:
                    stack.append(user)
                elif user is not self.kept and user.target is not aten.sym_size.int:
                    found.add(user)
        return found

    def parts(self, start: fx.Node) -> list[tuple[fx.Node, bool]] | None:
        """The parts of the gradient of what the softmax is of, and whether each is that of the scores; None where
        anything else reads it."""
        found, stack = [], [start]
        while stack:
            for user in stack.pop().users:
                if is_widened(user):
                    stack.append(user)
                elif self.is_kept(user) or self.is_dropped(user):
                    found.append((user, self.is_kept(user)))
                else:
                    return None
        return found

    def is_kept(self, node: fx.Node) -> bool:
        """Whether a node is the part of one more element that belongs to the scores."""
        columns, span = self.scores.meta["val"].shape[-1], _span(node)
        start = 1 if self.first else 0
        return span is not None and _same(span[0], start) and _same(span[1], columns + start)

    def is_dropped(self, node: fx.Node) -> bool:
        columns, span = self.scores.meta["val"].shape[-1], _span(node)
        start = 0 if self.first else columns
        return span is not None and _same(span[0], start) and _same(span[1], start + 1)


def find_sink(softmax: fx.Node) -> Sink | None:
    """The sink of a softmax, where it has one."""
    joined = softmax.args[0]
    if isinstance(joined, fx.Node) and is_widened(joined):
        joined = joined.args[0]
    if not isinstance(joined, fx.Node) or joined.target is not aten.cat.default:
        return None
    rank = joined.meta["val"].dim()
    parts, dim = joined.args[0], joined.args[1] if len(joined.args) > 1 else 0
    if {dim % rank, softmax.args[1] % rank} != {rank - 1} or len(parts) != 2:  # type: ignore[operator, arg-type]
        return None
    if any(n.meta["val"].dtype is not joined.meta["val"].dtype or n.meta["val"].dim() != rank for n in parts):
        return None
    widths = [n.meta["val"].shape[-1] for n in parts]
    if sum(_same(w, 1) for w in widths) != 1:
        return None
    first = _same(widths[0], 1)
    sink, scores = parts if first else reversed(parts)
    readers = [u for u in softmax.users if u.target is aten.slice.Tensor]
    if len(readers) != 1:
        return None
    found = Sink(softmax, readers[0], scores, sink, first)
    return found if found.is_kept(readers[0]) else None


def is_widened(node: fx.Node) -> bool:
    """Whether a node is another as another floating type."""
    return node.target is aten._to_copy.default and bool(node.meta["val"].is_floating_point())


def _span(node: fx.Node) -> tuple[Any, Any] | None:
    """The first element of a slice in the last dimension, and the end."""
    if node.target is not aten.slice.Tensor:
        return None
    given: tuple[Any, ...] = tuple(node.args)
    source, dim, start, _, step = given + (0, None, None, 1)[len(given) - 1 :]
    shape = source.meta["val"].shape
    if step != 1 or dim % len(shape) != len(shape) - 1:
        return None
    columns = shape[-1]
    start = 0 if start is None else _value(start)
    start = columns + start if isinstance(start, int) and start < 0 else start
    return start, start + node.meta["val"].shape[-1]


def _value(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def write_sinks(graph: fx.Graph) -> int:
    """Rewrite every softmax with a sink, and its gradient, in place; how many there were."""
    done = 0
    for node in graph.find_nodes(op="call_function", target=aten._softmax.default):
        found = find_sink(node)
        if found is not None and _rewrite(graph, found):
            done += 1
    if done:
        tidy(graph)
    return done


def _rewrite(graph: fx.Graph, found: Sink) -> bool:
    gradients = found.others
    if any(not is_gradient(found, n) for n in gradients):
        return False
    kept, dtype = found.kept, found.kept.meta["val"].dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    write = NodeWriter(graph, found.softmax)
    with graph.inserting_before(kept):
        shifted, total, taken = write_sums(write, found.scores, found.sink, wide)[1:]
        probabilities = write.call(aten.div.Tensor, shifted, total)
        result = write.cast(probabilities, dtype)
    write.replace(kept, result)
    for start in gradients:
        write = NodeWriter(graph, start)
        flow = start.args[0].args[0]  # type: ignore[union-attr]
        with graph.inserting_before(start):
            flow = write.cast(flow, wide)
            told = write.call(aten.sum.dim_IntList, write.call(aten.mul.Tensor, flow, probabilities), [-1], True)
            of_scores = write.call(aten.mul.Tensor, probabilities, write.call(aten.sub.Tensor, flow, told))
            share = write.call(aten.div.Tensor, taken, total)
            of_sink = write.call(aten.neg.default, write.call(aten.mul.Tensor, share, told))
            for part, is_kept in found.parts(start) or []:
                write.replace(part, write.cast(of_scores if is_kept else of_sink, part.meta["val"].dtype))
    return True


def write_sums(
    write: NodeWriter, scores: fx.Node, sink: fx.Node, wide: torch.dtype
) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """The largest number of a row, the exponentials of scores below it, their sum with the sink's, and that."""
    scores = write.cast(scores, wide)
    top = write.call(aten.amax.default, scores, [-1], True)
    if is_zero(sink):
        top = write.call(aten.clamp.default, top, 0)
        below = write.call(aten.neg.default, top)
    else:
        sink = narrow(sink)  # which is converted where it is read, so that nobody has to make it before
        top = write.call(aten.maximum.default, top, sink)
        below = write.call(aten.sub.Tensor, sink, top)
    shifted = write.call(aten.exp.default, write.call(aten.sub.Tensor, scores, top))
    taken = write.call(aten.exp.default, below)
    total = write.call(aten.add.Tensor, write.call(aten.sum.dim_IntList, shifted, [-1], True), taken)
    return top, shifted, total, taken


def narrow(sink: fx.Node) -> fx.Node:
    """A sink before it was repeated for rows: where it meets theirs, it is again."""
    while sink.target is aten.expand.default:
        sink = sink.args[0]  # type: ignore[assignment]
    return sink


def is_gradient(found: Sink, node: fx.Node) -> bool:
    """Whether a node is the gradient of a softmax whose dropped part flows nothing back, in the two parts of it."""
    if node.target is not aten._softmax_backward_data.default:
        return False
    given = node.args[0]
    if not isinstance(given, fx.Node) or given.target is not aten.slice_backward.default:
        return False
    source, sizes, dim, start, _, step = given.args
    rank = len(sizes)  # type: ignore[arg-type]
    columns, begin = found.scores.meta["val"].shape[-1], 1 if found.first else 0
    same = step == 1 and dim % rank == rank - 1 and _same(source.meta["val"].shape[-1], columns)  # type: ignore
    return bool(same and _same(_value(start), begin) and found.parts(node) is not None)


__all__ = ["Sink", "find_sink", "is_gradient", "narrow", "write_sinks", "write_sums"]
