"""Which results to compute again in each kernel that reads them, rather than write them out and read them back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import sympy

from ...ir.expr.index import simplify
from ...ir.expr.ops import OPS
from ...ir.expr.symbols import SymbolTable
from ...ir.expr.value import Call, Expr, Load, is_value, length, rewrite, walk
from ...ir.graph.graph import Graph
from ..context import PassContext
from ..cost.recompute import GAIN, MANY, is_costly_in_lanes, is_read_where_kept
from ..decisions import Alternative, place_key
from ..facts.fusion_nodes import INLINE_NODES, FusionNode, collect_loads, gathers_lanes, is_cheap
from ..facts.views import map_value
from .group import Group

MAX_LOADS = 4


def choose_repeats(
    groups: list[Group], outside: set[str], sizes: Mapping[str, int], graph: Graph, context: PassContext
) -> dict[str, Expr]:
    """Names whose every reader should compute them again, with the value in terms of tensors that are in memory anyway.

    A name qualifies where only other kernels read it, it costs few and cheap operations, and reading its operands
    moves fewer bytes than writing it once and reading it in each kernel.
    """
    readers: dict[str, list[Group]] = {}
    for g in groups:
        for name in {ld.buffer for m in g.nodes for ld in m.loads} - g.produced.keys():
            readers.setdefault(name, []).append(g)
    chosen: dict[str, Expr] = {}
    # What chosen values are made of must stay in memory.
    pinned: set[str] = set()
    for g in groups:
        for m in g.nodes:
            name = m.name
            if m.monoid is not None or name in outside or name not in readers or name in pinned:
                continue
            value = _expanded(m, g, readers, outside, chosen)
            if value is None or any(_makes_anew(m, value, r) or _gathers_often(m, r) for r in readers[name]):
                continue
            if any(name in n.packed for r in readers[name] for n in r.nodes):
                continue
            operands = _bytes_read(value, sizes, sizes.get(name, 0))
            extra = sum(size for r in readers[name] for o, size in operands.items() if o not in r.tensors)
            before = sizes.get(name, 0) * (1 + len(readers[name]))
            if operands.keys() & chosen.keys():
                continue
            bandwidth = g.target.machine.bandwidth
            way = context.decide(
                "recompute", lambda name=name: place_key(graph, (name,)),  # type: ignore[misc]
                (Alternative("again", extra / bandwidth), Alternative("store", before / bandwidth)),
                "again" if extra <= before * GAIN else "store", at=name, nbytes=before,
                reason=f"{extra} bytes read in {len(readers[name])} kernels rather than {before} written and read",
            )  # fmt: skip
            if way == "again":
                chosen[name] = value
                pinned |= operands.keys()
    return chosen


def _makes_anew(made: FusionNode, value: Expr, reader: Group) -> bool:
    """Whether lanes of a CPU along what is made (factors of channels, innermost in memory) would compute it for each of
    many rows: no loop outside them knows it, and roots and quotients cost more than the visit of an element."""
    most = max((OPS[e.fn].flops for e in walk(value) if isinstance(e, Call)), default=0)
    if not is_costly_in_lanes(reader.target.machine, most):
        return False
    hint = reader.table.hint
    for m in reader.nodes:
        for ld in m.loads:
            if ld.buffer == made.name and hint(m.types[0].numel) >= MANY * hint(made.types[0].numel):
                lanes = [a for a, step in zip(m.axes, m.types[0].strides, strict=True) if step == 1]
                if any(a in i.free_symbols for a in lanes for i in ld.indices if not is_value(i)):
                    return True
    return False


def _gathers_often(made: FusionNode, reader: Group) -> bool:
    """Whether a kernel would gather more than twice as many elements as there are results, lane by lane."""
    if not gathers_lanes(made):
        return False
    hint = reader.table.hint
    reading = [m for m in reader.nodes if any(ld.buffer == made.name for ld in m.loads)]
    return any(hint(sympy.Mul(*m.extents.values())) > 2 * hint(made.types[0].numel) for m in reading)


def _bytes_read(value: Expr, sizes: Mapping[str, int], result: int) -> dict[str, int]:
    """Bytes read of each operand: all of it, or of a gather no more than the result's own size."""
    touched: dict[str, int] = {}
    for ld in collect_loads((value,)):
        size = sizes.get(ld.buffer, 0)
        touched[ld.buffer] = min(size, result) if any(is_value(i) for i in ld.indices) else size
    return touched


def _expanded(
    m: FusionNode, g: Group, readers: Mapping[str, list[Group]], outside: set[str], chosen: Collection[str]
) -> Expr | None:
    """The value of a node over tensors that are in memory whatever is decided here, if that is small and cheap."""

    def stays(name: str) -> bool:
        if name not in g.produced or name in outside:
            return True
        return name in readers and name not in chosen and is_read_where_kept(g.target.machine)

    def go(value: Expr, depth: int) -> Expr | None:
        ok = True

        def leaf(e: Expr) -> Expr | None:
            nonlocal ok
            if not isinstance(e, Load) or stays(e.buffer):
                return None
            made = g.produced[e.buffer]
            if made.monoid is not None:
                # A reduction's result stays in memory only if somebody else reads it there already.
                ok = ok and e.buffer in readers
                return None
            inner = go(made.values[0], depth + 1) if depth < 6 else None
            if inner is None:
                ok = False
                return None
            return map_value(inner, dict(zip(made.axes, e.indices, strict=True)))

        result = rewrite(value, leaf)
        return result if ok else None

    value = go(m.values[0], 0)
    if value is None or not is_cheap(value) or length(value) > INLINE_NODES // 4:
        return None
    return value if len({ld.buffer for ld in collect_loads((value,))}) <= MAX_LOADS else None


def apply_repeats(nodes: list[FusionNode], chosen: Mapping[str, Expr], table: SymbolTable) -> list[FusionNode]:
    """The nodes with the chosen values substituted into their readers; those nobody reads any more are gone."""
    if not chosen:
        return nodes
    axes = {m.name: m.axes for m in nodes}
    result = []
    for m in nodes:
        if m.name in chosen:
            continue

        def leaf(e: Expr, extents: dict = m.extents) -> Expr | None:  # type: ignore[type-arg]
            if isinstance(e, Load) and e.buffer in chosen:
                moved = map_value(chosen[e.buffer], dict(zip(axes[e.buffer], e.indices, strict=True)))
                return rewrite(moved, lambda _: None, lambda i: simplify(i, extents, table))
            return None

        values = tuple(rewrite(v, leaf) for v in m.values)
        changed = any(a is not b for a, b in zip(values, m.values, strict=True))
        result.append(replace(m, values=values, loads=collect_loads(values)) if changed else m)
    return result
