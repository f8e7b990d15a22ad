"""Make products of the convolutions that combine the channels of each element by itself, where that saves time.

A convolution whose filters cover one element is a matrix of filters times each image, a matrix of channels by elements.
oneDNN brings a plain image into a layout of its own for it and the result back; a product reads both as they lie, so it
gains most where there are few channels. Over small images of many channels the library, which takes a batch as one
product, reads its filters less often and keeps the call. This pass comes after ``convert_layouts``: convolutions with
channels innermost have no copies to spare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ...ir.dtypes import DType
from ...ir.expr import Load, call
from ...ir.graph import Compute, Graph, Library, Node, Reduction, Ref, TensorType, View, uses
from ...ir.loops import contiguous_strides
from ..convolution import Convolution, axes_of, convolution
from .names import fresh_name

# A product for each image beat the library's call on Zen 3 and Sapphire Rapids where an image has so many elements, or
# where its filters have so few: they stay in the nearest caches.
ELEMENTS, FILTERS = 256, 1 << 16


def multiply_points(graph: Graph) -> Graph:
    """Replace convolutions by products of matrices where those are faster."""
    types = graph.types()
    found = {n.names[0]: c for n in graph.nodes if (c := _points(n, types, graph)) is not None}
    shared = _seen_otherwise(graph) if any("bias" in c.names for c in found.values()) else set()
    chosen = {name: c for name, c in found.items() if "bias" not in c.names or name not in shared}
    if not chosen:
        return graph
    taken = {i.name for i in graph.inputs} | {name for n in graph.nodes for name in n.names}
    nodes: list[Node] = []
    for node in graph.nodes:
        c = chosen.get(node.names[0])
        nodes += [node] if c is None else _multiplied(c, taken)
    return replace(graph, nodes=tuple(nodes))


def _points(node: Node, types: Mapping[str, TensorType], graph: Graph) -> Convolution | None:
    """The node as a convolution of plain images by filters of one element that a product is faster for."""
    c = convolution(node, types)
    if c is None or c.is_backward or c.transposed or c.groups != 1:
        return None
    if c.taps != 1 or any(s != 1 for s in c.stride) or any(c.padding):
        return None
    if c.input.dtype is not DType.FLOAT32 or c.input.device != "cpu":
        return None
    if any(t.strides != contiguous_strides(t.shape) for t in (c.input, c.weight, c.output)):
        return None
    hint = graph.symbols.hint
    small = hint(c.weight.numel) <= FILTERS
    return c if small or c.input.shape[0] == 1 or hint(_numel(c.input.shape[2:])) >= ELEMENTS else None


def _seen_otherwise(graph: Graph) -> set[str]:
    """Values that others than loops of ours read, or nobody: adding to them is a visit of its own."""
    seen = {o for o in graph.outputs if isinstance(o, str)}
    looped: set[str] = set()
    for node in graph.nodes:
        (looped if isinstance(node, (Compute, Reduction)) else seen).update(uses(node))
    return seen | {name for n in graph.nodes for name in n.names} - looped


def _multiplied(c: Convolution, taken: set[str]) -> list[Node]:
    """The images as matrices, their products with the filters, and those as images again."""
    node, result = c.node, c.node.names[0]
    batch, channels, *sizes = c.input.shape
    filters, elements, batched = c.weight.shape[0], _numel(sizes), batch != 1
    names = {part: fresh_name(f"{result}_{part}", taken) for part in ("filters", "images", "product")}

    def matrices(rows: sympy.Expr, columns: sympy.Expr, repeated: bool = False) -> TensorType:
        """A matrix, or one for each image: the same for all where ``repeated``."""
        shape = (batch, rows, columns) if batched else (rows, columns)
        strides = contiguous_strides(shape)
        if repeated and batched:
            strides = (sympy.S.Zero, *strides[1:])
        return TensorType(shape, strides, c.input.dtype, c.input.device)

    def view(name: str, kind: TensorType, source: str, indices: Sequence[sympy.Expr]) -> View:
        return View(name, kind, source, axes_of(len(kind.shape)), tuple(indices), sympy.S.Zero, node.origins)

    first = axes_of(3)[:1] if batched else (sympy.S.Zero,)  # the image
    row, column = axes_of(3 if batched else 2)[-2:]
    call_ = Library(
        (names["product"],), (matrices(filters, elements),), f"aten::{'bmm' if batched else 'mm'}.default",
        (Ref(names["filters"]), Ref(names["images"])), (), "a convolution by single elements: a product for each image",
        node.origins, node.compared,
    )  # fmt: skip
    nodes: list[Node] = [
        view(
            names["filters"], matrices(filters, channels, repeated=True), c.names["weight"],
            (row, column, *(sympy.S.Zero for _ in sizes)),
        ),
        view(
            names["images"], matrices(channels, elements), c.names["input"], (*first, row, *_digits(column, sizes)),
        ),
        call_,
    ]  # fmt: skip
    axes = axes_of(2 + len(sizes))
    place = sympy.Add(*(i * s for i, s in zip(axes[2:], contiguous_strides(tuple(sizes)), strict=True)))
    at = (*axes[: 1 if batched else 0], axes[1], place)
    if "bias" not in c.names:
        return [*nodes, view(result, c.output, names["product"], at)]
    product, bias = (Load(n, i, c.output.dtype) for n, i in ((names["product"], at), (c.names["bias"], (axes[1],))))
    return [*nodes, Compute(result, c.output, axes, call("add", product, bias), node.origins)]


def _digits(place: sympy.Symbol, shape: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """The indices of the element at a row-major ``place``."""
    steps = contiguous_strides(tuple(shape))
    return [
        sympy.S.Zero if n == 1 else ModularIndexing(place, step, n) if k else FloorDiv(place, step)
        for k, (n, step) in enumerate(zip(shape, steps, strict=True))
    ]


def _numel(shape: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*shape)
