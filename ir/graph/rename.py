"""Nodes of graphs under other names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from ..expr.value import is_value, rename_loads
from .graph import CallRegion, CallTensor, Compute, Library, Node, Reduction, Ref, Scan, Scatter, View, uses

# The new name of a tensor or another value.
Naming: TypeAlias = Callable[[str], str]


def renamed(node: Node, name: Naming) -> Node:
    """A node under other names, with what it reads."""
    if isinstance(node, Library):
        return renamed_call(node, name)
    if isinstance(node, CallTensor):
        into = tuple(None if t is None else name(t) for t in node.into)
        names, args = tuple(map(name, node.names)), tuple(map(name, node.args))
        return CallTensor(names, node.types, node.function, args, node.sizes, node.origins, into, node.count)
    if isinstance(node, CallRegion):
        given = (tuple(map(name, row)) for row in (node.names, node.carried, node.shared))
        names, carried, shared = given
        taken = tuple(tuple(map(name, row)) for row in node.taken)
        return replace(node, names=names, carried=carried, taken=taken, shared=shared)
    read = {ld: name(ld) for ld in uses(node)}
    match node:
        case View():
            indices = tuple(rename_loads(i, read) if is_value(i) else i for i in node.indices)
            return View(
                name(node.name), node.type, name(node.source), node.axes, indices, node.offset, node.origins
            )  # fmt: skip
        case Compute():
            return replace(node, name=name(node.name), value=rename_loads(node.value, read))
        case Scatter():
            return replace(node, name=name(node.name), values=tuple(rename_loads(v, read) for v in node.values))
        case Reduction() | Scan():
            values = tuple(rename_loads(v, read) for v in node.values)
            return replace(node, names=tuple(map(name, node.names)), values=values)


def renamed_call(node: Library, name: Naming) -> Library:
    """A library call with its tensors under other names."""
    args = tuple(_argument(a, name) for a in node.args)
    kwargs = tuple((k, _argument(v, name)) for k, v in node.kwargs)
    return replace(node, names=tuple(map(name, node.names)), args=args, kwargs=kwargs)


def _argument(arg: Any, name: Naming) -> Any:
    match arg:
        case Ref(old):
            return Ref(name(old))
        case tuple():
            return tuple(_argument(a, name) for a in arg)
        case list():
            return [_argument(a, name) for a in arg]
        case dict():
            return {k: _argument(v, name) for k, v in arg.items()}
    return arg


__all__ = ["Naming", "renamed", "renamed_call"]
