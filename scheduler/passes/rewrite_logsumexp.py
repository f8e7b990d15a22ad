"""A sum of exponentials that waits for the row's maximum becomes one log-sum-exp: both in a single visit of the row.

``sum of exp(s - c) * w`` over a row, where ``c`` is one value a row, is ``S * exp(M - c)`` with (M, S) the
log-sum-exp of ``s`` with weights ``w``, whatever ``c`` is. So nothing has to be recognised but a product with an
exponential whose argument falls into a part that varies along the row and one that does not; where the latter is made
of a reduction over the same row, the sum no longer waits for it. A maximum of the same values is the first part of the
state. Rows with infinite maxima come out as they were: ``exp(M - c)`` is then what every term was multiplied by.
Source: Milakov and Gimelshein 2018.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy

from ...ir.expr import Call, Const, Expr, Load, call, cast, const, free_symbols, loads, substitute_index
from ...ir.graph import Compute, Graph, Node, Reduction, View
from ...ir.monoid import LOGSUMEXP, MAX, SUM
from ..definitions import Definitions
from ..group import FEW_ROWS, MANY_ELEMENTS
from .names import fresh_name

# Elements of a row that stay in the registers of one program of a GPU: a second visit of them costs nothing.
REGISTERS = 32768
# Bytes of a row past which a CPU does not find it in its second-level cache any more.
CACHE = 512 << 10
# So many nodes between a sum and the reductions that it waits for are looked at.
DEPTH = 64


def rewrite_logsumexp(graph: Graph, always: bool = False) -> Graph:
    """Rewrite the sums of exponentials for which one visit of a row is worth more than an exponential an element;
    with ``always`` all of them."""
    if not any(_sums(n) for n in graph.nodes):
        return graph
    found = Definitions.of(graph)
    order = {name: k for k, n in enumerate(graph.nodes) for name in n.names}
    taken = {i.name for i in graph.inputs} | order.keys()
    changed: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not _sums(node):
            continue
        assert isinstance(node, Reduction)
        parts = _Reader(found, node).parts()
        if parts is None or not (always or _is_worth(found, node, parts)):
            continue
        top = _maximum(found, node, parts)
        if top is not None and (top.names[0] in changed or not _is_ready(parts, top, order)):
            top = None
        for name, nodes in _written(node, parts, top, taken):
            changed[name] = nodes
    if not changed:
        return graph
    nodes = [m for n in graph.nodes for m in changed.get(n.names[0] if n.names else "", [n])]
    return replace(graph, nodes=tuple(nodes))


def _sums(node: Node) -> bool:
    return isinstance(node, Reduction) and node.monoid == SUM and node.values[0].dtype.is_float


@dataclass(frozen=True, slots=True)
class _Parts:
    """Each term is ``exp(score + offset) * weight``; ``offset`` is the same for all of a row, and ``made`` are the
    reductions over the row that it is made of."""

    score: Expr
    offset: Expr
    weight: Expr
    made: tuple[Reduction, ...]


@dataclass(frozen=True, slots=True)
class _Factor:
    """One factor of a term as it stands, and as what the nodes before make of it."""

    value: Expr
    inner: Expr


class _Reader:
    """Takes the terms of one sum apart."""

    def __init__(self, found: Definitions, node: Reduction) -> None:
        extents = dict(zip((*node.axes, *node.reduce_axes), (*node.types[0].shape, *node.reduce_shape), strict=True))
        self.found = found.within(extents)
        self.node = node
        self.along = set(node.reduce_axes)
        self.kind = node.values[0].dtype.compute

    def parts(self) -> _Parts | None:
        """The parts of a term, or None where the sum does not wait for another reduction over its row."""
        exponential: _Factor | None = None
        weight: Expr = const(1.0, self.kind)
        for factor in self.factors(self.node.values[0]):
            if exponential is None and isinstance(factor.inner, Call) and factor.inner.fn == "exp":
                exponential = factor
            else:
                value = cast(factor.value, self.kind)
                weight = value if isinstance(weight, Const) else call("mul", weight, value)
        if exponential is None:
            return None
        assert isinstance(exponential.inner, Call)
        score, offset = self.split(exponential.inner.args[0])
        made = () if offset is None else self.reductions(offset)
        if score is None or offset is None or not made:
            return None
        return _Parts(cast(score, self.kind), cast(offset, self.kind), weight, made)

    def factors(self, e: Expr) -> list[_Factor]:
        inner = self.found.peel(e)
        if isinstance(inner, Call) and inner.fn == "mul":
            return [f for a in inner.args for f in self.factors(a)]
        return [_Factor(e, inner)]

    def varies(self, e: Expr) -> bool:
        return not self.along.isdisjoint(free_symbols(e))

    def split(self, e: Expr) -> tuple[Expr | None, Expr | None]:
        """``e`` as a sum of what varies along the row and what does not; None for a part that is not there."""
        if not self.varies(e):
            return None, e
        match self.found.peel(e):
            case Call("add" | "sub" as fn, (a, b), _):
                (x, c), (y, d) = self.split(a), self.split(b)
                return (e, None) if c is None and d is None else (self.join(fn, x, y), self.join(fn, c, d))
            case Call("neg", (a,), _):
                x, c = self.split(a)
                return (e, None) if c is None else (self.join("sub", None, x), self.join("sub", None, c))
            case Call("mul", (a, b), _):
                for scale, other in ((a, b), (b, a)):
                    x, c = (None, None) if self.varies(scale) else self.split(other)
                    if x is not None and c is not None:
                        by = cast(scale, self.kind)
                        return call("mul", cast(x, self.kind), by), call("mul", cast(c, self.kind), by)
        return e, None

    def join(self, fn: str, a: Expr | None, b: Expr | None) -> Expr | None:
        if b is None:
            return a
        b = cast(b, self.kind)
        if a is None:
            return call("neg", b) if fn == "sub" else b
        return call(fn, cast(a, self.kind), b)

    def reductions(self, e: Expr) -> tuple[Reduction, ...]:
        """The reductions over rows of this shape that a value is made of, through element-wise nodes."""
        result: dict[str, Reduction] = {}
        stack, seen = [e], set[str]()
        while stack and len(seen) < DEPTH:
            for load in loads(stack.pop()):
                base = self.found.base(load).buffer
                made = self.found.makers.get(base)
                if base in seen:
                    continue
                seen.add(base)
                if isinstance(made, Compute):
                    stack.append(made.value)
                elif isinstance(made, Reduction) and made.reduce_shape == self.node.reduce_shape:
                    result[made.names[0]] = made
        return tuple(result.values())


def _is_worth(found: Definitions, node: Reduction, parts: _Parts) -> bool:
    """Whether a row does not stay near the arithmetic units, or is cut in pieces that programs or threads share."""
    hint = found.graph.symbols.hint
    elements, rows = hint(sympy.Mul(*node.reduce_shape)), hint(node.types[0].numel)
    along = [ld for ld in loads(parts.score) if not free_symbols(ld).isdisjoint(node.reduce_axes)]
    tensors = {found.base(ld).buffer: ld.dtype.itemsize for ld in along}
    if node.types[0].device.startswith("cpu"):
        return elements * sum(tensors.values()) > CACHE and _is_spread(found, node, elements)
    if rows < FEW_ROWS and elements >= MANY_ELEMENTS:
        return True
    known = all(n.is_Integer for n in node.reduce_shape)
    return not known or elements * max(len(tensors), 1) > REGISTERS


def _is_spread(found: Definitions, node: Reduction, elements: int) -> bool:
    """Whether the sum comes back to the elements of its row, which are then visited once more."""
    hint = found.graph.symbols.hint
    stack, seen = [node.names[0]], {node.names[0]}
    while stack:
        for reader in found.readers.get(stack.pop(), ()):
            if isinstance(reader, Compute) and hint(reader.type.numel) >= elements * hint(node.types[0].numel):
                return True
            if isinstance(reader, (Compute, View)) and reader.name not in seen:
                seen.add(reader.name)
                stack.append(reader.name)
    return False


def _maximum(found: Definitions, node: Reduction, parts: _Parts) -> Reduction | None:
    """The maximum of the very scores, with a result for each sum, if there is one."""
    extents = dict(zip((*node.axes, *node.reduce_axes), (*node.types[0].shape, *node.reduce_shape), strict=True))
    inside = found.within(extents)
    space = (*node.axes, *node.reduce_axes)
    # The one place of an axis of extent 1 has two names.
    place = tuple(sympy.S.Zero if extents[a] == 1 else a for a in space)
    score = inside.moved(parts.score, space, place)
    for made in parts.made:
        if made.monoid == MAX and made.types[0].shape == node.types[0].shape:
            value = inside.moved(made.values[0], (*made.axes, *made.reduce_axes), place)
            if inside.same(value, score):
                return made
    return None


def _is_ready(parts: _Parts, top: Reduction, order: dict[str, int]) -> bool:
    """Whether the weights are there where the maximum is made."""
    return all(order.get(ld.buffer, -1) < order[top.names[0]] for ld in loads(parts.weight))


def _written(
    node: Reduction, parts: _Parts, top: Reduction | None, taken: set[str]
) -> Iterator[tuple[str, list[Node]]]:
    """The nodes in the place of the sum, and of the maximum where there is one."""
    kind = parts.score.dtype
    row = replace(node.types[0], dtype=kind)
    names = fresh_name(f"{node.names[0]}_top", taken), fresh_name(f"{node.names[0]}_total", taken)
    score = parts.score if top is None else cast(_moved(top, node), kind)
    both = Reduction(
        names, (row, row), node.axes, node.reduce_axes, node.reduce_shape, LOGSUMEXP, (score, parts.weight),
        node.origins if top is None else (*top.origins, *node.origins),
    )  # fmt: skip
    highest, total = (Load(name, node.axes, kind) for name in names)
    scale = call("exp", _plus(highest, parts.offset))
    value = cast(call("mul", total, scale), node.values[0].dtype)
    rest: list[Node] = [Compute(node.names[0], node.types[0], node.axes, value, node.origins)]
    if top is None:
        yield node.names[0], [both, *rest]
        return
    first = Load(names[0], top.axes, kind)
    yield (
        top.names[0],
        [both, Compute(top.names[0], top.types[0], top.axes, cast(first, top.types[0].dtype), top.origins)],
    )
    yield node.names[0], rest


def _plus(a: Expr, b: Expr) -> Expr:
    match b:
        case Call("neg", (inner,), _):
            return call("sub", a, inner)
    return call("add", a, b)


def _moved(top: Reduction, node: Reduction) -> Expr:
    """The values of the maximum over the axes of the sum."""
    axes = dict(zip((*top.axes, *top.reduce_axes), (*node.axes, *node.reduce_axes), strict=True))
    return substitute_index(top.values[0], axes)
