"""Joins on CPUs: where comparisons of a position choose between tensors, each part has loops of its own.

One loop over all parts of a concat would evaluate each of them, masked, in every vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import sympy
from torch.utils._sympy.functions import ModularIndexing

from ....ir.expr.ops import OPS
from ....ir.expr.value import Call, Expr, Select, children, index_exprs, loads, walk
from ....ir.nest.loops import Block, Loop, LoopNest, blocks, walk_nodes
from ....ir.target import Target
from ...cost.cpu_kernels import PART_TEAM
from ...error import ScheduleError
from ...primitives.analysis.region import at_least
from ...primitives.analysis.tree import linear_part
from ...primitives.loops.partition import COMPARISONS, threshold
from ...schedule.schedule import Schedule
from ..analysis import analyse
from .common import cost, lane_bytes, values

# Two parts are worth loops of their own from so many registers on; more, or what is computed for one, in any case.
LONG, HEAVY = 4, 8
# Parts of a nest at most, and nodes of expressions in all of them beyond those of one.
MOST_PARTS, MOST_NODES = 32, 2048

Points = tuple[sympy.Expr, ...]


def has_concats(nest: LoopNest) -> bool:
    """Whether positions choose between tensors somewhere in the nest."""
    return any(_flips(nest, b, a.var, a.extent) for b in analyse(nest).blocks for a in b.axes)


def partition_concats(schedule: Schedule, target: Target) -> None:
    """Cut loops into those over the parts of concats, outer loops first."""
    seen: set[str] = set()

    def unseen() -> str | None:
        loops = (n.var.name for n, _ in walk_nodes(schedule.nest.body) if isinstance(n, Loop))
        return next((name for name in loops if name not in seen), None)

    while (loop := unseen()) is not None:
        seen.add(loop)
        points = _worthwhile(schedule, loop, target)
        if points:
            try:
                seen.update(schedule.partition(loop, points))
            except ScheduleError:
                continue


def _worthwhile(schedule: Schedule, loop: str, target: Target) -> Points:
    """The points between the parts of a loop, where it is worth cutting."""
    nest, node = schedule.nest, schedule.loop(loop)
    every = list(blocks(nest))
    around = [(b, outer, [lp.var.name for lp in outer].index(loop)) for b, outer in every if node in outer]
    inside = [b for b, _, _ in around]
    found: dict[sympy.Expr, None] = {}
    for block in inside:
        for axis, binding in zip(block.axes, block.bindings, strict=True):
            if binding == node.var:
                found.update(dict.fromkeys(_flips(nest, block, axis.var, axis.extent)))
    hint = nest.symbols.hint
    points = tuple(sorted(found, key=hint))
    if not points or len(points) + len(every) > MOST_PARTS:
        return ()
    shared = [e for b in inside for s in b.body for v in values(s) for e in _unconditional(v)]
    if len(points) * len(shared) > MOST_NODES:
        return ()
    ends = [0, *map(hint, points), hint(node.extent)]
    within = [outer[k + 1 :] for _, outer, k in around]
    inner = max(hint(sympy.Mul(*(lp.extent for lp in loops))) for loops in within)
    parts = [max(b - a, 0) * inner for a, b in pairwise(ends)]
    work = sum(map(cost, inside)) // len(parts)  # of an element of one part, roughly
    is_heavy = work - sum(map(_operations, shared)) // len(parts) >= HEAVY
    if len(parts) == 2 and not is_heavy and min(parts) < LONG * target.lanes(lane_bytes(nest)):
        return ()
    if any(k == 0 for _, _, k in around):  # each part has a team of its own, or none
        if nest.table or (not is_heavy and any(within)):
            return ()
        if not is_heavy and min(parts) * (work + 2) < PART_TEAM <= sum(parts) * (work + 2):
            return ()
    return points


def part_width(schedule: Schedule, loop: str, width: int, target: Target) -> int:
    """Lanes of a loop over the parts of a concat: ``width``, or less where each vector is in one part then.

    What vectors that end at the ends of parts read is looked up in a table; of others every part is read, masked.
    """
    node, nest = schedule.loop(loop), schedule.nest
    points = [
        p
        for block, outer in blocks(nest)
        if node in outer
        for axis, binding in zip(block.axes, block.bindings, strict=True)
        if binding == node.var
        for p in _flips(nest, block, axis.var, axis.extent)
    ]
    whole = math.gcd(*map(nest.symbols.divisor, points)) if points else width
    narrower = math.gcd(whole, width)
    return narrower if narrower >= target.lanes(lane_bytes(nest)) else width


def _unconditional(value: Expr) -> Iterator[Expr]:
    """What is in no branch of a choice: every part has it."""
    stack = [value]
    while stack:
        e = stack.pop()
        yield e
        if not isinstance(e, Select):
            stack += children(e)


def _operations(e: Expr) -> int:
    """Of one node, without what is inside."""
    return OPS[e.fn].flops if isinstance(e, Call) else 0


def _flips(nest: LoopNest, block: Block, axis: sympy.Symbol, extent: sympy.Expr) -> Points:
    """Where along an axis a choice between tensors changes sides, or a remainder begins anew."""
    found: dict[sympy.Expr, None] = {}
    for statement in block.body:
        for value in values(statement):
            for e in walk(value):
                if isinstance(e, Select) and _reads(e.if_true) and _reads(e.if_false):
                    found.update(dict.fromkeys(_comparison_points(e.condition, axis)))
            for index in index_exprs(value):
                found.update(dict.fromkeys(_remainder_points(index, axis, extent)))
    sizes, table = set(nest.symbols.symbols), nest.symbols
    return tuple(
        p for p in found
        if p.free_symbols <= sizes and not at_least(sympy.S.Zero, p, table) and not at_least(p, extent, table)
    )  # fmt: skip


def _reads(e: Expr) -> bool:
    return next(loads(e), None) is not None


def _comparison_points(condition: Expr, axis: sympy.Symbol) -> Iterator[sympy.Expr]:
    for e in walk(condition):
        if isinstance(e, Call) and e.fn in ("eq", "ne"):  # one below the other
            sides = [Call(fn, e.args, e.dtype) for fn in ("lt", "le")]
        else:
            sides = [e] if isinstance(e, Call) and e.fn in COMPARISONS else []
        yield from (known[0] for side in sides if (known := threshold(side, axis)) is not None)


def _remainder_points(index: sympy.Expr, axis: sympy.Symbol, extent: sympy.Expr) -> Iterator[sympy.Expr]:
    """Where ``(axis + shift) % extent``, a rotation, begins anew."""
    for e in index.atoms(ModularIndexing) if axis in index.free_symbols else ():
        base, divisor, modulus = e.args
        parts = linear_part(base, axis)
        if parts is not None and parts[0] == 1 and divisor == 1 and modulus == extent:
            yield sympy.expand(modulus - parts[1])
