"""Sites: where a rule's schedule of a nest may be edited, and the values worth trying at each.

Sites are read off the rule's own schedule, so that most edits that are drawn are legal; those that are not are refused
when they are applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy

from ...ir.expr.value import is_value
from ...ir.nest.hints import HINTS, Annotated, Changes, Hint, Place
from ...ir.nest.loops import AxisKind, Block, Loop, LoopKind, LoopNest, blocks, walk_nodes
from ...ir.target import Target
from ..primitives.analysis.tree import blocks_under
from ..schedule.trace import Step
from .edits import AND, Base, TraceEdit, is_team, is_tile, step_name
from .order import rounds

# Registers of lanes; elements of a tile's axis; iterations of a chunk, a tile, a jam and an unrolled loop.
REGISTERS, ELEMENTS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512, 1024)
CHUNKS, TILES, JAMS, UNROLLS = (2, 4, 8, 16, 32, 64), (4, 8, 16, 32, 64, 128), (2, 4, 8), (2, 4, 8)
# What a hint may be that takes any number: so many, and so many times what holds where nothing is said.
COUNTS, TIMES = (0, 128, 256, 512, 1024, 2048), (1 / 32, 1 / 8, 8, 128)
# A hint of no more values is tried with each.
FEW = 8
# A loop of no more iterations may be written out as a whole, and be jammed.
WRITTEN = 16
# Hints that speak of tensorized blocks, or of what data decide there.
OF_PRODUCTS = ("descriptor", "transposed", "column_parts", "data_ends", "warp_specialize")
# Steps that a rule can do without.
OPTIONAL = ("merge", "unroll", "annotate", "parallel", "compute_inline", "pipeline")


@dataclass(frozen=True, slots=True)
class EditSite:
    """One place of a schedule and the values that may stand there. ``reduces``: it may change an order of combining.
    ``here`` is the factor that the rule has there, ``is_lanes`` whether it is of lanes or of a tile."""

    kind: str
    at: str
    values: tuple[int | str, ...]
    reduces: bool = False
    here: int | None = None
    is_lanes: bool = False

    def edits(self) -> Iterator[TraceEdit]:
        """The edit of each value."""
        return (TraceEdit(self.kind, self.at, v) for v in self.values)


def sites_of(base: Base, nest: LoopNest, target: Target) -> tuple[EditSite, ...]:
    """The sites of a rule's schedule, always in the same order."""
    made = base.schedule.nest
    found = [*_inlined(nest), *_factors(base, target), *_steps(base, target)]
    is_grid = target.is_gpu
    # Copies of a GPU's tiles are registers, which loops do not share.
    found += [*_loops(made), *_placements(made, copies=not is_grid), *_hints(made, "gpu" if is_grid else "cpu")]
    return tuple(s for s in found if s.values)


# --- before the rule, and its steps -----------------------------------------------------------------------------------


def _inlined(nest: LoopNest) -> Iterator[EditSite]:
    local = {b.name for b in nest.locals}
    for block, _ in blocks(nest):
        writes = block.writes
        if not block.is_reduction and len(writes) == 1 and writes[0].buffer in local:
            yield EditSite("inline", block.name, (1,))


def _factors(base: Base, target: Target) -> Iterator[EditSite]:
    """The factors of splits, those of several blocks that must agree together."""
    tiles = {str(dict(s.args)["loop"]): s.primitive for s in base.trace.steps if is_tile(s)}
    carried = _carried(base)
    linked: dict[tuple[frozenset[str], tuple[Any, ...]], list[tuple[Step, sympy.Expr]]] = {}
    for k, step in enumerate(base.trace.steps):
        if step.primitive == "split":
            args = dict(step.args)
            state = base.states[k]
            key = (_axes(state.loop(args["loop"])), args["factors"])
            linked.setdefault(key, []).append((step, state.extent(args["loop"])))
    merged = {name for s in base.trace.steps if s.primitive == "merge" for _, name in s.args}
    for (_, factors), group in linked.items():
        names = [r for s, _ in group for r in s.results]
        # Stages of one tile have its shape, and loops that are one have one extent.
        together = len(group) > 1 and any(n in merged or tiles.get(n) == "bind" for n in names)
        for one in [group] if together else [[g] for g in group]:
            _, extent = one[0]
            loop = AND.join(dict(s.args)["loop"] for s, _ in one)
            reduces = any(n in carried for s, _ in one for n in (dict(s.args)["loop"], *s.results))
            for place, factor in enumerate(factors):
                if isinstance(factor, int) and not isinstance(factor, bool):
                    made_by = [tiles[s.results[place]] for s, _ in one if s.results[place] in tiles]
                    is_lanes = bool(made_by)
                    # How a tile is laid over threads follows from all of its axes.
                    reduces = reduces or (made_by[:1] == ["bind"] and bool(carried))
                    values = _near(factor, extent, target, made_by[0] if made_by else "")
                    yield EditSite("factor", f"{loop}.{place}", values, reduces, factor, is_lanes)


def _axes(loop: Loop) -> frozenset[str]:
    """The axes of blocks that a loop moves."""
    return frozenset(
        a.var.name
        for block in blocks_under(loop)
        for a, e in zip(block.axes, block.bindings, strict=True)
        if loop.var in e.free_symbols
    )


def _carried(base: Base) -> set[str]:
    """Every loop, of any state, along which something rounds."""
    nests = {id(s.nest): s.nest for s in (*base.states, base.schedule)}.values()
    return set().union(*map(_over, nests))


def _near(factor: int, extent: sympy.Expr, target: Target, tile: str) -> tuple[int, ...]:
    """Other factors; ``tile`` is the primitive that makes lanes or a tile of that part, if one does."""
    most = 2 * int(extent) if extent.is_Integer else 1 << 16
    wanted = [factor // 4, factor // 2, factor * 2, factor * 4]
    if tile == "vectorize":
        wanted = [target.lanes(4) * r for r in REGISTERS] + [target.lanes(4) // 2]
    elif not tile:
        wanted += [1, *_divisors(extent, factor)]
    return tuple(sorted({w for w in wanted if 1 <= w < most and w != factor and w <= 1 << 14}))


def _divisors(extent: sympy.Expr, near: int) -> list[int]:
    """Factors near to the one at hand that leave no tail."""
    if not extent.is_Integer:
        return []
    n = int(extent)
    return [d for d in range(max(near // 2, 1), 2 * near + 1) if n % d == 0][:4]


def _steps(base: Base, target: Target) -> Iterator[EditSite]:
    """Steps that may be left out, lanes of whole loops, and what a thread or a program takes at a time."""
    carried = _carried(base)
    split = {r for s in base.trace.steps if s.primitive == "split" for r in s.results}
    for k, step in enumerate(base.trace.steps):
        args = dict(step.args)
        loop = str(args.get("loop", ""))
        state = base.states[k]
        if step.primitive in OPTIONAL and not (step.primitive == "annotate" and args["at"] == ""):
            touches = {str(v) for v in args.values()} & carried
            yield EditSite("omit", step_name(step), (1,), step.primitive != "merge" and bool(touches))
        if is_tile(step) and loop not in split:
            extent = state.extent(loop)
            lanes = step.primitive == "vectorize"
            wanted = [target.lanes(4) * r for r in REGISTERS] if lanes else ELEMENTS
            if extent.is_Integer:
                yield EditSite("lanes", loop, tuple(w for w in wanted if w < int(extent)), loop in carried)
        if is_team(step):
            extent = state.extent(loop)
            count = int(extent) if extent.is_Integer else state.nest.symbols.hint(extent)
            yield EditSite("chunk", loop, tuple(c for c in CHUNKS if c * target.cores <= count))
            node = state.loop(loop)
            if len(node.body) == 1 and isinstance(node.body[0], Loop) and node.body[0].kind is LoopKind.SERIAL:
                yield EditSite("team", loop, (1,))


# --- loops of what the rule makes -------------------------------------------------------------------------------------


def _loops(nest: LoopNest) -> Iterator[EditSite]:
    over = _over(nest)
    for node, _ in walk_nodes(nest.body):
        if not isinstance(node, Loop) or node.kind is not LoopKind.SERIAL or node.extent == 1:
            continue
        name, reduces = node.var.name, node.var.name in over
        count = int(node.extent) if node.extent.is_Integer else None
        inside = node.body[0] if len(node.body) == 1 else None
        if isinstance(inside, Loop) and inside.kind is LoopKind.SERIAL:
            both = reduces and inside.var.name in over
            yield EditSite("order", name, (inside.var.name,), both)
            yield EditSite("tile", name, tuple(t for t in TILES if count is None or 2 * t <= count), both)
            yield EditSite("jam", name, tuple(j for j in JAMS if count is None or 2 * j <= count), reduces)
        whole = (0,) if count is not None and count <= WRITTEN else ()
        yield EditSite("unroll", name, (*whole, *(u for u in UNROLLS if count is None or 2 * u <= count)), reduces)


def _over(nest: LoopNest) -> set[str]:
    """Loops along which something is combined that rounds."""
    return {
        s.name
        for b, _ in blocks(nest)
        if rounds(b)
        for a, e in zip(b.axes, b.bindings, strict=True)
        if a.kind is not AxisKind.SPATIAL
        for s in e.free_symbols
    }


def _placements(nest: LoopNest, copies: bool) -> Iterator[EditSite]:
    """Blocks that may move to the loops of those that read them, and copies of what loops use again and again."""
    found = list(blocks(nest))
    local = {b.name for b in nest.locals}
    for block, path in found:
        made = {w.buffer for w in block.writes}
        readers = [(b, p) for b, p in found if b is not block and any(ld.buffer in made for ld in b.reads)]
        if made <= local and len(readers) == 1:
            yield EditSite("compute_at", block.name, tuple(lp.var.name for lp in readers[0][1] if lp not in path))
        sources = [p for b, p in found if b is not block and {w.buffer for w in b.writes} & _reads(block)]
        if len(sources) == 1 and not block.is_reduction:
            yield EditSite("reverse_compute_at", block.name, tuple(lp.var.name for lp in sources[0] if lp not in path))
        if not copies:
            continue
        serial = [lp.var.name for lp in path if lp.kind in (LoopKind.SERIAL, LoopKind.PARALLEL)]
        params = {b.name for b in nest.params}
        again = [ld.buffer for ld in block.reads if ld.buffer in params and _is_used_again(block, path, ld.indices)]
        for kind in ("cache_read", "pack") if again else ():
            yield EditSite(kind, block.name, tuple(f"{b}@{lp}" for b in dict.fromkeys(again) for lp in serial))
        yield EditSite(
            "cache_write", block.name, tuple(f"{b}@{lp}" for b in sorted(made) if b in params for lp in serial[:-1])
        )


def _reads(block: Block) -> set[str]:
    return {ld.buffer for ld in block.reads}


def _is_used_again(block: Block, path: tuple[Loop, ...], indices: tuple[Any, ...]) -> bool:
    """Whether an element is read in several iterations of a loop."""
    if any(is_value(i) for i in indices):
        return False
    axes = {s for i in indices for s in i.free_symbols}
    moving = {
        s for a, e in zip(block.axes, block.bindings, strict=True) if a.var in axes for s in e.free_symbols
    }  # fmt: skip
    return any(lp.var not in moving and lp.extent != 1 for lp in path)


# --- hints ------------------------------------------------------------------------------------------------------------


def _hints(nest: LoopNest, kind: str) -> Iterator[EditSite]:
    """Every hint that the target's emitter reads, wherever it may stand; one for a buffer for each that is read."""
    over = _over(nest)
    products = any(HINTS["tensorize"].of(b) for b, _ in blocks(nest))
    places: list[tuple[str, Annotated, Place, LoopKind | None]] = [("", nest, Place.NEST, None)]
    for node, _ in walk_nodes(nest.body):
        if isinstance(node, Loop) and node.extent != 1:
            places.append((node.var.name, node, Place.LOOP, node.kind))
    read = [b.name for b in nest.params if b.name not in nest.outputs]
    for at, here, place, loop in places:
        for hint in HINTS.values():
            if hint.given_by != "annotate" or kind not in hint.targets:
                continue
            if hint.changes not in (Changes.SPEED, Changes.ORDER) or (hint.name in OF_PRODUCTS and not products):
                continue
            if place not in hint.places or (loop is not None and loop not in hint.kinds):
                continue
            if place is Place.LOOP and hint.changes is not Changes.SPEED and at not in over:
                continue
            for buffer in read if hint.of_buffer else [""]:
                now = hint.of(here, buffer)
                key = hint.key(buffer) if buffer else hint.name
                values = tuple(v for v in _values(hint) if v != now)
                yield EditSite("hint", f"{at}:{key}", values, hint.changes is not Changes.SPEED and bool(over))


def _values(hint: Hint[Any]) -> tuple[int | str, ...]:
    if hint.choices:
        return hint.choices
    if isinstance(hint.default, bool):
        return (False, True)
    if hint.high is not None:
        every = range(hint.low, hint.high + 1)
        return tuple(every) if len(every) <= FEW else tuple(v for v in (0, 1, 2, 4, 8, 16, 32) if v in every)
    return COUNTS if not hint.default else (hint.default, *(int(hint.default * t) for t in TIMES))
