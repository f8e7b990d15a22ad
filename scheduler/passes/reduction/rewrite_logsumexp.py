"""A sum of exponentials that waits for the row's maximum becomes one log-sum-exp: both in a single visit of the row.

``sum of exp(s - c) * w`` over a row, where ``c`` is one value a row, is ``S * exp(M - c)`` with (M, S) the
log-sum-exp of ``s`` with weights ``w``, whatever ``c`` is. So nothing has to be recognised but a product with an
exponential whose argument falls into a part that varies along the row and what is added to it; where the latter is made
of a reduction over the same row, the sum no longer waits for it. A maximum of the same values is the first part of the
state. Rows with infinite maxima come out as they were: ``exp(M - c)`` is then what every term was multiplied by. Scores
are as precise as the argument was: what is scaled or added along the row after ``c`` was taken off stays behind it.
Source: Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.expr.monoid import LOGSUMEXP, MAX, SUM
from ....ir.expr.value import Call, Const, Expr, Load, call, cast, const, free_symbols, loads, substitute_index
from ....ir.graph.facts import names_in, places_of
from ....ir.graph.graph import Compute, Graph, Node, Reduction, View
from ....ir.machine import Machine
from ...context import USUAL, PassContext
from ...cost.programs import is_split
from ...cost.rows import cache, held_elements, keeps_in_caches
from ...facts.definitions import Definitions
from ..canonical.names import fresh_name

# So many nodes between a sum and the reductions that it waits for are looked at.
DEPTH = 64


def rewrite_logsumexp(graph: Graph, context: PassContext = USUAL, always: bool = False) -> Graph:
    """Rewrite the sums of exponentials for which one visit of a row is worth more than an exponential an element;
    with ``always`` all of them."""
    if not any(_sums(n) for n in graph.nodes):
        return graph
    found = Definitions(graph)
    taken = set(names_in(graph))
    changed: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not _sums(node):
            continue
        assert isinstance(node, Reduction)
        parts = _TermReader(found, node).parts()
        if parts is None or not (
            always or _is_worth(found, node, parts, context.target_of(node.types[0].device).machine)
        ):
            continue
        top = _maximum(found, node, parts)
        if not isinstance(parts.weight, Const) and not _is_below(found, node, parts, top):
            continue
        if top is not None and (top.names[0] in changed or not _is_ready(parts, top, places_of(graph))):
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
class _Argument:
    """``whole(score)``, which is ``score`` with all of ``added`` added: numbers of which a row has one each.

    ``is_lowered`` where they are all subtracted from it. ``whole`` does as was done to the scores, in that order, so
    that the greatest of them comes out as it was.
    """

    score: Expr
    whole: Callable[[Expr], Expr]
    added: tuple[Expr, ...] = ()
    is_lowered: bool = True


@dataclass(frozen=True, slots=True)
class _Parts:
    """Each term is ``exp(argument) * weight``; ``made`` are the reductions over the row that is added to scores."""

    score: Expr
    argument: _Argument
    weight: Expr
    made: tuple[Reduction, ...]


@dataclass(frozen=True, slots=True)
class _Factor:
    """One factor of a term as it stands, and as what the nodes before make of it."""

    value: Expr
    inner: Expr


class _TermReader:
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
        argument = self.split(exponential.inner.args[0])
        made = self.reductions(argument.added)
        return _Parts(cast(argument.score, self.kind), argument, weight, made) if made else None

    def factors(self, e: Expr) -> list[_Factor]:
        inner = self.found.peel(e)
        if isinstance(inner, Call) and inner.fn == "mul":
            return [f for a in inner.args for f in self.factors(a)]
        return [_Factor(e, inner)]

    def varies(self, e: Expr) -> bool:
        return not self.along.isdisjoint(free_symbols(e))

    def split(self, e: Expr) -> _Argument:
        """``e``, which varies along the row, as a score and what is added to it."""
        match self.found.peel(e):
            case Call("add" | "sub" as fn, (a, b), _) if self.varies(a) and not self.varies(b):
                inner, by = self.split(a), cast(b, self.kind)
                lowered = inner.is_lowered and fn == "sub"
                return _Argument(inner.score, lambda m: call(fn, inner.whole(m), by), (*inner.added, b), lowered)
            case Call("add", (a, b), _) if self.varies(b) and not self.varies(a):
                inner, to = self.split(b), cast(a, self.kind)
                return _Argument(inner.score, lambda m: call("add", to, inner.whole(m)), (*inner.added, a), False)
            case Call("sub", (a, b), _) if self.varies(b) and not self.varies(a):
                inner, of = self.split(b), cast(a, self.kind)
                turned = call("neg", cast(inner.score, self.kind))
                return _Argument(
                    turned, lambda m: call("sub", of, inner.whole(call("neg", m))), (*inner.added, a), False
                )
            case Call("neg", (a,), _) if (inner := self.split(a)).added:
                turned = call("neg", cast(inner.score, self.kind))
                return _Argument(turned, lambda m: call("neg", inner.whole(call("neg", m))), inner.added, False)
            case Call("mul", (a, b), _):
                for scale, other in ((a, b), (b, a)):
                    number = self.found.peel(scale)
                    if isinstance(number, Const) and _is_exact(number.value) and (inner := self.split(other)).added:
                        return self.scaled(inner, float(number.value))
        return _Argument(e, lambda m: m)

    def scaled(self, inner: _Argument, factor: float) -> _Argument:
        """An argument times a power of two, which rounds nothing."""
        by, back = const(factor, self.kind), const(1 / factor, self.kind)
        score = call("mul", cast(inner.score, self.kind), by)
        return _Argument(score, lambda m: call("mul", inner.whole(call("mul", m, back)), by), inner.added, False)

    def reductions(self, values: Sequence[Expr]) -> tuple[Reduction, ...]:
        """The reductions over rows of this shape that values are made of, through element-wise nodes."""
        result: dict[str, Reduction] = {}
        stack, seen = [*values], set[str]()
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


def _is_exact(factor: bool | int | float) -> bool:
    """Whether multiplying by a number rounds nothing, and is undone by multiplying by its inverse."""
    return abs(math.frexp(factor)[0]) == 0.5 and 2**-32 < abs(factor) < 2**32


def _is_worth(found: Definitions, node: Reduction, parts: _Parts, machine: Machine) -> bool:
    """Whether a row does not stay near the arithmetic units, or is cut in pieces that programs or threads share."""
    hint = found.graph.symbols.hint
    elements, rows = hint(sympy.Mul(*node.reduce_shape)), hint(node.types[0].numel)
    along = [ld for ld in loads(parts.score) if not free_symbols(ld).isdisjoint(node.reduce_axes)]
    tensors = {found.base(ld).buffer: ld.dtype.itemsize for ld in along}
    if keeps_in_caches(machine):
        return elements * sum(tensors.values()) > cache(machine) and _is_spread(found, node, elements)
    known = all(n.is_Integer for n in node.reduce_shape)
    return is_split(machine, rows, elements) or not known or elements * max(len(tensors), 1) > held_elements(machine)


def _is_spread(found: Definitions, node: Reduction, elements: int) -> bool:
    """Whether the sum comes back to the elements of its row, which are then visited once more."""
    hint = found.graph.symbols.hint
    stack, seen = [node.names[0]], {node.names[0]}
    while stack:
        for reader in found.readers(stack.pop()):
            if isinstance(reader, Compute) and hint(reader.type.numel) >= elements * hint(node.types[0].numel):
                return True
            if isinstance(reader, (Compute, View)) and reader.name not in seen:
                seen.add(reader.name)
                stack.append(reader.name)
    return False


def _maximum(found: Definitions, node: Reduction, parts: _Parts) -> Reduction | None:
    """The maximum of the very scores, with a result for each sum, if there is one."""
    inside, place = _inside(found, node)
    score = inside.moved(parts.score, (*node.axes, *node.reduce_axes), place)
    for made in parts.made:
        if made.monoid == MAX and made.types[0].shape == node.types[0].shape:
            value = inside.moved(made.values[0], (*made.axes, *made.reduce_axes), place)
            if inside.same(value, score):
                return made
    return None


def _inside(found: Definitions, node: Reduction) -> tuple[Definitions, tuple[sympy.Expr, ...]]:
    """The definitions for positions of a sum's terms, and that of each; the one place of an axis of extent 1, which has
    two names, is 0."""
    extents = dict(zip((*node.axes, *node.reduce_axes), (*node.types[0].shape, *node.reduce_shape), strict=True))
    return found.within(extents), tuple(sympy.S.Zero if n == 1 else a for a, n in extents.items())


def _is_below(found: Definitions, node: Reduction, parts: _Parts, top: Reduction | None) -> bool:
    """Whether no exponential was above one: the maximum is taken off its scores, and the logarithm of their sum may be.

    Elsewhere the terms with weights may all be so far below the greatest score that nothing is left of them beside it.
    """
    if top is None or not parts.argument.is_lowered:
        return False
    inside, place = _inside(found, node)
    taken: list[Expr] = []
    for e in parts.argument.added:
        inner = inside.peel(e)
        taken += inner.args if isinstance(inner, Call) and inner.fn == "add" else (inner,)
    logs = [e for e in taken if not _is_result(inside, e, top, place)]
    if len(taken) - len(logs) != 1:
        return False
    score = inside.moved(parts.score, (*node.axes, *node.reduce_axes), place)
    return all(_is_log_of_sum(inside, e, score, top, place) for e in logs)


def _is_result(inside: Definitions, e: Expr, made: Reduction, place: tuple[sympy.Expr, ...]) -> bool:
    """Whether a value is what a reduction makes of the row at hand."""
    state = inside.state(e)
    return state is not None and state[0] is made and state[2].indices == place[: len(made.axes)]


def _is_log_of_sum(inside: Definitions, e: Expr, score: Expr, top: Reduction, place: tuple[sympy.Expr, ...]) -> bool:
    """Whether a value is the logarithm of the sum of ``exp(score - top)`` over the row: the greatest term is one."""
    log = inside.peel(e)
    state = inside.state(log.args[0]) if isinstance(log, Call) and log.fn == "log" else None
    if state is None or state[0].monoid != SUM or not _is_result(inside, state[2], state[0], place):
        return False
    made = state[0]
    if len(made.reduce_axes) != len(top.reduce_axes) or made.types[0].shape != top.types[0].shape:
        return False
    match inside.peel(inside.moved(made.values[0], (*made.axes, *made.reduce_axes), place)):
        case Call("exp", (x,), _):
            match inside.peel(x):
                case Call("sub", (a, b), _):
                    return inside.same(a, score) and _is_result(inside, b, top, place)
    return False


def _is_ready(parts: _Parts, top: Reduction, order: Mapping[str, int]) -> bool:
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
    scale = call("exp", parts.argument.whole(highest))
    value = cast(call("mul", total, scale), node.values[0].dtype, when_stored=True)
    rest: list[Node] = [Compute(node.names[0], node.types[0], node.axes, value, node.origins)]
    if top is None:
        yield node.names[0], [both, *rest]
        return
    first = cast(Load(names[0], top.axes, kind), top.types[0].dtype, when_stored=True)
    yield top.names[0], [both, Compute(top.names[0], top.types[0], top.axes, first, top.origins)]
    yield node.names[0], rest


def _moved(top: Reduction, node: Reduction) -> Expr:
    """The values of the maximum over the axes of the sum."""
    axes = dict(zip((*top.axes, *top.reduce_axes), (*node.axes, *node.reduce_axes), strict=True))
    return substitute_index(top.values[0], axes)
