"""Make products of the convolutions that combine the channels of each element by itself, where that saves time.

A convolution whose filters cover one element is a matrix of filters times each image, a matrix of channels by elements,
and the gradient of its images the transposed filters times each gradient. oneDNN brings plain images into a layout of
its own for them and the results back; a product reads both as they lie, so it gains most where there are few channels.
Over small images of many channels the library, which takes a batch as one product, reads its filters less often and
keeps the call, as it does for the gradient of filters, a sum over images. This pass comes after ``convert_layouts``:
images with channels innermost are one matrix that has a row for each pixel, which is one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.value import Load, call
from ....ir.graph.facts import names_in, places_of
from ....ir.graph.graph import Compute, Graph, Library, Node, Reduction, Ref, TensorType, View, uses
from ....ir.nest.loops import contiguous_strides
from ...context import USUAL, PassContext
from ...cost.layouts import are_measured, multiplies_points
from ...decisions import Alternative, place_key
from ...facts.convolution import Convolution, axes_of, convolution
from ..canonical.names import fresh_name
from ..products.multiply_by_onednn import onednn_product

_REASON = "a convolution by single elements: a product for each image"
_REASON_PIXELS = "a convolution by single elements: a product of all pixels"


def multiply_points(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Replace convolutions, and gradients of their images, by products of matrices where those are faster."""
    types = graph.types()
    found = {n.names[0]: c for n in graph.nodes if (c := _points(n, types, graph, context)) is not None}
    shared = _seen_otherwise(graph) if any("bias" in c.names for c in found.values()) else set()
    chosen = {
        name: c for name, c in found.items()
        if "bias" not in c.names or name not in shared or c.input.strides != contiguous_strides(c.input.shape)
    }  # fmt: skip
    if not chosen:
        return graph
    taken = set(names_in(graph))
    nodes: list[Node] = []
    for node in graph.nodes:
        c = chosen.get(node.names[0])
        if c is None:
            nodes.append(node)
        elif c.input.strides != contiguous_strides(c.input.shape):
            nodes += _product_of_pixels(c, types, graph, taken, context)
        elif c.is_backward:
            nodes += _without_images(c, taken)
            nodes += _BatchedProduct.of_gradient(c).written(taken)
        else:
            nodes += _BatchedProduct.of(c).written(taken)
    return replace(graph, nodes=tuple(nodes))


def _points(node: Node, types: Mapping[str, TensorType], graph: Graph, context: PassContext) -> Convolution | None:
    """The node as a convolution of plain images by filters of one element that a product is faster for."""
    c = convolution(node, types)
    if c is None or c.transposed or c.groups != 1 or c.node.types[0] is None:
        return None
    if c.taps != 1 or any(s != 1 for s in c.stride) or any(c.padding):
        return None
    if c.input.dtype is not DType.FLOAT32 or not are_measured(context.target_of(c.input.device).machine):
        return None
    if c.weight.strides != contiguous_strides(c.weight.shape):
        return None
    if not c.is_backward and all(t.strides == _pixel_strides(t.shape) for t in (c.input, c.output)):
        return c
    if any(t.strides != contiguous_strides(t.shape) for t in (c.input, c.output, c.node.types[0])):
        return None
    hint = graph.symbols.hint
    images = 1 if c.input.shape[0] == 1 else 2  # hints of sizes that vary are no ones
    elements = hint(_numel(c.input.shape[2:]))
    by_cost = multiplies_points(images, elements, hint(c.weight.numel))
    chosen = context.decide(
        "points", lambda: place_key(graph, node.names), (Alternative("product"), Alternative("convolution")),
        "product" if by_cost else "convolution", at=node.names[0],
        nbytes=hint(c.input.nbytes) + hint(c.output.nbytes) + hint(c.weight.nbytes),
        reason=f"{images} images or more of {elements} elements",
    )  # fmt: skip
    return c if chosen == "product" else None


def _seen_otherwise(graph: Graph) -> set[str]:
    """Values that others than loops of ours read, or nobody: adding to them is a visit of its own."""
    seen = {o for o in graph.outputs if isinstance(o, str)}
    looped: set[str] = set()
    for node in graph.nodes:
        (looped if isinstance(node, (Compute, Reduction)) else seen).update(uses(node))
    return seen | (places_of(graph).keys() - looped)


def _without_images(c: Convolution, taken: set[str]) -> list[Node]:
    """The call of a backward for the other gradients, if those are asked for."""
    node = c.node
    names, types = (fresh_name(f"{node.names[0]}_unmade", taken), *node.names[1:]), (None, *node.types[1:])
    if all(t is None for t in types):
        return []
    mask = tuple(t is not None for t in types)
    return [replace(node, names=names, types=types, args=(*node.args[:-1], mask))]


def _pixel_strides(shape: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """Strides of images whose channels are innermost in memory: a row for each pixel."""
    batch, *size, channels = contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (batch, channels, *size)


def _product_of_pixels(
    c: Convolution, types: Mapping[str, TensorType], graph: Graph, taken: set[str], context: PassContext
) -> list[Node]:
    """Images with channels innermost as one matrix ``[pixels, channels]``, times the filters, and that as images."""
    result, origins = c.node.names[0], c.node.origins
    pixels, product, filters = (fresh_name(f"{result}_{n}", taken) for n in ("pixels", "product", "filters"))
    to, channels = c.weight.shape[:2]
    places = (c.input.shape[0], *c.input.shape[2:])
    count, (row, column) = _numel(places), axes_of(2)

    def matrix(rows: sympy.Expr, columns: sympy.Expr) -> TensorType:
        return replace(c.output, shape=(rows, columns), strides=contiguous_strides((rows, columns)))

    def view(name: str, kind: TensorType, source: str, at: Sequence[sympy.Expr]) -> View:
        return View(name, kind, source, axes_of(len(kind.shape)), tuple(at), sympy.S.Zero, origins)

    image, *size = _digits(row, places)
    turned = replace(matrix(channels, to), strides=(sympy.S.One, channels))
    axes = axes_of(len(c.output.shape))
    steps = contiguous_strides(places)
    place = sympy.Add(*(i * s for i, s in zip((axes[0], *axes[2:]), steps, strict=True)))
    given = (Ref(pixels), Ref(filters))
    kinds = {**types, pixels: matrix(count, channels), filters: turned}
    args = (Ref(c.names["bias"]), *given) if "bias" in c.names else given
    target = f"aten::{'addmm' if 'bias' in c.names else 'mm'}.default"
    multiplied = Library((product,), (matrix(count, to),), target, args, (), _REASON_PIXELS, origins, c.node.rounded)
    return [
        view(pixels, kinds[pixels], c.names["input"], (image, column, *size)),
        view(filters, turned, c.names["weight"], (column, row, *(sympy.S.Zero,) * len(size))),
        *onednn_product(multiplied, kinds, graph, taken, context),
        view(result, c.output, product, (place, axes[1])),
    ]


@dataclass(frozen=True, slots=True)
class _BatchedProduct:
    """Matrices ``[rows, between]`` of filters by images, each a matrix ``[between, elements]``, for a ``result``."""

    c: Convolution
    images: str
    rows: sympy.Expr
    between: sympy.Expr
    transposed: bool
    result: str
    kind: TensorType

    @classmethod
    def of(cls, c: Convolution) -> _BatchedProduct:
        rows, between = c.weight.shape[:2]
        return cls(c, c.names["input"], rows, between, False, c.node.names[0], c.output)

    @classmethod
    def of_gradient(cls, c: Convolution) -> _BatchedProduct:
        between, rows = c.weight.shape[:2]
        return cls(c, c.names["grad"], rows, between, True, c.node.names[0], c.input)

    def written(self, taken: set[str]) -> list[Node]:
        """The images as matrices, their products with the filters, and those as images again."""
        batch, _, *sizes = self.kind.shape
        elements, batched = _numel(sizes), batch != 1
        filters, images, product = (fresh_name(f"{self.result}_{n}", taken) for n in ("filters", "images", "product"))
        first = axes_of(3)[:1] if batched else (sympy.S.Zero,)  # the image
        row, column = axes_of(3 if batched else 2)[-2:]
        place = (*((column, row) if self.transposed else (row, column)), *(sympy.S.Zero,) * len(sizes))
        origins = self.c.node.origins
        nodes: list[Node] = [
            self._view(filters, self._filters(batched), self.c.names["weight"], place),
            self._view(
                images, self._matrices(self.between, elements), self.images, (*first, row, *_digits(column, sizes))
            ),
            Library(
                (product,), (self._matrices(self.rows, elements),), f"aten::{'bmm' if batched else 'mm'}.default",
                (Ref(filters), Ref(images)), (), _REASON, origins, self.c.node.rounded,
            ),
        ]  # fmt: skip
        axes = axes_of(2 + len(sizes))
        element = sympy.Add(*(i * s for i, s in zip(axes[2:], contiguous_strides(tuple(sizes)), strict=True)))
        at = (*axes[: 1 if batched else 0], axes[1], element)
        if "bias" not in self.c.names:
            return [*nodes, self._view(self.result, self.kind, product, at)]
        made = Load(product, at, self.kind.dtype), Load(self.c.names["bias"], (axes[1],), self.kind.dtype)
        return [*nodes, Compute(self.result, self.kind, axes, call("add", *made), origins)]

    def _view(self, name: str, kind: TensorType, source: str, at: Sequence[sympy.Expr]) -> View:
        return View(name, kind, source, axes_of(len(kind.shape)), tuple(at), sympy.S.Zero, self.c.node.origins)

    def _matrices(self, rows: sympy.Expr, columns: sympy.Expr) -> TensorType:
        """A matrix for each image; the matrix itself where there is one image."""
        batch = self.kind.shape[0]
        shape = (batch, rows, columns) if batch != 1 else (rows, columns)
        return TensorType(shape, contiguous_strides(shape), self.kind.dtype, self.kind.device)

    def _filters(self, batched: bool) -> TensorType:
        """The same matrix for all images."""
        plain = self._matrices(self.rows, self.between)
        strides = (sympy.S.One, self.rows) if self.transposed else (self.between, sympy.S.One)
        return replace(plain, strides=(sympy.S.Zero, *strides) if batched else strides)


def _digits(place: sympy.Symbol, shape: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """The indices of the element at a row-major ``place``."""
    steps = contiguous_strides(tuple(shape))
    return [
        sympy.S.Zero if n == 1 else ModularIndexing(place, step, n) if k else FloorDiv(place, step)
        for k, (n, step) in enumerate(zip(shape, steps, strict=True))
    ]


def _numel(shape: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*shape)
