"""Sub-graphs of control flow: which of a graph's attributes are bodies of branches, loops and nested regions, each of
which becomes a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from ...runtime.host.control import CONTROL
from ..converters import CONVERTERS
from .decompositions import decomposition_table


def regions_of(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The bodies by the name of the node that reads them; nodes of one body have one object."""
    found: dict[str, fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.users and all(_is_control(user) for user in node.users):
            value = attribute(gm, str(node.target))
            if isinstance(value, fx.GraphModule):
                found[node.name] = value
    return found


def attribute(gm: fx.GraphModule, target: str) -> Any:
    """An attribute by its dotted name."""
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def taken_apart(region: fx.GraphModule, table: Mapping[Any, Callable[..., Any]] | None = None) -> fx.GraphModule:
    """A body whose ops are those that our decompositions leave, or those of a ``table``; the same object where it has
    no others.

    torch traces bodies of nested regions without the table of the graph around them.
    """
    table = decomposition_table() if table is None else table
    wanted = [n for n in region.graph.nodes if n.op == "call_function" and n.target in table]
    if not any(str(n.target) not in CONVERTERS for n in wanted):
        return region
    values = [n.meta["val"] for n in region.graph.nodes if n.op == "placeholder"]
    mode = next((v.fake_mode for v in tree_leaves(values) if isinstance(v, FakeTensor)), None)
    if mode is None:
        return region
    with mode, torch.no_grad():
        return make_fx(fx.Interpreter(region).run, decomposition_table=dict(table), tracing_mode="real")(*values)


def _is_control(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in CONTROL
