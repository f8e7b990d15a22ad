"""The registry of substitutions: what each is called, what it does to numbers, and how its places are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from ....ir.expr.dtypes import DType
from ...context import PassContext
from ..products.operands import Product
from .joined import join_products
from .rewrite import Rewrite
from .sites import ProductSites
from .sums import distribute, narrow_product, reorder, sum_first
from .tables import look_up_later

_WIDE = frozenset({DType.FLOAT64, DType.FLOAT32})


class Numerics(Enum):
    """What a rule does to numbers.

    BITWISE: no sum has other terms, or adds them in another order, but as a library does for other sizes. REASSOCIATED:
    results are rounded otherwise. OVERFLOW_PRONE: what is between may pass the greatest number, or lose bits, where
    eager's does not.
    """

    BITWISE = "bitwise"
    REASSOCIATED = "reassociated"
    OVERFLOW_PRONE = "overflow-prone"

    def allows(self, dtype: DType, context: PassContext) -> bool:
        """Whether products of a type may be rewritten so. Float16 may overflow in one order and not in another."""
        match self:
            case Numerics.BITWISE:
                return True
            case Numerics.REASSOCIATED:
                return context.fast and (dtype in _WIDE or dtype is DType.BFLOAT16)
            case Numerics.OVERFLOW_PRONE:
                return context.fast and dtype in _WIDE


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """A rewrite of products. ``find`` gives what it could make of a product, whatever that costs; ``told`` says in a
    few words what it does. One that is ``wide`` looks for products that lie far apart, and is asked for whole graphs,
    the others for parts of them. ``in_attention``: it may change products that become one kernel with a softmax.
    ``may_lose``: what it makes may be worth something to another rewrite, so that it is tried where it alone does not
    pay.
    """

    name: str
    numerics: Numerics
    told: str
    find: Callable[[ProductSites, Product], Iterator[Rewrite]]
    wide: bool = False
    in_attention: bool = False
    may_lose: bool = False

    def applies(self, sites: ProductSites, product: Product) -> bool:
        """Whether a product may be rewritten so at all."""
        if not sites.may_change(product) or not self.numerics.allows(product.type.dtype, sites.context):
            return False
        return self.in_attention or not sites.attends(product)


RULES: tuple[RewriteRule, ...] = (
    RewriteRule(
        "join_products",
        Numerics.BITWISE,
        "products that share an operand are one",
        join_products,
        wide=True,
        may_lose=True,
    ),
    RewriteRule(
        "narrow_product",
        Numerics.BITWISE,
        "rows and columns that nobody reads are left out",
        narrow_product,
        in_attention=True,
    ),
    RewriteRule("look_up_later", Numerics.BITWISE, "a table is multiplied before rows of it are chosen", look_up_later),
    RewriteRule("reorder", Numerics.REASSOCIATED, "factors are multiplied in another order", reorder),
    RewriteRule(
        "distribute",
        Numerics.REASSOCIATED,
        "a sum or a concatenation is multiplied term by term",
        distribute,
        may_lose=True,
    ),
    RewriteRule(
        "sum_first", Numerics.OVERFLOW_PRONE, "what is summed behind a product is summed in front of it", sum_first
    ),
)

__all__ = ["RULES", "Numerics", "RewriteRule"]
