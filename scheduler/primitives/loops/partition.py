"""partition (index set splitting)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import is_

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.index import Extents, simplify
from ....ir.expr.symbols import SymbolTable
from ....ir.expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, const, is_value, symbol
from ....ir.nest.loops import (
    BLOCK_KINDS,
    Access,
    Axis,
    AxisKind,
    Block,
    Bound,
    Buffer,
    Loop,
    LoopKind,
    LoopNest,
    Node,
    Statement,
    Store,
    walk_nodes,
)
from ....ir.nest.loops import blocks as all_blocks
from ...error import ScheduleError
from ..analysis.dependence import accesses
from ..analysis.empty import Facts, fails, holds
from ..analysis.region import at_least
from ..analysis.tree import blocks_under, find_loop, fresh, linear_part, with_node
from ..memory.copies import free_name

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def partition(nest: LoopNest, loop: str, points: Sequence[int | sympy.Expr]) -> tuple[LoopNest, list[str]]:
    """Cut a loop into consecutive loops, of which each knows on which side of the points it is.

    Rewrites::

        for i in range(n + m):                              for i_0 in range(n):
            C[i] = A[i] if i < n else B[i - n]      ->          C[i_0] = A[i_0]
                                                            for i_1 in range(m):
                                                                C[n + i_1] = B[i_1]

    where the point is ``n``. Points are numbers or expressions in sizes; a loop is made for each interval between
    them. Comparisons of positions that the interval decides are gone, and with them the branches that are not taken;
    remainders whose quotient is one number there are differences. The blocks of the first loop keep their names, and
    so do the loops in it. Buffers of the nest's own that are written in the loop become one for each interval.

    Requires: a serial loop, with no loop of a grid inside, that is one whole spatial axis of each block in it; no
    other block reads what those write; points that provably do not descend, nor leave the loop.
    Raises: ScheduleError.    Source: index set splitting (Banerjee 1993; Griebl, Feautrier and Lengauer 2000); TVM
    ``Schedule.loop_partition`` and its pass ``LoopPartition``, Halide ``Func.partition``.
    """
    asked = f"partition({loop}, {list(points)})"
    node, _ = find_loop(nest, loop, asked)
    if node.kind is not LoopKind.SERIAL:
        raise ScheduleError(asked, f"the loop is {node.kind.value} already", nest, loop, "partition it before")
    starts, extents = _intervals(nest, node, points, asked)
    axes = {b.name: _axis(nest, b, node, asked) for b in blocks_under(node)}
    own = _own_buffers(nest, node, asked)
    loops = [n.var for n, _ in walk_nodes(node.body) if isinstance(n, Loop)]
    names, buffers = [fresh(nest, f"{loop}_{k}") for k in range(len(starts))], list(nest.locals)
    taken = set(names)
    known = {b.name for b, _ in all_blocks(nest)}
    pieces: list[Loop] = []
    for k, (start, extent, name) in enumerate(zip(starts, extents, names, strict=True)):
        inner: dict[sympy.Symbol, sympy.Expr] = {}
        called: dict[str, str] = {}
        held: dict[str, str] = {}
        for var in loops if k else ():
            inner[var] = symbol(fresh(nest, f"{var.name}_{k}", taken))
            taken.add(inner[var].name)
        for block in axes if k else ():
            called[block] = free_name(known, f"{block}_{k}")
            known.add(called[block])
        for buffer in own if k else ():
            held[buffer.name] = free_name({b.name for b in (*nest.params, *buffers)}, f"{buffer.name}_{k}")
            buffers.append(replace(buffer, name=held[buffer.name]))
        piece = _Piece(nest, node, axes, start, extent, symbol(name), inner, called, held)
        pieces.append(replace(node, var=piece.var, extent=extent, body=piece.nodes(node.body)))
    return replace(with_node(nest, node, *pieces), locals=tuple(buffers)), names


def _intervals(
    nest: LoopNest, node: Loop, points: Sequence[int | sympy.Expr], asked: str
) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    """Where each interval begins, and how long it is."""
    given = [sympy.expand(sympy.sympify(p)) for p in points]
    sizes = set(nest.symbols.symbols)
    if not given or not all(p.free_symbols <= sizes for p in given):
        raise ScheduleError(asked, "the points must be numbers or expressions in sizes", nest, node.var.name)
    starts = [sympy.S.Zero, *given]
    extents = [sympy.expand(b - a) for a, b in zip(starts, [*given, node.extent], strict=True)]
    for start, extent in zip(starts, extents, strict=True):
        if extent == 0 or not at_least(extent, sympy.S.Zero, nest.symbols):
            end = sympy.expand(start + extent)
            says = "is empty" if extent == 0 else "is not provably one"
            raise ScheduleError(
                asked, f"the interval from {start} to {end} {says}", nest, node.var.name,
                "the points ascend from above 0 to below the extent",
            )  # fmt: skip
    return starts, extents


def _axis(nest: LoopNest, block: Block, loop: Loop, asked: str) -> Axis:
    """The axis that the loop is in a block."""
    mine = [(a, b) for a, b in zip(block.axes, block.bindings, strict=True) if loop.var in b.free_symbols]
    if len(mine) != 1 or mine[0][1] != loop.var or sympy.expand(mine[0][0].extent - loop.extent) != 0:
        raise ScheduleError(
            asked, f"it is not one whole axis of {block.name}", nest, block.name, "partition before split and fuse"
        )
    if mine[0][0].kind is not AxisKind.SPATIAL:
        raise ScheduleError(asked, f"{block.name} needs all of it for one result", nest, block.name)
    return mine[0][0]


def _own_buffers(nest: LoopNest, node: Loop, asked: str) -> list[Buffer]:
    """The buffers of the nest that are made in a loop; refuses where somebody outside uses what is written in it."""
    inside = blocks_under(node)
    written = {name for b in inside for name in accesses(b).written}
    local = {b.name for b in nest.locals}
    for b, _ in all_blocks(nest):
        used = (accesses(b).read | accesses(b).written & local) & written
        if used and not any(b is x for x in inside):
            raise ScheduleError(
                asked, f"{b.name}, outside of the loop, uses {min(used)}, of which each interval would make a part",
                nest, b.name, "merge their loops first",
            )  # fmt: skip
    for n, _ in walk_nodes(node.body):
        if isinstance(n, Loop) and (n.kind in BLOCK_KINDS or n.kind is LoopKind.PARALLEL):
            raise ScheduleError(asked, f"{n.var}, inside it, is {n.kind.value}", nest, n.var.name, "partition before")
    return [b for b in nest.locals if b.name in written]


@dataclass(slots=True)
class _Piece:
    """The copy of a loop's body for ``extent`` iterations from ``start``, under the variable ``var``.

    ``loops``, ``blocks`` and ``buffers`` have the names that differ from those in the loop.
    """

    nest: LoopNest
    loop: Loop
    axes: Mapping[str, Axis]
    start: sympy.Expr
    extent: sympy.Expr
    var: sympy.Symbol
    loops: Mapping[sympy.Symbol, sympy.Expr]
    blocks: Mapping[str, str]
    buffers: Mapping[str, str]

    def nodes(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.block(n) if isinstance(n, Block) else self.inner(n) for n in body)

    def inner(self, n: Loop) -> Loop:
        return replace(n, var=self.loops.get(n.var, n.var), extent=self.placed(n.extent), body=self.nodes(n.body))

    def placed(self, e: sympy.Expr) -> sympy.Expr:
        """An expression in the loops of the piece."""
        moved = {self.loop.var: self.start + self.var, **self.loops}
        return sympy.expand(e.xreplace(moved)) if e.free_symbols & moved.keys() else e

    def block(self, b: Block) -> Block:
        axis = self.axes[b.name]
        axes = tuple(replace(a, extent=self.extent) if a is axis else a for a in b.axes)
        bindings = tuple(
            self.var if a is axis else self.placed(e) for a, e in zip(b.axes, b.bindings, strict=True)
        )  # fmt: skip
        interval = Interval({a.var: a.extent for a in axes}, axis.var, self.start, self.nest.symbols, self.buffers)
        predicate = tuple(Bound(self.placed(p.lhs), self.placed(p.rhs)) for p in b.predicate)
        body = tuple(_moved(s, interval) for s in b.body)
        return Block(self.blocks.get(b.name, b.name), axes, bindings, body, predicate, b.annotations)


def _moved(s: Statement, interval: Interval) -> Statement:
    names = interval.buffers
    if isinstance(s, Store):
        return Store(names.get(s.buffer, s.buffer), tuple(map(interval.index, s.indices)), interval.value(s.value))
    targets = tuple(
        Access(names.get(t.buffer, t.buffer), tuple(map(interval.index, t.indices))) for t in s.targets
    )  # fmt: skip
    return replace(s, targets=targets, values=tuple(map(interval.value, s.values)))


@dataclass(slots=True)
class Interval:
    """Values of a block where its axis ``axis`` starts at ``start``; ``extents`` are those of its axes there.

    ``buffers`` has names of buffers that are others there.
    """

    extents: Extents
    axis: sympy.Symbol
    start: sympy.Expr
    table: SymbolTable
    buffers: Mapping[str, str] = field(default_factory=dict)
    known: dict[int, Expr] = field(default_factory=dict)

    def index(self, i: Index) -> Index:
        """An index there."""
        if is_value(i):
            return self.value(i)
        if self.axis not in i.free_symbols:
            return i
        if i == self.axis:
            return i + self.start
        return simplify(sympy.expand(i.xreplace({self.axis: self.axis + self.start})), self.extents, self.table)

    def value(self, e: Expr) -> Expr:
        """A value there, without the branches that are not taken; the same object where nothing changed."""
        if (known := self.known.get(id(e))) is not None:
            return known
        new = self._value(e)
        self.known[id(e)] = new
        return new

    def _value(self, e: Expr) -> Expr:
        match e:
            case Load():
                indices, name = tuple(map(self.index, e.indices)), self.buffers.get(e.buffer, e.buffer)
                same = name == e.buffer and all(map(is_, indices, e.indices))
                return e if same else Load(name, indices, e.dtype)
            case IndexValue():
                index = self.index(e.index)
                if index.is_Integer:
                    return const(int(index), e.dtype)
                return e if index is e.index else IndexValue(index, e.dtype)
            case Cast():
                value = self.value(e.value)
                return e if value is e.value else Cast(value, e.dtype)
            case Select():
                condition = self.value(e.condition)
                if isinstance(condition, Const):
                    return self.value(e.if_true if condition.value else e.if_false)
                a, b = self.value(e.if_true), self.value(e.if_false)
                same = condition is e.condition and a is e.if_true and b is e.if_false
                return e if same else Select(condition, a, b)
            case Call():
                if e.fn in COMPARISONS and (verdict := self.verdict(e)) is not None:
                    return const(verdict, DType.BOOL)
                args = tuple(map(self.value, e.args))
                return _folded(e if all(map(is_, args, e.args)) else Call(e.fn, args, e.dtype))
        return e

    def verdict(self, comparison: Call) -> bool | None:
        """Whether a comparison of positions holds in the whole interval, or nowhere in it; None for neither."""
        known = threshold(comparison, self.axis)
        if known is not None and not known[0].free_symbols & self.extents.keys():
            point, holds_before = known
            if at_least(point, self.start + self.extents[self.axis], self.table):
                return holds_before
            return not holds_before if at_least(self.start, point, self.table) else None
        yes, no = self._here(holds(comparison)), self._here(fails(comparison))
        if any(map(self._is_negative, yes)):
            return True
        if any(map(self._is_negative, no)):
            return False
        if comparison.fn in ("eq", "ne") and (sides := yes or no) and all(self._is_negative(g - 1) for g in sides):
            return comparison.fn == "eq"
        return None

    def _here(self, facts: Facts) -> Facts:
        """What is negative where a condition is told, of that which depends on the axis."""
        moved = {self.axis: self.axis + self.start}
        return [sympy.expand(g.xreplace(moved)) for g in facts if self.axis in g.free_symbols]

    def _is_negative(self, g: sympy.Expr) -> bool:
        for var, extent in self.extents.items():
            if var in g.free_symbols and (parts := linear_part(g, var)) is not None:
                if at_least(sympy.S.Zero, parts[0], self.table):
                    g = parts[1]
                elif at_least(parts[0], sympy.S.Zero, self.table):
                    g = parts[1] + parts[0] * (extent - 1)
        return at_least(sympy.S.NegativeOne, g, self.table)


@lru_cache(maxsize=4096)
def threshold(comparison: Call, axis: sympy.Symbol) -> tuple[sympy.Expr, bool] | None:
    """``(point, before)``: the comparison holds for an axis below the point and nowhere else, or, where not ``before``,
    from it on; None where it is no such comparison."""
    if comparison.fn in ("eq", "ne"):
        return None
    for g in holds(comparison):  # below zero where the comparison holds
        parts = linear_part(sympy.expand(g), axis)
        if parts is not None and parts[0] == 1:
            return -parts[1], True
        if parts is not None and parts[0] == -1:
            return parts[1] + 1, False
    return None


def _folded(e: Call) -> Expr:
    """A condition without the parts that are decided."""
    match e:
        case Call("logical_not", (Const(value, _),), _):
            return const(not value, DType.BOOL)
        case Call("logical_and" | "logical_or" as fn, (Const(value, _) as told, other), _) | Call(
            "logical_and" | "logical_or" as fn, (other, Const(value, _) as told), _
        ) if told.dtype is DType.BOOL and other.dtype is DType.BOOL:
            return told if value is (fn == "logical_or") else other
    return e
