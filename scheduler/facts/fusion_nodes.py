"""The nodes of a graph as the fuser sees them: values read through views, trivial producers substituted into their
readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import sympy

from ...ir.expr.dtypes import DType
from ...ir.expr.index import simplify
from ...ir.expr.monoid import SUM, Monoid
from ...ir.expr.nonnegative import is_nonnegative
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import (
    Call,
    Cast,
    Expr,
    Load,
    Select,
    const,
    flops,
    free_symbols,
    is_value,
    length,
    loads,
    rewrite,
    walk,
)
from ...ir.graph.graph import Compute, Graph, Origin, Reduction, Scan, TensorType, View, node_values, uses
from ...ir.target import multiplies_halves, waits_for_places
from .evaluations import evaluations
from .packed_operands import packed_for
from .repeated_windows import made_once
from .views import ViewMap, map_value, results_of

# Producers up to these sizes are computed again where they are read at another position.
INLINE_FLOPS = 48
INLINE_NODES = 400
# What is computed in one loop for the parts of a join.
CONCAT_NODES = 1600
# How far such chains are followed.
SUBSTITUTION_DEPTH = 8
# A function of this cost is worth keeping rather than computing twice.
CHEAP_FLOPS = 8
# Elements from which a row that is gathered whole is read as fast as one that lies where it is wanted.
LONG_ROW = 16


@dataclass(frozen=True, slots=True)
class FusionNode:
    """One node to be fused. ``axes`` are the kept axes, ``reduce_axes`` those of a reduction; ``extents`` covers
    both. ``scan_axis`` is the one of ``axes`` along which a scan combines."""

    index: int
    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    axes: tuple[sympy.Symbol, ...]
    reduce_axes: tuple[sympy.Symbol, ...]
    extents: dict[sympy.Symbol, sympy.Expr]
    values: tuple[Expr, ...]
    monoid: Monoid | None
    origins: tuple[Origin, ...]
    loads: tuple[Load, ...]
    # A reduction whose results nothing spreads over elements again.
    ends: bool = False
    # One of which nothing is spread either that is made of its results, however far off.
    settles: bool = False
    scan_axis: sympy.Symbol | None = None
    # What it reads in memory of its own, which is laid out for it.
    packed: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def all_axes(self) -> tuple[sympy.Symbol, ...]:
        return (*self.axes, *self.reduce_axes)


def is_product(m: FusionNode) -> bool:
    """Whether a node sums products of tensors each of which is read for all results along some axis, as a matrix is."""
    if m.monoid is not SUM or not m.reduce_axes:
        return False
    value = m.values[0]
    while isinstance(value, Cast):
        value = value.value
    if not isinstance(value, Call) or value.fn != "mul":
        return False
    kept = {a for a in m.axes if m.extents[a] != 1}
    read = [kept & free_symbols(part) for part in value.args]
    return len(read) == 2 and all(read) and all(side != kept for side in read)


def fusion_node_sizes(m: FusionNode) -> set[sympy.Symbol]:
    """Every size symbol, and axis, that a node mentions."""
    found = {s for t in m.types for e in (*t.shape, *t.strides) for s in e.free_symbols}
    found.update(s for e in m.extents.values() for s in e.free_symbols)
    return found.union(*(free_symbols(v) for v in m.values))


def collect_loads(values: tuple[Expr, ...]) -> tuple[Load, ...]:
    """Every load of some values, each once."""
    seen: dict[Load, None] = {}
    for v in values:
        seen.update(dict.fromkeys(loads(v)))
    return tuple(seen)


def simplify_value(value: Expr, rounded: bool = False) -> Expr:
    """Undo conversions that cancel, and what is done to indices that count from the end where none does. Unless it is
    ``rounded``, the former is so of what a kernel goes on with, too."""

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Select) and isinstance(e.condition, Call) and e.condition.fn == "lt":
            index, zero = e.condition.args
            return e.if_false if zero == const(0, DType.INT64) and is_nonnegative(index) else None
        if isinstance(e, Cast) and isinstance(e.value, Cast):
            middle, origin = e.value.dtype, e.value.value.dtype
            if origin is e.dtype and _widens(origin, middle):
                return e.value.value
            if e.dtype is not DType.FLOAT32 or not e.value.when_stored:
                return None
            if not origin.is_float:  # bytes, say: the half type holds them
                return Cast(e.value.value, e.dtype)
            if not rounded and origin is e.dtype:
                return e.value.value
        return None

    return rewrite(value, leaf)


def keeps_rounding(node: Compute | Reduction | Scan, value: Expr) -> bool:
    """Whether a value is the product of two operands that a GPU multiplies in the type to which they were rounded."""
    if not isinstance(node, Reduction) or node.monoid is not SUM or not multiplies_halves(node.types[0].device):
        return False
    if not isinstance(value, Call) or value.fn != "mul":
        return False
    left, right = (free_symbols(a) & set(node.axes) for a in value.args)
    return bool(left - right and right - left)


@cache
def _widens(origin: DType, middle: DType) -> bool:
    """Whether every value of ``origin`` survives a trip through ``middle``."""
    if origin.is_float and middle.is_float:
        return middle is DType.FLOAT64 or (middle is DType.FLOAT32 and origin.is_half)
    if origin.is_int and middle.is_int:
        return middle.bits > origin.bits and (middle.is_signed or not origin.is_signed)
    return origin is DType.BOOL and middle is not DType.BOOL


def build_fusion_nodes(graph: Graph, views: ViewMap) -> tuple[list[FusionNode], set[str]]:
    """The nodes of a graph in order, and the names that have been substituted into every reader and so may vanish.

    A substituted node is one all the same where something that is not fused needs it in memory.
    """
    counts: dict[str, int] = {}
    outside: set[str] = set(results_of(graph))
    for node in graph.nodes:
        if isinstance(node, (Compute, Reduction, Scan)):
            for v in dict.fromkeys(views.base(u) for u in uses(node)):
                counts[v] = counts.get(v, 0) + 1
        elif not isinstance(node, View):
            outside.update(views.base(u) for u in uses(node))
    substituted: dict[str, tuple[tuple[sympy.Symbol, ...], Expr]] = {}
    # A product on tensor cores reads what is in memory for it in the type that they take.
    widening: dict[str, tuple[tuple[sympy.Symbol, ...], Expr]] = {}
    # Results of reductions, each with its narrower form.
    narrower: dict[str, FusionNode] = {}
    nodes: dict[str, FusionNode] = {}
    order: list[FusionNode] = []
    for index, node in enumerate(graph.nodes):
        if not isinstance(node, (Compute, Reduction, Scan)):
            continue
        reduce_axes = node.reduce_axes if isinstance(node, Reduction) else ()
        reduce_shape = node.reduce_shape if isinstance(node, Reduction) else ()
        extents = dict(zip((*node.axes, *reduce_axes), (*node.types[0].shape, *reduce_shape), strict=True))
        values = tuple(views.resolve(v, extents) for v in node_values(node))
        for _ in range(SUBSTITUTION_DEPTH):
            before = values
            trivial = widening if any(keeps_rounding(node, v) for v in values) else substituted
            once = made_once(node, values, extents)
            packed = packed_for(node, values, nodes, extents, graph)
            values = _substitute(values, trivial, nodes, outside, counts, extents, graph.symbols, once, packed)
            if values is before:
                break
        values = _read_narrow(values, narrower, nodes, extents)
        values = tuple(simplify_value(v, keeps_rounding(node, v)) for v in values)
        fused = FusionNode(
            index, node.names, node.types, node.axes, reduce_axes, extents, values,
            None if isinstance(node, Compute) else node.monoid, node.origins, collect_loads(values),
            scan_axis=node.scan_axis if isinstance(node, Scan) else None, packed=packed,
        )  # fmt: skip
        nodes[fused.name] = fused
        order.append(fused)
        if isinstance(node, Compute) and _is_trivial(fused) and not _better_read(fused, outside, nodes):
            substituted[fused.name] = (node.axes, values[0])
            if (wide := _narrowed(fused, nodes)) is not None:
                narrower.setdefault(wide, fused)
            if all(ld.dtype.itemsize <= fused.types[0].dtype.itemsize for ld in fused.loads):
                widening[fused.name] = substituted[fused.name]
    return _with_ends(drop_dead(order, outside)), outside


def _with_ends(nodes: list[FusionNode]) -> list[FusionNode]:
    """Mark the reductions whose every reader has no more elements than they have results, and those that stay so few
    whatever is made of them."""
    spread: set[str] = set()
    counts: dict[str, sympy.Expr] = {}
    for m in nodes:
        points = sympy.Mul(*m.extents.values())
        spread.update(ld.buffer for ld in m.loads if ld.buffer in counts and counts[ld.buffer] != points)
        counts.update({n: t.numel for n, t in zip(m.names, m.types, strict=True)})
    far = set(spread)
    for m in reversed(nodes):
        if m.monoid is None and not far.isdisjoint(m.names):
            far.update(ld.buffer for ld in m.loads if ld.buffer in counts)
    return [
        replace(m, ends=spread.isdisjoint(m.names), settles=far.isdisjoint(m.names)) if m.monoid is not None else m
        for m in nodes
    ]


def drop_dead(nodes: list[FusionNode], outside: set[str]) -> list[FusionNode]:
    """The nodes that something outside, or another needed node, reads."""
    needed = set(outside)
    kept = []
    for m in reversed(nodes):
        if any(n in needed for n in m.names):
            kept.append(m)
            needed.update(ld.buffer for ld in m.loads)
    return kept[::-1]


def _is_trivial(fused: FusionNode) -> bool:
    """A node that costs a reader nothing to compute itself: constants, index arithmetic, copies and widening
    conversions."""
    value = fused.values[0]
    if not fused.loads:
        return flops(value) <= CHEAP_FLOPS
    while isinstance(value, Cast):
        value = value.value
    if isinstance(value, Load):
        return not any(is_value(i) for i in value.indices)
    return False


def _narrowed(fused: FusionNode, nodes: Mapping[str, FusionNode]) -> str | None:
    """The reduction of whose result a node is the conversion to a type of fewer bytes; None for anything else."""
    value = fused.values[0]
    while isinstance(value, Cast):
        value = value.value
    if not isinstance(value, Load) or value.indices != fused.axes or value.buffer not in nodes:
        return None
    narrow = fused.types[0].dtype.itemsize < value.dtype.itemsize
    return value.buffer if narrow and nodes[value.buffer].monoid is not None else None


def _read_narrow(
    values: tuple[Expr, ...], narrower: Mapping[str, FusionNode], nodes: Mapping[str, FusionNode],
    extents: Mapping[sympy.Symbol, sympy.Expr],
) -> tuple[Expr, ...]:  # fmt: skip
    """Elements of a reduction's result that are read by who is never in one kernel with the reduction, which would
    write the wider form for that reader alone, are read in the narrower form: those at places that data name, and those
    of a scan that are read beside the place that is visited, or for more places than there are."""
    points = sympy.Mul(*extents.values())
    found = [ld for v in values for ld in loads(v) if ld.buffer in narrower]
    apart = {
        ld.buffer for ld in found
        if (scan := nodes[ld.buffer]).scan_axis is not None
        and (points != scan.types[0].numel or len(set(ld.indices)) < len(ld.indices) or not _is_regular(ld.indices, {}))
    }  # fmt: skip

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in narrower and (e.buffer in apart or any(is_value(i) for i in e.indices)):
            made = narrower[e.buffer]
            return Cast(Load(made.name, e.indices, made.types[0].dtype), e.dtype)
        return None

    return tuple(rewrite(v, leaf) for v in values) if found else values


def _better_read(fused: FusionNode, outside: set[str], nodes: dict[str, FusionNode]) -> bool:
    """Whether a trivial node that is in memory anyway is cheaper to read than what it is made of."""
    if fused.name not in outside:
        return False
    return any(
        ld.dtype.itemsize > fused.types[0].dtype.itemsize or (ld.buffer in nodes and ld.buffer not in outside)
        for ld in fused.loads
    )


def _substitute(
    values: tuple[Expr, ...],
    trivial: dict[str, tuple[tuple[sympy.Symbol, ...], Expr]],
    nodes: dict[str, FusionNode],
    outside: set[str],
    counts: dict[str, int],
    extents: dict[sympy.Symbol, sympy.Expr],
    table: SymbolTable,
    once: frozenset[str],
    packed: frozenset[str],
) -> tuple[Expr, ...]:
    """Put trivial producers, and cheap ones that are read at odd positions, in the place of their loads. Those of
    ``once`` are made once, however many windows read them, and those that are ``packed`` stay."""
    sites: dict[str, set[tuple[object, ...]]] = {}
    guarded: set[str] = set()
    for v in values:
        for ld in loads(v):
            sites.setdefault(ld.buffer, set()).add(ld.indices)
        for e in walk(v):
            if isinstance(e, Select):
                guarded.update(ld.buffer for branch in (e.if_true, e.if_false) for ld in loads(branch))
    parts = _parts_of_concat(values, guarded, nodes, outside, counts, extents, table)
    chosen: dict[str, tuple[tuple[sympy.Symbol, ...], Expr]] = {}
    for name, positions in sites.items():
        if name in packed:
            continue
        if name in parts:
            chosen[name] = (nodes[name].axes, nodes[name].values[0])
        elif name in trivial:
            chosen[name] = trivial[name]
        elif (m := nodes.get(name)) is not None and m.monoid is None:
            odd = name in guarded or any(not _is_regular(p, extents) for p in positions)
            # What is in memory anyway is read there, unless it costs next to nothing to make of what else is.
            limit = CHEAP_FLOPS if name in outside else INLINE_FLOPS
            if name in outside and any(ld.buffer in nodes and ld.buffer not in outside for ld in m.loads):
                continue
            if odd and _is_nearer(m, positions, nodes, outside, counts):
                continue
            if odd and once and name not in once:
                continue  # what is made of a channel alone would be made again for each element
            spread = m.extents if name in once and counts.get(name, 1) == 1 else extents
            if odd and _worth_repeating(m, len(positions), counts.get(name, 1), spread, limit):
                chosen[name] = (m.axes, m.values[0])
    if not chosen:
        return values

    def leaf(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer in chosen:
            axes, value = chosen[e.buffer]
            if axes == e.indices:
                return value
            moved = map_value(value, dict(zip(axes, e.indices, strict=True)))
            return rewrite(moved, lambda _: None, lambda i: simplify(i, extents, table))
        return None

    return tuple(rewrite(v, leaf) for v in values)


def _parts_of_concat(
    values: tuple[Expr, ...],
    guarded: set[str],
    nodes: dict[str, FusionNode],
    outside: set[str],
    counts: dict[str, int],
    extents: dict[sympy.Symbol, sympy.Expr],
    table: SymbolTable,
) -> set[str]:
    """The producers on CPUs that only these values read, under conditions, and no element more than once: nothing is
    computed twice, and the tensor need not be."""
    # On GPUs lanes that take no part wait while others compute.
    found = {
        name: length(m.values[0])
        for name in guarded
        if (m := nodes.get(name)) is not None and m.monoid is None and counts[name] == 1 and name not in outside
        and m.types[0].device.startswith("cpu")
    }  # fmt: skip
    if not found or sum(found.values()) > CONCAT_NODES:
        return set()
    read = evaluations(values, extents, lambda size: int(table.hint(size)))
    return {name for name in found if read[name] <= int(table.hint(nodes[name].types[0].numel))}


def _is_regular(indices: tuple[object, ...], extents: dict[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether an access may be of the same iteration: no gather, no shift, no reversal."""
    for i in indices:
        if is_value(i):
            return False
        assert isinstance(i, sympy.Expr)
        if i.is_Add and any(t.is_Integer or t.could_extract_minus_sign() for t in i.args):
            return False
        if i.is_Integer and i != 0:
            return False
    return True


def _worth_repeating(
    m: FusionNode, positions: int, readers: int, extents: dict[sympy.Symbol, sympy.Expr], limit: int
) -> bool:
    value = m.values[0]
    if length(value) > INLINE_NODES or len(m.loads) > 6:
        return False
    cost = flops(value)
    # A gather or a broadcast reads each element many times: repeat only what is nearly free.
    ratio = sympy.Mul(*extents.values()) / m.types[0].numel
    if ratio.is_number and ratio > 2 and gathers_lanes(m):
        return False
    if positions > 2:
        return cost <= 2 and len(m.loads) <= 2
    if ratio.is_number and ratio.is_finite and ratio > 2:
        return cost <= CHEAP_FLOPS and len(m.loads) <= 2 and not _waits_for_data(m)
    if not ratio.is_number and _waits_for_data(m):
        return False
    return cost * positions * readers <= limit


def gathers_lanes(m: FusionNode) -> bool:
    """Whether data say where each element of a value is read, and not where rows of many begin: lanes of a CPU then
    look for their elements one by one."""
    if waits_for_places(m.types[0].device):
        return False
    shape = zip(m.axes, m.types[0].shape, m.types[0].strides, strict=True)
    rows = {a for a, size, step in shape if step == 1 and not (size.is_number and size < LONG_ROW)}
    return any(is_value(i) and rows <= free_symbols(i) for ld in m.loads for i in ld.indices)


def _is_nearer(
    m: FusionNode,
    positions: set[tuple[object, ...]],
    nodes: dict[str, FusionNode],
    outside: set[str],
    counts: dict[str, int],
) -> bool:
    """Whether elements at places that data name are better read than made, of as many tensors, for each reader: where
    one of those would be in memory for that alone, or where writing the elements once moves less."""
    readers = counts.get(m.name, 1)
    if readers < 2 or not any(is_value(i) for p in positions for i in p):
        return False
    read: set[str] = set()
    waits = False
    left = [(m, ld) for ld in m.loads]
    while left:
        of, ld = left.pop()
        if not _spans(of, ld):
            continue
        made = nodes.get(ld.buffer) if ld.buffer not in outside else None
        if made is None:
            read.add(ld.buffer)
        elif made.monoid is None and _worth_repeating(made, 1, counts.get(made.name, 1), m.extents, INLINE_FLOPS):
            left += [(made, inner) for inner in made.loads]
        else:
            waits |= ld.dtype.itemsize >= m.types[0].dtype.itemsize
            read.add(ld.buffer)
    return waits or len(read) + 1 + readers < len(read) * readers


def _spans(m: FusionNode, load: Load) -> bool:
    """Whether a node reads as many elements as it has."""
    moving = {s for i in load.indices for s in (free_symbols(i) if is_value(i) else i.free_symbols)}  # type: ignore[arg-type, union-attr]
    return moving >= {a for a, n in m.extents.items() if n != 1}


def _waits_for_data(m: FusionNode) -> bool:
    """Whether a program of a GPU would wait for one element to know the place of another."""
    gathers = any(is_value(i) for ld in m.loads for i in ld.indices)
    return gathers and waits_for_places(m.types[0].device)


def is_cheap(value: Expr) -> bool:
    """Whether computing a value again costs less than reading it back, bytes apart."""
    return all(not isinstance(e, Call) or flops(Call(e.fn, (), e.dtype)) <= CHEAP_FLOPS for e in walk(value))


def is_drawn(value: Expr) -> bool:
    """Whether a value is made of random numbers, of a seed that has one place, and of positions."""
    calls = {e.fn for e in walk(value) if isinstance(e, Call)}
    return "rand" in calls and not any(is_value(i) or i.free_symbols for ld in loads(value) for i in ld.indices)
