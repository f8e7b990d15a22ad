"""Whether the work of a graph can be captured once and replayed (CUDA graphs), and what a replay has to know of it.

A captured program is the launches that it made, with their addresses and numbers. So what the host decides, computes or
waits for between launches must be the same each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from ...ir.errors import IRError
from ...ir.graph.begun import is_begun, is_wait
from ...ir.graph.collectives import is_collective, is_collectives_wait
from ...ir.graph.effects import may_alias, resolve_op, written
from ...ir.graph.facts import users_of
from ...ir.graph.graph import (
    ArgumentRef,
    CallTensor,
    ConstantRef,
    Graph,
    Input,
    Library,
    Node,
    OpRef,
    View,
    every_node,
    refs,
    size_makers,
)
from ...ir.graph.regions import write_out_regions
from .build import MUTATES
from .steps.lines import place_text
from .steps.step import leaves

_REGION, _TRITON = "hop::invoke_subgraph", "hop::triton_kernel_wrapper_functional"
# Ops that wait for the device or copy from it, though no tag of theirs says so.
_WAITING = frozenset(
    {"aten::multinomial.default", "aten::_linalg_check_errors.default", "aten::_assert_scalar.default",
     "aten::is_nonzero.default"}
)  # fmt: skip
# Under torch.use_deterministic_algorithms these sort by host code.
_SORTING = ("aten::index_put", "aten::_unsafe_index_put", "aten::_unsafe_masked_index_put_accumulate")
_UNSAFE_TAGS = tuple(
    tag
    for name in ("dynamic_output_shape", "data_dependent_output", "cudagraph_unsafe")
    if (tag := getattr(torch.Tag, name, None)) is not None
)


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """``reason`` says why a graph cannot be captured, "" where it can: on ``device``.

    The rest are positions of arguments: ``tensors`` that it reads, those that are ``static`` (parameters, whose address
    does not change), those that the program has ``written`` to, and those whose layout is ``symbolic``. Results from
    ``saved`` on are read by the backward graph alone.
    """

    reason: str
    device: str = ""
    tensors: tuple[int, ...] = ()
    static: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    symbolic: tuple[int, ...] = ()
    saved: int | None = None


def capture_plan(
    graph: Graph, kinds: Collection[str], *, saved: int | None = None, regions: Mapping[str, str] | None = None
) -> CapturePlan:
    """The plan of a fused graph, where tensors of device types ``kinds`` can be captured.

    ``regions`` gives for each body that the graph calls, by its name, why that cannot be captured.
    """
    reason = _misplaced(graph, kinds)
    if not reason:
        graph = write_out_regions(graph)
        reason = _reason(graph, regions or {})
    if reason:
        return CapturePlan(reason)
    read = users_of(graph).keys() | {o for o in graph.outputs if isinstance(o, str)}
    inputs = [(k, i) for k, i in enumerate(graph.inputs) if isinstance(i, Input)]
    written = _written(graph)
    return CapturePlan(
        "",
        next(device for device, _ in _places(graph)),
        tuple(k for k, i in inputs if i.name in read),
        tuple(k for k, i in inputs if i.static and i.name in read),
        tuple(k for k, i in inputs if i.name in written),
        tuple(k for k, i in inputs if any(e.free_symbols for e in (*i.type.shape, *i.type.strides))),
        saved,
    )


# --- why not ----------------------------------------------------------------------------------------------------------


def _misplaced(graph: Graph, kinds: Collection[str]) -> str:
    device = ""
    for found, where in _places(graph):
        if found.partition(":")[0] not in kinds:
            return f"{_told(where)} is on the device {found}"
        if device and found != device:
            return f"its tensors are on several devices: {device}, {found}"
        device = found
    return "" if device else "it has no tensors"


def _reason(graph: Graph, regions: Mapping[str, str]) -> str:
    deciding = set(size_makers(graph).values())
    for node in graph.nodes:
        if not isinstance(node, Library):
            continue
        number = None in node.types and not node.target.startswith("aten::sym_")
        if number or not deciding.isdisjoint(node.names):
            return f"{_told(node)} decides a size or a number by data"
        why = _unsafe(node, graph, regions)
        if why:
            return f"{_told(node)} {why}"
    return ""


def _places(graph: Graph) -> Iterator[tuple[str, Input | Node]]:
    """The devices of all tensors, and what is there."""
    for i in graph.inputs:
        if isinstance(i, Input):
            yield i.type.device, i
    for node, _ in every_node(graph):
        for kind in node.types:
            if kind is not None:
                yield kind.device, node


def _told(node: Input | Node) -> str:
    if isinstance(node, Input):
        return f"input {node.name}"
    what = node.target if isinstance(node, Library) else node.names[0]
    return f"{what}{place_text(node.origins, aside=True)}"


def _unsafe(node: Library, graph: Graph, regions: Mapping[str, str]) -> str:
    """What of a library call cannot be captured."""
    target = node.target
    if is_collective(node) or is_collectives_wait(node):
        return "talks to other processes"
    if is_begun(node) or is_wait(node):
        return "copies between devices"
    if target == _REGION:
        bodies = [a.name for a in node.args if isinstance(a, ConstantRef)]
        return next((f"calls a region in which {regions[b]}" for b in bodies if regions.get(b)), "")
    if target == MUTATES:
        return next((_of_op(a.name, node, graph) for a in node.args if isinstance(a, OpRef)), "")
    if target.startswith("hop::") and target != _TRITON:
        return "is decided by the host"
    if target.startswith("mlc::"):
        return ""
    if any(isinstance(a, (ArgumentRef, ConstantRef)) for a in leaves((node.args, node.kwargs))) and target != _TRITON:
        return "takes an object that only the host has"
    return _of_op(target, node, graph) if target != _TRITON else ""


def _of_op(target: str, node: Library, graph: Graph) -> str:
    if target in _WAITING:
        return "waits for the device"
    try:
        tags = resolve_op(target).tags
    except (IRError, AttributeError):
        tags = ()
    if any(tag in tags for tag in _UNSAFE_TAGS):
        return "waits for the device"
    if target.startswith(_SORTING):
        if torch.are_deterministic_algorithms_enabled():
            return "waits for the device where algorithms are to be deterministic"
        types = graph.types()
        masks = [r for r in refs(node.args[1]) if types[r].dtype.value in ("bool", "uint8")]
        if masks:
            return "counts the elements of a mask"
    return ""


# --- what is written --------------------------------------------------------------------------------------------------


def _written(graph: Graph) -> set[str]:
    """The inputs in whose memory a node writes, or may write."""
    roots: dict[str, frozenset[str]] = {i.name: frozenset((i.name,)) for i in graph.inputs if isinstance(i, Input)}
    found: set[str] = set()
    for node in graph.nodes:
        found = found.union(*(roots[name] for name in written(node)))
        match node:
            case View():
                roots[node.name] = roots[node.source]
            case CallTensor():
                for name, target in zip(node.names, node.into or (None,) * len(node.names), strict=True):
                    roots[name] = roots[target] if target is not None else frozenset()
            case Library():
                read = list(refs((node.args, tuple(v for _, v in node.kwargs))))
                behind = frozenset().union(*(roots[r] for r in read)) if may_alias(node.target) else frozenset()
                roots.update(dict.fromkeys(node.names, behind))
    return found
