"""Keys and values that few rows read are computed where attention reads them: gathered by pages, or made of integers
and scales.

A cache in pages, or one of int8, would be written out whole, as floats and side by side, for each token that is
decoded: several times the bytes of the cache, all of its length. Read in place, it is visited once, as far as it is
alive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import sympy

from ....ir.expr.monoid import ATTENTION
from ....ir.expr.ops import OPS
from ....ir.expr.value import Call, Cast, Const, Expr, IndexValue, Load, Select, is_value, length, loads, rewrite
from ....ir.graph.graph import Compute, Graph, Node, Reduction, View
from ....ir.machine import Machine
from ....ir.target import has_kernels
from ...context import USUAL, PassContext
from ...cost.attention import MASK_OPERATIONS, MASK_STEPS, OPERAND_LOADS, OPERAND_NODES, inlined_readers
from ...facts.definitions import Definitions
from ...facts.order import in_order


def inline_operands(graph: Graph, context: PassContext = USUAL) -> Graph:
    """Compute keys and values in place where it costs less than their copies; the same graph where there are none."""
    found = Definitions(graph)
    changed: dict[str, Node] = {}
    for state in graph.nodes:
        if not isinstance(state, Reduction) or state.monoid is not ATTENTION or not has_kernels(state.types[0].device):
            continue
        machine = context.target_of(state.types[0].device).machine
        nodes = {n.names[0]: n for n in (state, *_products(state, found))}
        for name, node in nodes.items():
            new = _inlined(changed.get(name, node), found, nodes, machine)  # type: ignore[arg-type]
            if new is not None:
                changed[name] = new
    if not changed:
        return graph
    return in_order(graph, [changed.get(n.names[0], n) if n.names else n for n in graph.nodes])


def _products(state: Reduction, found: Definitions) -> list[Reduction]:
    """The sums that the scores of a state are made of."""
    made, stack = [], [ld.buffer for ld in loads(state.values[0])]
    seen = set(stack)
    while stack:
        node = found.makers.get(stack.pop())
        if isinstance(node, Reduction) and node.monoid.name == "sum":
            made.append(node)
        elif isinstance(node, Compute):
            more = {ld.buffer for ld in loads(node.value)} - seen
            seen |= more
            stack += more
        elif isinstance(node, View) and node.source not in seen:
            seen.add(node.source)
            stack.append(node.source)
    return made


def _inlined(node: Reduction, found: Definitions, inside: Collection[str], machine: Machine) -> Reduction | None:
    axes = (*node.axes, *node.reduce_axes)
    extents = dict(zip(axes, (*node.types[0].shape, *node.reduce_shape), strict=True))
    here, hint = found.within(extents), found.graph.symbols.hint
    visits = hint(sympy.Mul(*extents.values()))
    whole = found.graph.outputs

    def leaf(e: Expr) -> Expr | None:
        made = here.makers.get(here.base(e).buffer) if isinstance(e, Load) else None
        if not isinstance(made, Compute) or any(is_value(i) for i in e.indices):  # type: ignore[union-attr]
            return None
        if made.name in whole or not _read_only_by(made.name, found, inside):
            return None
        if visits > inlined_readers(machine) * max(hint(made.type.numel), 1):
            return None
        value = _operand(e, here, MASK_STEPS)
        if value is None or length(value) > OPERAND_NODES or not _is_worth(value):
            return None
        return value if len({ld.buffer for ld in loads(value)}) <= OPERAND_LOADS else None

    values = tuple(rewrite(v, leaf) for v in node.values)
    return None if all(a is b for a, b in zip(values, node.values, strict=True)) else replace(node, values=values)


def _read_only_by(name: str, found: Definitions, inside: Collection[str]) -> bool:
    outputs = found.graph.outputs
    for reader in found.readers(name):
        if isinstance(reader, View):
            if reader.name in outputs or not _read_only_by(reader.name, found, inside):
                return False
        elif not reader.names or reader.names[0] not in inside:
            return False
    return True


def _operand(e: Expr, found: Definitions, depth: int) -> Expr | None:
    """A value of cheap operations over tensors that are in memory; None where it is of another kind."""
    match e:
        case Const() | IndexValue():
            return e
        case Load():
            indices = [_operand(i, found, depth) if is_value(i) else i for i in e.indices]
            if None in indices:
                return None
            load = Load(e.buffer, tuple(indices), e.dtype)  # type: ignore[arg-type]
            inner = found.step(load) if depth else None
            return found.base(load) if inner is None else _operand(inner, found, depth - 1)
        case Cast(inner, dtype):
            made = _operand(inner, found, depth)
            return None if made is None else Cast(made, dtype, e.when_stored)
        case Call(fn, args, dtype) if OPS[fn].flops <= MASK_OPERATIONS:
            parts = [_operand(a, found, depth) for a in args]
            return None if None in parts else Call(fn, tuple(parts), dtype)  # type: ignore[arg-type]
        case Select(c, a, b):
            three = [_operand(x, found, depth) for x in (c, a, b)]
            return None if None in three else Select(*three)  # type: ignore[arg-type]
    return None


def _is_worth(value: Expr) -> bool:
    """Whether a value is gathered, or read from narrower numbers than it has."""
    width = value.dtype.itemsize
    return any(any(map(is_value, ld.indices)) or 2 * ld.dtype.itemsize <= width for ld in loads(value))
