"""Calls of functions that differ in sizes alone, and in how many parts they join, are of one function of more sizes.

Each layer of a DenseNet normalises all channels so far, a concat of one part more than the layer before. Its kernel is
that of the last layer, which is told how many channels there are: parts behind them are never read. So compile time
grows with the kinds of layers, not with their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from ...ir.expr.value import Call, Const, Expr, IndexValue, Load, Select, rename_loads, rewrite, walk
from ...ir.function.function import TensorFunction
from ...ir.graph.graph import CallTensor, Node
from ...ir.target import Target
from ..context import PassContext
from ..cost.calls import LEAST_FAMILY, LEAST_SHARED, MOST_UNREAD, shares_code
from ..functions.function_table import FunctionTable
from ..functions.unify import constants_of, skeleton, unify, with_constants
from ..fusion.fusion import Fusion


def share_code(fusion: Fusion, context: PassContext) -> Fusion:
    """Let calls on CPUs run one function where theirs differ in sizes that decide nothing of the code."""
    calls = [n for n in fusion.graph.nodes if isinstance(n, CallTensor) and n.count == 1]
    devices = {n.function: n.types[0].device for n in calls}
    families: dict[tuple[TensorFunction, str], list[str]] = {}
    for name, device in devices.items():
        form = _form(fusion.functions[name]) if name in fusion.functions else None
        if form is not None and shares_code(context.target_of(device).machine):
            families.setdefault((form, device), []).append(name)
    table = FunctionTable(fusion.functions)
    shared: dict[str, _Member] = {}
    for (_, device), names in families.items():
        if len(names) >= LEAST_FAMILY:
            shared |= _shared({n: fusion.functions[n] for n in names}, context.target_of(device), table)
    if not shared:
        return fusion
    nodes: list[Node] = [
        shared[n.function].call(n) if isinstance(n, CallTensor) and n.count == 1 and n.function in shared else n
        for n in fusion.graph.nodes
    ]
    return fusion.having(replace(fusion.graph, nodes=tuple(nodes)), table.used(nodes))


@dataclass(frozen=True, slots=True)
class _Member:
    """A function as another, ``function``: which of its arguments are given for each of that one's, and sizes."""

    function: str
    given: tuple[int, ...]
    sizes: tuple[int, ...]

    def call(self, node: CallTensor) -> CallTensor:
        args = tuple(node.args[k] for k in self.given)
        return replace(node, function=self.function, args=args, sizes=tuple(map(sympy.Integer, self.sizes)))


def _form(function: TensorFunction) -> TensorFunction | None:
    """What functions of a family have in common: all but constants, and parts of joins behind the first."""
    if function.symbols.sizes or function.scatters or not function.rows:
        return None
    if any(o.buffer in function.inputs for o in function.outputs):
        return None
    if any(not e.is_Integer for e in constants_of(function)):
        return None
    return skeleton(_fewer(function, dict.fromkeys((d.var for d in function.dims), sympy.S.One))[0])


def _fewer(
    function: TensorFunction, extents: Mapping[sympy.Symbol, sympy.Expr]
) -> tuple[TensorFunction, tuple[int, ...]]:
    """A function where its dimensions are no longer than ``extents``: with the choices that this leaves, and of the
    inputs the one that stands for each; for one that nothing reads any more, the one read before."""

    def leaf(e: Expr) -> Expr | None:
        return e.if_true if isinstance(e, Select) and _always(e.condition, extents) else None

    stages = tuple(replace(s, values=tuple(rewrite(v, leaf) for v in s.values)) for s in function.stages)
    read = {e.buffer for s in stages for v in s.values for e in walk(v) if isinstance(e, Load)}
    read |= {o.buffer.name for o in function.outputs}
    kept = [b for b in function.inputs if b.name in read]
    if len(kept) == len(function.inputs):
        return replace(function, stages=stages), tuple(range(len(kept)))
    names = {b.name: f"in{k}" for k, b in enumerate(kept)}
    stages = tuple(replace(s, values=tuple(rename_loads(v, names) for v in s.values)) for s in stages)
    place, given = -1, []
    for b in function.inputs:
        place += b.name in names
        given.append(max(place, 0))
    inputs = tuple(replace(b, name=names[b.name]) for b in kept)
    return replace(function, inputs=inputs, stages=stages), tuple(given)


def _always(condition: Expr, extents: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether a position is below a number wherever it is."""
    if not isinstance(condition, Call) or condition.fn != "lt":
        return False
    index, bound = condition.args
    if not isinstance(index, IndexValue) or not isinstance(bound, Const) or index.index not in extents:
        return False
    return bool(extents[index.index] <= int(bound.value))


def _shared(functions: Mapping[str, TensorFunction], target: Target, table: FunctionTable) -> dict[str, _Member]:
    """The functions of one form as few, by name."""
    found: dict[str, _Member] = {}
    left = sorted(functions, key=lambda n: -len(functions[n].inputs))
    while len(left) >= LEAST_FAMILY:
        first = functions[left[0]]
        family = {left[0]: (first, tuple(range(len(first.inputs))))}
        for name in left[1:]:
            known = _as_whole(first, functions[name])
            if known is not None and _are_one((first, known[0]), target):
                family[name] = known
        members = [f for f, _ in family.values()]
        unified = unify(members, any_vectors=True) if len(family) >= LEAST_FAMILY else None
        if unified is None:
            left = left[1:]
            continue
        left = [n for n in left if n not in family]
        made = table.enter(replace(unified.function, name=first.name))
        for (name, (_, given)), sizes in zip(family.items(), unified.values, strict=True):
            found[name] = _Member(made, given, sizes)
    return found


def _as_whole(whole: TensorFunction, function: TensorFunction) -> tuple[TensorFunction, tuple[int, ...]] | None:
    """A function with all choices of ``whole``, and which of its inputs stands for each; None where it is another."""
    if len(whole.inputs) > MOST_UNREAD * len(function.inputs):
        return None
    if len(whole.dims) != len(function.dims):
        return None
    extents = {a.var: b.extent for a, b in zip(whole.dims, function.dims, strict=True)}
    fewer, given = _fewer(whole, extents)
    if skeleton(fewer) != skeleton(function):
        return None
    layouts = [(b.shape, b.strides, b.dtype, b.align) for b in whole.inputs]
    if any(layouts[k] != layouts[given.index(part)] for k, part in enumerate(given)):
        return None  # what stands for a part that is never read is as that is
    inputs = tuple(replace(function.inputs[k], name=b.name) for k, b in zip(given, whole.inputs, strict=True))
    return with_constants(whole, constants_of(replace(function, inputs=inputs))), given


def _are_one(functions: Sequence[TensorFunction], target: Target) -> bool:
    """Whether functions differ in what schedules do not depend on: it is long, and whole vectors."""
    if len({f.inner for f in functions}) > 1 or unify(functions, any_vectors=True) is None:
        return False
    for dims in zip(*(f.rows for f in functions), strict=True):
        extents = {int(d.extent) for d in dims}
        if len(extents) > 1 and min(extents) < LEAST_SHARED:
            return False
    last = {int(f.rows[-1].extent) for f in functions}
    return len(last) == 1 or all(n % (2 * target.lanes(4)) == 0 for n in last)


__all__ = ["share_code"]
