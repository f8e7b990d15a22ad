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
from ...ir.nest.hints import (
    CASCADE,
    EARLY,
    EVICT,
    GRAIN,
    HOLD,
    NUM_STAGES,
    NUM_WARPS,
    PEEL,
    PREFETCH,
    PREFETCH_STORES,
    RESIDENT,
    Hint,
)
from ...ir.nest.loops import AxisKind, Block, Loop, LoopKind, LoopNest, Scope, blocks, walk_nodes
from ...ir.target import Target
from ..schedule.trace import Step
from .edits import SHARED, Base, Edit, step_name

# Lanes in registers, iterations of a chunk, a tile, a jam and an unrolled loop, and bytes ahead that are fetched.
REGISTERS = (1, 2, 4, 8, 16)
CHUNKS, TILES, JAMS, UNROLLS, AHEAD = (2, 4, 8, 16, 32, 64), (4, 8, 16, 32, 64, 128), (2, 4, 8), (2, 4, 8), (0, 128, 256, 512, 1024, 2048)  # fmt: skip
GRAINS = (1, 1 << 12, 1 << 18, 1 << 22)
# A loop of no more iterations may be written out as a whole, and be jammed.
WRITTEN = 16
# Steps that a rule can do without.
OPTIONAL = ("merge", "unroll", "annotate", "parallel", "compute_inline", "pipeline")


@dataclass(frozen=True, slots=True)
class Site:
    """One place of a schedule and the values that may stand there. ``reduces``: it may change an order of combining.
    ``here`` is the factor that the rule has there, ``is_lanes`` whether it is of lanes or of a tile."""

    kind: str
    at: str
    values: tuple[int | str, ...]
    reduces: bool = False
    here: int | None = None
    is_lanes: bool = False

    def edits(self) -> Iterator[Edit]:
        """The edit of each value."""
        return (Edit(self.kind, self.at, v) for v in self.values)


def sites_of(base: Base, nest: LoopNest, target: Target) -> tuple[Site, ...]:
    """The sites of a rule's schedule, always in the same order."""
    made = base.schedule.nest
    found = [*_inlined(nest), *_factors(base, target), *_steps(base, target)]
    if target.is_gpu:
        found += _gpu_hints(made)
    else:
        found += [*_loops(made), *_placements(made), *_cpu_hints(made)]
    return tuple(s for s in found if s.values)


# --- before the rule, and its steps -----------------------------------------------------------------------------------


def _inlined(nest: LoopNest) -> Iterator[Site]:
    local = {b.name for b in nest.locals}
    for block, _ in blocks(nest):
        writes = block.writes
        if not block.is_reduction and len(writes) == 1 and writes[0].buffer in local:
            yield Site("inline", block.name, (1,))


def _factors(base: Base, target: Target) -> Iterator[Site]:
    """The factors of splits, those of several blocks that must agree together."""
    lanes = _lanes(base)
    carried = _carried(base)
    linked: dict[tuple[str, tuple[Any, ...]], list[tuple[Step, sympy.Expr]]] = {}
    for k, step in enumerate(base.trace.steps):
        if step.primitive == "split":
            args = dict(step.args)
            key = (_ending(args["loop"]), args["factors"])
            linked.setdefault(key, []).append((step, base.states[k].extent(args["loop"])))
    merged = {name for s in base.trace.steps if s.primitive == "merge" for _, name in s.args}
    for (ending, factors), group in linked.items():
        names = [r for s, _ in group for r in s.results]
        together = len(group) > 1 and (target.is_gpu or any(n in merged for n in names))
        for one in [group] if together else [[g] for g in group]:
            step, extent = one[0]
            loop = f"{SHARED}{ending}" if together else dict(step.args)["loop"]
            reduces = any(n in carried for s, _ in one for n in (dict(s.args)["loop"], *s.results))
            for place, factor in enumerate(factors):
                if isinstance(factor, int) and not isinstance(factor, bool):
                    is_lanes = any(s.results[place] in lanes for s, _ in one)
                    values = _near(factor, extent, target, is_lanes)
                    yield Site("factor", f"{loop}.{place}", values, reduces, factor, is_lanes)


def _ending(loop: str) -> str:
    """A loop's name without that of its block."""
    return f"_{loop.split('_', 1)[1]}" if "_" in loop else loop


def _lanes(base: Base) -> set[str]:
    return {
        str(dict(s.args)["loop"])
        for s in base.trace.steps
        if s.primitive == "vectorize" or (s.primitive == "bind" and dict(s.args)["thread"].startswith("thread"))
    }


def _carried(base: Base) -> set[str]:
    """Every loop, of any state, that carries a reduction."""
    found: set[str] = set()
    for nest in {id(s.nest): s.nest for s in (*base.states, base.schedule)}.values():
        for block, _ in blocks(nest):
            for a, e in zip(block.axes, block.bindings, strict=True):
                if a.kind is not AxisKind.SPATIAL:
                    found |= {s.name for s in e.free_symbols}
    return found


def _near(factor: int, extent: sympy.Expr, target: Target, is_lanes: bool) -> tuple[int, ...]:
    most = 2 * int(extent) if extent.is_Integer else 1 << 16
    if target.is_gpu:
        wanted = [factor // 4, factor // 2, factor * 2, factor * 4]
        if not is_lanes:
            wanted += [1, 2, 4, 8]
    elif is_lanes:
        wanted = [target.lanes(4) * r for r in REGISTERS] + [target.lanes(4) // 2]
    else:
        wanted = [1, factor // 4, factor // 2, factor * 2, factor * 4, *_divisors(extent, factor)]
    return tuple(sorted({w for w in wanted if 1 <= w < most and w != factor and w <= 1 << 14}))


def _divisors(extent: sympy.Expr, near: int) -> list[int]:
    """Factors near to the one at hand that leave no tail."""
    if not extent.is_Integer:
        return []
    n = int(extent)
    return [d for d in range(max(near // 2, 1), 2 * near + 1) if n % d == 0][:4]


def _steps(base: Base, target: Target) -> Iterator[Site]:
    """Steps that may be left out, lanes of whole loops, and what a thread or a program takes at a time."""
    carried = _carried(base)
    split = {r for s in base.trace.steps if s.primitive == "split" for r in s.results}
    for k, step in enumerate(base.trace.steps):
        args = dict(step.args)
        loop = str(args.get("loop", ""))
        state = base.states[k]
        if step.primitive in OPTIONAL and not (step.primitive == "annotate" and args["at"] == ""):
            touches = {str(v) for v in args.values()} & carried
            yield Site("omit", step_name(step), (1,), step.primitive != "merge" and bool(touches))
        tile = step.primitive == "vectorize" or (step.primitive == "bind" and args["thread"].startswith("thread"))
        if tile and loop not in split:
            extent = state.extent(loop)
            wanted = [target.lanes(4) * r for r in REGISTERS] if not target.is_gpu else [64, 128, 256, 512, 1024]
            if extent.is_Integer:
                yield Site("lanes", loop, tuple(w for w in wanted if w < int(extent)), loop in carried)
        if step.primitive == "parallel" or (step.primitive == "bind" and args["thread"].startswith("block")):
            extent = state.extent(loop)
            count = int(extent) if extent.is_Integer else state.nest.symbols.hint(extent)
            yield Site("chunk", loop, tuple(c for c in CHUNKS if c * target.cores <= count))
            node = state.loop(loop)
            if len(node.body) == 1 and isinstance(node.body[0], Loop) and node.body[0].kind is LoopKind.SERIAL:
                yield Site("team", loop, (1,))


# --- loops of what the rule makes -------------------------------------------------------------------------------------


def _loops(nest: LoopNest) -> Iterator[Site]:
    over = _over(nest)
    for node, _ in walk_nodes(nest.body):
        if not isinstance(node, Loop) or node.kind is not LoopKind.SERIAL or node.extent == 1:
            continue
        name, reduces = node.var.name, node.var.name in over
        count = int(node.extent) if node.extent.is_Integer else None
        inside = node.body[0] if len(node.body) == 1 else None
        if isinstance(inside, Loop) and inside.kind is LoopKind.SERIAL:
            both = reduces and inside.var.name in over
            yield Site("order", name, (inside.var.name,), both)
            yield Site("tile", name, tuple(t for t in TILES if count is None or 2 * t <= count), both)
            yield Site("jam", name, tuple(j for j in JAMS if count is None or 2 * j <= count), reduces)
        whole = (0,) if count is not None and count <= WRITTEN else ()
        yield Site("unroll", name, (*whole, *(u for u in UNROLLS if count is None or 2 * u <= count)), reduces)


def _over(nest: LoopNest) -> set[str]:
    """Loops that carry a reduction."""
    return {
        s.name
        for b, _ in blocks(nest)
        for a, e in zip(b.axes, b.bindings, strict=True)
        if a.kind is not AxisKind.SPATIAL
        for s in e.free_symbols
    }


def _placements(nest: LoopNest) -> Iterator[Site]:
    """Blocks that may move to the loops of those that read them, and copies of what loops use again and again."""
    found = list(blocks(nest))
    local = {b.name for b in nest.locals}
    for block, path in found:
        made = {w.buffer for w in block.writes}
        readers = [(b, p) for b, p in found if b is not block and any(ld.buffer in made for ld in b.reads)]
        if made <= local and len(readers) == 1:
            yield Site("compute_at", block.name, tuple(lp.var.name for lp in readers[0][1] if lp not in path))
        sources = [p for b, p in found if b is not block and {w.buffer for w in b.writes} & _reads(block)]
        if len(sources) == 1 and not block.is_reduction:
            yield Site("reverse_compute_at", block.name, tuple(lp.var.name for lp in sources[0] if lp not in path))
        serial = [lp.var.name for lp in path if lp.kind in (LoopKind.SERIAL, LoopKind.PARALLEL)]
        params = {b.name for b in nest.params}
        again = [ld.buffer for ld in block.reads if ld.buffer in params and _is_used_again(block, path, ld.indices)]
        for kind in ("cache_read", "pack") if again else ():
            yield Site(kind, block.name, tuple(f"{b}@{lp}" for b in dict.fromkeys(again) for lp in serial))
        yield Site(
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


def _hint(at: str, hint: Hint[Any], values: tuple[int | str, ...], node: Any, buffer: str = "") -> Site:
    here = hint.of(node, buffer)
    key = hint.key(buffer) if buffer else hint.name
    return Site("hint", f"{at}:{key}", tuple(v for v in values if v != here), hint.changes.name != "SPEED")


def _cpu_hints(nest: LoopNest) -> Iterator[Site]:
    over = _over(nest)
    for node, _ in walk_nodes(nest.body):
        if not isinstance(node, Loop):
            continue
        name = node.var.name
        if node.kind is LoopKind.PARALLEL:
            yield _hint(name, GRAIN, GRAINS, node)
        lanes = any(isinstance(n, Block) or n.kind is LoopKind.VECTORIZED for n in node.body)
        if node.kind in (LoopKind.SERIAL, LoopKind.PARALLEL) and lanes:
            yield _hint(name, PREFETCH, AHEAD, node)
            yield _hint(name, PREFETCH_STORES, AHEAD, node)
        if node.kind is LoopKind.SERIAL and name in over:
            yield _hint(name, CASCADE, (True,), node)
            yield _hint(name, HOLD, (True,), node)


def _gpu_hints(nest: LoopNest) -> Iterator[Site]:
    yield _hint("", NUM_WARPS, (1, 2, 4, 8, 16), nest)
    yield _hint("", RESIDENT, (0, 1, 2, 4, 8, 16), nest)
    yield _hint("", PEEL, (True, False), nest)
    for node, _ in walk_nodes(nest.body):
        if isinstance(node, Loop) and node.kind is LoopKind.SERIAL and node.extent != 1:
            yield _hint(node.var.name, NUM_STAGES, (1, 2, 3, 4, 5), node)
    for b in nest.params:
        if b.scope is Scope.GLOBAL and b.name not in nest.outputs:
            yield _hint("", EVICT, ("evict_first", "evict_last"), nest, b.name)
            yield _hint("", EARLY, (True, False), nest, b.name)
