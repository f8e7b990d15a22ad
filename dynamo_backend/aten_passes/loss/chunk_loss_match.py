"""Finds linear + cross-entropy in a graph of ATen ops, by following the logits to everything that reads them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...tracing.hints import is_decided_by_data

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)
_COPIES = (aten.alias.default, aten.detach.default, aten.clone.default, aten._to_copy.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_TRANSPOSES = (aten.t.default,)
# Ops whose result is other strides over the memory of their first argument.
_ALIASES = (
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.alias.default, aten.detach.default, aten.squeeze.dim, aten.unsqueeze.default, aten.slice.Tensor,
)  # fmt: skip
_REDUCTIONS = (1, 2)  # mean, sum
_NO_GRADIENT = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that the graph computes at ``node``.

    ``row_maps`` lead from the gradient of the loss's rows to that of the product's; ``transposed``: the node holds the
    gradient of the weight as its operand [features, classes] lies.
    """

    node: fx.Node
    row_maps: tuple[fx.Node, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class LossSite:
    """One loss. ``rows`` [n, features] @ ``weight`` [features, classes] (+ ``bias``) are the logits; ``row_maps``
    (views, slices of rows) make of them what the loss of ``target`` is taken of. ``value`` is the loss, ``gradient``
    what flows back into it, None where nothing does. ``region`` are the nodes that the rewrite makes needless."""

    product: fx.Node
    log_probabilities: fx.Node
    loss: fx.Node
    value: fx.Node
    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    target: fx.Node
    reduction: int
    ignore: int
    row_maps: tuple[fx.Node, ...]
    gradient: fx.Node | None
    dx: tuple[Gradient, ...]
    dw: tuple[Gradient, ...]
    db: tuple[Gradient, ...]
    region: frozenset[fx.Node]

    @property
    def features(self) -> int:
        """The width of the rows that the product takes."""
        return int(self.weight.meta["val"].shape[0])

    @property
    def classes(self) -> int:
        """The number of logits of a row."""
        return int(self.weight.meta["val"].shape[1])


@dataclass(frozen=True, slots=True)
class RefusedLoss:
    """A product whose logits a loss reads, and why it stays as it is."""

    product: fx.Node
    reason: str


Found: TypeAlias = LossSite | RefusedLoss


class _No(Exception):
    """Why a loss cannot be chunked."""


def find_losses(graph: fx.Graph) -> list[Found]:
    """The losses of a graph whose logits are a product's, and those that must stay whole."""
    graph.eliminate_dead_code()
    return list(_found(graph))


def _found(graph: fx.Graph) -> Iterator[Found]:
    for node in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        path = _path(node.args[0])
        if path is None:
            continue
        product = path[0]
        try:
            yield _Match(path, node).site()
        except _No as no:
            yield RefusedLoss(product, str(no))


def _path(logits: Any) -> list[fx.Node] | None:
    """From a product to what the loss reads, or None where the logits are made otherwise."""
    path: list[fx.Node] = [logits]
    while path[-1].target not in _PRODUCTS:
        if not _maps_rows(path[-1]):
            return None
        path.append(path[-1].args[0])  # type: ignore[arg-type]
    return path[::-1]


def _maps_rows(node: fx.Node) -> bool:
    """Whether a node copies, converts, views or takes slices of rows and leaves rows as they are."""
    if node.target is aten.slice_backward.default:
        # (grad, input_sizes, dim, start, end, step)
        return _last(node.args[0]) == _last(node) and _dim(node, 2) != node.meta["val"].dim() - 1
    if node.target not in (*_COPIES, *_VIEWS, aten.slice.Tensor) or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    if node.target is aten.slice.Tensor and _dim(node, 1) == after.dim() - 1:
        return False
    same_kind = before.device == after.device and before.is_floating_point() and after.is_floating_point()
    return same_kind and _last(node.args[0]) == _last(node) is not None


def _dim(node: fx.Node, position: int) -> int:
    dim = node.args[position] if len(node.args) > position else 0
    assert isinstance(dim, int)
    return dim % node.meta["val"].dim()


def _last(node: Any) -> int | None:
    """The last extent of a value, where it is a number."""
    shape = node.meta["val"].shape
    return shape[-1] if len(shape) and isinstance(shape[-1], int) else None


def _replayed(path: list[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes of a path that have to be repeated for other columns: none where they only view rows as other rows."""
    if not any(n.target in (aten.slice.Tensor, aten.slice_backward.default) for n in path):
        return ()
    return tuple(n for n in path if n.target is not aten._to_copy.default)


def _same(a: Any, b: Any, transposed: bool = False) -> bool:
    """Whether two nodes are the same elements of the same memory (of one transposed)."""
    if a is b and not transposed:
        return True
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)) or base_of(a) is not base_of(b):
        return False
    x, y = a.meta["val"], b.meta["val"]
    if x.dim() != y.dim() or x.dtype != y.dtype:
        return False
    step = -1 if transposed else 1
    pairs = [*zip(x.shape, y.shape[::step]), *zip(x.stride(), y.stride()[::step])]
    pairs.append((x.storage_offset(), y.storage_offset()))
    return all(statically_known_true(p == q) for p, q in pairs)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node views."""
    while node.target in _ALIASES:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


@dataclass(slots=True)
class _Match:
    path: list[fx.Node]
    log_softmax: fx.Node
    region: set[fx.Node] = field(default_factory=set)
    dx: list[Gradient] = field(default_factory=list)
    dw: list[Gradient] = field(default_factory=list)
    db: list[Gradient] = field(default_factory=list)

    def site(self) -> LossSite:
        """The loss. Raises _No with the reason where it has to stay."""
        product, ls = self.path[0], self.log_softmax
        bias, rows, weight = self.operands(product)
        if any(is_decided_by_data(n.meta["val"].shape[0]) for n in (*self.path, ls)):
            raise _No("data decide how many rows they have")
        if ls.meta["val"].dim() != 2 or ls.args[1] not in (1, -1) or ls.args[2]:
            raise _No("the loss is not over the last dimension of a matrix")
        for here, then in zip(self.path, [*self.path[1:], ls]):
            self.only(here, {then})
        self.region.update(self.path, (ls,))
        readers = self.readers(ls)
        loss = self.one(readers, aten.nll_loss_forward.default)
        _, target, weights, reduction, ignore = loss.args
        if weights is not None:
            raise _No("classes have weights")
        backward = [u for u in readers if u.target is aten.nll_loss_backward.default]
        if reduction not in (_REDUCTIONS if backward else _NO_GRADIENT[1:]):
            raise _No("losses of single rows are wanted, and each may get a gradient of its own")
        value, total = (self.item(loss, k) for k in (0, 1))
        self.region.add(loss)
        if total is not None:
            self.only(total, set(backward))
            self.region.add(total)
        if value is None:
            raise _No("nothing reads the loss")
        own = {aten._log_softmax_backward_data.default} if backward else set()
        others = {r for r in readers if r not in (loss, *backward) and r.target not in own}
        if others:
            raise _No(f"log-probabilities are also read by {_names(others)}")
        gradient = self.backward(backward, readers, loss) if backward else None
        assert isinstance(target, fx.Node) and isinstance(reduction, int) and isinstance(ignore, int)
        maps = _replayed(self.path[1:])
        return LossSite(
            product, ls, loss, value, rows, weight, bias, target, reduction, ignore, maps, gradient,
            tuple(self.dx), tuple(self.dw), tuple(self.db), frozenset(self.region | {value}),
        )  # fmt: skip

    def operands(self, product: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
        if product.target is aten.addmm.default:
            if product.kwargs or len(product.args) != 3:
                raise _No("the product is scaled")
            bias, rows, weight = product.args
        else:
            bias, (rows, weight) = None, product.args  # type: ignore[assignment]
        assert isinstance(rows, fx.Node) and isinstance(weight, fx.Node)
        if isinstance(bias, fx.Node) and bias.meta["val"].dim() != 1:
            raise _No("the bias is not one for each class")
        if not all(isinstance(n, int) for n in weight.meta["val"].shape):
            raise _No("the sizes of the weight vary")
        return bias, rows, weight  # type: ignore[return-value]

    def only(self, node: fx.Node, allowed: set[fx.Node]) -> None:
        others = set(node.users) - allowed
        if others:
            raise _No(f"they are also read by {_names(others)}")

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Who reads a value, also through copies of it."""
        found: list[fx.Node] = []
        for user in node.users:
            if user.target in (aten.detach.default, aten.alias.default):
                self.region.add(user)
                found += self.readers(user)
            else:
                found.append(user)
        return list(dict.fromkeys(found))

    def one(self, nodes: list[fx.Node], target: Any) -> fx.Node:
        found = [n for n in nodes if n.target is target]
        if len(found) != 1:
            others = _names(set(nodes)) or "nothing"
            raise _No(f"log-probabilities are read by {others} and not by one negative log-likelihood")
        return found[0]

    def item(self, node: fx.Node, k: int) -> fx.Node | None:
        found = [u for u in node.users if u.target is operator.getitem and u.args[1] == k]
        if len(found) > 1:
            raise _No("the loss is read twice")
        return found[0] if found else None

    def backward(self, found: list[fx.Node], readers: list[fx.Node], loss: fx.Node) -> fx.Node:
        """Follow the gradient to the products that take it; the factor that flows into the loss."""
        if len(found) != 1 or found[0].args[2:6] != loss.args[1:5]:
            raise _No("the loss has more than one gradient")
        start = self.one(readers, aten._log_softmax_backward_data.default)
        self.only(found[0], {start})
        if start.args[0] is not found[0]:
            raise _No("the gradient of log-probabilities is not that of the loss alone")
        self.region.update((found[0], start))
        self.follow(start, [], False)
        if not (self.dx or self.dw or self.db):
            raise _No("no product takes the gradient")
        factor = found[0].args[0]
        assert isinstance(factor, fx.Node)
        return factor

    def follow(self, node: fx.Node, path: list[fx.Node], transposed: bool) -> None:
        """Everything that the gradient of the logits becomes, with the way to it."""
        for user in node.users:
            self.region.add(user)
            if not transposed and _maps_rows(user) and user.args[0] is node:
                self.follow(user, [*path, user], False)
            elif user.target in _TRANSPOSES and node.meta["val"].dim() == 2:
                self.follow(user, path, not transposed)
            else:
                self.take(user, node, path, transposed)

    def take(self, user: fx.Node, node: fx.Node, path: list[fx.Node], transposed: bool) -> None:
        product = self.path[0]
        _, rows, weight = self.operands(product)
        value, wanted = node.meta["val"], product.meta["val"]
        extent = value.shape[1 if transposed else 0] if value.dim() == 2 else None
        if extent is None or value.dtype != wanted.dtype or not statically_known_true(extent == wanted.shape[0]):
            raise _No(f"their gradient is read by {_names({user})}")
        if user.target is aten.mm.default:
            left, right = user.args
            if left is node and not transposed and _same(right, weight, True):
                return self.dx.append(Gradient(user, _replayed(path)))
            if left is node and transposed and _same(right, rows):
                return self.dw.append(Gradient(user))
            if right is node and not transposed and _same(left, rows, True):
                return self.dw.append(Gradient(user, (), True))
        if user.target is aten.sum.dim_IntList and user.args[1] == [1 if transposed else 0]:
            if product.target is aten.addmm.default and not user.kwargs:
                return self.db.append(Gradient(user))
        raise _No(f"their gradient is read by {_names({user})}")


def _names(nodes: set[fx.Node]) -> str:
    names = {"the graph's result" if n.op == "output" else str(n.target) for n in nodes}
    return ", ".join(sorted(names))
