"""Values as functions of what views and element-wise nodes read, for what matches the functions between products."""

from __future__ import annotations

from ....ir.expr.value import Expr, Load, length, rewrite
from ....ir.graph.graph import Compute
from ...facts.definitions import Definitions
from .operands import is_simple


class ReadThrough:
    """Follows loads to where they are made, each load once, to expressions of no more than ``most`` operations.

    Whoever derives from it says which loads end the walk (``ends``), what others are (``resolved``), and how it refuses
    what is too long (``too_long``).
    """

    def __init__(self, found: Definitions, most: int) -> None:
        self.found = found
        self.most = most
        self.known: dict[Load, Expr] = {}
        self.count = 0

    def ends(self, load: Load) -> bool:
        """Whether a load is a leaf of the result."""
        raise NotImplementedError

    def resolved(self, load: Load) -> Expr:
        """The value of a load from its base."""
        raise NotImplementedError

    def too_long(self) -> Exception:
        raise NotImplementedError

    def expanded(self, e: Expr) -> Expr:
        """The value read through views and element-wise nodes. Raises what ``too_long`` says."""
        self.count += length(e)
        if self.count > self.most:
            raise self.too_long()
        return rewrite(e, lambda x: self.load(x) if isinstance(x, Load) and not self.ends(x) else None)

    def load(self, e: Load) -> Expr:
        known = self.known.get(e)
        if known is None:
            known = self.known[e] = self.resolved(self.found.base(e))
        return known

    def settled(self, e: Load) -> Expr:
        """A load of what lies apart from the products: its maker's value where that is simple."""
        settled = self.found.settled_load(e)
        if settled is None:
            return e
        made = self.found.makers.get(e.buffer)
        if isinstance(made, Compute) and is_simple(self.found, made):
            return self.expanded(self.found.moved(made.value, made.axes, settled.indices))
        return settled
