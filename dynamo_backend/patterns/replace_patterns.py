"""Put what users have registered in the place of sub-graphs of ATen ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..aten_passes.joint_graph import backward_of
from ..tracing.origins import PATTERN
from .match import Found, key_of, matches
from .register import PATTERNS, Pattern, replacement_for
from .trace import TensorExample

_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")


def replace_patterns(gm: fx.GraphModule) -> int:
    """Replace matches of the patterns that are registered, in place, the last one first; how many."""
    done = 0
    for pattern in reversed(tuple(PATTERNS.values())):
        for graph in pattern.variants():
            done += _replaced(gm.graph, pattern, graph)
    if done:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return done


def _replaced(graph: fx.Graph, pattern: Pattern, of: fx.Graph) -> int:
    (end,) = of.find_nodes(op="output")
    results: list[fx.Node] = list(end.args[0])  # type: ignore[arg-type]
    done = 0
    for anchor in reversed(graph.find_nodes(op="call_function", target=results[0].target)):
        for found in matches(of, anchor, pattern.free):
            if _replace(graph, pattern, of, results, found):
                done += 1
                break
    return done


def _replace(graph: fx.Graph, pattern: Pattern, of: fx.Graph, results: list[fx.Node], found: Found) -> bool:
    old = [found.nodes[r] for r in results]
    if any(not n.users for n in old) or not _is_own(graph, found, old):
        return False
    operands = [found.nodes[p] for p in of.find_nodes(op="placeholder")]
    places = {n: k for k, n in enumerate(graph.nodes)}
    first = min(old, key=places.__getitem__)
    if any(places[n] > places[first] for n in operands):
        return False  # a result is read before all operands are there
    values = list(_values(pattern, operands, found))
    if pattern.check is not None and not pattern.check(*values):
        return False
    traced = replacement_for(pattern, values).graph
    (end,) = traced.find_nodes(op="output")
    if not all(_is_same(was, now) for was, now in zip(old, end.args[0], strict=True)):  # type: ignore[arg-type]
        return False
    with graph.inserting_before(first):
        made = _copied(graph, traced, operands, first, f"replaced by pattern {pattern.name}")
    for was, now in zip(old, made, strict=True):
        was.replace_all_uses_with(now)
    return True


def _values(pattern: Pattern, operands: list[fx.Node], found: Found) -> Iterator[Any]:
    tensors = iter(operands)
    for example in pattern.examples:
        if isinstance(example, TensorExample):
            yield next(tensors).meta["val"]
        else:
            yield found.numbers[key_of(example)]


def _is_own(graph: fx.Graph, found: Found, results: list[fx.Node]) -> bool:
    """Whether nothing else reads what is in between. A backward may read that of the forward: it makes it again."""
    backward = backward_of(graph)
    inside = {g for p, g in found.nodes.items() if p.op != "placeholder"}
    others = {user for node in inside.difference(results) for user in node.users} - inside
    if not backward.isdisjoint(results):
        return not others
    return others.isdisjoint(_needed(graph, backward))


def _needed(graph: fx.Graph, backward: set[fx.Node]) -> set[fx.Node]:
    """The nodes of which results of the forward are made, and the end of the graph."""
    (end,) = graph.find_nodes(op="output")
    found = {end}
    left = [n for n in end.all_input_nodes if n not in backward]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _copied(graph: fx.Graph, traced: fx.Graph, operands: list[fx.Node], like: fx.Node, note: str) -> list[Any]:
    """The nodes of a traced function in a graph, and its results there."""
    known = dict(zip(traced.find_nodes(op="placeholder"), operands, strict=True))
    place = {k: like.meta[k] for k in _PLACE if k in like.meta}
    for node in traced.nodes:
        if node.op == "call_function":
            known[node] = graph.node_copy(node, known.__getitem__)
            known[node].meta = {**node.meta, **place, "mlc_note": note, PATTERN: note}
    (end,) = traced.find_nodes(op="output")
    return [known[r] for r in end.args[0]]  # type: ignore[union-attr]


def _is_same(old: fx.Node, new: Any) -> bool:
    """Whether a result may stand for another: of the same type, sizes and strides."""
    a, b = old.meta["val"], new.meta["val"]
    same = a.dtype is b.dtype and a.device == b.device and a.dim() == b.dim()
    return same and all(statically_known_true(m == n) for m, n in zip((*a.shape, *a.stride()), (*b.shape, *b.stride())))
