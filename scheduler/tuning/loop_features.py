"""Features of a scheduled nest's loops: what runs side by side, what is wasted, what stays in caches and registers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...ir.expr.value import Load
from ...ir.nest.hints import HINTS, Annotated, Changes
from ...ir.nest.loops import BLOCK_KINDS, Block, Loop, LoopKind, LoopNest, Scope, Store, Update, walk_nodes
from ...ir.target import Target
from ..cost.cpu_kernels import LINE
from .measures import BlockWork, NestMeasures, Reference, elements

# How many of the largest buffers, and of the innermost loops, are told of.
BUFFERS, DEPTHS = 5, 4
_OF_BUFFER = ("bytes", "lines", "accessed", "lane", "stride", "reuse", "distance", "written")
_FAR = 40.0
# Hints that are numbers, or yes and no, for the whole of a nest or a loop.
NUMBERS = tuple(
    h.name for h in HINTS.values()
    if h.changes is not Changes.MEANING and not (h.of_buffer or h.of_outputs or isinstance(h.default, str))
)  # fmt: skip
_ONE = (LoopKind.SERIAL, LoopKind.PARALLEL, *BLOCK_KINDS)

LOOP_FEATURES: tuple[str, ...] = (
    "loops.serial", "loops.parallel", "loops.vectorized", "loops.unrolled", "loops.blocks", "loops.threads",
    "loops.parallel.extent", "loops.parallel.tasks", "loops.parallel.imbalance", "loops.parallel.regions",
    "loops.parallel.work", "loops.grid", "loops.grid.waves", "loops.tile", "loops.tile.thread",
    "loops.lanes.most", "loops.lanes.least", "loops.lanes.share", "loops.lanes.across", "loops.copies.most",
    "loops.copies.body", "loops.serial.innermost", "loops.serial.shortest", "loops.depth", "loops.waste",
    "loops.waste.most", "loops.recomputed", "loops.entered", "loops.instructions", "loops.instructions.strided",
    "loops.memory", "loops.memory.l1", "loops.cycles", "loops.trips", "loops.body", "loops.masked", "loops.steps",
    "loops.accumulators", "loops.accumulators.chain", "loops.scratch",
    "loops.copies.blocks", *(f"hint.{name}" for name in NUMBERS),
    *(f"buffer.{k}.{n}" for k in range(BUFFERS) for n in _OF_BUFFER),
    *(f"footprint.{k}.{level}" for k in range(DEPTHS) for level in ("l1", "l2", "trips")),
)  # fmt: skip


def loop_features(found: NestMeasures, target: Target) -> dict[str, float]:
    """What the loops of a scheduled nest make of the machine."""
    nest = found.nest
    loops = [n for n, _ in walk_nodes(nest.body) if isinstance(n, Loop)]
    return {
        **_kinds(loops), **_hints(nest, loops), **_buffers(found), **_bodies(found, target),
        **base_features(found, target), **_memory(found, target),
    }  # fmt: skip


def base_features(found: NestMeasures, target: Target) -> dict[str, float]:
    """Those that tell most, of which drafts have some."""
    loops = [(n, outer) for n, outer in walk_nodes(found.nest.body) if isinstance(n, Loop)]
    return {
        **_teams(found, loops, target), **_lanes(found, target), **_waste(found, loops), **_registers(found, target),
        **_footprints(found, target),
    }  # fmt: skip


def _log(value: float) -> float:
    return math.log2(1.0 + max(value, 0.0))


def _kinds(loops: list[Loop]) -> dict[str, float]:
    counts = {
        "serial": (LoopKind.SERIAL,), "parallel": (LoopKind.PARALLEL,), "vectorized": (LoopKind.VECTORIZED,),
        "unrolled": (LoopKind.UNROLLED,), "blocks": BLOCK_KINDS, "threads": (LoopKind.THREAD_X,),
    }  # fmt: skip
    return {f"loops.{name}": float(sum(lp.kind in kinds for lp in loops)) for name, kinds in counts.items()}


def _teams(found: NestMeasures, loops: list[tuple[Loop, tuple[Loop, ...]]], target: Target) -> dict[str, float]:
    """BlockWork that runs side by side."""
    hint = found.nest.symbols.hint
    teams = [lp for lp, _ in loops if lp.kind is LoopKind.PARALLEL]
    extents = [hint(lp.extent) for lp in teams]
    total = sum(w.iterations * w.cost for w in found.works)
    in_teams = sum(
        w.iterations * w.cost for w in found.works if any(lp.kind is LoopKind.PARALLEL for lp in w.path)
    )  # fmt: skip
    grids = [
        math.prod(w.extents[lp.var.name] for lp in w.path if lp.kind in BLOCK_KINDS) for w in found.works
    ]  # fmt: skip
    tiles = [
        math.prod(w.extents[lp.var.name] for lp in w.path if lp.kind is LoopKind.THREAD_X) for w in found.works
    ]  # fmt: skip
    grid, tile = max(grids, default=1), max(tiles, default=1)
    threads = max(int(HINTS["num_warps"].of(found.nest)) * target.warp, 1)
    cores = max(target.cores, 1)
    return {
        "loops.parallel.extent": _log(max(extents, default=0)),
        "loops.parallel.tasks": _log(max(extents, default=0) / cores),
        "loops.parallel.imbalance": max((_imbalance(e, cores) for e in extents), default=0.0),
        "loops.parallel.regions": float(len(teams)),
        "loops.parallel.work": in_teams / max(total, 1.0),
        "loops.grid": _log(grid), "loops.grid.waves": _imbalance(grid, cores),
        "loops.tile": _log(tile), "loops.tile.thread": _log(tile / threads),
    }  # fmt: skip


def _imbalance(count: int, cores: int) -> float:
    """How much longer the busiest core works than it would with equal parts."""
    return math.log2(max(math.ceil(count / cores) * cores / count, 1.0)) if count else 0.0


def _lanes(found: NestMeasures, target: Target) -> dict[str, float]:
    """Lanes in registers, and copies that are written out."""
    works = found.works
    native = max(target.lanes(4), 1)
    lanes = [w.lanes for w in works]
    total = max(sum(w.iterations * w.cost for w in works), 1.0)
    vectors = sum(w.iterations * w.cost for w in works if w.lanes > 1)
    across = sum(
        w.iterations * w.cost for w in works
        if any(lp.kind is LoopKind.VECTORIZED and lp.var.name in w.over for lp in w.path)
    )  # fmt: skip
    copies = [
        math.prod(w.extents[lp.var.name] for lp in w.path if lp.kind is LoopKind.UNROLLED) for w in works
    ]  # fmt: skip
    instructions = strided = 0.0
    for w in works:
        per = max(w.lanes / native, 1.0) / max(w.lanes, 1)
        lane = next((lp.var.name for lp in reversed(w.path) if lp.kind is LoopKind.VECTORIZED), None)
        odd = sum(_is_odd(r, lane) for r in w.references) * (1.0 - per if lane else 0.0)
        instructions += w.iterations * (w.cost * per + odd)
        strided += w.iterations * odd
    serial = [[w.extents[lp.var.name] for lp in w.path if lp.kind in _ONE] for w in works]
    ends = [s[-1] for s in serial if s]
    return {
        "loops.lanes.most": _log(max(lanes, default=1)), "loops.lanes.least": _log(min(lanes, default=1)),
        "loops.lanes.share": vectors / total, "loops.lanes.across": across / total,
        "loops.copies.most": _log(max(copies, default=1)),
        "loops.copies.body": _log(
            max((c * w.cost * max(w.lanes / native, 1.0) for c, w in zip(copies, works, strict=True)), default=0.0)
        ),
        "loops.serial.innermost": _log(max(ends, default=0)), "loops.serial.shortest": _log(min(ends, default=0)),
        "loops.depth": float(max((len(w.path) for w in works), default=0)),
        "loops.instructions": _log(instructions), "loops.instructions.strided": _log(strided),
    }  # fmt: skip


def _bodies(found: NestMeasures, target: Target) -> dict[str, float]:
    """What innermost loops are: how often their bodies run, what stands in one, and how much of it is under a mask."""
    native = max(target.lanes(4), 1)
    trips = done = masked = memory = 0.0
    for w in found.works:
        inner = [lp for lp in w.path if lp.kind not in _ONE]
        copies = math.prod(w.extents[lp.var.name] for lp in inner)
        here = w.iterations / max(copies, 1)
        instructions = w.iterations * w.cost * max(w.lanes / native, 1.0) / max(w.lanes, 1)
        trips += here
        done += instructions
        masked += instructions * bool(w.block.predicate)
        memory += w.iterations * len(w.references) / max(w.lanes, 1)
    return {
        "loops.trips": _log(trips), "loops.body": _log(done / max(trips, 1.0)),
        "loops.masked": masked / max(done, 1.0), "loops.steps": memory / max(done, 1.0),
    }  # fmt: skip


def _is_odd(reference: Reference, lane: str | None) -> bool:
    """Whether lanes of an access are neither neighbours nor one value."""
    return lane is not None and reference.steps.get(lane, 0.0) not in (0.0, 1.0)


def _waste(found: NestMeasures, loops: list[tuple[Loop, tuple[Loop, ...]]]) -> dict[str, float]:
    """Iterations past the ends of the domain, iterations done again, and how often loops are entered."""
    works = found.works
    hint = found.nest.symbols.hint
    useful = max(sum(w.useful * w.cost for w in works), 1.0)
    done = sum(w.iterations * w.cost for w in works)
    ratios = [w.iterations / w.useful for w in works if w.useful]
    entered = sum(
        math.prod(hint(o.extent) for o in outer if o.kind in _ONE) for lp, outer in loops if lp.kind in _ONE
    )  # fmt: skip
    again = sum(w.iterations for w in works if w.iterations > 1.5 * max(w.useful, 1.0))
    return {
        "loops.waste": math.log2(max(done / useful, 0.0) + 1.0), "loops.waste.most": _log(max(ratios, default=1.0)),
        "loops.recomputed": _log(again), "loops.entered": _log(entered),
        "loops.copies.blocks": float(sum(_is_copy(w.block) for w in works)),
    }  # fmt: skip


def _registers(found: NestMeasures, target: Target) -> dict[str, float]:
    """Accumulators that are alive at once, the chains that wait for them, and scratch memory."""
    native = max(target.lanes(4), 1)
    most, chain = 0.0, 0.0
    for w in found.works:
        if not w.over:
            continue
        names = [lp.var.name for lp in w.path]
        first = min(names.index(n) for n in w.over)
        inside = [lp for lp in w.path[first:] if lp.var.name not in w.over or lp.kind is not LoopKind.SERIAL]
        states = max(len(s.values) for s in w.block.body if isinstance(s, Update)) if w.block.is_reduction else 1
        size = math.prod(w.extents[lp.var.name] for lp in inside)
        lanes = max(w.lanes, 1)
        if not any(lp.kind is LoopKind.VECTORIZED for lp in inside):
            size *= lanes
        most = max(most, states * max(size / native, 1.0))
        terms = math.prod(w.extents[n] for n in w.over)
        across = math.prod(w.extents[lp.var.name] for lp in inside if lp.var.name in w.over)
        chain = max(chain, terms / max(across, 1))
    hint = found.nest.symbols.hint
    scratch = sum(
        math.prod(hint(e) for e in b.shape) * b.dtype.itemsize for b in found.nest.locals if b.scope is Scope.LOCAL
    )  # fmt: skip
    return {
        "loops.accumulators": _log(most), "loops.accumulators.chain": _log(chain), "loops.scratch": _log(scratch),
    }  # fmt: skip


def _hints(nest: LoopNest, loops: list[Loop]) -> dict[str, float]:
    """The greatest value of each hint that a nest or a loop has: 0 where nobody says one."""
    found = {f"hint.{name}": 0.0 for name in NUMBERS}
    places: tuple[Annotated, ...] = (nest, *loops)
    said = [n for n in places if n.annotations]
    for name in NUMBERS if said else ():
        hint = HINTS[name]
        for node in said:
            value = hint.found(node)
            if isinstance(value, (bool, int)):
                found[f"hint.{name}"] = max(found[f"hint.{name}"], _log(float(value)))
    return found


def _is_copy(block: Block) -> bool:
    """Whether a block only copies what it reads."""
    return all(isinstance(s, Store) and isinstance(s.value, Load) for s in block.body)


# --- memory -----------------------------------------------------------------------------------------------------------


def _buffers(found: NestMeasures) -> dict[str, float]:
    """The buffers with the most bytes: of each its dominant access."""
    chosen: dict[str, tuple[float, BlockWork, Reference]] = {}
    for w in found.works:
        for r in w.references:
            accessed = w.iterations * r.itemsize
            if r.buffer not in chosen or accessed > chosen[r.buffer][0]:
                chosen[r.buffer] = (accessed, w, r)
    largest = sorted(chosen.values(), key=lambda c: (-_bytes(c[1], c[2]), c[2].buffer))[:BUFFERS]
    values = {f"buffer.{k}.{n}": 0.0 for k in range(BUFFERS) for n in _OF_BUFFER}
    for k, (accessed, w, r) in enumerate(largest):
        unique = _bytes(w, r)
        tiles = (LoopKind.VECTORIZED, LoopKind.THREAD_X)
        lane = next((lp.var.name for lp in reversed(w.path) if lp.kind in tiles), None)
        serial = next((lp.var.name for lp in reversed(w.path) if lp.kind in _ONE), None)
        values |= {
            f"buffer.{k}.bytes": _log(unique), f"buffer.{k}.lines": _log(found.lines(w, r)),
            f"buffer.{k}.accessed": _log(accessed),
            f"buffer.{k}.lane": _stride(r, lane), f"buffer.{k}.stride": _stride(r, serial),
            f"buffer.{k}.reuse": _log(accessed / max(unique, 1.0)), f"buffer.{k}.distance": _distance(found, w, r),
            f"buffer.{k}.written": float(r.is_write),
        }  # fmt: skip
    return values


def _bytes(w: BlockWork, r: Reference) -> float:
    return elements(r, w.extents, w.extents) * r.itemsize


def _stride(r: Reference, loop: str | None) -> float:
    """Bytes between neighbours along a loop, as a logarithm; -1 where there is no such loop."""
    return -1.0 if loop is None else _log(abs(r.steps.get(loop, 0.0)) * r.itemsize)


def _distance(found: NestMeasures, w: BlockWork, r: Reference) -> float:
    """Bytes touched between two visits of an element, as a logarithm: what its innermost loop of reuse holds."""
    for lp in reversed(w.path):
        if w.extents[lp.var.name] > 1 and not r.steps.get(lp.var.name, 0.0):
            return _log(found.held(lp))
    return _FAR


def _footprints(found: NestMeasures, target: Target) -> dict[str, float]:
    """Bytes that one iteration of the innermost loops touches, against the caches."""
    values = {f"footprint.{k}.{level}": 0.0 for k in range(DEPTHS) for level in ("l1", "l2", "trips")}
    heaviest = max(found.works, key=lambda w: w.iterations * w.cost, default=None)
    around = [lp for lp in heaviest.path if lp.kind in _ONE] if heaviest is not None else []
    for k, lp in zip(range(DEPTHS), reversed(around), strict=False):
        bytes_ = sum(found.touched(found.inside(lp) | {lp.var.name}).values())
        values[f"footprint.{k}.l1"] = math.log2(max(bytes_, 1.0) / max(target.l1_bytes, 1))
        values[f"footprint.{k}.l2"] = math.log2(max(bytes_, 1.0) / max(target.l2_bytes, 1))
        values[f"footprint.{k}.trips"] = _log(found.nest.symbols.hint(lp.extent))
    return values


def _memory(found: NestMeasures, target: Target) -> dict[str, float]:
    """Bytes from beyond the caches, and cycles, by estimate."""
    memory = sum(traffic_past(found, target.l2_bytes))
    work = sum(w.iterations * w.cost / max(min(w.lanes, target.lanes(4)), 1) for w in found.works)
    return {
        "loops.memory": _log(memory), "loops.memory.l1": _log(sum(traffic_past(found, target.l1_bytes))),
        "loops.cycles": _log(max(work, memory / 8.0)),
    }  # fmt: skip


def traffic_past(found: NestMeasures, cache: int) -> Iterator[float]:
    """Bytes from beyond a cache of so many: what a loop touches is fetched anew where it does not fit."""
    for w in found.works:
        for r in w.references:
            times, fits = 1.0, True
            for lp in reversed(w.path):
                if fits and w.extents[lp.var.name] > 1 and not r.steps.get(lp.var.name, 0.0):
                    fits = found.held(lp) <= cache
                if not fits and not r.steps.get(lp.var.name, 0.0):
                    times *= w.extents[lp.var.name]
            yield times * LINE * found.lines(w, r)
