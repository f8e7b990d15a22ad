"""What does not change between calls leaves the graph: the rest is given its values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ....ir.target import Target
from ....runtime.frozen.recipe import GETITEM, KeptResult, OpCall, Recipe, ValueRef
from ...tracing.origins import origins_of
from .known import known_nodes
from .worth import Worth, reached

# Where a pass notes what it wrote a node for; a value that has it spares the ops that the pass has taken out.
FOR = "mlc_frozen_for"


def part(
    gm: fx.GraphModule, sources: Mapping[fx.Node, str], target: Callable[[str], Target], *, discard: bool = False
) -> tuple[Recipe, list[Any]] | None:
    """Give a graph, in place, inputs for values that do not change between calls, behind those that it has.

    ``sources`` are the inputs that do not change, with what the model calls them. Returns how the values are made, and
    their fake tensors; None where nothing is worth it. All other inputs keep their places, read or not. With
    ``discard`` the recipe tells which sources nobody reads any more, and is there for every graph that has sources.
    """
    graph = gm.graph
    known = known_nodes(graph, sources)
    kept = kept_nodes(graph, known, Worth.of(graph, target))
    if not kept and not (discard and sources):
        return None
    inputs = graph.find_nodes(op="placeholder")
    recipe = recipe_of(graph, kept, sources)
    fakes = [n.meta["val"] for n in kept]
    last = graph.find_nodes(op="placeholder")
    place = last[-1] if last else None
    for k, node in enumerate(kept):
        with graph.inserting_before(next(iter(graph.nodes))) if place is None else graph.inserting_after(place):
            given = graph.placeholder(f"frozen_{k}")
        given.meta.update({"val": node.meta["val"], **{m: v for m, v in node.meta.items() if m == "stack_trace"}})
        node.replace_all_uses_with(given)
        place = given
    graph.eliminate_dead_code()
    graph.lint()
    gm.recompile()
    if discard:
        spent = tuple(k for k, place in enumerate(recipe.sources) if not inputs[place].users)
        plain = tuple((k, sources[n]) for k, n in enumerate(inputs) if n in sources and n.users)
        recipe = replace(recipe, spent=spent, plain=plain)
    return recipe, fakes


def kept_nodes(graph: fx.Graph, known: set[fx.Node], worth: Worth) -> list[fx.Node]:
    """The known nodes that others read and that are worth it; where one is not, those that it is made of are asked."""
    kept: list[fx.Node] = []
    wanted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in known and node not in wanted:
            continue
        if node in wanted and worth.keeps(node):
            kept.append(node)
        else:
            wanted.update(n for n in node.all_input_nodes if n in known)
    return kept[::-1]


def recipe_of(graph: fx.Graph, kept: Sequence[fx.Node], sources: Mapping[fx.Node, str]) -> Recipe:
    """How nodes of a graph are made of some of its inputs."""
    needed = set(kept)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    places = {n: k for k, n in enumerate(graph.find_nodes(op="placeholder"))}
    read = [n for n in places if n in needed]
    numbers = {n: k for k, n in enumerate(read)}
    calls = []
    for node in graph.nodes:
        if node in needed and node.op == "call_function":
            numbers[node] = len(numbers)
            calls.append(_call(node, numbers))
    spared: set[fx.Node] = set()
    results = []
    for node in kept:
        before = len(spared)
        spared |= {n for n in reached(node) if n.op == "call_function" and FOR not in node.meta}
        value = node.meta["val"]
        results.append(
            KeptResult(
                numbers[node], tuple(value.shape), tuple(value.stride()), value.dtype, _told(node), len(spared) - before
            )
        )
    return Recipe(tuple(places[n] for n in read), tuple(sources[n] for n in read), tuple(calls), tuple(results))


def _told(node: fx.Node) -> str:
    (origin,) = origins_of(node, str(node.target))
    return f"{node.meta.get(FOR) or origin.op} {origin.source}".rstrip()


def _call(node: fx.Node, numbers: Mapping[fx.Node, int]) -> OpCall:
    def given(arg: Any) -> Any:
        return _plain(map_arg(arg, lambda n: ValueRef(numbers[n])))

    args, kwargs = tuple(given(a) for a in node.args), {k: given(a) for k, a in node.kwargs.items()}
    op = node.target
    if op is operator.getitem:
        return OpCall(GETITEM, args, kwargs)
    assert isinstance(op, OpOverload)
    takes = {a.name for a in op._schema.arguments}
    value = node.meta["val"]
    if not node.all_input_nodes and isinstance(value, torch.Tensor) and "dtype" in takes:
        # A type that is left out is the default one of the time of the call.
        kwargs["dtype"] = value.dtype
    return OpCall(f"{op.namespace}::{op._opname}.{op._overloadname}", args, kwargs)


def _plain(arg: Any) -> Any:
    """Lists and dictionaries of torch's own as those of Python, which can be written down."""
    match arg:
        case tuple() | list():
            return tuple(map(_plain, arg)) if isinstance(arg, tuple) else list(map(_plain, arg))
        case dict():
            return {k: _plain(a) for k, a in arg.items()}
    return arg


__all__ = ["FOR", "kept_nodes", "part", "recipe_of"]
