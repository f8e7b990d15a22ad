"""Training of attention keeps a number a row: the graph that holds forward and backward is rewritten, before it is
parted, such that the backward makes probabilities again from scores and the log-sum-exp of their rows.

A softmax between two products (whatever stands between scores and softmax) is followed to the products and to
everything that its probabilities become. What the backward reads of them becomes ``exp(score - logsumexp)``, element by
element, so that no reduction is left in it but products; the sum over a row of probabilities times their gradients is
that of the output times its gradient, since the output is linear in the probabilities. Scores and what is made of them
are marked to be computed again, and dropout draws its numbers again, of a seed that is kept. From there the backend
sees plain operations: which of them become one kernel is decided where they are fused.
Sources: Dao et al. 2022; Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from ..runtime.options import Options
from ..scheduler.passes.stream_products import DEVICES, MAX_WIDTH, MIN_ROWS, MIN_WIDTH_GPU
from .chunk_loss_match import base_of, hint_of
from .chunk_loss_write import Writer
from .converters.context import KEEPS_ROUNDING
from .random_ops import DRAW_SEEDS, UNIFORM

aten = torch.ops.aten

_PRODUCTS = (aten.bmm.default, aten.mm.default, aten.baddbmm.default)
_VIEWS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.alias.default, aten.detach.default, aten.clone.default,
)  # fmt: skip
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor)
# What is computed again with the scores though it is not tagged as point-wise: positions and masks.
_MADE = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default, aten.ones.default,
    aten.zeros.default, aten.scalar_tensor.default, aten.tril.default, aten.triu.default, aten._to_copy.default,
    aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.where.self, aten.lift_fresh_copy.default,
)  # fmt: skip
# How the partitioner is told what only the backward computes.
_TAG, _IN_BACKWARD = "partitioner_tag", "must_be_in_backward"


class _No(Exception):
    """Why a softmax keeps its probabilities."""


def recompute_scores(joint: fx.GraphModule, options: Options) -> int:
    """Rewrite, in place, every attention of a graph of forward and backward; how many there were.

    Common nodes have been united before: what is computed twice afterwards is so on purpose. Where a softmax stands
    between products and keeps its probabilities, the note ``mlc_note`` of the product that reads them says why.
    """
    if options.numerics == "eager":
        return 0
    done = 0
    for node in list(joint.graph.find_nodes(op="call_function", target=aten._softmax.default)):
        device = node.meta["val"].device.type
        on_gpu = device != "cpu" or options.target not in (None, "cpu")
        found = _Site(joint.graph, node, on_gpu, draws=not options.fallback_random)
        if device not in DEVICES or not found.scores:
            continue
        try:
            found.match()
        except _No as no:
            for product in found.readers[:1]:
                product.meta["mlc_note"] = f"probabilities are kept for the backward: {no}"
            continue
        found.rewrite()
        done += 1
    if done:
        joint.graph.lint()
        joint.recompile()
    return done


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (
        node.target in (*_VIEWS, *_TURNS, *_MADE) or (torch.Tag.pointwise in tags and not _is_random(node))
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
class _Site:
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
    # Dropouts on that way, and, once they are written out, the numbers and masks that the backward makes again.
    dropouts: list[fx.Node] = field(default_factory=list)
    drawn: list[fx.Node] = field(default_factory=list)
    # Zeros in the shape of probabilities, and which rows have no score: there those stand in for them.
    zeros: list[fx.Node] = field(default_factory=list)
    empty: fx.Node | None = None
    gradient: fx.Node | None = None  # of the output of the product
    start: fx.Node | None = None  # the softmax's backward

    def __post_init__(self) -> None:
        tangents = [n for n in self.graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)]
        self.backward = _after(self.graph, tangents)
        self.scores = list(self._products())

    def _products(self) -> Iterator[fx.Node]:
        """The products that the softmax's operand is made of element by element."""
        stack, seen = [self.softmax.args[0]], set()
        while stack:
            node = stack.pop()
            if not isinstance(node, fx.Node) or node in seen:
                continue
            seen.add(node)
            if node.target in _PRODUCTS:
                if statically_known_true(_size(node) == _size(self.softmax)):
                    yield node
            elif _is_pointwise(node):
                stack += _inputs(node)

    # --- finding ------------------------------------------------------------------------------------------------------

    def match(self) -> None:
        """Find all that is to change. Raises _No."""
        value = self.softmax.meta["val"]
        self.forward()
        if self.softmax.args[1] not in (-1, value.dim() - 1):
            raise _No("the softmax is not over the last dimension")
        if not any(n in self.backward for w in self.weights for n in w.users):
            raise _No("nothing flows back through it")
        self.recomputed()
        self.flow()
        widths = [n.args[-2].meta["val"].shape[-1] for n in self.scores]  # type: ignore[union-attr]
        widths.append(self.readers[0].meta["val"].shape[-1])
        least = MIN_WIDTH_GPU if self.on_gpu else 1
        if self.on_gpu and value.dtype is torch.float64:
            raise _No("float64 is not for the tensor cores")
        if not all(isinstance(w, int) and least <= w <= MAX_WIDTH for w in widths):
            raise _No(f"heads are {', '.join(map(str, widths))} elements wide")
        few = [n for n in value.shape[-2:] if hint_of(n) < MIN_ROWS]
        if few:
            raise _No(f"there are {few[0]} rows or columns, too few for tiles of them")

    def forward(self) -> None:
        """From the softmax through operations that are linear in its probabilities to one product."""
        stack, seen, other = [self.softmax], {self.softmax}, None
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
            raise _No(f"{_said(other)} reads them")
        if len(self.readers) != 1:
            raise _No(f"{len(self.readers)} products read them")
        node = self.readers[0].args[0]
        if node not in self.weights:
            raise _No("they are the right operand of a product")
        while node is not self.softmax:
            if node.target in _TURNS:  # type: ignore[union-attr]
                raise _No("they are transposed")
            (node,) = (n for n in _inputs(node) if n in self.weights)  # type: ignore[arg-type]

    def _kept(self, user: fx.Node, node: fx.Node) -> fx.Node | None:
        """The probabilities that a dropout leaves, where its mask is read by the backward alone."""
        if user.target is not aten.native_dropout.default or user.args[0] is not node or user.args[2] is not True:
            return None
        if not self.draws:
            raise _No("eager draws the numbers of their dropout")
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
                return len(others) == 1 and user.args[0] is not node and _is_zero(others[0])
        if user.target in _TURNS:
            return user.target is not aten.slice.Tensor
        return user.target in _VIEWS and statically_known_true(result.shape[-1] == value.shape[-1])

    def recomputed(self) -> None:
        """What is computed again: all that is as large as the scores."""
        rows, keys = self.softmax.meta["val"].shape[-2:]
        least = rows * keys  # torch.Size.numel would make constants of sizes
        stack, seen = [self.softmax.args[0]], set()
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
        for node in self.graph.nodes:
            if node not in after or node in within or node in self.weights:
                continue
            if not within.isdisjoint(_inputs(node)) and _is_pointwise(node):
                within.add(node)
                self.made.append(node)
        for node in after & within:
            for user in node.users.keys() - within - self.backward - {self.softmax}:
                if self.empty is None and self._tells_empty(user):
                    self.empty = user
                    continue
                raise _No(f"{_said(user)} reads its scores")
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
        if tested.target is not aten.eq.Scalar or tested.args != (self.softmax.args[0], -float("inf")):
            return False
        return all(u.target is aten.where.self and u in self.weights and u.args[0] is node for u in node.users)

    def flow(self) -> None:
        """The gradient of the output, and where the softmax's own backward stands."""
        out = self.readers[0]
        values = out.args[1]
        found = [u for w in self.weights for u in w.users if u.target is aten._softmax_backward_data.default]
        if len(set(found)) != 1:
            raise _No(f"it has {len(set(found))} gradients")
        self.start = found[0]
        makers = _inputs_of(self.start.args[0], lambda n: n in self.backward and n.target not in _PRODUCTS)
        products = [n for n in makers if n.target in (aten.bmm.default, aten.mm.default)]
        if len(products) != 1 or not _is_transposed(products[0].args[1], values):
            raise _No("its gradient is not that of one product")
        gradient = products[0].args[0]
        assert isinstance(gradient, fx.Node)
        if gradient.meta["val"].shape != out.meta["val"].shape:
            raise _No("its gradient has another shape than its result")
        self.gradient = gradient
        others = [n for n in _ends(self.start) if n.target not in (aten.bmm.default, aten.mm.default)]
        if others:
            raise _No(f"{_said(others[0])} reads the gradient of its scores")

    # --- writing ------------------------------------------------------------------------------------------------------

    def rewrite(self) -> None:
        """Probabilities of the backward from scores and row statistics, and the softmax's gradient."""
        out, start, gradient = self.readers[0], self.start, self.gradient
        assert start is not None and gradient is not None
        scores = self.softmax.args[0]
        assert isinstance(scores, fx.Node)
        wide = torch.float64 if scores.meta["val"].dtype is torch.float64 else torch.float32
        write = Writer(self.graph, self.softmax)
        for node in self.dropouts:
            self.write_dropout(node)
        self.round_sources()
        copies = self.repeated([*self.made, *self.drawn], {})
        with self.graph.inserting_before(out.next):
            z = write.cast(scores, wide)
            top = write.call(aten.amax.default, z, [-1], True)
            shifted = write.call(aten.exp.default, write.call(aten.sub.Tensor, z, top))
            total = write.call(aten.sum.dim_IntList, shifted, [-1], True)
            lse = write.call(aten.add.Tensor, top, write.call(aten.log.default, total))
            if self.empty is not None:  # not NaN, so that it tells of them
                nothing = write.call(aten.eq.Scalar, top, -float("inf"))
                lse = write.call(aten.where.self, nothing, top, lse)
            lse.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            wide_scores = write.cast(copies[scores], wide)
            difference = write.call(aten.sub.Tensor, wide_scores, lse)
            again = write.call(aten.exp.default, difference)
            made = [wide_scores, difference, again]
            if self.empty is not None:
                nothing = write.call(aten.eq.Scalar, lse, -float("inf"))
                again = write.call(aten.where.self, nothing, write.call(aten.zeros_like.default, again), again)
                made += [nothing, *_inputs(again), again]
            probabilities = write.cast(again, self.softmax.meta["val"].dtype)
        for node in (*made, probabilities):
            node.meta[_TAG] = _IN_BACKWARD
        known = {self.softmax: probabilities, **{n: copies[n] for n in self.drawn}}
        if self.empty is not None:
            known[self.empty] = nothing
        copies |= self.repeated([*self.weights, *self.zeros], known)
        for node, copy in copies.items():
            for user in list(node.users):
                if user in self.backward and user is not start:
                    user.replace_input_with(node, copy)
        write = Writer(self.graph, start)
        with self.graph.inserting_before(start):
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
        for node in (start, *reversed(self.weights)):
            if not node.users:
                self.graph.erase_node(node)

    def write_dropout(self, node: fx.Node) -> None:
        """A dropout as factors of numbers that follow from a seed, which is kept."""
        x, p = node.args[:2]
        assert isinstance(x, fx.Node) and isinstance(p, (int, float))
        write = Writer(self.graph, self.softmax)
        write.place = {k: node.meta[k] for k in write.place if k in node.meta}
        with self.graph.inserting_before(node):
            value = x.meta["val"]
            sizes = [
                n if isinstance(n, int) else write.call(aten.sym_size.int, x, d) for d, n in enumerate(value.shape)
            ]
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
                self.graph.erase_node(results[k])
        self.graph.erase_node(node)
        self.weights = [n for n in self.weights if n is not node and n is not results[0]] + [chosen, scaled]
        self.drawn += [numbers, mask]

    def round_sources(self) -> None:
        """Let half-typed values be read as they are stored, where two results have to be made of the very same.

        Scores are made of operands that are saved for the backward, where a difference of scores is a factor of
        probabilities: they would no longer be those whose sum the forward took. And the gradient of the output is in
        both terms of that of the scores, which cancel. Tensor cores take operands of products rounded as it is.
        """
        made = set(self.made)
        assert self.gradient is not None
        _keep_rounding(self.gradient)
        for node in self.made:
            if self.on_gpu and node in self.scores:
                continue
            for source in set(_inputs(node)) - made:
                _keep_rounding(source)

    def repeated(self, nodes: Iterable[fx.Node], known: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Copies of nodes that the backward computes, of one another where they read one another."""
        place = {n: k for k, n in enumerate(self.graph.nodes)}
        copies, last = dict(known), max(known.values(), key=place.__getitem__, default=None)
        for node in sorted(set(nodes) - known.keys(), key=place.__getitem__):
            after = node if last is None or place[node] > place[last] else last
            with self.graph.inserting_after(after):
                copy = self.graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta[_TAG] = _IN_BACKWARD
            copies[node] = copy
            if last is not None:
                last = copy
                place[copy] = place[after]
        return copies


def _keep_rounding(node: fx.Node) -> None:
    """Let a value that is rounded to a half type, maybe seen through views, be read so."""
    while node.target in (*_VIEWS, *_TURNS):
        node = _inputs(node)[0]
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        node.meta[KEEPS_ROUNDING] = True


def _said(node: fx.Node) -> str:
    return "the graph's result" if node.op == "output" else str(node.target)


def _is_zero(node: Any) -> bool:
    """Whether a node holds zeros."""
    if not isinstance(node, fx.Node):
        return bool(node == 0)
    match node.target:
        case aten.zeros_like.default | aten.zeros.default:
            return True
        case aten.full.default | aten.full_like.default | aten.scalar_tensor.default:
            return node.args[-1] == 0
        case aten.expand.default | aten.view.default | aten.alias.default:
            return _is_zero(node.args[0])
    return False


def _is_constant(node: fx.Node) -> bool:
    """Whether nothing that the caller gives decides a value."""
    return all(_is_pointwise(n) and _is_constant(n) for n in _inputs(node))


def _inputs_of(start: Any, through: Any) -> list[fx.Node]:
    """The nodes at which a walk towards inputs ends, which goes on through some of them."""
    ends, stack, seen = [], [start], set()
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if through(node):
            stack += _inputs(node)
        else:
            ends.append(node)
    return ends


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


__all__ = ["recompute_scores"]
