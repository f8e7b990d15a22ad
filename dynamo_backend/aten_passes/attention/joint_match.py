"""Which softmaxes of a graph that holds forward and backward are those of an attention whose probabilities the
backward can make again, and all that is to change there: see ``joint``."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ....scheduler.cost.attention import LEAST_WIDTH, WIDEST
from ....scheduler.passes.products.chain_choice import MIN_ROWS
from ...tracing.hints import hint_of
from ..joint_graph import is_tangent
from ..loss.chunk_loss_match import base_of
from .gradient_terms import is_zero
from .write_sinks import Sink, find_sink, is_gradient

aten = torch.ops.aten

# Bytes of probabilities below which a CPU keeps them where a bias gets a gradient: from there the products that make
# them again cost less than twice what reading them does (measured: 2.4 times at 8 MiB, 1.3 times at 64 MiB).
KEPT_BESIDE_BIAS = 2**25

_PRODUCTS = (aten.bmm.default, aten.mm.default, aten.baddbmm.default)
VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.clone.default,
)  # fmt: skip
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor)
# What is computed again with the scores though it is not tagged as point-wise: positions and masks.
_MADE = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.ones.default,
    aten.zeros.default, aten.scalar_tensor.default, aten.tril.default, aten.triu.default, aten._to_copy.default,
    aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.where.self, aten.lift_fresh_copy.default,
)  # fmt: skip


class KeptError(Exception):
    """Why a softmax keeps its probabilities."""


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (
        node.target in (*VIEWS, *TURNS, *_MADE) or (torch.Tag.pointwise in tags and not _is_random(node))
    )


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _inputs(node: fx.Node) -> list[fx.Node]:
    return list(node.all_input_nodes)


def _size(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _after(graph: fx.Graph, starts: Iterable[fx.Node]) -> set[fx.Node]:
    """Everything that depends on some nodes, they included; not the output, which holds results of both parts."""
    found = set(starts)
    for node in graph.nodes:
        if node not in found and node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


@dataclass(slots=True)
class Site:
    """One softmax: its ``scores`` (products that it is made of), the forward from it to the one product that ``out``
    is, and the backward's readers."""

    graph: fx.Graph
    softmax: fx.Node
    on_gpu: bool = False
    draws: bool = True  # whether random numbers are ours
    backward: set[fx.Node] = field(default_factory=set)
    scores: list[fx.Node] = field(default_factory=list)
    # Nodes of the forward that are as large as the scores and come of them; masks and positions that they need.
    made: list[fx.Node] = field(default_factory=list)
    # The forward from the softmax to the product, and the products that read probabilities.
    weights: list[fx.Node] = field(default_factory=list)
    readers: list[fx.Node] = field(default_factory=list)
    # What stands between the product and the softmax, each with the operand that probabilities are.
    way: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    # Dropouts on that way, and, once they are written out, the numbers and masks that the backward makes again.
    dropouts: list[fx.Node] = field(default_factory=list)
    drawn: list[fx.Node] = field(default_factory=list)
    # Zeros in the shape of probabilities, and which rows have no score: there those stand in for them.
    zeros: list[fx.Node] = field(default_factory=list)
    empty: fx.Node | None = None
    gradient: fx.Node | None = None  # of the output of the product
    start: fx.Node | None = None  # the softmax's backward
    sink: Sink | None = None  # where the softmax has one number more a row, whose probability is dropped

    def __post_init__(self) -> None:
        self.backward = _after(self.graph, filter(is_tangent, self.graph.nodes))
        self.sink = find_sink(self.softmax)
        self.scores = list(self._products())

    @property
    def operand(self) -> fx.Node:
        """The scores that the softmax is of, without a sink."""
        node = self.softmax.args[0] if self.sink is None else self.sink.scores
        assert isinstance(node, fx.Node)
        return node

    @property
    def joined(self) -> fx.Node | None:
        """What reads the scores where the softmax has a sink: both beside one another."""
        return None if self.sink is None else next(u for u in self.sink.scores.users if u.target is aten.cat.default)

    @property
    def result(self) -> fx.Node:
        """The probabilities of the scores."""
        return self.softmax if self.sink is None else self.sink.kept

    def _products(self) -> Iterator[fx.Node]:
        """The products that the softmax's operand is made of element by element."""
        stack, seen = [self.operand], set[fx.Node]()
        while stack:
            node = stack.pop()
            if not isinstance(node, fx.Node) or node in seen:
                continue
            seen.add(node)
            if node.target in _PRODUCTS:
                if statically_known_true(_size(node) == _size(self.result)):
                    yield node
            elif _is_pointwise(node):
                stack += _inputs(node)

    # --- finding ------------------------------------------------------------------------------------------------------

    def match(self) -> None:
        """Find all that is to change. Raises KeptError."""
        value = self.result.meta["val"]
        if statically_known_true(_size(self.result) == 0):
            raise KeptError("they are none")  # and nothing is as large as they are
        self.forward()
        if self.softmax.args[1] not in (-1, value.dim() - 1):
            raise KeptError("the softmax is not over the last dimension")
        if not any(n in self.backward for w in self.weights for n in w.users):
            raise KeptError("nothing flows back through it")
        self.recomputed()
        self.flow()
        widths = [n.args[-2].meta["val"].shape[-1] for n in self.scores]  # type: ignore[union-attr]
        widths.append(self.readers[0].meta["val"].shape[-1])
        least = LEAST_WIDTH if self.on_gpu else 1
        if self.on_gpu and value.dtype is torch.float64:
            raise KeptError("float64 is not for the tensor cores")
        if not all(isinstance(w, int) and least <= w <= WIDEST for w in widths):
            raise KeptError(f"heads are {', '.join(map(str, widths))} elements wide")
        few = [n for n in value.shape[-2:] if hint_of(n) < MIN_ROWS]
        if few:
            raise KeptError(f"there are {few[0]} rows or columns, too few for tiles of them")

    def forward(self) -> None:
        """From the softmax through operations that are linear in its probabilities to one product."""
        stack, seen, other = [self.result], {self.result}, None
        if self.sink is not None and not self.sink.others <= self.backward:
            raise KeptError("the graph reads the probability of their sink")
        while stack:
            node = stack.pop()
            self.weights.append(node)
            for user in node.users:
                if user in self.backward or user in seen:
                    continue
                seen.add(user)
                if user.target in (aten.bmm.default, aten.mm.default):
                    self.readers.append(user)
                elif (kept := self._kept(user, node)) is not None:
                    self.dropouts.append(user)
                    self.weights.append(user)
                    stack.append(kept)
                elif self._is_linear(user, node):
                    stack.append(user)
                elif user.target is aten.zeros_like.default:
                    self.zeros.append(user)
                else:
                    other = user
        if other is not None:
            raise KeptError(f"{_said(other)} reads them")
        if len(self.readers) != 1:
            raise KeptError(f"{len(self.readers)} products read them")
        node = self.readers[0].args[0]
        if node not in self.weights:
            raise KeptError("they are the right operand of a product")
        while node is not self.result:
            assert isinstance(node, fx.Node)
            if node.target in TURNS:
                raise KeptError("they are transposed")
            through = [n for n in _inputs(node) if n in self.weights]
            if len(through) != 1:
                raise KeptError("they are multiplied by themselves")
            self.way.append((node, through[0]))
            node = through[0]

    def _kept(self, user: fx.Node, node: fx.Node) -> fx.Node | None:
        """The probabilities that a dropout leaves, where its mask is read by the backward alone."""
        if user.target is not aten.native_dropout.default or user.args[0] is not node or user.args[2] is not True:
            return None
        if not self.draws:
            raise KeptError("eager draws the numbers of their dropout")
        results = {n.args[1]: n for n in user.users if n.target is operator.getitem}
        if len(results) != len(user.users) or 0 not in results:
            return None
        mask = results.get(1)
        return results[0] if mask is None or mask.users.keys() <= self.backward else None

    def _is_linear(self, user: fx.Node, node: fx.Node) -> bool:
        value, result = node.meta["val"], user.meta.get("val")
        if not isinstance(result, torch.Tensor) or not statically_known_true(result.numel() == value.numel()):
            return False
        match user.target:
            case aten._to_copy.default:
                return bool(result.is_floating_point())
            case aten.mul.Tensor:
                return user.args[0] is not user.args[1]
            case aten.div.Tensor | aten.mul.Scalar | aten.div.Scalar:
                return user.args[0] is node and user.args[1] is not node
            case aten.masked_fill.Scalar:
                return user.args[0] is node and user.args[2] == 0
            case aten.where.self:
                others = [a for a in user.args[1:] if a is not node]
                return len(others) == 1 and user.args[0] is not node and is_zero(others[0])
        if user.target in TURNS:
            return user.target is not aten.slice.Tensor
        return user.target in VIEWS and statically_known_true(result.shape[-1] == value.shape[-1])

    def recomputed(self) -> None:
        """What is computed again: all that is as large as the scores."""
        rows, keys = self.result.meta["val"].shape[-2:]
        least = rows * keys  # torch.Size.numel would make constants of sizes
        stack, seen = [self.operand], set[fx.Node]()
        while stack:
            node = stack.pop()
            if not isinstance(node, fx.Node) or node in seen or node in self.backward:
                continue
            seen.add(node)
            if node in self.scores:
                self.made.append(node)
            elif _is_pointwise(node) and (not statically_known_true(_size(node) < least) or _is_constant(node)):
                self.made.append(node)
                stack += _inputs(node)
        after = _after(self.graph, self.scores) - self.backward
        within = set(self.made)
        of_scores = after & within  # masks and positions are within too, and other layers read the same
        for node in self.graph.nodes:
            if node not in after or node in within or node in self.weights:
                continue
            if not of_scores.isdisjoint(_inputs(node)) and _is_pointwise(node):
                within.add(node)
                of_scores.add(node)
                self.made.append(node)
        for node in of_scores:
            for user in node.users.keys() - within - self.backward - {self.softmax, self.joined}:
                if user.target is aten.sym_size.int:
                    continue
                if self.empty is None and self._tells_empty(user):
                    self.empty = user
                    continue
                raise KeptError(f"{_said(user)} reads its scores")
        masks = {m for m in self.made if m.meta["val"].dtype is torch.bool}
        for node in masks:
            self.made += [u for u in node.users if _is_pointwise(u) and u not in within and u not in self.backward
                          and u not in after]  # fmt: skip

    def _tells_empty(self, node: fx.Node) -> bool:
        """Whether a node tells which rows have minus infinity for every score, and does nothing but to choose zeros
        for their probabilities."""
        tested = node.args[0]
        if node.target is not aten.all.dim or list(node.args[1:]) != [-1, True] or not isinstance(tested, fx.Node):
            return False
        if tested.target is not aten.eq.Scalar or tested.args != (self.operand, -float("inf")):
            return False
        return all(u.target is aten.where.self and u in self.weights and u.args[0] is node for u in node.users)

    def flow(self) -> None:
        """The gradient of the output, and where the softmax's own backward stands."""
        out = self.readers[0]
        values = out.args[1]
        found = [u for w in self.weights for u in w.users if u.target is aten._softmax_backward_data.default]
        if self.sink is not None:
            found += self.sink.others
        if len(set(found)) != 1:
            raise KeptError(f"it has {len(set(found))} gradients")
        self.start = found[0]
        if self.sink is not None and not is_gradient(self.sink, self.start):
            raise KeptError("what it gives its sink is not dropped")
        product = self.back()
        if not _is_transposed(product.args[1], values):
            raise KeptError("its gradient is not that of one product")
        gradient = product.args[0]
        assert isinstance(gradient, fx.Node)
        if gradient.meta["val"].shape != out.meta["val"].shape:
            raise KeptError("its gradient has another shape than its result")
        self.gradient = gradient
        others = [
            n for n in self.ends()
            if n.target not in (aten.bmm.default, aten.mm.default) and not self._is_over_batch(n)
        ]  # fmt: skip
        if others:
            raise KeptError(f"{_said(others[0])} reads the gradient of its scores")

        self.biases()

    def back(self) -> fx.Node:
        """The product that the gradient of probabilities is made of, by the factors that they were multiplied by on
        their way: a function of the user's may have any gradient. Raises KeptError."""
        assert self.start is not None
        node, made = self.given(), list[Any]()
        while isinstance(node, fx.Node) and node.target not in (aten.bmm.default, aten.mm.default):
            through = [n for n in _inputs(node) if n in self.backward and isinstance(n.meta["val"], torch.Tensor)]
            factors = _factors(node, through[0]) if len(through) == 1 else None
            if factors is None:
                raise KeptError("its gradient is not that of one product")
            made += factors
            node = through[0]
        assert isinstance(node, fx.Node)
        # Where zeros stand for rows without a score, they are those of the softmax whose gradient is taken.
        softmax, given, is_own = unaliased(self.start.args[1]), Counter[Any](), False
        for step, operand in self.way:
            is_own = is_own or step is softmax
            if is_own:
                factors = [] if step.target in VIEWS or step.args[0] is self.empty else None
            else:
                factors = _factors(step, operand)
            if factors is None:
                raise KeptError("they are not what its gradient is taken of")
            given.update(factors)
        if given != Counter(made) or not (is_own or softmax is self.softmax):
            raise KeptError("its gradient has other factors than they have")
        return node

    def given(self) -> fx.Node:
        """The gradient of the probabilities of the scores."""
        assert self.start is not None
        node = self.start.args[0] if self.sink is None else self.start.args[0].args[0]  # type: ignore[union-attr]
        assert isinstance(node, fx.Node)
        return node

    def ends(self) -> list[fx.Node]:
        """Who reads the gradient of the scores, through point-wise nodes."""
        assert self.start is not None
        if self.sink is None:
            return _ends(self.start)
        return [n for u, is_kept in self.sink.parts(self.start) or [] if is_kept for n in _ends(u)]

    def biases(self) -> None:
        """What sums gradients of scores over a batch: the gradient of a bias. Raises KeptError."""
        assert self.start is not None
        found = [n for n in self.ends() if self._is_over_batch(n)]
        if not found:
            return
        if any(not _is_alike(n, found[0]) for n in found):
            raise KeptError("biases are shared by different parts of the batch")
        value = self.result.meta["val"]
        size = hint_of(_size(self.result)) * value.dtype.itemsize
        if not self.on_gpu and size < KEPT_BESIDE_BIAS:
            raise KeptError(
                f"they take {size / 2**20:.3g} MiB, which products of a library read faster than ours are made"
            )

    def _is_over_batch(self, node: fx.Node) -> bool:
        """Whether a node is the sum of the gradients of scores over dimensions before rows and keys: that of a bias."""
        read = node.args[0] if node.args else None
        if node.target is not aten.sum.dim_IntList or not isinstance(read, fx.Node):
            return False
        shape, dims = read.meta["val"].shape, node.args[1]
        assert isinstance(dims, Sequence)
        same = zip(shape[-2:], self.result.meta["val"].shape[-2:], strict=True)
        over = {d % len(shape) for d in dims}  # type: ignore[operator]
        several = any(hint_of(shape[d]) > 1 for d in over)
        return several and max(over) < len(shape) - 2 and all(statically_known_true(a == b) for a, b in same)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two sums are over the same dimensions of tensors of one shape."""
    x, y = (n.args[0].meta["val"].shape for n in (a, b))  # type: ignore[union-attr]
    same = len(x) == len(y) and all(statically_known_true(i == j) for i, j in zip(x, y, strict=True))
    return same and list(a.args[1]) == list(b.args[1])  # type: ignore[arg-type]


def _said(node: fx.Node) -> str:
    return "the graph's result" if node.op == "output" else str(node.target)


def _is_constant(node: fx.Node) -> bool:
    """Whether nothing that the caller gives decides a value."""
    return all(_is_pointwise(n) and _is_constant(n) for n in _inputs(node))


def _factors(node: fx.Node, through: fx.Node) -> list[Any] | None:
    """What an operation multiplies the elements of an operand by, where it does nothing else: numbers, tensors as they
    are in memory, and masks of what becomes zero, each with the value that it has there."""
    args = node.args
    match node.target:
        case aten.mul.Tensor | aten.mul.Scalar:
            return _parts(args[1] if args[0] is through else args[0])
        case aten.div.Tensor | aten.div.Scalar if args[0] is through:
            return [("over", part) for part in _parts(args[1])]
        case aten.masked_fill.Scalar if args[0] is through and args[2] == 0:
            return [("zero", _source(args[1]), True)]
        case aten.where.self if args[0] is not through:
            chosen = args[2] is through
            return [("zero", _source(args[0]), chosen)] if is_zero(args[1 if chosen else 2]) else None
        case aten.native_dropout.default:
            masks = [u for u in node.users if u.target is operator.getitem and u.args[1] == 1]
            p = args[1]
            assert isinstance(p, (int, float))
            return [*masks, 0.0 if p == 1 else 1.0 / (1.0 - p)]
        case aten.native_dropout_backward.default if args[0] is through:
            return [*_parts(args[1]), *_parts(args[2])]
        case operator.getitem:  # of a dropout
            return []
    return [] if node.target in VIEWS or _is_widened(node) else None


def unaliased(node: Any) -> Any:
    """What a node is another name of."""
    while isinstance(node, fx.Node) and node.target in (aten.alias.default, aten.detach.default):
        node = node.args[0]
    return node


def _parts(factor: Any) -> list[Any]:
    """The factors of a factor."""
    source = _source(factor)
    if isinstance(source, fx.Node) and source.target in (aten.mul.Tensor, aten.mul.Scalar):
        return [part for operand in source.args for part in _parts(operand)]
    return [source]


def _source(value: Any) -> Any:
    """What a value is in another shape, or as floating point; a number is one of that."""
    while isinstance(value, fx.Node) and (value.target in VIEWS or _is_widened(value)):
        value = value.args[0]
    return float(value) if isinstance(value, (int, float)) else value


def _is_widened(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and bool(node.meta["val"].is_floating_point())


def _ends(start: fx.Node) -> list[fx.Node]:
    """Who reads a value, through point-wise nodes."""
    ends, stack, seen = [], list(start.users), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if _is_pointwise(node):
            stack += list(node.users)
        else:
            ends.append(node)
    return ends


def _is_transposed(a: Any, b: Any) -> bool:
    """Whether two nodes are the same matrices in the same memory, one transposed."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or base_of(a) is not base_of(b):
        return False
    x, y = a.meta["val"], b.meta["val"].mT
    pairs = [*zip(x.shape, y.shape), *zip(x.stride(), y.stride()), (x.storage_offset(), y.storage_offset())]
    return x.dim() == y.dim() and all(statically_known_true(p == q) for p, q in pairs)
