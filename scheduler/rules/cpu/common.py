"""Steps that the CPU rules share: rows brought together, lanes, teams."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

import sympy

from ....ir.expr.dtypes import DType
from ....ir.expr.iterations import ITERATIONS
from ....ir.expr.value import Call, Const, Expr, IndexValue, Load, children, flops, walk
from ....ir.nest.hints import CASCADE
from ....ir.nest.loops import AxisKind, Block, Loop, LoopKind, LoopNest, Scope, Store, Update, blocks
from ....ir.target import Target
from ...cost.cpu_kernels import HEAVY_FLOPS, LEAST_IN_FLIGHT, LINE, TRANSPOSED_LANES, TRANSPOSED_TILE, WORTH_A_TAIL
from ...error import ScheduleError
from ...primitives.analysis.dependence import scanned
from ...primitives.analysis.tree import blocks_under
from ...schedule.schedule import Schedule
from ..analysis import NestShape

UNROLLS = (4, 2, 8, 1)
# Terms of one accumulator past which sums are made of sums, which err far less than one long sum (Higham 2002, 4.2).
LONG = 256
_QUOTIENTS = frozenset(("floordiv", "remainder", "truncdiv", "fmod"))


def unroll_values(nest: LoopNest, target: Target) -> Mapping[str, tuple[int, ...]]:
    """How many registers wide a vector loop is: enough to hide latency, not so many that constants are spilled.

    One where that is AMD's, whose halves of a register follow one another anyway, and whose prefetchers keep up with
    several arrays best where these are read evenly.
    """
    if target.machine.reads_ahead:
        return {"unroll": (1, 2, 4, 8)}
    heavy = max((cost(b) for b, _ in blocks(nest)), default=0) >= HEAVY_FLOPS
    return {"unroll": (2, 4, 1, 8) if heavy else UNROLLS}


def cost(block: Block) -> int:
    """Operations of one iteration of a block."""
    return sum(flops(v) for s in block.body for v in values(s))


def values(statement: Store | Update) -> tuple[Expr, ...]:
    return statement.values if isinstance(statement, Update) else (statement.value,)


def _one_by_one(nest: LoopNest) -> bool:
    """Whether lanes are computed one after the other, as quotients of integers are, or loop as often as data tell.

    More of them at a time would only be more code, which takes a compiler minutes where there is much of it.
    """
    made = (e for b, _ in blocks(nest) for s in b.body for v in values(s) for e in walk(v) if isinstance(e, Call))
    return any(e.fn in ITERATIONS or (e.fn in _QUOTIENTS and e.dtype.is_int) for e in made)


def lane_bytes(nest: LoopNest) -> int:
    """Bytes of the widest type that is computed with: narrower ones share its number of lanes.

    And halves compute wide.
    """
    return _widest(e for block, _ in blocks(nest) for s in block.body for v in values(s) for e in _lanes(v))


def moving_bytes(schedule: Schedule, loop: str) -> int:
    """The same of what differs from one iteration of a loop to the next: what does not is one value for all lanes."""
    found: list[Expr] = []
    for block in blocks_under(schedule.loop(loop)):
        over = zip(block.axes, block.bindings, strict=True)
        moving = {axis.var for axis, binding in over if any(s.name == loop for s in binding.free_symbols)}
        known: dict[int, bool] = {}
        parts = (e for s in block.body for v in values(s) for e in _lanes(v))
        found += (e for e in parts if _mentions(e, moving, known))
    return _widest(found)


def _mentions(expr: Expr, symbols: Set[sympy.Symbol], known: dict[int, bool]) -> bool:
    """Whether an index somewhere in an expression mentions one of the symbols; ``known`` of parts by their ids."""
    found = known.get(id(expr))
    if found is None:
        own = expr.indices if isinstance(expr, Load) else (expr.index,) if isinstance(expr, IndexValue) else ()
        found = any(isinstance(i, sympy.Expr) and not symbols.isdisjoint(i.free_symbols) for i in own)
        found = found or any([_mentions(e, symbols, known) for e in children(expr)])
        known[id(expr)] = found
    return found


def _widest(lanes: Iterable[Expr]) -> int:
    # An index that is looked up for a whole vector is no lane.
    sizes = (e.dtype.itemsize for e in lanes if not isinstance(e, Load) or e.dtype.is_float)
    return min(max((4, *sizes)), 8)


def _lanes(value: Expr) -> Iterator[Expr]:
    """The parts of a value that lanes are made for: where a position is compared with another, only the outcome is."""
    yield value
    if isinstance(value, Call) and value.fn in ("lt", "le", "gt", "ge") and all(map(_is_position, value.args)):
        return
    for part in children(value):
        yield from _lanes(part)


def _is_position(e: Expr) -> bool:
    return isinstance(e, (IndexValue, Const)) and e.dtype is DType.INT64


def choose_width(target: Target, nest: LoopNest, extent: sympy.Expr, unroll: int, size: int = 0) -> int:
    """Lanes of a vector loop over ``extent``: the wanted width, less where that leaves no tail.

    Or the whole of a short loop. ``size``: bytes of a lane, found in the nest where not given.
    """
    native = target.lanes(size or lane_bytes(nest))
    wanted = native * (1 if _one_by_one(nest) else unroll)
    divisor = nest.symbols.divisor(extent)
    if extent.is_Integer and int(extent) <= wanted:
        return max(int(extent), 1)
    width = wanted
    while width >= native:
        if divisor % width == 0:
            return width
        width //= 2
    return wanted


def in_flight(target: Target, nest: LoopNest, extent: sympy.Expr, size: int = 0) -> int:
    """Lanes with which a reduction of little work does not wait for its own results, a tail or not: as many as fit
    several times into ``extent``, since a tail takes longer than what it leaves out."""
    native = target.lanes(size or lane_bytes(nest))
    width = native * LEAST_IN_FLIGHT
    while width > native and nest.symbols.hint(extent) < WORTH_A_TAIL * width:
        width //= 2
    return width


def vectorize_loop(schedule: Schedule, loop: str, target: Target, unroll: int, waits: bool = False) -> None:
    """Split a loop by the width of its vectors and make the inner part lanes; ``waits`` where it reduces with little
    work, and would wait for its own results."""
    extent = schedule.extent(loop)
    size = moving_bytes(schedule, loop)
    width = choose_width(target, schedule.nest, extent, unroll, size)
    if waits and extent != width and not _one_by_one(schedule.nest):
        width = max(width, in_flight(target, schedule.nest, extent, size))
    if width == 1:
        return
    inner = loop
    if extent != width:
        if is_long(schedule, loop, width):
            _, run, inner = schedule.split(loop, [None, run_length(schedule, loop, width), width])
            schedule.annotate(run, CASCADE, True)
        else:
            _, inner = schedule.split(loop, [None, width])
    schedule.vectorize(inner)


def is_long(schedule: Schedule, loop: str, width: int) -> bool:
    """Whether one accumulator would take so many terms of a rounding reduction that its error shows."""
    inside = blocks_under(schedule.loop(loop))
    rounding = [
        b
        for b in inside
        for s in b.body
        if isinstance(s, Update) and not s.monoid.exact and s.values[0].dtype.is_float and _reduces(b, loop)
    ]
    if not rounding:
        return False
    _, most = schedule.nest.symbols.bounds(schedule.extent(loop))
    return most is None or most > LONG * width


def run_length(schedule: Schedule, loop: str, width: int) -> int:
    """How many terms to sum before they join the rest: about the square root of all, so that both sums are short."""
    terms = schedule.nest.symbols.hint(schedule.extent(loop), default=LONG * width) // width
    return 1 << min(max((max(terms, 1).bit_length() + 1) // 2, 5), 9)


def _carries(block: Block, loop: str) -> bool:
    return _reduces(block, loop) or any(v.name == loop for v in scanned(block))


def _reduces(block: Block, loop: str) -> bool:
    return any(
        axis.kind is AxisKind.REDUCTION and any(s.name == loop for s in binding.free_symbols)
        for axis, binding in zip(block.axes, block.bindings, strict=True)
    )


def vectorize_innermost(
    schedule: Schedule, target: Target, unroll: int, skip: int = 0, only: str | None = None
) -> None:
    """Lanes on the innermost loop of every block (or of ``only``) that has more than ``skip`` loops, where that loop
    has no other inside."""
    for block in schedule.get_blocks() if only is None else [only]:
        loops = schedule.get_loops(block)
        if len(loops) <= skip:
            continue
        innermost = schedule.loop(loops[-1])
        if innermost.kind is LoopKind.SERIAL and not any(isinstance(n, Loop) for n in innermost.body):
            light = schedule.block(block).is_reduction and cost(schedule.block(block)) < HEAVY_FLOPS
            waits = light and _reduces(schedule.block(block), loops[-1])
            vectorize_loop(schedule, loops[-1], target, max(unroll, LEAST_IN_FLIGHT) if light else unroll, waits)


def parallel_roots(schedule: Schedule, target: Target) -> None:
    """A team for every outermost loop that carries no reduction.

    Two loops together where one has too few iterations.
    """
    seen: set[str] = set()
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        if not loops or loops[0] in seen:
            continue
        root = schedule.loop(loops[0])
        seen.add(loops[0])
        if root.kind is not LoopKind.SERIAL:
            continue
        hint = schedule.nest.symbols.hint(root.extent)
        nested = len(root.body) == 1 and len(loops) > 1 and schedule.loop(loops[1]).kind is LoopKind.SERIAL
        nested = nested and not any(_carries(schedule.block(b), loops[1]) for b in schedule.get_blocks())
        if root.extent == 1 and not nested:
            continue
        try:
            if hint < 4 * target.cores and nested:
                joined = schedule.fuse(loops[0], loops[1])
                seen.add(joined)
                schedule.parallel(joined)
            else:
                schedule.parallel(loops[0])
        except ScheduleError:
            try:
                schedule.parallel(loops[0])
            except ScheduleError:
                continue


def merge_rows(schedule: Schedule, rows: int, only: Collection[str] | None = None) -> None:
    """Put all stages of a row (or ``only`` some) under one set of row loops, as far as dependences allow."""
    for level in range(rows):
        _merge_level(schedule, level, only)


def merge_inner(schedule: Schedule, rows: int, only: Collection[str] | None = None) -> None:
    """Let neighbouring stages over the same elements share their loops: fewest passes over a row."""
    depth = max((len(schedule.get_loops(b)) for b in schedule.get_blocks()), default=0)
    for level in range(rows, depth):
        _merge_level(schedule, level, only)


def merge_paths(schedule: Schedule, paths: list[list[str]]) -> list[str]:
    """Blocks under loops that they share: each path has the outer loops of one block, outermost first, in the order in
    which blocks stand. The longest path as it is then."""
    merged = []
    for level in range(max(map(len, paths))):
        loop, *others = (path[level] for path in paths if len(path) > level)
        for other in others:
            schedule.merge(loop, other)
        merged.append(loop)
    return merged


def _merge_level(schedule: Schedule, level: int, only: Collection[str] | None) -> None:
    previous: str | None = None
    for block in schedule.get_blocks():
        if only is not None and block not in only:
            continue
        loops = schedule.get_loops(block)
        if len(loops) <= level:
            previous = None
            continue
        here = loops[level]
        if previous is not None and here != previous:
            try:
                schedule.merge(previous, here)
                here = previous
            except ScheduleError:
                pass
        previous = here


def inline_cheap(schedule: Schedule, limit: int = 2) -> None:
    """Compute cheap intermediate elements again instead of keeping a row of them."""
    local = {b.name for b in schedule.nest.locals if b.scope is Scope.LOCAL}
    for name in schedule.get_blocks():
        block = schedule.block(name)
        writes = [w.buffer for w in block.writes]
        if block.is_reduction or cost(block) > limit or len(writes) != 1 or writes[0] not in local:
            continue
        try:
            schedule.compute_inline(name)
        except ScheduleError:
            continue


def cut_rows(schedule: Schedule, block: str, rows: int, partials: int) -> str | None:
    """Reduce ``partials`` pieces of a block's reduction by themselves, the loop over pieces outermost.

    The block that does it.
    """
    loops = schedule.get_loops(block)
    if len(loops) <= rows or schedule.loop(loops[rows]).kind is not LoopKind.SERIAL:
        return None
    try:
        piece, _ = schedule.split(loops[rows], [partials, None])
        partial = schedule.rfactor(piece)
        others = [lp for lp in schedule.get_loops(partial) if lp != piece]
        if schedule.get_loops(partial)[0] != piece:
            schedule.reorder(piece, *others)
    except ScheduleError:
        return None
    return partial


SHORT = 8


def best_vector(shape: NestShape) -> sympy.Symbol | None:
    """The dimension along which most traffic is contiguous: bytes times how often; writes count double.

    Later ones win ties. A dimension too short to fill a register, such as a pooling window, is chosen only if all are.
    """
    hint = shape.nest.symbols.hint
    extents = {a.var: a.extent for b in shape.blocks for a in b.axes} | dict((*shape.rows, *shape.inner))
    scores: dict[sympy.Symbol, int] = {}
    for a in shape.accesses:
        count = 1
        for var, step in a.steps:
            count *= hint(extents[var]) if step != 0 else 1
        for var, step in a.steps:
            if step == 1 and extents[var] != 1:
                scores[var] = scores.get(var, 0) + count * a.buffer.dtype.itemsize * (2 if a.is_write else 1)
    order = {var: k for k, var in enumerate(extents)}
    return max(scores, key=lambda v: (hint(extents[v]) >= SHORT, scores[v], order[v]), default=None)


def crosses(shape: NestShape, vector: sympy.Symbol | None) -> sympy.Symbol | None:
    """A dimension that some access is contiguous in while it jumps along ``vector``.

    Tiles of the two use whole cache lines.
    """
    for a in shape.accesses:
        if vector is not None and a.step(vector) not in (0, 1, None):
            for var, step in a.steps:
                if step == 1 and var != vector:
                    return var
    return None


def begins_in_lines(shape: NestShape) -> bool:
    """Whether tiles are transposed, and all rows of all arrays begin at the same place of a cache line."""
    if crosses(shape, best_vector(shape)) is None:
        return False
    divisor = shape.nest.symbols.divisor
    return all(
        step is not None and (step in (0, 1) or divisor(step) * a.buffer.dtype.itemsize % LINE == 0)
        for a in shape.accesses
        for _, step in a.steps
    )


def tile_lanes(shape: NestShape, target: Target) -> int:
    """The lanes of a tile that is transposed in registers, of ``TRANSPOSED_TILE`` elements of the other side."""
    native = target.lanes(lane_bytes(shape.nest))
    return min(max(native, TRANSPOSED_LANES), TRANSPOSED_TILE) if begins_in_lines(shape) else TRANSPOSED_LANES


def row_loops(shape: NestShape) -> int:
    """How many loops of every stage run over rows."""
    return len(shape.rows)


def roots(schedule: Schedule) -> Iterator[tuple[str, list[str]]]:
    """The outermost loops, each with the blocks inside."""
    grouped: dict[str, list[str]] = {}
    for block in schedule.get_blocks():
        loops = schedule.get_loops(block)
        if loops:
            grouped.setdefault(loops[0], []).append(block)
    yield from grouped.items()
