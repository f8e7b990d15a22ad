"""Views in a row that leave the elements in their order are one view of what lies before them.

``torch.einsum`` writes every product with dimensions of one element that it adds, moves and takes away again, and with
permutations that cancel, in its backward too. What looks for patterns would have to see that nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..write import NodeWriter

aten = torch.ops.aten
_SHAPES = (aten.view.default, aten._unsafe_view.default)
_UNITS = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_TURNS = (aten.permute.default, aten.transpose.int, aten.t.default)


@dataclass(frozen=True, slots=True)
class _Row:
    """What views in a row make of ``root``: of each dimension which it is there, None of those of one element, and
    whether one of them is a permutation."""

    root: fx.Node
    dims: tuple[int | None, ...]
    is_turned: bool = False

    @property
    def keeps_order(self) -> bool:
        """Whether the elements are in the order in which they were."""
        moved = [d for d in self.dims if d is not None]
        return moved == sorted(moved)


def straighten_views(graph: fx.Graph) -> int:
    """Read the last of views in a row that leave elements in their order, permutations among them, straight off what
    lies before the row; how many there were.

    Results of the graph keep their views, which say what they share memory with.
    """
    rows: dict[fx.Node, _Row] = {}
    ends: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (*_SHAPES, *_UNITS, *_TURNS, aten.expand.default):
            continue
        source = node.args[0]
        before = rows.get(source) or _Row(source, _own(source))
        row = _after(node, before)
        if row is not None:
            rows[node] = row
        last = row or before
        is_read = any(u.target not in (*_UNITS, *_TURNS, *_SHAPES) for u in node.users)
        is_shape = row is None and node.target in _SHAPES
        if last.is_turned and last.keeps_order and (is_shape or is_read):
            ends.append((node, last.root))
    done: dict[fx.Node, fx.Node] = {}
    for node, root in ends:
        if all(u.op != "output" for u in node.users):
            straight = _straight(graph, node, done.get(root, root))
            if straight is not None:
                node.replace_all_uses_with(straight)
                done[node] = straight
    return len(done)


def _own(node: fx.Node) -> tuple[int | None, ...]:
    return tuple(None if _is_equal(n, 1) else d for d, n in enumerate(node.meta["val"].shape))


def _after(node: fx.Node, row: _Row) -> _Row | None:
    """The row with a view at its end; None where that unites dimensions, takes them apart or repeats elements."""
    if node.target in _TURNS:
        order = order_of(node, len(row.dims))
        return replace(row, dims=tuple(row.dims[d] for d in order), is_turned=True)
    # Whatever else keeps the sizes of dimensions of several elements, in their order, adds or drops the others.
    several = [d for d in row.dims if d is not None]
    shape = node.meta["val"].shape
    sizes = [n for n in node.args[0].meta["val"].shape if not _is_equal(n, 1)]  # type: ignore[union-attr]
    found = [n for n in shape if not _is_equal(n, 1)]
    if len(found) != len(sizes) or not all(map(_is_equal, found, sizes)):
        return None
    left = iter(several)
    return replace(row, dims=tuple(None if _is_equal(n, 1) else next(left) for n in shape))


def order_of(node: fx.Node, rank: int) -> list[int]:
    """Which dimension of its operand each of a permutation's is."""
    order = list(range(rank))
    if node.target is aten.permute.default:
        dims = node.args[1]
        assert isinstance(dims, Sequence)
        return [order[d] for d in dims]  # type: ignore[index]
    if rank > 1:
        a, b = node.args[1:] if node.target is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return order


def _straight(graph: fx.Graph, node: fx.Node, root: fx.Node) -> fx.Node | None:
    """The elements of ``root`` in the shape of ``node``, where its memory allows and its sizes can be named."""
    shape = node.meta["val"].shape
    before = root.meta["val"].shape
    if len(shape) == len(before) and all(map(_is_equal, shape, before)):
        return root
    write = NodeWriter(graph, node)
    with graph.inserting_before(node):
        if node.target in _SHAPES:
            sizes: Any = node.args[1]
        else:
            known = [next((k for k, m in enumerate(before) if _is_equal(n, m)), None) for n in shape]
            if any(k is None and not isinstance(n, int) for k, n in zip(known, shape, strict=True)):
                return None
            sizes = [
                n if isinstance(n, int) else write.call(aten.sym_size.int, root, k)
                for k, n in zip(known, shape, strict=True)
            ]
        try:
            return write.call(aten.view.default, root, sizes)
        except RuntimeError:  # other dimensions have been united than lie together
            return None


def _is_equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)
