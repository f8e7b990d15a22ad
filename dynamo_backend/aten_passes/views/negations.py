"""Negation that torch keeps as a bit of a tensor, as the operation that it is; and which arguments may carry bits.

``_neg_view`` of ATen, by which ``x.conj().imag`` is made, leaves memory as it is. In the IR it is ``neg``. An argument
that was traced negated is the negative of its memory, which is what the program is given (runtime/host/lazy_bits.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from ....ir.expr.value import call
from ....ir.graph.graph import Library, Ref
from ....runtime.host.lazy_bits import Lazy
from ...converters import ImportContext, Tensor
from ...converters.index.views import view_chain
from ...converters.terms import axes
from ...tracing.tokens import is_token
from ..joint_graph import is_tangent
from ..write import NodeWriter, give_results

aten = torch.ops.aten

# The op that changes nothing but the bit.
NEGATE = aten._neg_view.default
# The mark of views that torch is to make, so that autograd knows what they are views of, and why.
BIT, WHY_BIT = "mlc_bit", "a view of what a bit negates"
# Ops that name places in the storage of their operand, also such as are none of its elements.
_STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)


def lazy_inputs(gm: fx.GraphModule, *, region: bool = False) -> tuple[Lazy, ...]:
    """The arguments whose bits have to be looked at: what autograd gives, and what was traced with bits.

    Dynamo's guards tell bits apart, so that a forward graph gets the bits that it was traced with. Nothing guards what
    a loss makes of a result, and what is saved or given to a ``region`` may come out of an op whose fake version
    conjugates otherwise.
    """
    places = gm.graph.find_nodes(op="placeholder")
    backward = any(map(is_tangent, places))
    found = []
    for k, node in enumerate(places):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not node.users or is_token(node):
            continue
        bits = value.is_conj(), value.is_neg()
        unsure = is_tangent(node) or (value.is_complex() and (backward or region))
        if any(bits) or unsure:
            found.append(Lazy(k, *bits))
    return tuple(found)


def with_bits(gm: fx.GraphModule, lazy: Iterable[Lazy]) -> frozenset[str]:
    """The arguments that were traced with bits. AOTAutograd brings gradients into the layout that they were traced
    with, but not these."""
    places = gm.graph.find_nodes(op="placeholder")
    return frozenset(places[x.position].name for x in lazy if x.is_conj or x.is_neg)


def negative(ctx: ImportContext, x: Tensor, name: str, val: torch.Tensor) -> Tensor:
    """What the memory of a tensor stands for that a bit negates, and the other way round; ``val`` is the fake tensor
    of either, whose other bit stays."""
    if not x.dtype.is_carried:
        return ctx.compute(call("neg", ctx.at(x, axes(x.rank))), x.type, name)
    ops = ("_conj", "neg", "_conj") if val.is_conj() else ("neg",)
    for k, op in enumerate(ops):
        made = name if k == len(ops) - 1 else ctx.fresh("negated")
        ctx.nodes.append(
            Library((made,), (x.type,), f"aten::{op}.default", (Ref(x.name),), (), "complex numbers", ctx.origins)
        )
        x = Tensor(made, x.type)
    return x


def is_negated(node: object) -> bool:
    """Whether a node is an argument that was traced with the bit set."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_neg()


def stride_before_negating(gm: fx.GraphModule) -> int:
    """Let ops that name places in the storage of what a bit negates see that storage, and negate what they give; how
    many do. The negative of a value has no more elements than the value, whatever lies between those in memory."""
    changed = 0
    for node in [n for op in _STRIDED for n in gm.graph.find_nodes(op="call_function", target=op)]:
        views, root = view_chain(node.args[0])
        given = is_negated(root)
        if not given and all(v.target is not NEGATE for v in views):
            continue
        writer = NodeWriter(gm.graph, node)
        with gm.graph.inserting_before(node):
            made = writer.call(NEGATE, root) if given else root
            for view in views:
                if view.target is not NEGATE:
                    made = writer.call(view.target, made, *view.args[1:], **view.kwargs)
            negated = node.args[0].meta["val"].is_neg()  # type: ignore[union-attr]
            rest = list(node.args[1:])
            if negated and node.target is aten.as_strided_scatter.default:
                rest[0] = writer.call(NEGATE, rest[0])
            made = writer.call(node.target, made, *rest, **node.kwargs)
            made = writer.call(NEGATE, made) if negated else made
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
        changed += 1
    if changed:
        gm.recompile()
    return changed


def return_negated_views(gm: fx.GraphModule) -> int:
    """Let results that bits make the negatives of their memory share it with what they are views of; how many are.

    Views of arguments are: AOTAutograd makes most of them itself from the caller's tensors, but not those that
    ``split`` and the like give in training, and those of sizes that vary it makes as the program does. So are negated
    views of a value of which the caller gets another.
    """
    (end,) = gm.graph.find_nodes(op="output")
    results = list(end.args[0])  # type: ignore[arg-type]
    chains = [view_chain(r) if isinstance(r, fx.Node) else ([], None) for r in results]
    roots = Counter(root for _, root in chains)
    changed = 0
    for k, (views, root) in enumerate(chains):
        negated = is_negated(root)
        if root is None or not views:
            continue
        shared = root.op == "placeholder" or roots[root] > 1
        if not (negated or (shared and any(v.target is NEGATE for v in views))):
            continue
        writer = NodeWriter(gm.graph, root)
        with gm.graph.inserting_before(end):
            made = writer.call(NEGATE, root) if negated else root
            for view in views:
                if view.target is not NEGATE:
                    made = writer.call(view.target, made, *view.args[1:], **view.kwargs)
                    made.meta[BIT] = True
            if results[k].meta["val"].is_neg():
                made = writer.call(NEGATE, made)
                made.meta[BIT] = True
        results[k] = made
        changed += 1
    if changed:
        give_results(gm, results)
    return changed


def negate(ctx: ImportContext, node: fx.Node, x: Tensor) -> Tensor:
    """``_neg_view`` of a value."""
    if is_negated(node.args[0]):
        return Tensor(node.args[0].name, x.type)  # type: ignore[union-attr]
    if node.meta.get(BIT):
        why = WHY_BIT
        ctx.nodes.append(
            Library((node.name,), (x.type,), "aten::_neg_view.default", (Ref(x.name),), (), why, ctx.origins)
        )
        return Tensor(node.name, x.type)
    return negative(ctx, x, node.name, node.meta["val"])


def write_negated(ctx: ImportContext, destination: fx.Node, value: Tensor, val: torch.Tensor) -> Tensor:
    """Copy a value, of which ``val`` is the fake tensor, over an argument that a bit negates: its memory gets the
    negative. Returns the value."""
    memory = negative(ctx, value, ctx.fresh("negated"), val)
    kind = ctx.sizes.tensor_type(destination.meta["val"])
    arguments = (Ref(destination.name), Ref(memory.name))
    why = "a value that is written over an argument"
    ctx.nodes.append(Library((ctx.result,), (kind,), "aten::copy_.default", arguments, (), why, ctx.origins))
    return value
