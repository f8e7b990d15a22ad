"""Products that share an operand's place become one: sums of them, as weights that are used again and again get.

A recurrent network multiplies by the same weights at each step. Its backward makes a gradient of each step, as large
as the weights, and adds them all: ``x1.T @ g1 + x2.T @ g2 + …`` is ``[x1; x2; …].T @ [g1; g2; …]``, one product, and
what is copied to join the operands is less than what would be written and read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..tracing.hints import hint_of
from .context import AtenContext
from .rounding.numerics import rounding_kept
from .write import NodeWriter

aten = torch.ops.aten
# Whether a node is not to be rewritten.
Stays = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix as it lies in memory, and whether it is meant transposed."""

    node: fx.Node
    turned: bool = False

    @classmethod
    def of(cls, node: fx.Node, turned: bool = False) -> _Matrix:
        """A node, seen through transpositions."""
        while _is_turn(node):
            node, turned = node.args[0], not turned  # type: ignore[assignment]
        return cls(node, turned)

    @property
    def shape(self) -> tuple[int, int]:
        """Typical sizes."""
        rows, columns = (hint_of(s) for s in self.node.meta["val"].shape)
        return (columns, rows) if self.turned else (rows, columns)

    @property
    def transposed(self) -> _Matrix:
        """The same memory, meant the other way."""
        return _Matrix(self.node, not self.turned)

    def written(self, out: NodeWriter) -> fx.Node:
        """A node for it."""
        return out.call(aten.t.default, self.node) if self.turned else self.node


@dataclass(frozen=True, slots=True)
class _Product:
    """A term ``a @ b`` of a sum."""

    term: fx.Node
    a: _Matrix
    b: _Matrix

    @classmethod
    def of(cls, term: fx.Node, stays: Stays) -> _Product | None:
        """What a term multiplies, where it is a product, or one transposed, that nothing else reads and may go."""
        node, turned = term, False
        while _is_turn(node) and len(node.users) == 1:
            node, turned = node.args[0], not turned  # type: ignore[assignment]
        if node.target is not aten.mm.default or node.kwargs or stays(node):
            return None
        if len(node.users) != 1 or len(term.users) != 1:
            return None
        a, b = (_Matrix.of(x, turned) for x in node.args)  # type: ignore[arg-type]
        return cls(term, b, a) if turned else cls(term, a, b)


def merge_products(gm: fx.GraphModule, context: AtenContext) -> int:
    """Write, in place, sums of matrix products as products of joined operands where less memory is touched; how many
    products went into others. Sums and products whose rounding is to be eager's stay."""
    merged = 0
    stays = rounding_kept(context.options)
    for root in [n for n in gm.graph.nodes if _is_sum(n, stays) and not _is_part(n, stays)]:
        terms = list(_terms(root, stays))
        products = [p for t in terms if (p := _Product.of(t, stays)) is not None]
        if len(products) < 2 or not _gains(products):
            continue
        taken = {p.term for p in products}
        with gm.graph.inserting_before(root):
            out = NodeWriter(gm.graph, root)
            left, right = _joined(out, [p.a for p in products], 1), _joined(out, [p.b for p in products], 0)
            total = _multiplied(out, left, right, by_columns=root.meta["val"].stride(0) == 1)
            for term in terms:
                if term not in taken:
                    total = out.call(aten.add.Tensor, total, term)
        out.replace(root, total)
        _drop(gm.graph, root)
        merged += len(products)
    if merged:
        gm.graph.lint()
        gm.recompile()
    return merged


def _is_sum(node: fx.Node, stays: Stays) -> bool:
    """Whether a node adds two tensors of its own shape and type, one by one, and may go."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or stays(node):
        return False
    kind = node.meta["val"]
    return kind.is_floating_point() and all(isinstance(a, fx.Node) and _like(a.meta["val"], kind) for a in node.args)


def _is_part(node: fx.Node, stays: Stays) -> bool:
    """Whether a sum is only there to be a term of another."""
    users = list(node.users)
    return len(users) == 1 and _is_sum(users[0], stays) and users[0].args[0] is not users[0].args[1]


def _terms(root: fx.Node, stays: Stays) -> Iterator[fx.Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        for arg in reversed(node.args):
            assert isinstance(arg, fx.Node)
            if _is_sum(arg, stays) and _is_part(arg, stays):
                stack.append(arg)
            else:
                yield arg


def _like(x: object, kind: torch.Tensor) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.dtype is kind.dtype
        and x.device == kind.device
        and x.dim() == kind.dim()
        and all(statically_known_true(a == b) for a, b in zip(x.shape, kind.shape))
    )


def _gains(products: Sequence[_Product]) -> bool:
    """Whether joining the operands moves less than writing each product and reading it again to add it.

    It never does where a product has one row or column, whose strides would be others, but for products of nothing.
    """
    (rows, _), (_, columns) = products[0].a.shape, products[0].b.shape
    depth = sum(p.a.shape[1] for p in products)
    return 0 < depth * (rows + columns) < len(products) * rows * columns


def _joined(out: NodeWriter, factors: Sequence[_Matrix], dim: int) -> _Matrix:
    """Matrices one behind the other along a dimension, joined as they lie in memory."""
    if all(f.turned for f in factors):
        return _Matrix(out.call(aten.cat.default, [f.node for f in factors], 1 - dim), turned=True)
    return _Matrix(out.call(aten.cat.default, [f.written(out) for f in factors], dim))


def _multiplied(out: NodeWriter, a: _Matrix, b: _Matrix, *, by_columns: bool) -> fx.Node:
    """The product, its elements one behind the other along columns or along rows."""
    if by_columns:
        return out.call(aten.t.default, _multiplied(out, b.transposed, a.transposed, by_columns=False))
    return out.call(aten.mm.default, a.written(out), b.written(out))


def _is_turn(node: fx.Node) -> bool:
    return (
        node.target in (aten.t.default, aten.permute.default)
        and node.meta["val"].dim() == 2
        and (len(node.args) == 1 or list(node.args[1]) == [1, 0])  # type: ignore[arg-type]
    )


def _drop(graph: fx.Graph, root: fx.Node) -> None:
    """Erase a node that nobody reads, and what then nobody reads."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.users or node.op == "placeholder":
            continue
        operands = list(node.all_input_nodes)
        graph.erase_node(node)
        waiting += operands
