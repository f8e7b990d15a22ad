"""Products of matrices as the graph has them: what each operand is made of, and what was decided about them.

A product whose operand is made on the way from something smaller (integers and scales, a narrower type) may read that
instead; ``operand_of`` finds how, through views, with no list of forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.value import Expr, Index, Load, flops, is_value, length, loads, symbol, walk
from ...ir.graph.graph import Compute, Graph, Library, Node, Ref, TensorType, node_values, uses
from ...ir.graph.graph import Reduction as ReductionNode
from ...ir.target import has_kernels
from .dots import codes_in, lies_in_words
from .fusion_nodes import is_cheap
from .prologues import Inliner, MadeElements, Prologue, as_joined, gathered_of, is_aligned, is_rounded, prologue_of
from .row_factors import Factored, factored

T = TypeVar("T")
I0, I1, I2, R0 = (symbol(s) for s in ("i0", "i1", "i2", "r0"))
# Op -> positions of the operands, and of what is added (None: nothing); how results and operands are indexed.
_MATRIX = ((I0, I1), (I0, R0), (R0, I1))
_BATCH = ((I0, I1, I2), (I0, I1, R0), (I0, R0, I2))
_VECTOR = ((I0,), (I0, R0), (R0,))
_FORMS: dict[str, tuple[int | None, int, tuple[tuple[sympy.Symbol, ...], ...]]] = {
    "aten::mm.default": (None, 0, _MATRIX),
    "aten::addmm.default": (0, 1, _MATRIX),
    "aten::bmm.default": (None, 0, _BATCH),
    "aten::baddbmm.default": (0, 1, _BATCH),
    "aten::mv.default": (None, 0, _VECTOR),
    "aten::addmv.default": (0, 1, _VECTOR),
    "aten::dot.default": (None, 0, ((), (R0,), (R0,))),
    "aten::_int_mm.default": (None, 0, _MATRIX),
}
# The type of operands, where it is not that of the result.
_OPERANDS = {"aten::_int_mm.default": DType.INT8}

# Columns of a tile that one program combines: what the fastest tiles of products have (``fusion/tiles.py``).
COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Operand:
    """One factor of a product.

    ``plain`` is its element as the library would read it, over the product's axes, and ``made`` the same made of what
    it is made of, without factors that are applied to the result: equal where nothing is gained. ``bytes`` are those of
    the tensor, ``read`` those that it loads then, ``flops`` what an element costs to make. ``stop`` says why this
    reaches no further. ``is_wide`` where rows of all that is loaded start at multiples of 16 bytes, so that copies of
    tiles may be so wide, ``is_aligned`` where those of the tensor do. ``prologue`` is there where nothing is packed and
    the product could make it. ``is_given`` where no node of the graph makes it. ``codes`` where it is bytes less a
    constant with scales, ``in_words`` where those bytes lie in words of neighbours along the sum, columns side by side.
    """

    name: str
    type: TensorType
    plain: Expr
    made: Factored
    bytes: int
    read: int
    flops: int
    stop: str = ""
    is_wide: bool = True
    is_aligned: bool = True
    prologue: Prologue | None = None
    is_given: bool = False
    codes: bool = False
    in_words: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether it can be read from less memory than it takes."""
        return self.read < self.bytes

    @property
    def inlined(self) -> Factored:
        """Its element where the product makes it."""
        return self.made if self.prologue is None else self.prologue.made

    @property
    def is_copied(self) -> bool:
        """Whether its tiles are memory as it is where the product makes it."""
        return isinstance(self.value, Load) or (self.prologue is not None and self.prologue.parts > 1)

    @property
    def value(self) -> Expr:
        """What the loops compute of an element where the product makes it."""
        return self.made.rest


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """A library call that is a product: ``result[axes] = beta * added + alpha * sum over r0 of a * b``.

    ``m``, ``n``, ``k`` and ``batch`` are typical sizes; m counts the rows of ``a``. ``readers`` are the nodes that read
    the result, through views too, at places that positions name, ``then`` those that read what they make; ``leaves``
    where the result is one of the graph, or is read at places that data name. ``most_m`` and ``most_n`` are what m and
    n are at most, None where that is not known. ``shared`` tells which operands something else needs in memory anyway;
    ``tiled`` names the reductions among readers that tiles of the result give parts of. Of the element-wise readers
    ``beside`` are the bytes of what else they read, ``made`` of what they make, ``kept`` of that part of it which a
    reduction's kernel would have to write for others. ``alone`` where no kernel makes an operand or reads the result,
    and no other product reads the shorter operand. ``is_aligned`` where rows of the result start at multiples of 16
    bytes.
    """

    node: Library
    axes: tuple[sympy.Symbol, ...]
    shape: tuple[sympy.Expr, ...]
    depth: sympy.Expr
    a: Operand
    b: Operand
    added: str | None
    beta: int | float
    alpha: int | float
    batch: int
    m: int
    n: int
    k: int
    readers: tuple[Node, ...]
    then: tuple[Node, ...]
    leaves: bool
    shared: tuple[bool, bool]
    tiled: frozenset[str] = frozenset()
    beside: int = 0
    made: int = 0
    kept: int = 0
    alone: bool = False
    is_aligned: bool = True
    most_m: int | None = None
    most_n: int | None = None

    @property
    def type(self) -> TensorType:
        """The type of the result."""
        (kind,) = self.node.types
        assert kind is not None
        return kind

    @property
    def accumulator(self) -> DType:
        """The type in which terms are added."""
        return self.type.dtype.compute


@dataclass(frozen=True, slots=True)
class StreamK:
    """The steps of all tiles of a product's results, ``step`` elements of the summed axis each, are dealt evenly to
    ``programs``; tiles have ``rows`` by ``columns`` results."""

    rows: int
    columns: int
    step: int
    programs: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a product, and why: ``decomposed`` into loops of ours, or left to the library.

    ``inlined`` tells of either operand whether the loops make it themselves. The summed axis is cut into ``pieces``,
    or steps are dealt as ``stream_k`` says; another kernel adds the sums of either. Where both ways were weighed,
    ``loops`` and ``library`` are their nanoseconds, and ``otherwise`` is the way that was not taken.
    """

    decomposed: bool
    reason: str
    inlined: tuple[bool, bool] = (False, False)
    pieces: int = 1
    stream_k: StreamK | None = None
    loops: float | None = field(default=None, compare=False)
    library: float | None = field(default=None, compare=False)
    otherwise: Decision | None = field(default=None, compare=False, repr=False)


def factors_of(node: Node) -> tuple[str, ...]:
    """The names of the operands that a library call multiplies as matrices; none where it is no such product."""
    found = operands_of(node.target, node.args) if isinstance(node, Library) else ()
    return tuple(a.name for a in found if isinstance(a, Ref))


def operands_of(op: str, args: Sequence[T]) -> tuple[T, ...]:
    """The two arguments of a call that are multiplied as matrices; none where the op ("aten::mm.default") is no such
    product."""
    form = _FORMS.get(op)
    return () if form is None or len(form[2][0]) < 2 else tuple(args[form[1] : form[1] + 2])


class Products(MadeElements):
    """The products of a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.weights = self._weights()
        self.rounded = self._weights(narrow=True)
        self.made_again = self._made_again()

    def _weights(self, narrow: bool = False) -> dict[str, tuple[int, int]]:
        """Operations and nodes of what each element-wise tensor is made of: a residual stream goes back through all
        layers, so this is known before anything is written out. ``narrow``: of bytes that were rounded at most."""
        found: dict[str, tuple[int, int]] = {}
        for name, maker in self.makers.items():
            if name in self.gathering or (narrow and is_rounded(maker)):
                continue
            cost, nodes = flops(maker.value), 0
            for e in walk(maker.value):
                inside = found.get(self.views.base(e.buffer), (0, 1)) if isinstance(e, Load) else (0, 1)
                cost, nodes = cost + inside[0], nodes + inside[1]
            found[name] = (cost, nodes)
        return found

    def _made_again(self) -> set[str]:
        """Element-wise results that are wanted only at places that data name, and are computed there: of the
        log-probabilities of a vocabulary a loss wants one a row."""
        found: set[str] = set()
        for node in reversed(self.graph.nodes):
            readers = self.readers.get(node.names[0], ()) if isinstance(node, Compute) else ()
            if not readers or not all(r.names[0] in found or r.names[0] in self.gathering for r in readers):
                continue
            assert isinstance(node, Compute)
            there = all(r.names[0] in found or self._names_places(r, node.name) for r in readers)
            if there and node.name not in self.leaving and is_cheap(node.value):
                found.add(node.name)
        return found

    def product(self, node: Node) -> LibraryProduct | None:
        """The node as a product, or None where it is none, or one that no kernel computes, for its device or types."""
        if not isinstance(node, Library) or node.target not in _FORMS or node.types[0] is None:
            return None
        at, first, (axes, of_a, of_b) = _FORMS[node.target]
        names = [a.name if isinstance(a, Ref) else "" for a in (node.args[first], node.args[first + 1])]
        kind, kinds = node.types[0], [self.types.get(n) for n in names]
        if not has_kernels(kind.device):
            return None
        read = _OPERANDS.get(node.target, kind.dtype)
        if any(t is None or t.dtype is not read for t in kinds) or not _has_arithmetic(kind.dtype):
            return None
        added = node.args[at] if at is not None else None
        kwargs = dict(node.kwargs)
        beta, alpha = kwargs.pop("beta", 1), kwargs.pop("alpha", 1)
        plain = all(type(v) in (int, float) for v in (beta, alpha)) and not kwargs and len(node.args) == first + 2
        if not plain or (added is not None and not isinstance(added, Ref)):
            return None
        depth = kinds[0].shape[of_a.index(R0)]  # type: ignore[union-attr]
        extents = {**dict(zip(axes, kind.shape, strict=True)), R0: depth}
        a, b = (self.operand(n, i, extents) for n, i in zip(names, (of_a, of_b), strict=True))
        hint = self.graph.symbols.hint
        before = 3 - len(kind.shape) if len(axes) != 1 else 1
        sides = (sympy.S.One,) * before + kind.shape + (sympy.S.One,) * (len(axes) == 1)
        batch, m, n = map(hint, sides)
        (result,) = node.names
        all_readers = self.readers.get(result, ())
        elsewhere = [r for r in all_readers if self._names_places(r, result) or r.names[0] in self.made_again]
        readers = tuple(r for r in all_readers if r not in elsewhere)
        then = tuple(s for r in readers for name in r.names for s in self.readers.get(name, ()))
        inside = {result, *(name for r in readers for name in r.names)}
        tiled = [r for r in (*readers, *then) if isinstance(r, ReductionNode) and self._is_tiled(r, kind, inside)]
        return LibraryProduct(
            node, axes, kind.shape, depth, a, b, added.name if added is not None else None, beta, alpha, batch, m, n,
            hint(depth), readers, then, result in self.leaving or len(readers) < len(all_readers),
            (self._is_needed(names[0], node), self._is_needed(names[1], node)),
            frozenset(r.names[0] for r in tiled), *self._around(result, readers),
            self._is_alone(node, names, readers, names[0 if m <= n else 1]),
            is_aligned(kind, self.graph.symbols, typically=True), *map(self.graph.symbols.most, sides[1:]),
        )  # fmt: skip

    def _is_alone(self, node: Library, names: list[str], readers: tuple[Node, ...], shorter: str) -> bool:
        """Whether no kernel makes an operand of a product or reads its result, and no other product reads its shorter
        operand."""
        kinds = (Compute, ReductionNode)
        beside = [r for r in self.readers.get(self.views.base(shorter), ()) if r is not node]
        return not (
            any(isinstance(r, kinds) for r in readers)
            or any(isinstance(self.made.get(self.views.base(n)), kinds) for n in names)
            or any(isinstance(r, Library) and r.target in _FORMS for r in beside)
        )

    def _around(self, result: str, readers: tuple[Node, ...]) -> tuple[int, int, int]:
        """Bytes that the element-wise readers of a result read beside it, that they make, and that others need of
        those."""
        computes = [r for r in readers if isinstance(r, Compute)]
        inside = {result, *(r.name for r in computes)}
        beside = {self.views.base(u) for r in computes for u in uses(r)} - inside
        hint, types = self.graph.symbols.hint, self.types
        kept = [r for r in computes if r.name in self.leaving or any(map(self._waits, self.readers.get(r.name, ())))]
        return (
            sum(hint(types[n].nbytes) for n in beside), sum(hint(r.type.nbytes) for r in computes),
            sum(hint(r.type.nbytes) for r in kept),
        )  # fmt: skip

    def _waits(self, node: Node) -> bool:
        """Whether a node is a library call or reads the result of one."""
        makers = (self.made.get(self.views.base(u)) for u in uses(node))
        return isinstance(node, Library) or any(isinstance(m, Library) for m in makers)

    def _is_tiled(self, r: ReductionNode, kind: TensorType, inside: set[str]) -> bool:
        """Whether a reduction is over the rows or the columns of a product whose tiles can give parts of it, and
        nothing spreads what is made of it."""
        if not kind.dtype.is_half or any(self.graph.symbols.hint(n) < COLUMNS for n in kind.shape):
            return False
        whole, made = sympy.expand(kind.numel), sympy.expand(r.types[0].numel)
        over = sympy.Mul(*r.reduce_shape)
        if len(kind.shape) != 2 or sympy.expand(made * over - whole) != 0 or over not in kind.shape:
            return False
        if not any(self.views.base(ld.buffer) in inside for v in r.values for ld in loads(v)):
            return False
        names = list(r.names)
        for name in names:
            for user in self.readers.get(name, ()):
                if isinstance(user, (Compute, ReductionNode)) and user.names[0] not in self.made_again:
                    over = sympy.Mul(*user.reduce_shape) if isinstance(user, ReductionNode) else sympy.S.One
                    if sympy.expand(user.types[0].numel * over - made) != 0:
                        return False
                    names += [n for n in user.names if isinstance(user, Compute) and n not in names]
        return True

    def _names_places(self, reader: Node, name: str) -> bool:
        """Whether a node reads a tensor at places that data name."""
        return isinstance(reader, (Compute, ReductionNode)) and any(
            any(is_value(i) for i in ld.indices) and self.views.base(ld.buffer) == name
            for value in node_values(reader)
            for ld in loads(value)
        )

    def _is_needed(self, name: str, node: Library) -> bool:
        base = self.views.base(name)
        others = [r for r in self.readers.get(base, ()) if r is not node]
        if base in self.gathering and all(map(factors_of, others)):
            others = []  # whoever multiplies it can gather it too
        return base not in self.makers or base in self.leaving or bool(others)

    def operand(self, name: str, indices: tuple[Index, ...], extents: Mapping[sympy.Symbol, sympy.Expr]) -> Operand:
        """A factor, with all that it can be made of."""
        kind = self.types[name]
        plain = Load(name, indices, kind.dtype)
        inliner = Inliner(self, extents, R0)
        hint = self.graph.symbols.hint
        found = hint(kind.nbytes)
        stop = "it costs too much to make for every use"
        aligned = is_aligned(kind, self.graph.symbols, typically=True)
        given = self.made.get(self.views.base(name)) is None
        wide = self.is_wide(plain)
        whole = Operand(name, kind, plain, Factored(plain), found, found, 0, stop, wide, aligned, None, given)
        base = self.views.base(name)
        if self.is_too_much(*self.rounded.get(base, (0, 1))):
            return whole
        value: Expr = plain
        read = found
        if not self.is_too_much(*self.weights.get(base, (0, 1))):
            value = inliner.expand(self.views.resolve(plain, extents))
            read = self.read_by(value)
        if read >= found and not inliner.gathers and self.rounded.get(base) != self.weights.get(base):
            # What was rounded on purpose is read as it is then, not made again of what it was rounded from.
            narrow = Inliner(self, extents, R0, narrow=True)
            rounded = narrow.expand(self.views.resolve(plain, extents))
            if self.read_by(rounded) < found:
                inliner, value, read = narrow, rounded, self.read_by(rounded)
        if value is plain and base in self.weights and self.is_too_much(*self.weights[base]):
            return whole
        if self.is_too_much(flops(value), length(value)):
            return whole
        stop = inliner.stop or self._stop(value)
        joined = as_joined(value)
        value = value if joined is None else joined
        parts = factored(value, R0)
        cost = flops(parts.rest)
        made = parts if read < found else Factored(plain)
        # Loops read through copies, whatever layout those have.
        wide = self.is_wide(value if isinstance(value, Load) else made.rest)
        prologue = prologue_of(self, value, parts, found, read, extents, R0) if read >= found else None
        if prologue is None and read >= found and inliner.gathers:
            prologue = gathered_of(self, name, plain, extents, R0, len(self.products_of(name)))
        codes = codes_in(made.rest, R0)
        column = next((i for i in reversed(indices) if i != R0 and isinstance(i, sympy.Symbol)), None)
        words = codes is not None and column is not None and lies_in_words(codes, column, R0, self.types)
        return Operand(
            name, kind, plain, made, found, read, cost, stop, wide, aligned, prologue, given, codes is not None, words
        )

    def products_of(self, name: str) -> list[Node]:
        """The products that read a tensor."""
        return [r for r in self.readers.get(self.views.base(name), ()) if factors_of(r)]

    def _stop(self, value: Expr) -> str:
        for ld in loads(value):
            maker = self.made.get(ld.buffer)
            if isinstance(maker, ReductionNode):
                return f"{ld.buffer} is a reduction"
            if isinstance(maker, Library):
                return f"{ld.buffer} comes from {maker.target}"
        return ""


def _has_arithmetic(dtype: DType) -> bool:
    """Whether kernels add and multiply this type as ATen does."""
    return dtype.is_int or (dtype.is_float and dtype.itemsize > 1)
