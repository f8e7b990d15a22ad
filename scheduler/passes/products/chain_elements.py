"""Elements of a product's operand, or of a sum, as functions of other products' results: see ``chain_products``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from ....ir.errors import MlcError
from ....ir.expr.dtypes import DType
from ....ir.expr.value import Call, Expr, Load, call, cast, const, is_value, loads, walk
from ....ir.graph.graph import Compute, Graph, Library, TensorType, View, uses
from ...facts.definitions import Definitions
from .operands import Product, mentions, product_of, scaled
from .read_through import ReadThrough

# An element beyond so many operations is no function of scores any more.
MAX_NODES = 3000
BATCH, ROW, COLUMN, FEATURE, INNER = (
    sympy.Symbol(f"att_{n}", integer=True, nonnegative=True) for n in ("batch", "row", "column", "feature", "inner")
)


class NoChainError(MlcError):
    """An operand is not made of products in a way that can be streamed."""


@dataclass(frozen=True, slots=True)
class Score:
    """A product whose results make elements: the sum over ``inner`` of query * key at [batch, row, column]."""

    product: Product
    query: Expr
    key: Expr
    width: sympy.Expr


@dataclass(frozen=True, slots=True)
class ChainedProduct:
    """``product[b, row, feature] = sum over columns of element * value``.

    ``element`` reads the results of ``scores[k]`` as the buffer ``names[k]``. ``transposed`` where the product's
    result is [b, feature, row].
    """

    product: Product
    scores: tuple[Score, ...]
    element: Expr
    value: Expr
    extents: dict[sympy.Symbol, sympy.Expr]
    transposed: bool
    # Whether a softmax is in the element.
    is_softmax: bool

    @property
    def node(self) -> Library:
        return self.product.node

    @property
    def name(self) -> str:
        return self.product.name

    @property
    def dtype(self) -> DType:
        return self.product.type.dtype

    @property
    def device(self) -> str:
        return self.product.type.device

    @property
    def values(self) -> tuple[Expr, ...]:
        return (self.element, self.value)

    @property
    def space(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.extents[s] for s in (BATCH, ROW, COLUMN) if s in self.extents)


def exponentials(graph: Graph, given: Iterable[str] = ()) -> set[str]:
    """Tensors in whose elements an exponential can be: made of one by element-wise nodes and views alone. Those that
    are ``given`` are made of one outside of the graph."""
    return _spread(graph, given, "exp")


def made_of_products(graph: Graph, products: Iterable[Product]) -> set[str]:
    """The results of some products, and what is made of them by element-wise nodes and views alone."""
    return _spread(graph, (p.name for p in products), None)


def _spread(graph: Graph, names: Iterable[str], fn: str | None) -> set[str]:
    """Some tensors, those in whose elements a function is called, and what element-wise nodes and views make of
    either."""
    result = set(names)
    for node in graph.nodes:
        match node:
            case View() if node.source in result:
                result.add(node.name)
            case Compute() if not result.isdisjoint(uses(node)) or (fn is not None and _calls(node.value, fn)):
                result.update(node.names)
    return result


def _calls(value: Expr, fn: str) -> bool:
    return any(isinstance(e, Call) and e.fn == fn for e in walk(value))


def buffer_of(product: Product) -> str:
    """The buffer by which an element reads a product's result."""
    return f"scores of {product.name}"


def _along(index: Any) -> tuple[bool, bool]:
    """Whether an index moves along rows and along columns."""
    return mentions(index, ROW), mentions(index, COLUMN)


class Elements(ReadThrough):
    """An operand's element as a function of products' results, of other tensors and of positions."""

    def __init__(self, found: Definitions, lead: tuple[sympy.Symbol, ...], types: dict[str, TensorType]) -> None:
        super().__init__(found, MAX_NODES)
        self.lead = lead
        self.types = types
        self.scores: dict[str, Score] = {}
        # By which elements read scores.
        self.buffers: set[str] = set()

    def ends(self, load: Load) -> bool:
        return load.buffer in self.buffers

    def is_softmax(self, element: Expr) -> bool:
        """Whether an exponential of scores minus something that each row or column has one of is in an element."""
        for e in walk(element):
            if isinstance(e, Call) and e.fn == "exp" and isinstance(e.args[0], Call) and e.args[0].fn == "sub":
                score, shift = e.args[0].args
                if any(map(self.ends, loads(score))) and not any(map(self.ends, loads(shift))):
                    return True
        return False

    def too_long(self) -> Exception:
        return NoChainError(f"it has more than {MAX_NODES} operations")

    def resolved(self, load: Load) -> Expr:
        made = self.found.makers.get(load.buffer)
        product = product_of(made)
        if product is not None:
            score = self._score(product, load)
            return load if score is None else score
        everywhere = all(any(not is_value(i) and mentions(i, s) for i in load.indices) for s in (ROW, COLUMN))
        at = self.found.settled_load(load)
        if isinstance(made, Compute) and everywhere and at is not None:
            before = len(self.scores)
            inside = self.expanded(self.found.moved(made.value, made.axes, at.indices))
            if len(self.scores) > before or any(map(self.ends, loads(inside))):
                return inside
        return self.settled(load)

    def _score(self, product: Product, e: Load) -> Expr | None:
        """A product's result as that of a score; None where it is read as any other tensor."""
        if any(is_value(i) for i in e.indices) or not product.type.dtype.is_float:
            return None
        *lead, i, j = e.indices
        if any(mentions(x, ROW, COLUMN) for x in lead):
            return None
        kind = product.type.dtype
        sides = (Load(product.left, (*lead, i, INNER), kind), Load(product.right, (*lead, INNER, j), kind))
        if _along(i) == (False, True) and _along(j) == (True, False):
            sides = sides[::-1]
        elif _along(i) != (True, False) or _along(j) != (False, True):
            return None
        width = self.types[product.left].shape[-1]
        inside = self.found.within({**self.found.extents, INNER: width})
        (query, a), (key, b) = (scaled(inside, ld) for ld in sides)
        known = self.scores.get(product.name)
        if known is not None and (known.query, known.key) != (query, key):
            raise NoChainError("results of several positions make one element")
        self.scores[product.name] = Score(product, query, key, width)
        compute = kind.compute
        self.buffers.add(buffer_of(product))
        value: Expr = Load(buffer_of(product), (*self.lead, ROW, COLUMN), compute)
        factor = a * b * product.alpha
        if factor != 1.0:
            value = call("mul", value, const(factor, compute))
        if product.added is not None and product.beta != 0.0:
            added = self._added(product.added, e.indices, kind)
            if product.beta != 1.0:
                added = call("mul", added, const(product.beta, compute))
            value = call("add", value, added)
        return cast(value, kind, when_stored=not product.node.rounded)

    def _added(self, name: str, indices: tuple[Any, ...], kind: DType) -> Expr:
        shape = self.types[name].shape
        at = indices[len(indices) - len(shape) :]
        at = tuple(sympy.S.Zero if n == 1 else i for i, n in zip(at, shape, strict=True))
        return cast(self.load(Load(name, at, kind)), kind.compute)
