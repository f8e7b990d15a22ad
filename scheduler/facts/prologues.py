"""Operands that a product makes itself though that reads no less: what they are made of, and what that saves.

An activation, a norm of rows whose sums are known, rows that data name, tensors that are joined: ``prologue_of`` says
how the elements of such an operand come from what is in memory in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import (
    Call,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Select,
    flops,
    free_symbols,
    is_value,
    length,
    loads,
    rewrite,
)
from ...ir.graph.facts import makers_of
from ...ir.graph.graph import Compute, Graph, Library, Node, TensorType, node_values
from ...ir.graph.graph import Reduction as ReductionNode
from .digits import Extents, refine
from .packed_operands import rounds
from .row_factors import Factored, factored
from .views import map_value, readers_of, results_of, views_of

# An operand's element may cost so many operations, and be written with so many nodes, where a product makes it itself.
INLINE_FLOPS, INLINE_NODES = 64, 400
# Bytes that one instruction copies.
WIDE = 16


@dataclass(frozen=True, slots=True)
class Prologue:
    """How a product may make an operand itself though that reads no less: an activation, a norm of rows whose
    statistics are known, rows that data name, tensors that are joined. ``made`` is its element, without what is the
    same along the sum, and ``read`` the bytes that this loads, from ``sources``. ``saved`` are bytes that need not be
    moved then, and ``launches`` the kernels that are gone; of an operand that several products gather, the share of one
    of them. ``gathers`` where data name the places of elements; these are known before the sum begins. ``parts`` are
    the steps of one length of what is joined along the sum; each is memory as it is. One where nothing is joined so."""

    made: Factored
    read: int
    flops: int
    is_wide: bool
    sources: frozenset[str]
    saved: int
    launches: float
    gathers: bool = False
    parts: int = 1


class MadeElements:
    """What elements of a graph's tensors are made of, read through views."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.views = views_of(graph)
        self.types = graph.types()
        self.makers = {n.name: n for n in graph.nodes if isinstance(n, Compute)}
        self.made, self.readers, self.leaving = makers_of(graph), readers_of(graph), results_of(graph)
        self.gathering = {
            name for n in graph.nodes if isinstance(n, (Compute, ReductionNode)) and gathers(n) for name in n.names
        }
        # Element-wise tensors read through views, as they are asked for.
        self.resolved: dict[str, Expr] = {}

    @staticmethod
    def is_too_much(cost: int, nodes: int) -> bool:
        """Whether an operand takes more operations or nodes than a product should make for every use."""
        return cost > INLINE_FLOPS or nodes > INLINE_NODES

    def definition(self, maker: Compute) -> Expr:
        """What an element of an element-wise tensor is, read through views."""
        if maker.name not in self.resolved:
            extents = dict(zip(maker.axes, maker.type.shape, strict=True))
            self.resolved[maker.name] = self.views.resolve(maker.value, extents)
        return self.resolved[maker.name]

    def read_by(self, value: Expr) -> int:
        """The bytes of all tensors that a value is made of."""
        hint = self.graph.symbols.hint
        return sum(hint(self.types[n].nbytes) for n in {ld.buffer for ld in loads(value)})

    def stays(self, maker: Node) -> bool:
        """Whether something beside one element-wise node needs what a node makes in memory."""
        (name, *_) = maker.names
        return name in self.leaving or any(not isinstance(r, Compute) for r in self.readers.get(name, ()))

    def is_wide(self, value: Expr) -> bool:
        """Whether the rows of all matrices that are loaded start at multiples of 16 bytes."""
        return all(is_aligned(self.types[ld.buffer], self.graph.symbols) for ld in loads(value))


def is_aligned(kind: TensorType, table: SymbolTable, typically: bool = False) -> bool:
    """Whether the rows of a tensor that has as many dimensions as a matrix start at multiples of 16 bytes, in all calls
    or ``typically``, which is what a library goes by."""
    steps = [s for s, e in zip(kind.strides, kind.shape, strict=True) if e != 1]
    whole = [s * kind.dtype.itemsize for s in steps if s != 1]
    if len(steps) < 2:
        return True
    return len(whole) < len(steps) and all(
        table.hint(s) % WIDE == 0 if typically else table.is_divisible(s, WIDE) for s in whole
    )


def prologue_of(
    products: MadeElements, value: Expr, made: Factored, nbytes: int, read: int, extents: Extents, along: sympy.Symbol
) -> Prologue | None:
    """How a product may make an operand of what is in memory in any case: what the caller or a library gives, and sums
    of rows. The kernel that sums those stays, and writes no more than them.

    ``value`` is the operand's element, ``made`` the same without factors, ``nbytes`` and ``read`` are the bytes of the
    operand and of what the element is made of. ``along`` is the summed axis among ``extents``.
    """
    sources = frozenset(ld.buffer for ld in loads(value))
    makers = [products.made[n] for n in sources if n in products.made]
    if not flops(value) or not all(isinstance(m, (Library, ReductionNode)) for m in makers):
        return None
    stays = any(isinstance(m, ReductionNode) for m in makers)
    if stays and any(products.types[m.names[0]].numel == products.types[n].numel for m in makers for n in sources
                     if isinstance(m, ReductionNode) and n not in m.names):  # fmt: skip
        return None
    saved = nbytes if stays else nbytes + read
    parts = joined_parts(made.rest, along, extents, products.graph.symbols)
    cost = flops(made.rest) if parts == 1 else 0
    return Prologue(made, read, cost, products.is_wide(made.rest), sources, saved, int(not stays), parts=parts)


def gathered_of(
    products: MadeElements, name: str, plain: Load, extents: Extents, along: sympy.Symbol, readers: int
) -> Prologue | None:
    """How a product may read an operand through the indices that say where its elements are, where those do not vary
    ``along`` the sum and name whole rows; ``readers`` are the products that would."""
    kind, hint = products.types[name], products.graph.symbols.hint
    value = Inliner(products, extents, along, through=True).expand(products.views.resolve(plain, extents))
    if products.is_too_much(flops(value), length(value)):
        return None
    elements = without_places(value)
    makers = [products.made[ld.buffer] for ld in loads(value) if ld.buffer in products.made]
    if value == elements or not all(isinstance(m, (Library, ReductionNode)) or products.stays(m) for m in makers):
        return None
    # A table of few rows is read from memory once, whoever asks for them.
    whole = hint(kind.numel)
    of_elements = {ld.buffer: min(hint(products.types[ld.buffer].nbytes), whole * ld.dtype.itemsize)
                   for ld in loads(elements)}  # fmt: skip
    sources = frozenset(ld.buffer for ld in loads(value))
    read = sum(of_elements.values()) + sum(hint(products.types[n].nbytes) for n in sources - of_elements.keys())
    made = factored(value, along)
    return Prologue(made, read, flops(without_places(made.rest)), products.is_wide(without_places(made.rest)), sources,
                    (hint(kind.nbytes) + read) // readers, 1 / readers, True)  # fmt: skip


# --- joined tensors ---------------------------------------------------------------------------------------------------


def as_joined(value: Expr) -> Expr | None:
    """An element of tensors of one type that are joined, chosen among theirs with no conversion there and back; None
    where it is anything else."""
    found = _chosen(value, value.dtype)
    return found if isinstance(found, Select) else None


def _chosen(e: Expr, dtype: DType) -> Expr | None:
    match e:
        case Load():
            return e if e.dtype is dtype else None
        case Cast(value) if e.dtype in (dtype, dtype.compute):
            return _chosen(value, dtype)
        case Select(Call("lt", (IndexValue(), Const()), _) as condition, a, b):
            first, second = _chosen(a, dtype), _chosen(b, dtype)
            return None if first is None or second is None else Select(condition, first, second)
    return None


def joined_parts(value: Expr, along: sympy.Symbol, extents: Extents, table: SymbolTable) -> int:
    """In how many steps of one length a product reads an operand that is joined along its sum, each of one tensor; 1
    where it is not joined so."""
    if as_joined(value) is None or any(e.condition.args[0].index != along for e in _selects(value)):  # type: ignore[union-attr]
        return 1
    kept = {v: n for v, n in extents.items() if v != along}
    axes, _ = refine(value, {along: extents[along]}, kept, table)
    first = next(iter(axes.values()))
    return int(first) if len(axes) == 2 and first.is_Integer else 1


def _selects(e: Expr) -> list[Select]:
    return [e, *_selects(e.if_true), *_selects(e.if_false)] if isinstance(e, Select) else []


# --- what elements are made of ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Inliner:
    """Replaces loads by what they are made of, as far as point-wise producers reach, and ``through`` indices that data
    give, where those do not vary ``along`` the sum; ``gathers`` where it has met any. ``narrow``: not through what was
    rounded to bytes, nor what takes no more memory than what it is made of."""

    products: MadeElements
    extents: Extents
    along: sympy.Symbol
    stop: str = ""
    through: bool = False
    gathers: bool = False
    narrow: bool = False

    def expand(self, value: Expr) -> Expr:
        return rewrite(value, self._made)

    def _made(self, e: Expr) -> Expr | None:
        products, table = self.products, self.products.graph.symbols
        if not isinstance(e, Load) or (maker := products.makers.get(e.buffer)) is None:
            return None
        if maker.name in products.gathering:
            self.gathers = True
            if not self.through:
                self.stop = f"{maker.name} gathers by data: it is made first, and the product reads it"
                return None
        elif any(map(is_value, e.indices)) and products.stays(maker):
            return None
        if self.narrow and is_rounded(maker):
            self.stop = f"{maker.name} is rounded to a byte"
            return None
        made = map_value(products.definition(maker), dict(zip(maker.axes, e.indices, strict=True)))
        if self.through and not all(self._is_row(ld) for ld in loads(made)):
            return None
        found = self.expand(rewrite(made, lambda _: None, lambda i: simplify(i, self.extents, table)))
        if self.narrow and products.graph.symbols.hint(maker.type.nbytes) <= products.read_by(found):
            self.stop = f"{maker.name} takes no more memory than what it is made of"
            return None
        return found

    def _is_row(self, load: Load) -> bool:
        """Whether the places that data name in a tensor are the same along the sum, and are those of rows."""
        strides = self.products.types[load.buffer].strides
        places = [(i, s) for i, s in zip(load.indices, strides, strict=True) if is_value(i)]
        fixed = self.along not in free_symbols(load)
        return fixed or all(self.along not in free_symbols(i) and s != 1 for i, s in places)  # type: ignore[arg-type]


def is_rounded(maker: Compute) -> bool:
    """Whether a tensor holds bytes that were rounded from floats."""
    return rounds(maker.type.dtype, (maker.value,))


def without_places(value: Expr) -> Expr:
    """A value with elements at the first place where data name one: what is loaded and computed for each element."""

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and any(map(is_value, e.indices)):
            return replace(e, indices=tuple(sympy.S.Zero if is_value(i) else i for i in e.indices))
        return None

    return rewrite(value, leaf)


def gathers(maker: Compute | ReductionNode) -> bool:
    return any(is_value(i) for value in node_values(maker) for ld in loads(value) for i in ld.indices)
