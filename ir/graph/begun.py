"""Work that a graph begins and waits for later: collectives, and copies between devices on a stream of their own.

What is begun goes on reading what it was given, and writing what it returns, until the wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .collectives import is_collective, is_collectives_wait
from .graph import Graph, Library, Node, Ref, TensorType, uses

# The device whose memory is the host's, and which has no streams.
HOST = "cpu"
# A copy to another device that is begun, and a wait for some of those: what it returns are these very tensors.
BEGIN_COPY, WAIT_COPIES = "mlc::begin_copy.default", "mlc::wait_copies.default"
# An ATen op that makes a tensor on another device, and what of its arguments a begun copy knows or needs not know.
TO_COPY = "aten::_to_copy.default"
_USUAL: dict[str, tuple[Any, ...]] = {
    "pin_memory": (None, False),
    "layout": (None, "torch.strided"),
    "memory_format": (None, "torch.preserve_format"),
}


def is_begun_copy(node: Node) -> bool:
    """Whether a node begins a copy to another device."""
    return isinstance(node, Library) and node.target == BEGIN_COPY


def is_begun(node: Node) -> bool:
    """Whether a node begins something that another one waits for."""
    return is_collective(node) or is_begun_copy(node)


def is_copy_wait(node: Node) -> bool:
    """Whether a node waits for copies that were begun."""
    return isinstance(node, Library) and node.target == WAIT_COPIES


def is_wait(node: Node) -> bool:
    """Whether a node waits for what was begun. What it returns is that very tensor, or these."""
    return is_copy_wait(node) or is_collectives_wait(node)


def passed_on(node: Node) -> dict[str, str]:
    """By the results of a wait, the names under which what is waited for was begun; none of another node."""
    return dict(zip(node.names, uses(node), strict=True)) if is_wait(node) else {}


def in_flight(graph: Graph) -> dict[int, tuple[str, ...]]:
    """By the position of each wait, the operands of what it is for: until then they are read.

    Operands of what the graph does not wait for stand under the number of its nodes.
    """
    issued: dict[str, tuple[str, ...]] = {}
    waiting: dict[str, tuple[str, ...]] = {}
    found: dict[int, tuple[str, ...]] = {}
    for k, node in enumerate(graph.nodes):
        if not isinstance(node, Library):
            continue
        if is_begun(node):
            issued.update(dict.fromkeys(node.names, uses(node)))
            waiting.update(dict.fromkeys(node.names, uses(node)))
        elif is_wait(node):
            found[k] = tuple(operand for name in uses(node) for operand in issued.get(name, ()))
            for name in uses(node):
                waiting.pop(name, None)
    if waiting:
        found[len(graph.nodes)] = tuple(dict.fromkeys(operand for operands in waiting.values() for operand in operands))
    return found


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A call that copies ``source`` to another device, of which one at least has streams."""

    call: Library
    source: str
    source_device: str
    type: TensorType

    @property
    def to_host(self) -> bool:
        return self.type.device == HOST

    @property
    def from_host(self) -> bool:
        return self.source_device == HOST

    @property
    def blocks(self) -> bool:
        """Whether the host may use its side of the copy as soon as the caller has the results: what is copied is there,
        and what it was copied from may be written over."""
        return (self.to_host or self.from_host) and not dict(self.call.kwargs).get("non_blocking", False)

    def begun(self, name: str, host: bool) -> tuple[Library, Library]:
        """The call as two, one that begins it under a name and one that waits for it. The host is let to its side of
        the copy by the wait where ``host``, else when the graph has run."""
        given = dict(self.call.kwargs)
        kwargs = tuple((k, given[k]) for k in ("device", "dtype", "non_blocking") if k in given)
        why = "copy between devices on a stream of its own"
        begin = replace(
            self.call, names=(name,), target=BEGIN_COPY, args=(Ref(self.source),), kwargs=kwargs, reason=why
        )  # fmt: skip
        wait = replace(self.call, target=WAIT_COPIES, args=((Ref(name),), host), kwargs=(), reason=why)
        return begin, wait


def device_copies(graph: Graph) -> dict[int, DeviceCopy]:
    """The copies between devices, by their positions."""
    nodes = [(k, n) for k, n in enumerate(graph.nodes) if isinstance(n, Library) and n.target == TO_COPY]
    types = graph.types() if nodes else {}
    found = {}
    for k, node in nodes:
        match node.args, node.types:
            case (Ref(source),), (TensorType() as kind,) if source in types:
                copy = DeviceCopy(node, source, types[source].device, kind)
                if _has_streams(copy) and _is_plain(node):
                    found[k] = copy
    return found


def _has_streams(copy: DeviceCopy) -> bool:
    """Whether the two sides are different devices, GPUs or the host, and one of them a GPU."""
    devices = {copy.source_device, copy.type.device}
    return len(devices) == 2 and all(d == HOST or d.startswith("cuda:") for d in devices)


def _is_plain(node: Library) -> bool:
    return all(k not in _USUAL or v in _USUAL[k] or str(v) in _USUAL[k] for k, v in node.kwargs)


def joined_waits(graph: Graph) -> Graph:
    """The graph with one wait for copies that are waited for one after the other."""
    nodes: list[Node] = []
    for node in graph.nodes:
        before = nodes[-1] if nodes else None
        if is_copy_wait(node) and before is not None and is_copy_wait(before):
            nodes[-1] = _both(before, node)  # type: ignore[arg-type]
        else:
            nodes.append(node)
    return graph if len(nodes) == len(graph.nodes) else replace(graph, nodes=tuple(nodes))


def _both(one: Library, other: Library) -> Library:
    return replace(
        one,
        names=(*one.names, *other.names),
        types=(*one.types, *other.types),
        args=((*one.args[0], *other.args[0]), one.args[1] or other.args[1]),
        origins=tuple(dict.fromkeys((*one.origins, *other.origins))),
    )
