"""Dependences: what must stay true of two blocks wherever they stand.

A block gives a buffer's element one value, however often it is computed. So a reader is right where the same iteration
of the loops that it shares with the writer has written, to the end, all that it reads; nothing has to be known about
other iterations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import sympy

from ....ir.expr.value import Index, Load, is_value
from ....ir.nest.hints import ATOMIC
from ....ir.nest.loops import Access, AxisKind, Block, Loop, LoopNest, Node, Statement, Update
from ....ir.verify.expr import parts
from ...error import ScheduleError
from .region import Region, axis_regions, covers, same_place


@dataclass(frozen=True, slots=True)
class Accesses:
    """What a block reads and writes; reads of elements that it has just written itself do not count."""

    reads: tuple[Load, ...]
    writes: tuple[Access, ...]
    read: frozenset[str]
    written: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class _Body:
    """A block's body, known by identity: reads are found once for all the trees that share it."""

    statements: tuple[Statement, ...]

    def __hash__(self) -> int:
        return id(self.statements)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Body) and self.statements is other.statements


def accesses(block: Block) -> Accesses:
    """The accesses of a block."""
    return _accesses(_Body(block.body))


@lru_cache(maxsize=2048)
def _accesses(body: _Body) -> Accesses:
    reads: dict[Load, None] = {}
    writes: list[Access] = []
    done: set[tuple[str, tuple[Index, ...]]] = set()
    for statement in body.statements:
        alone = Block("", (), (), (statement,))
        reads.update(dict.fromkeys(ld for ld in alone.reads if (ld.buffer, ld.indices) not in done))
        writes += alone.writes
        done.update((w.buffer, w.indices) for w in alone.writes)
    return Accesses(
        tuple(reads), tuple(writes), frozenset(ld.buffer for ld in reads), frozenset(w.buffer for w in writes)
    )


def guarded(block: Block) -> frozenset[Load]:
    """The loads that a ``Select`` may leave out wherever they stand: they may name places that are not there."""
    apart: set[Load] = set()
    sure: set[Load] = set()
    for s in block.body:
        for value in s.values if isinstance(s, Update) else (s.value,):
            for e, under in parts(value):
                if isinstance(e, Load):
                    (apart if under else sure).add(e)
    return frozenset(apart - sure)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """A block, the loops around it, and how many blocks come before it."""

    block: Block
    loops: tuple[Loop, ...]
    order: int


def places(nest: LoopNest) -> dict[str, BlockPlace]:
    """Every block's place, by name, in order."""
    found: dict[str, BlockPlace] = {}
    _collect(nest.body, (), found)
    return found


def _collect(body: tuple[Node, ...], outer: tuple[Loop, ...], found: dict[str, BlockPlace]) -> None:
    for n in body:
        if isinstance(n, Block):
            found[n.name] = BlockPlace(n, outer, len(found))
        else:
            _collect(n.body, (*outer, n), found)


def _loops_of(block: Block, kinds: tuple[AxisKind, ...]) -> set[sympy.Symbol]:
    return {
        s for a, b in zip(block.axes, block.bindings, strict=True) if a.kind in kinds for s in b.free_symbols
    }  # fmt: skip


def carried(block: Block) -> set[sympy.Symbol]:
    """The loop variables that a block reduces, scans or scatters over."""
    return _loops_of(block, (AxisKind.REDUCTION,)) | scanned(block)


def scanned(block: Block) -> set[sympy.Symbol]:
    """The loop variables along which a block scans or scatters, in whose order it needs its iterations."""
    return _loops_of(block, (AxisKind.SCAN,)) | (set() if is_atomic(block) else scattered(block))


def scattered(block: Block) -> set[sympy.Symbol]:
    """The loop variables whose iterations may write the same places."""
    return _loops_of(block, (AxisKind.SCATTER,))


def is_atomic(block: Block) -> bool:
    """Whether a block scatters by atomic operations, in any order."""
    return ATOMIC.of(block)


def unfinished(block: Block, write: Access) -> set[sympy.Symbol]:
    """The loop variables over which a block goes on changing one element: what it writes at each point of a scan is
    final there."""
    named = {s for i in write.indices if not is_value(i) for s in i.free_symbols}  # type: ignore[union-attr]
    running = [a for a in block.axes if a.kind is AxisKind.SCAN and a.var not in named]
    pairs = zip(block.axes, block.bindings, strict=True)
    over = (AxisKind.REDUCTION, AxisKind.SCATTER)
    return {s for a, b in pairs if a.kind in over or a in running for s in b.free_symbols}


def mixed(block: Block) -> set[sympy.Symbol]:
    """The loop variables that carry both a reduction axis of a block and a spatial one."""
    over = carried(block)
    return over & _loops_of(block, (AxisKind.SPATIAL,)) if over else over


def conflict(nest: LoopNest, first: BlockPlace, second: BlockPlace, depth: int | None = None) -> str:
    """Why ``second`` is wrong if each iteration of the loops that it shares with ``first`` runs by itself; "" where it
    is right. With ``depth`` only that many outermost loops are taken as shared.
    """
    a, b = accesses(first.block), accesses(second.block)
    if not (a.written & b.read or a.read & b.written or a.written & b.written):
        return ""
    shared: dict[sympy.Symbol, sympy.Expr] = {}
    for x, y in zip(first.loops[:depth], second.loops[:depth], strict=False):
        if x.var != y.var:
            break
        shared[x.var] = x.extent
    if not shared:
        return ""
    outer = set(shared)
    made, wanted = _regions(first, outer), _regions(second, outer)
    for ld in b.reads:
        if ld.buffer not in a.written:
            continue
        writes = [w for w in a.writes if w.buffer == ld.buffer]
        over = {v for w in writes for v in unfinished(first.block, w)} & outer
        if over:
            names = ", ".join(sorted(v.name for v in over))
            return f"{second.block.name} reads {ld.buffer}, which {first.block.name} reduces over {names}"
        if not any(covers(nest, w, made, ld, wanted) or _at_once(first, w, second, ld) for w in writes):
            return (
                f"{second.block.name} reads {ld.buffer} from other iterations than those in which "
                f"{first.block.name} writes it"
            )
    for w in b.writes:
        touched = [x for x in (*a.writes, *(Access(ld.buffer, ld.indices) for ld in a.reads)) if x.buffer == w.buffer]
        if any(not same_place(nest, x, made, w, wanted, shared) for x in touched):
            return f"{second.block.name} overwrites {w.buffer}, which {first.block.name} uses"
    return ""


def _at_once(first: BlockPlace, write: Access, second: BlockPlace, read: Load) -> bool:
    """Whether each iteration of all the loops around both blocks writes the very element that it reads.

    Indices are compared as functions of the loops, so that it does not matter how the loops make up an axis: quotients
    and remainders by sizes that are symbols are as good as constants. Loops inside of those, of one block each, over
    the elements that an iteration writes and reads, count as one where they run equally long.
    """
    common: set[sympy.Symbol] = set()
    for x, y in zip(first.loops, second.loops, strict=False):
        if x.var != y.var:
            break
        common.add(x.var)
    over = unfinished(first.block, write)
    # What guards nothing but the elements that are reduced leaves no result out.
    guards = {p for p in first.block.predicate if p.lhs.free_symbols & common or not p.lhs.free_symbols & over}
    apart = [[lp for lp in place.loops if lp.var not in common | over] for place in (first, second)]
    alike = {y.var: x.var for x, y in zip(*apart, strict=False) if x.extent == y.extent}
    same = {replace(p, lhs=p.lhs.xreplace(alike), rhs=p.rhs.xreplace(alike)) for p in second.block.predicate}
    if over & common or not guards <= same:
        return False
    ours = dict(zip((x.var for x in first.block.axes), first.block.bindings, strict=True))
    theirs = {x.var: b.xreplace(alike) for x, b in zip(second.block.axes, second.block.bindings, strict=True)}
    inner = {lp.var for lp in first.loops} - common - set(alike.values())
    for i, j in zip(write.indices, read.indices, strict=True):
        if is_value(i) or is_value(j):
            return False
        here, there = i.xreplace(ours), j.xreplace(theirs)  # type: ignore[union-attr]
        if here.free_symbols & inner or sympy.expand(here - there) != 0:
            return False
    return True


def _regions(place: BlockPlace, outer: Collection[sympy.Symbol]) -> Mapping[sympy.Symbol, Region]:
    inner = {lp.var: lp.extent for lp in place.loops if lp.var not in outer}
    return axis_regions(place.block, outer, inner)


def check_pairs(
    nest: LoopNest,
    pairs: Iterable[tuple[BlockPlace, BlockPlace]],
    asked: str,
    shown: LoopNest,
    depth: int | None = None,
) -> None:
    """Raise ScheduleError, showing the nest ``shown``, for the first pair that would be wrong."""
    for first, second in pairs:
        reason = conflict(nest, first, second, depth)
        if reason:
            raise ScheduleError(asked, reason, shown, second.block.name)


def check_moved(before: LoopNest, after: LoopNest, name: str, asked: str) -> None:
    """Check that one block, wherever it went, is still right with every other. Raises ScheduleError."""
    old, new = places(before), places(after)
    was, now = old[name], new[name]
    mine = accesses(was.block)
    _check_runs(before, was, now, asked)
    for other in new.values():
        if other.block.name == name or other.block.name not in old:
            continue
        theirs = accesses(other.block)
        if not (mine.written & (theirs.read | theirs.written) or mine.read & theirs.written):
            continue
        earlier = old[other.block.name].order < was.order
        if earlier != (other.order < now.order):
            side, wrong = ("after", "before") if earlier else ("before", "after")
            raise ScheduleError(
                asked, f"it would come {wrong} {other.block.name} and has to stay {side} it", before, other.block.name
            )
        first, second = (other, now) if earlier else (now, other)
        reason = conflict(after, first, second)
        if reason:
            raise ScheduleError(asked, reason, before, other.block.name)


def refuse_scatter(nest: LoopNest, block: Block, asked: str) -> None:
    """Refuse to take a block apart, or to compute it elsewhere, that writes where data say."""
    if block.is_scatter:
        raise ScheduleError(asked, "it scatters: it writes where data say", nest, block.name)


def refuse_continued(nest: LoopNest, block: Block, asked: str) -> None:
    """Refuse to compute a block elsewhere whose updates go on from what is there: done twice they would count twice."""
    refuse_scatter(nest, block, asked)
    if any(isinstance(s, Update) and not s.begins for s in block.body):
        raise ScheduleError(
            asked, "it goes on from what another block has begun", nest, block.name,
            "move it before decompose_reduction",
        )  # fmt: skip


def _check_runs(nest: LoopNest, was: BlockPlace, now: BlockPlace, asked: str) -> None:
    """Refuse loops around a block that may not run at all, where what it writes leaves the nest. Raises ScheduleError.

    A loop that makes up one of the block's axes is empty where the axis is; others must have an iteration.
    """
    if not accesses(now.block).written & set(nest.outputs):
        return
    own = {s for b in now.block.bindings for s in b.free_symbols}
    before = {lp.var for lp in was.loops}
    for lp in now.loops:
        if lp.var not in own and lp.var not in before and nest.symbols.bounds(lp.extent, _extents(now))[0] < 1:
            raise ScheduleError(
                asked, f"{lp.var} runs {lp.extent} times, which may be none: then {now.block.name} would not write its "
                "output", nest, now.block.name, "say in the size's lower bound that it is not zero",
            )  # fmt: skip


def _extents(place: BlockPlace) -> dict[sympy.Symbol, sympy.Expr]:
    return {lp.var: lp.extent for lp in place.loops}


def pairs_under(node: Loop, outer: tuple[Loop, ...]) -> list[tuple[BlockPlace, BlockPlace]]:
    """Each pair of blocks inside a loop, in order."""
    found: dict[str, BlockPlace] = {}
    _collect(node.body, (*outer, node), found)
    inside = list(found.values())
    return [(a, b) for k, a in enumerate(inside) for b in inside[k + 1 :]]
