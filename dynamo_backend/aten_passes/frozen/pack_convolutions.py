"""Filters of convolutions that do not change are laid out once as oneDNN reads them.

The library puts filters in order at each call, whatever the layout of images, and ATen's convolution does more around
it. Where images are few and small and channels many, as in the last blocks of a net, that takes as long as the
convolution itself. With filters in its own layout it makes images whose channels are innermost in memory, so copies to
that layout are written around the call; ``convert_layouts`` lets what lies between two such calls have it, and the
copies are gone.

What follows the convolution is part of the call where oneDNN computes it as eager does, and it costs the library less
than a loop of ours: an image that is added, and a leaky relu. Its relu makes zeros of what is no number, and swish,
sigmoid, tanh and GELU take it as long as they take our loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from ....scheduler.cost.frozen import is_for_libraries, packed_filters_pay
from ....scheduler.decisions import Alternative
from ..context import AtenContext
from ..write import NodeWriter, tidy
from .known import hoist, known_of
from .pack_weights import told_of
from .part import FOR
from .weight_products import is_memory
from .worth import Worth

aten = torch.ops.aten
# A slope of zero in float32 is a relu, which makes zeros of what is no number.
_TINY = torch.finfo(torch.float32).tiny
# Who reads an image as it is. Other ops are one loop with a sum of images, which reads what is added in any case.
_CALLS = (aten.convolution.default, torch.ops.mkldnn._convolution_pointwise.default, "output")


@dataclass(frozen=True, slots=True)
class _Filters:
    """A convolution of images [N, C, H, W] with filters [O, C / groups, h, w] that do not change; ``transposed``:
    [C, O / groups, h, w], and ``added`` rows and columns of the result."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    added: tuple[int, ...]
    groups: int

    @property
    def size(self) -> tuple[int, ...]:
        """Of the images: oneDNN chooses a layout for it."""
        return tuple(self.x.meta["val"].shape)

    @property
    def pixels(self) -> int:
        """Places of all images at which every element of the filters is multiplied."""
        kind = (self.x if self.transposed else self.node).meta["val"]
        return int(kind.shape[0] * math.prod(kind.shape[2:]))

    @property
    def geometry(self) -> tuple[Any, ...]:
        """As the library's ops take it."""
        added = (list(self.added),) if self.transposed else ()
        return list(self.padding), *added, list(self.stride), list(self.dilation), self.groups


def pack_convolutions(gm: fx.GraphModule, context: AtenContext) -> int:
    """Let convolutions, in place, read filters in the layout of a library, where that is faster; how many do."""
    graph = gm.graph
    known = known_of(graph, context.frozen)
    worth = Worth.of(graph, context.target)
    found = [_filters(n, known) for n in graph.find_nodes(op="call_function", target=aten.convolution.default)]
    chosen = [f for f in found if f is not None and is_memory(f.weight, worth) and _pays(f, context)]
    if not chosen:
        return 0
    hoist(graph, known)
    packed: dict[tuple[object, ...], fx.Node] = {}
    for f in chosen:
        key = (f.weight, f.transposed, f.stride, f.padding, f.dilation, f.added, f.groups, f.size)
        if key not in packed:
            packed[key] = _packed(graph, f)
        _write(graph, f, packed[key])
    tidy(graph)
    graph.lint()
    return len(chosen)


def _filters(node: fx.Node, known: set[fx.Node]) -> _Filters | None:
    """The node as a convolution of images that stays a library's call; None where it is none, where filters or bias
    change, or where sizes vary."""
    x, weight, bias, stride, padding, dilation, transposed, added, groups = node.args
    if node.kwargs or weight not in known or x in known:
        return None
    if bias is not None and bias not in known:
        return None
    kind, taken = x.meta["val"], weight.meta["val"]
    if kind.dim() != 4 or kind.dtype is not torch.float32 or taken.dtype is not torch.float32:
        return None
    made = node.meta["val"]
    if not all(isinstance(n, int) for n in (*kind.shape, *made.shape)) or 0 in (*kind.shape, *made.shape):
        return None
    # An image of one pixel, or of one channel, has several layouts.
    if any(math.prod(t.shape[2:]) == 1 or t.shape[1] == 1 for t in (kind, made)):
        return None
    if groups in (kind.shape[1], made.shape[1]) and groups > 1:  # a filter for each channel is for loops of ours
        return None
    steps, pads, spread, ends = (_pair(n) for n in (stride, padding, dilation, added))
    found = _Filters(node, x, weight, bias, steps, pads, spread, bool(transposed), ends, groups)
    points = math.prod(taken.shape[2:]) == 1 and max(found.stride) == 1 and not any(found.padding) and groups == 1
    return None if points else found  # a filter of one element everywhere is a product of matrices


def _pair(numbers: list[int]) -> tuple[int, ...]:
    return tuple(numbers) if len(numbers) > 1 else (*numbers, *numbers)


def _pays(f: _Filters, context: AtenContext) -> bool:
    weight = f.weight.meta["val"]
    target = context.target(str(weight.device))
    if not is_for_libraries(target) or not has_layout():
        return False
    pays = packed_filters_pay(weight.numel(), f.pixels, target)
    return context.decide(
        "packed-filters", (tuple(weight.shape), f.pixels, weight.dtype), (Alternative("packed"), Alternative("plain")),
        pays, at=f.node.name, nbytes=weight.numel() * weight.dtype.itemsize,
    )  # fmt: skip


def _packed(graph: fx.Graph, f: _Filters) -> fx.Node:
    """Filters in the layout for images of a size, those of transposed convolutions with results first. They have no
    strides; their node tells those of plain ones, which nothing but the library's op asks for."""
    ops = torch.ops.mkldnn
    op = ops._reorder_convolution_transpose_weight if f.transposed else ops._reorder_convolution_weight
    with graph.inserting_after(f.weight):
        node = graph.call_function(op.default, (f.weight, *f.geometry, list(f.size)))
    node.meta.update({k: v for k, v in f.node.meta.items() if k == "stack_trace"})
    first, second, *taps = f.weight.meta["val"].shape
    shape = (second * f.groups, first // f.groups, *taps) if f.transposed else (first, second, *taps)
    with NodeWriter(graph, f.node).mode:
        node.meta["val"] = f.weight.meta["val"].new_empty(shape)
    node.meta[FOR] = f"{told_of(f.weight)}, packed"
    return node


def _write(graph: fx.Graph, f: _Filters, packed: fx.Node) -> None:
    """Write the call, with what follows that it can do, in the place of the convolution, with copies where images lie
    otherwise."""
    end = _Behind.of(f)
    made = end.last.meta["val"]
    with graph.inserting_before(end.last):
        out, ops = NodeWriter(graph, end.last), torch.ops.mkldnn
        images = [_in_layout(out, n, torch.channels_last) for n in (f.x, end.image) if n is not None]
        if end.image is not None:
            op = ops._convolution_pointwise.binary
        else:
            op = (ops._convolution_transpose_pointwise if f.transposed else ops._convolution_pointwise).default
        new = graph.call_function(op, (*images, packed, f.bias, *f.geometry, *end.told))
        # Torch's own fake of the transposed one has channels of the input, and another layout than the op.
        with out.mode:
            value = torch.empty_like(made, memory_format=torch.channels_last)
        new.meta.update(out.place, val=value)
        if value.stride() != made.stride():
            new = _in_layout(out, new, torch.contiguous_format)
    assert new.meta["val"].stride() == made.stride()
    end.last.replace_all_uses_with(new)


@dataclass(frozen=True, slots=True)
class _Behind:
    """What a call does behind a convolution, whose last node is ``last``: it adds an ``image``, and has a ``slope`` for
    what is below zero."""

    last: fx.Node
    image: fx.Node | None = None
    slope: float | None = None

    @classmethod
    def of(cls, f: _Filters) -> _Behind:
        user = _only_user(f.node)
        if user is None:
            return cls(f.node)
        if user.target is aten.leaky_relu.default:
            slope = float(user.args[1]) if len(user.args) > 1 else 0.01
            return cls(user, slope=slope) if _TINY <= abs(slope) < math.inf else cls(f.node)
        image = None if f.transposed else _added(user, f.node)
        if image is None or any(n.target not in _CALLS for n in user.users):
            return cls(f.node)
        return cls(user, image)

    @property
    def told(self) -> tuple[Any, ...]:
        """The last arguments of the op, which say it."""
        if self.image is not None:
            return "add", 1.0, None, [], ""
        return ("none", [], "") if self.slope is None else ("leaky_relu", [self.slope], "")


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _added(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """The other image of a plain sum of two in one layout."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or one not in node.args:
        return None
    other = node.args[0] if node.args[1] is one else node.args[1]
    if not isinstance(other, fx.Node) or other is one:
        return None
    kinds = [n.meta["val"] for n in (node, one, other)]
    same = len({(t.shape, t.stride(), t.dtype, t.device) for t in kinds}) == 1
    return other if same else None


def _in_layout(out: NodeWriter, image: fx.Node, layout: torch.memory_format) -> fx.Node:
    if image.meta["val"].is_contiguous(memory_format=layout):
        return image
    return out.call(aten.clone.default, image, memory_format=layout)


@cache
def has_layout() -> bool:
    """Whether oneDNN of this torch, on this processor, has filters in a layout of its own."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            x = torch.ones(1, 16, 4, 4).to(memory_format=torch.channels_last)
            around = [1, 1]
            packed = torch.ops.mkldnn._reorder_convolution_weight(
                torch.ones(16, 16, 3, 3), around, around, around, 1, list(x.shape)
            )
            torch.ops.mkldnn._nbytes(packed)
            y = torch.ops.mkldnn._convolution_pointwise(x, packed, None, around, around, around, 1, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool(y.is_contiguous(memory_format=torch.channels_last))


__all__ = ["has_layout", "pack_convolutions"]
