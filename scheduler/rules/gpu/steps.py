"""The loops over the summed axis of a contraction on a GPU: shared by its products, cut into steps that are copied
while others are multiplied, and where a program does a run of steps, from where that begins to where it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from ....ir.nest.hints import NUM_STAGES
from ...cost.products.gpu_tiles import FEW_RESULTS, LEAST, SHORT, WORD, TileShape
from ...schedule.schedule import Schedule
from ..contraction import ContractionNest, StepRun, part_axes
from .common import cut, fused, tile


def loops_of(schedule: Schedule, block: str) -> dict[sympy.Symbol, str]:
    """The loop over each axis of a block whose axes are loops."""
    b = schedule.block(block)
    return {a.var: e.name for a, e in zip(b.axes, b.bindings, strict=True) if isinstance(e, sympy.Symbol)}


def steps_of(
    schedule: Schedule,
    c: ContractionNest,
    shape: TileShape,
    run: StepRun | None = None,
    words: bool = False,
    packed: bool = False,
    together: bool = False,
) -> str | None:
    """The loop over the summed axis, if it has several steps: shared by the products, in steps of a tile,
    pipelined. With ``words``, bytes that lie side by side are parts of a word where that leaves no tail. With
    ``together`` a step has tiles of all parts of a joined operand."""
    if run is not None:
        return _run(schedule, c, run, shape)
    parts = {v: int(e) for v, e in part_axes(c)}
    own = {v for v, _ in c.summed} - parts.keys()
    chains: list[str] = []
    for p in c.products:
        loops = loops_of(schedule, p.name)
        chain = [lp for lp in schedule.get_loops(p.name) if lp in {loops[v] for v in own if v in loops}]
        joined = fused(schedule, chain)
        assert joined is not None
        chains.append(joined)
    size = max(shape.step // math.prod(_at_once(c, parts).values()), LEAST)
    whole = [schedule.nest.symbols.is_divisible(schedule.extent(chain), size) for chain in chains]
    word = WORD if words and size >= WORD * LEAST and all(whole) else 1
    # What groups have in common is loaded once for a tile that lies in one.
    group = next((e for v, e in reversed(c.summed) if v in own), sympy.S.One)
    if word > 1 and len(own) > 1 and WORD * LEAST <= group < size and size % group == 0:
        size = int(group)
    if parts or word > 1:
        return _parts(schedule, c, chains, parts, shape, (size, word), packed, together)
    for other in chains[1:]:
        schedule.merge(chains[0], other)
    step, lane = cut(schedule, chains[0], shape.step)
    tile(schedule, lane)
    if step is not None:
        schedule.annotate(step, NUM_STAGES, shape.stages)
    return step


def _parts(
    schedule: Schedule,
    c: ContractionNest,
    chains: Sequence[str],
    parts: Mapping[sympy.Symbol, int],
    shape: TileShape,
    sizes: tuple[int, int],
    packed: bool,
    inside: bool,
) -> str | None:
    """Steps where an element of memory has several parts, or is one of several of a word: a tile of elements is there
    for the products of all parts, which are written out: ``inside`` of the steps, also where the parts stand around
    them. ``sizes`` are the elements of a step and of a word."""
    size, word = sizes
    together = math.prod(_at_once(c, parts).values())
    steps: list[str] = []
    stages = shape.stages
    # Of groups whose scales lie side by side, so many that a thread has a word of them: words are copied ahead.
    written_out = 4 if len(c.summed) - len(parts) > 1 else 2
    for p, chain in zip(c.products, chains, strict=True):
        loops = loops_of(schedule, p.name)
        step, lane = cut(schedule, chain, size)
        written = [loops[v] for v in parts]
        if word > 1:
            lane, place = schedule.split(lane, [None, word])
            written = [place, *written]
        # A step of few products costs as much beside them: several are written as one.
        few = (word > 1 or packed) and shape.rows * shape.columns <= FEW_RESULTS
        several = written_out * shape.step // (size * together) if few and step is not None else 1
        while several > 1 and not schedule.nest.symbols.is_divisible(schedule.extent(str(step)), several * SHORT):
            several //= 2
        if step is not None and several > 1:
            step, within = schedule.split(step, [None, several])
            written, stages = [within, *written], math.ceil((shape.stages + several - 1) / several)
        schedule.reorder(*((step,) if inside and step is not None else ()), *written, lane)
        for lp in written:
            schedule.unroll(lp)
        tile(schedule, lane)
        steps += [] if step is None else [step]
    for other in steps[1:]:
        schedule.merge(steps[0], other)
    if steps:
        schedule.annotate(steps[0], NUM_STAGES, stages)
    return steps[0] if steps else None


def _at_once(c: ContractionNest, parts: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """The parts of which a step has all: not those around all that is no part, which have loops one behind the other,
    each with steps of its own."""
    order = [v for v, _ in c.summed]
    first = next((k for k, v in enumerate(order) if v not in parts), len(order))
    return {v: e for v, e in parts.items() if order.index(v) > first}


def _run(schedule: Schedule, c: ContractionNest, run: StepRun, shape: TileShape) -> str:
    """The steps of a program's run that are those of one tile: all others are left out at either end."""
    names = [p.name for p in c.products]
    for name in names:
        loops = loops_of(schedule, name)
        lane = fused(schedule, [loops[v] for v, _ in c.summed if v != run.step])
        assert lane is not None
        whole = schedule.extent(lane)
        inner, lane = cut(schedule, lane, min(shape.step, int(whole)) if whole.is_Integer else shape.step)
        tile(schedule, lane)
        if inner is not None:
            schedule.annotate(inner, NUM_STAGES, shape.stages)
    first, *others = (loops_of(schedule, name)[run.step] for name in names)
    for other in others:
        schedule.merge(first, other)
    for name in names:
        schedule.decompose_reduction(name, first, skip=True)
    if NUM_STAGES.found(schedule.loop(first)) is None:
        schedule.annotate(first, NUM_STAGES, shape.stages)
    return first
