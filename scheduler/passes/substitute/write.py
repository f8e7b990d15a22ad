"""The nodes of a graph that compute a sum of products in an order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ....ir.expr.dtypes import DType
from ....ir.expr.index import simplify
from ....ir.expr.monoid import SUM
from ....ir.expr.origin import Origin
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Expr, Load, call, cast, const, symbol
from ....ir.graph.graph import Compute, Library, Node, Reduction, Ref, TensorType, View
from ....ir.nest.loops import contiguous_strides
from ...facts.definitions import Definitions
from ..canonical.names import fresh_name
from .einsum import Einsum, EinsumReader
from .order import Multiplication, Operand

Group: TypeAlias = tuple[sympy.Symbol, ...]
# The dimensions of a matrix, or of a batch of matrices, each with the axes that it counts, the slowest first.
Groups: TypeAlias = tuple[Group, ...]


@dataclass(slots=True)
class EinsumWriter:
    """Writes the products of one sum. ``result`` names what its nodes are for, ``dtype`` and ``device`` are those of
    products; ``nodes`` are in the order in which they run."""

    reader: EinsumReader
    e: Einsum
    result: str
    dtype: DType
    device: str
    rounded: bool
    origins: tuple[Origin, ...]
    reason: str
    taken: set[str]
    nodes: list[Node] = field(default_factory=list)

    def written(self, step: Multiplication) -> Load:
        """The result of a sum, over the axes of it."""
        if step.right is None:
            return self._summed(self.e.factors[0], step.axes)
        left, right = self._operand(step.left), self._operand(step.right)
        a, b, kept = self._along(left), self._along(right), step.axes
        batch, rows, columns, summed = (a & b & kept, a - b, b - a, (a & b) - kept)
        if not summed or not (rows or columns):
            return self._multiplied((left, right), kept, summed)
        return self._product(left, right, (batch, rows, columns, summed))

    def value(self, load: Load, axes: Sequence[sympy.Symbol], shape: Sequence[sympy.Expr]) -> Load:
        """A result over the axes of a node, which stand one by one for those of the sum before any was split."""
        extents = dict(zip(axes, shape, strict=True))
        env: dict[sympy.Symbol, sympy.Expr] = dict(zip(self.e.uncut, axes, strict=True))
        for cut in self.e.cuts:
            if cut.axis in env:
                whole = env.pop(cut.axis)
                env[cut.high] = simplify(FloorDiv(whole, cut.size), extents, self._table)
                env[cut.low] = simplify(ModularIndexing(whole, 1, cut.size), extents, self._table)
        found = Definitions(self.reader.graph, extents)
        moved = found.moved(load, tuple(env), tuple(env.values()))
        assert isinstance(moved, Load)
        return moved

    @property
    def _table(self) -> SymbolTable:
        return self.reader.graph.symbols

    def add(self, node: Node) -> None:
        """Put a node behind those written so far."""
        self.nodes.append(node)
        for name, kind in zip(node.names, node.types, strict=True):
            if kind is not None:
                self.reader.types[name] = kind

    # --- steps --------------------------------------------------------------------------------------------------------

    def _operand(self, operand: Operand) -> Load:
        if isinstance(operand, Multiplication):
            return self.written(operand)
        factor = self.e.factors[operand]
        others: set[sympy.Symbol] = set(self.e.axes)
        for k, f in enumerate(self.e.factors):
            if k != operand:
                others |= self._along(f)
        return self._summed(factor, frozenset(self._along(factor) & others))

    def _along(self, f: Load) -> frozenset[sympy.Symbol]:
        return frozenset(s for s in self.e.axes_of(f) if self.e.extents[s] != 1)

    def _summed(self, factor: Load, kept: Iterable[sympy.Symbol]) -> Load:
        """A factor summed along what is not kept."""
        over = self._along(factor) - frozenset(kept)
        return self._multiplied((factor,), frozenset(kept), over) if over else factor

    def _multiplied(self, factors: Sequence[Load], kept: Iterable[sympy.Symbol], over: Iterable[sympy.Symbol]) -> Load:
        """The sum over some axes of factors' elements multiplied, by a kernel."""
        axes, summed = self._ordered(kept), self._ordered(over)
        value: Expr = cast(factors[0], self.dtype.compute)
        for f in factors[1:]:
            value = call("mul", value, cast(f, self.dtype.compute))
        name = fresh_name(f"{self.result}_part", self.taken)
        shape = tuple(self.e.extents[s] for s in axes)
        if not summed:
            self._compute(name, axes, shape, cast(value, self.dtype))
            return Load(name, axes, self.dtype)
        over_shape = tuple(self.e.extents[s] for s in summed)
        env = {s: symbol(f"i{k}") for k, s in enumerate(axes)} | {s: symbol(f"r{k}") for k, s in enumerate(summed)}
        kind = TensorType(shape, contiguous_strides(shape), self.dtype.compute, self.device)
        self.add(
            Reduction(
                (name,), (kind,), tuple(env[s] for s in axes), tuple(env[s] for s in summed), over_shape, SUM,
                (self._renamed(value, env),), self.origins,
            )
        )  # fmt: skip
        total = Load(name, axes, self.dtype.compute)
        if self.dtype.compute is self.dtype:
            return total
        narrow = fresh_name(f"{self.result}_part", self.taken)
        self._compute(narrow, axes, shape, cast(total, self.dtype))
        return Load(narrow, axes, self.dtype)

    def _product(self, left: Load, right: Load, classes: tuple[frozenset[sympy.Symbol], ...]) -> Load:
        """A library's product of two operands."""
        batch, rows, columns, summed = classes
        orders = [self._orders(c, left, right) for c in (batch, rows, columns, summed)]
        lead = bool(batch)

        def groups(b: Group, m: Group, n: Group, k: Group) -> tuple[Groups, Groups]:
            return ((b,) * lead + (m, k)), ((b,) * lead + (k, n))

        def copies(chosen: tuple[Group, ...]) -> int:
            of_a, of_b = groups(*chosen)
            return sum(
                self._numel(f) for f, g in ((left, of_a), (right, of_b)) if self._layout(f, g) is None
            )  # fmt: skip

        b, m, n, k = min(product(*orders), key=copies)
        of_a, of_b = groups(b, m, n, k)
        names = self._matrix(left, of_a), self._matrix(right, of_b)
        shape = tuple(self._extent(g) for g in (*((b,) * lead), m, n))
        kind = TensorType(shape, contiguous_strides(shape), self.dtype, self.device)
        name = fresh_name(f"{self.result}_product", self.taken)
        target = f"aten::{'bmm' if lead else 'mm'}.default"
        self.add(Library((name,), (kind,), target, tuple(map(Ref, names)), (), self.reason, self.origins, self.rounded))
        return Load(name, tuple(self._position(g) for g in (*((b,) * lead), m, n)), self.dtype)

    # --- operands -----------------------------------------------------------------------------------------------------

    def _orders(self, axes: frozenset[sympy.Symbol], *factors: Load) -> list[Group]:
        """Orders in which the axes may be one dimension: those in which they lie in the factors' memory."""
        found: dict[Group, None] = {}
        for f in factors:
            strides = self.reader.strides(f, self.e)
            if strides is not None and axes <= strides.keys():
                hint = self._table.hint
                found[tuple(sorted(axes, key=lambda s: (-hint(strides[s]), str(s))))] = None
        found[self._ordered(axes)] = None
        return list(found)

    def _layout(self, f: Load, groups: Groups) -> tuple[sympy.Expr, ...] | None:
        """The strides of a matrix whose dimensions count groups of axes, where a library reads the factor as such."""
        strides = self.reader.strides(f, self.e)
        if strides is None or f.dtype is not self.dtype:
            return None
        found: list[sympy.Expr] = []
        for group in groups:
            own = [strides.get(s, sympy.S.Zero) for s in group]
            for s, outer, inner in zip(group[1:], own, own[1:], strict=False):
                if sympy.expand(outer - inner * self.e.extents[s]) != 0:
                    return None
            found.append(own[-1] if own else sympy.S.One)
        is_even = any(s == 1 for s in found[-2:]) or any(self._extent(g) == 1 for g in groups[-2:])
        return tuple(found) if is_even else None

    def _matrix(self, f: Load, groups: Groups) -> str:
        """The name of a matrix: the factor's memory where that is one, else a copy of it."""
        axes = tuple(symbol(f"i{k}") for k in range(len(groups)))
        shape = tuple(self._extent(g) for g in groups)
        extents = dict(zip(axes, shape, strict=True))
        env: dict[sympy.Symbol, sympy.Expr] = {}
        for axis, group in zip(axes, groups, strict=True):
            step: sympy.Expr = sympy.S.One
            for k, s in reversed(list(enumerate(group))):
                size = self.e.extents[s]
                digit = FloorDiv(axis, step) if k == 0 else ModularIndexing(axis, step, size)
                env[s] = simplify(digit, extents, self._table) if len(group) > 1 else axis
                step = step * size
        found = Definitions(self.reader.graph, extents)
        moved = found.moved(f, tuple(env), tuple(env.values()))
        assert isinstance(moved, Load)
        strides = self._layout(f, groups)
        name = fresh_name(f"{self.result}_operand", self.taken)
        if strides is None:
            kind = TensorType(shape, contiguous_strides(shape), self.dtype, self.device)
            self.add(Compute(name, kind, axes, cast(moved, self.dtype), self.origins))
            return name
        place = self.reader.place(f, self.e.extents)
        assert place is not None
        offset = place.xreplace(dict.fromkeys(self.e.extents, sympy.S.Zero))
        kind = TensorType(shape, strides, f.dtype, self.device)
        self.add(View(name, kind, f.buffer, axes, moved.indices, offset, self.origins))
        return name

    def _compute(self, name: str, axes: Group, shape: tuple[sympy.Expr, ...], value: Expr) -> None:
        env = {s: symbol(f"i{k}") for k, s in enumerate(axes)}
        kind = TensorType(shape, contiguous_strides(shape), value.dtype, self.device)
        self.add(Compute(name, kind, tuple(env.values()), self._renamed(value, env), self.origins))

    def _renamed(self, value: Expr, env: Mapping[sympy.Symbol, sympy.Expr]) -> Expr:
        return Definitions(self.reader.graph).moved(value, tuple(env), tuple(env.values()))

    def _ordered(self, axes: Iterable[sympy.Symbol]) -> Group:
        """Axes in the order of the sum: those of the result, then those that are summed."""
        wanted = frozenset(axes)
        return tuple(s for s in (*self.e.axes, *self.e.summed) if s in wanted)

    def _extent(self, group: Group) -> sympy.Expr:
        return sympy.Mul(*(self.e.extents[s] for s in group))

    def _position(self, group: Group) -> sympy.Expr:
        position: sympy.Expr = sympy.S.Zero
        for s in group:
            position = position * self.e.extents[s] + s
        return sympy.expand(position)

    def _numel(self, f: Load) -> int:
        return self._table.hint(self._extent(tuple(self._along(f))))


def scaled_by(value: Expr, scale: float, dtype: DType) -> Expr:
    """A value times a number, in the type in which a result is computed."""
    wide = cast(value, dtype.compute)
    return wide if scale == 1.0 else call("mul", wide, const(scale, dtype.compute))


__all__ = ["EinsumWriter", "scaled_by"]
