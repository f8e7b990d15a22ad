"""Parts of complex numbers that were made of parts a moment before are those.

``complex/parts.py`` writes each operation by itself: it takes numbers apart, and puts results together. Between two of
them both are views of one memory, which no kernel reads through. Here they cancel, whatever views stand in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_CONJUGATE = aten._conj.default
_APART, _TOGETHER = aten.view_as_real.default, aten.view_as_complex.default


def join_parts(gm: fx.GraphModule) -> int:
    """Let readers of parts read what those were put together from, in place; how many there were."""
    found = 0
    for node in gm.graph.find_nodes(op="call_function", target=_CONJUGATE):
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is _CONJUGATE:
            node.replace_all_uses_with(source.args[0])
            found += 1
    for node in gm.graph.find_nodes(op="call_function", target=_APART):
        source = node.args[0]
        between: list[fx.Node] = []
        while isinstance(source, fx.Node) and source.target in _VIEWS:
            between.append(source)
            source = source.args[0]
        if not isinstance(source, fx.Node) or source.target is not _TOGETHER:
            continue
        parts: Any = source.args[0]
        with gm.graph.inserting_before(node):
            for view in reversed(between):
                parts = _of_parts(gm.graph, view, parts)
        if parts.meta["val"].stride() != node.meta["val"].stride():
            continue
        node.replace_all_uses_with(parts)
        found += 1
    if found:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return found


def _of_parts(graph: fx.Graph, view: fx.Node, parts: fx.Node) -> fx.Node:
    """The view of numbers as one of their parts, which have one dimension more, the last."""
    args: list[Any] = list(view.args)
    rank = view.args[0].meta["val"].dim()  # type: ignore[union-attr]
    match view.target:
        case aten.permute.default:
            args[1] = [*(d % rank for d in args[1]), rank]
        case aten.t.default:
            return _made(graph, aten.permute.default, (parts, [*reversed(range(rank)), rank]), view)
        case aten.view.default | aten.expand.default:
            args[1] = [*args[1], 2]
        case aten.unsqueeze.default:
            args[1] %= rank + 1
        case aten.slice.Tensor:
            args[1:2] = [args[1] % rank] if len(args) > 1 else [0]
        case _:
            args[1] %= rank
    return _made(graph, view.target, (parts, *args[1:]), view)


def _made(graph: fx.Graph, target: Any, args: tuple[Any, ...], view: fx.Node) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {k: v for k, v in view.meta.items() if k != "val"}
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    with values[0].fake_mode:
        node.meta["val"] = target(*values)
    return node


_VIEWS = (
    aten.permute.default, aten.t.default, aten.view.default, aten.expand.default, aten.unsqueeze.default,
    aten.slice.Tensor, aten.select.int, aten.squeeze.dim,
)  # fmt: skip
