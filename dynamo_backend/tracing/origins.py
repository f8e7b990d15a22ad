"""Where a node comes from: the user's line, read from what Dynamo left in the node's metadata."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import fx

from ...codegen.host.steps.lines import Lines
from ...ir.graph.graph import Origin
from ..converters.context import KEEPS

# The metadata of a node of Dynamo's that the ATen nodes made of it have, too.
_CUSTOM, _PLACE = "custom", "mlc_place"
# What Dynamo's path of a module has that the model's has not: L['self']._modules['layers']._modules['0'].
_NOISE = ("_modules", "_parameters", "_buffers")
# Where a node has which pattern of a user's it was made by.
PATTERN = "mlc_pattern"


def origins_of(node: fx.Node, op: str, place: int = -1) -> tuple[Origin, ...]:
    """The op and the user's innermost line ("model.py:12 in forward: x = self.norm(x)") of one node, and its place
    among the graph's nodes. What only modules of torch's run has no line of the user's: then its layer is told."""
    found = _origin(op, _place_of(node))
    if (pattern := node.meta.get(PATTERN)) is not None:
        found = replace(found, note=pattern)
    if kept := node.meta.get(KEEPS):
        found = replace(found, keeps=tuple(kept))
    return (replace(found, place=place) if found.source and place >= 0 else found,)


def innermost_line(trace: str) -> str:
    """The user's innermost line of a stack trace of Dynamo's, "" where there is none."""
    return _last_frame(trace)


def lines_of(gm: fx.GraphModule) -> Lines:
    """The user's lines by the places of the graph's nodes."""
    nodes = list(gm.graph.nodes)
    return lambda place: _place_of(nodes[place]) if place < len(nodes) else ""


def path_of(stack: Mapping[str, Any]) -> str:
    """The path of the innermost module of a node's stack of modules, "" for the model itself."""
    for path, *_ in reversed(list(stack.values())):
        words = [w for w in re.findall(r"\w+", str(path)) if w not in _NOISE]
        words = words[1:] if words[:1] in (["L"], ["G"]) else words
        return ".".join(words[1:])  # the first is what the model is called where it is called
    return ""


def number_nodes(gm: fx.GraphModule) -> Lines:
    """Give each node of a graph of Dynamo's, and of the graphs inside, a number that ATen nodes will have as well; the
    user's lines by these."""
    nodes = [n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    for k, node in enumerate(nodes):
        node.meta[_CUSTOM] = {**(node.meta.get(_CUSTOM) or {}), _PLACE: k}
    return lambda place: _place_of(nodes[place]) if 0 <= place < len(nodes) else ""


def numbers_of(gm: fx.GraphModule, places: Iterable[int]) -> dict[int, int]:
    """The numbers that nodes of Dynamo's were given, by the places of the ATen nodes made of them."""
    nodes = list(gm.graph.nodes)
    found = {p: (nodes[p].meta.get(_CUSTOM) or {}).get(_PLACE) for p in places if p < len(nodes)}
    return {p: number for p, number in found.items() if number is not None}


@lru_cache(maxsize=4096)
def _origin(op: str, source: str) -> Origin:
    return Origin(op, source)


def _place_of(node: fx.Node) -> str:
    """The user's innermost line, else the innermost layer ("layer 4.bn1 (BatchNorm2d)"), else ""."""
    if line := _last_frame(node.meta.get("stack_trace") or ""):
        return line
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not (path := path_of(stack)):
        return ""
    kind = [*stack.values()][-1][-1]
    return f"layer {path} ({getattr(kind, '__name__', str(kind).rpartition('.')[2])})"


@lru_cache(maxsize=1024)
def _last_frame(trace: str) -> str:
    # Frames look as in a traceback: '  File "path", line 12, in forward' and the line of code below.
    start = trace.rfind('File "')
    if start < 0:
        return ""
    head, _, code = trace[start + 6 :].partition("\n")
    path, _, rest = head.partition('", line ')
    line, _, function = rest.partition(", in ")
    code = code.strip().partition("\n")[0].strip()
    place = f"{os.path.basename(path)}:{line}" + (f" in {function}" if function else "")
    return f"{place}: {code}" if code else place
