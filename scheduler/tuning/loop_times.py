"""How long a scheduled nest takes at its typical sizes, by its loops: an estimate that tells schedules of one nest
apart where sizes differ, and is no prediction of a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import sympy

from ...ir.expr.ops import OPS
from ...ir.expr.role import Role
from ...ir.expr.value import Call, Expr, IndexValue, Load, Select, children, is_value
from ...ir.nest.loops import BLOCK_KINDS, LoopKind, LoopNest, Update
from ...ir.target import Target
from .measures import HEAVY, HEAVY_MONOIDS, BlockWork, measured

# Nanoseconds that a step of a GPU's program waits for memory where too few programs are there to fill the time.
WAIT = 600.0
# Bytes of the vectors by which a CPU's instructions a nanosecond are counted, and of one lane of them.
VECTOR, VECTOR_ITEM = 32, 4


def loops_time(nest: LoopNest, target: Target) -> float:
    """Nanoseconds: a launch, and the longer of computing and of what comes from beyond the caches.

    On GPUs iterations past the ends of the domain count, as tiles that hang over have them, on CPUs lanes there, and
    lanes that a register has not; cores and multiprocessors that have nothing to do do not help.
    """
    machine, found = target.machine, measured(nest)
    issued = called = moved = 0.0
    share, waits = 1.0, 0
    for work in found.works:
        if target.is_gpu:
            issued += work.iterations * work.cost / _at_once(work, target)
        elif work.block.role is Role.LIBRARY_PRODUCT:
            called += 2.0 * work.useful / machine.matmul
        else:
            issued += _iterations(work, nest.symbols.hint) * _instructions(work) / _at_once(work, target)
        share = min(share, _busy(work, target))
        waits = max(waits, math.prod(work.extents[lp.var.name] for lp in work.path if lp.kind is LoopKind.SERIAL))
    # What is fetched again after it has been used is the caches'.
    moved = sum(found.touched(frozenset(v for w in found.works for v in w.extents)).values())
    if target.is_gpu:
        # A program whose steps wait for one another takes as long however few programs there are.
        waited = waits * WAIT if share < 1.0 else 0.0
        return machine.launch + max(max(issued / machine.issued, moved / machine.bandwidth) / share, waited)
    # Longer vectors are as many instructions.
    rate = machine.float32 * VECTOR_ITEM / min(machine.vector_bytes, VECTOR)
    computing = issued / rate + called
    return machine.launch + max(computing, moved / machine.bandwidth) / (max(target.cores, 1) * share)


def _iterations(work: BlockWork, hint: Callable[[sympy.Expr], int]) -> float:
    """How often a CPU runs a block: iterations past an end are left out, but for lanes, of which all are computed."""
    found, used = work.useful, set[str]()
    for axis, binding in zip(work.block.axes, work.block.bindings, strict=True):
        inside = {s.name for s in binding.free_symbols}
        used |= inside
        lanes = math.prod(
            work.extents[lp.var.name] for lp in work.path if lp.kind is LoopKind.VECTORIZED and lp.var.name in inside
        )
        extent = max(hint(axis.extent), 1)
        found *= -(-extent // max(lanes, 1)) * max(lanes, 1) / extent
    # Loops that no axis goes along run the block again.
    return found * math.prod(n for name, n in work.extents.items() if name not in used)


def _instructions(work: BlockWork) -> float:
    """Instructions of one iteration of a block on a CPU. What is the same in all copies of an unrolled loop, or while a
    loop inside runs, is loaded and computed once for them."""
    loops = {
        axis.var: {s.name for s in binding.free_symbols if s.name in work.extents}
        for axis, binding in zip(work.block.axes, work.block.bindings, strict=True)
    }  # fmt: skip
    found, seen = 0.0, dict[int, frozenset[str]]()

    def moving(indices: tuple[object, ...]) -> frozenset[str]:
        symbols = {s for i in indices if not is_value(i) for s in i.free_symbols}  # type: ignore[attr-defined]
        return frozenset(name for s in symbols for name in loops.get(s, ()))

    def visit(e: Expr) -> frozenset[str]:
        nonlocal found
        if id(e) in seen:
            return seen[id(e)]
        moves = frozenset().union(*map(visit, children(e)))
        if isinstance(e, Load):
            moves |= moving(e.indices)
        elif isinstance(e, IndexValue):
            moves |= moving((e.index,))
        cost = float(OPS[e.fn].flops) if isinstance(e, Call) else float(isinstance(e, (Load, Select)))
        found += cost * _share(work, moves)
        seen[id(e)] = moves
        return moves

    for statement in work.block.body:
        if isinstance(statement, Update):
            for value, target in zip(statement.values, statement.targets, strict=True):
                visit(value)
                found += HEAVY if statement.monoid.name in HEAVY_MONOIDS else 1.0
                found += _share(work, moving(target.indices))
        else:
            visit(statement.value)
            found += _share(work, moving(statement.indices))
    return found


def _share(work: BlockWork, moves: frozenset[str]) -> float:
    """Of how many iterations one loads or computes what ``moves`` along some loops, as a share."""
    found = 1.0
    for lp in reversed(work.path):
        name = lp.var.name
        if lp.kind is LoopKind.VECTORIZED:
            continue
        if lp.kind not in (LoopKind.SERIAL, LoopKind.UNROLLED) or (lp.kind is LoopKind.SERIAL and name in moves):
            break
        if name not in moves:
            found /= max(work.extents[name], 1)
    return found


def _at_once(work: BlockWork, target: Target) -> float:
    """Iterations of a block that one instruction does: lanes, as far as a register has them. A GPU's instructions are
    counted by lanes, and those of its tensor cores do many."""
    if target.is_gpu:
        dots = work.over and any(lp.kind is LoopKind.THREAD_X and lp.var.name in work.over for lp in work.path)
        return target.machine.matmul / target.machine.float32 if dots else 1.0
    lanes = max(work.lanes, 1)
    return lanes / math.ceil(lanes / target.lanes(4))


def _busy(work: BlockWork, target: Target) -> float:
    """The share of a machine's cores that a block's loops keep at work."""
    kinds = BLOCK_KINDS if target.is_gpu else (LoopKind.PARALLEL,)
    programs = math.prod(work.extents[lp.var.name] for lp in work.path if lp.kind in kinds)
    cores = max(target.cores, 1)
    return min(1.0, max(programs, 1) / cores)
