"""What is computed of numbers alone and comes out as one number is a fill with it, which costs kernels nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ....runtime.frozen.recipe import Recipe
from ..context import AtenContext
from ..write import NodeWriter
from .known import known_nodes
from .part import kept_nodes, recipe_of
from .worth import Worth, reached

aten = torch.ops.aten

# So many elements may be computed while a graph is compiled to learn that they are equal.
MOST_ELEMENTS = 1 << 20


def write_literals(gm: fx.GraphModule, context: AtenContext) -> int:
    """Write fills, in place, for reductions and other costly functions of numbers alone; how many. Their value is that
    of torch's own ops on a CPU."""
    graph = gm.graph
    done = 0
    for node in kept_nodes(graph, known_nodes(graph, ()), Worth((), context.target)):
        recipe = recipe_of(graph, (node,), {})
        if _elements(node) > MOST_ELEMENTS or not node.meta["val"].is_contiguous():
            continue
        try:
            (value,) = _on_cpu(recipe).values(())
        except RuntimeError:  # torch refuses, and does so again when the program is called, as in eager
            continue
        number = _number(value)
        if number is None:
            continue
        kind = node.meta["val"]
        with graph.inserting_before(node):
            fill = NodeWriter(graph, node).call(
                aten.full.default, list(kind.shape), number, dtype=kind.dtype, device=kind.device, pin_memory=False
            )
        node.replace_all_uses_with(fill)
        done += 1
    if done:
        graph.eliminate_dead_code()
        gm.recompile()
    return done


def _number(value: torch.Tensor) -> Any:
    """The number that all elements are, in all their bits; None where there is none that a fill would give."""
    if value.is_complex() or not value.numel():
        return None
    number = value.reshape(-1)[0].item()
    fill = torch.full_like(value, number)
    same = fill.contiguous().view(torch.uint8) if value.dim() else fill.reshape(1).view(torch.uint8)
    given = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
    return number if torch.equal(same, given) else None


def _elements(node: fx.Node) -> int:
    """Elements of all that a node is computed of."""
    return sum(math.prod(value.shape) for n in reached(node) for value in tree_leaves(n.meta["val"]))


def _on_cpu(recipe: Recipe) -> Recipe:
    """The recipe with all its tensors on the CPU, whatever device is here."""
    cpu = torch.device("cpu")
    calls = tuple(
        replace(c, kwargs={k: cpu if isinstance(v, torch.device) else v for k, v in c.kwargs.items()})
        for c in recipe.calls
    )
    return replace(recipe, calls=calls)
