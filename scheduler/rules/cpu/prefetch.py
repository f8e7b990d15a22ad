"""Lines of memory asked for ahead, where no prefetcher of the processor does.

Those stop at the end of a page, and out of order a core looks ahead by instructions, not by bytes: a loop of several
instructions a register waits at the begin of each page, and one that goes from page to page waits each time. AMD's
cores gain nothing from it, and where memory is busy with others the requests take the place of those that are waited
for.
"""

from __future__ import annotations

import sympy

from ....ir.nest.hints import PREFETCH, PREFETCH_STORES
from ....ir.nest.loops import Block, Buffer, Loop, LoopKind, LoopNest, Scope, walk_nodes
from ....ir.target import Target
from ...cost.cpu_kernels import JUMPS, LARGE_ARRAY, PAGE
from ...primitives.analysis.tree import blocks_under, linear_part
from ...schedule.schedule import Schedule


def gains(target: Target) -> bool:
    """Whether a processor is quicker for it."""
    return not target.machine.reads_ahead


def fetch_ahead(schedule: Schedule, target: Target) -> None:
    """Annotate the loops over vectors that are the first to read a large array, from one end to the other, and those
    that write one.

    Lines that are written come from memory too, and are asked for as a store wants them. Both or neither: where stores
    alone set the pace, what is read a page early only takes their place.
    """
    if not gains(target):
        return
    seen: set[str] = set()
    for node, _ in walk_nodes(schedule.nest.body):
        if not isinstance(node, Loop) or node.kind is not LoopKind.SERIAL or not _is_over_vectors(node):
            continue
        inside = blocks_under(node)
        reads = {name for b in inside for name in _large(schedule.nest, b)}
        # Pieces that lie apart have a distance of their own.
        if reads - seen and PREFETCH.found(node) is None:
            schedule.annotate(node.var.name, PREFETCH, PAGE)
        seen |= reads
        if any(_is_large_result(schedule.nest, w.buffer) for b in inside for w in b.writes):
            schedule.annotate(node.var.name, PREFETCH_STORES, PAGE)


def fetch_jumps(schedule: Schedule, target: Target) -> None:
    """Annotate loops over vectors that read pieces of a large array far from one another, one behind the other."""
    if not gains(target):
        return
    for node, outer in walk_nodes(schedule.nest.body):
        if not isinstance(node, Block) or len(outer) < 2 or outer[-1].kind is not LoopKind.VECTORIZED:
            continue
        run, loop = outer[-1].extent, outer[-2]
        itemsize = max(schedule.nest.buffers[w.buffer].dtype.itemsize for w in node.writes)
        # A piece is a vector, or several in a loop of their own.
        for around in outer[-2:-4:-1]:
            if around.kind is not LoopKind.SERIAL:
                break
            steps = {_step(schedule.nest, node, name, around) for name in _large(schedule.nest, node)}
            step = steps.pop() if len(steps) == 1 else None
            if step is not None and run.is_Integer and step >= PAGE > 2 * int(run) * itemsize:
                schedule.annotate(loop.var.name, PREFETCH, JUMPS * step)
                break
            run = run * around.extent


def _is_over_vectors(loop: Loop) -> bool:
    return any(isinstance(n, Loop) and n.kind is LoopKind.VECTORIZED for n in loop.body)


def _large(nest: LoopNest, block: Block) -> set[str]:
    return {r.buffer for r in block.reads if _is_large(nest, nest.buffers[r.buffer])}


def _is_large(nest: LoopNest, buffer: Buffer) -> bool:
    """Whether an argument is large and has no gaps, so that what lies a page ahead is read soon."""
    return buffer.scope is Scope.GLOBAL and buffer.name not in nest.outputs and _is_whole(nest, buffer)


def _is_large_result(nest: LoopNest, name: str) -> bool:
    return name in nest.outputs and _is_whole(nest, nest.buffers[name])


def _is_whole(nest: LoopNest, buffer: Buffer) -> bool:
    """Whether a buffer is large and has no gaps."""
    numel = sympy.Mul(*buffer.shape)
    span = 1 + sum(((e - 1) * s for e, s in zip(buffer.shape, buffer.strides, strict=True)), sympy.S.Zero)
    return bool(sympy.expand(span - numel) == 0) and _bytes(nest, buffer) >= LARGE_ARRAY


def _bytes(nest: LoopNest, buffer: Buffer) -> int:
    return nest.symbols.hint(sympy.Mul(*buffer.shape)) * buffer.dtype.itemsize


def _step(nest: LoopNest, block: Block, name: str, loop: Loop) -> int | None:
    """Bytes between what neighbouring iterations of a loop read of a buffer; None where that is not known or varies."""
    buffer = nest.buffers[name]
    axes = dict(zip((a.var for a in block.axes), block.bindings, strict=True))
    found: set[sympy.Expr | None] = set()
    for read in (r for r in block.reads if r.buffer == name):
        if not all(isinstance(i, sympy.Expr) for i in read.indices):
            return None
        places = zip(read.indices, buffer.strides, strict=True)
        offset = sympy.expand(sum((i.xreplace(axes) * s for i, s in places), sympy.S.Zero))  # type: ignore[union-attr]
        part = linear_part(offset, loop.var)
        found.add(None if part is None else part[0])
    if len(found) != 1 or (step := found.pop()) is None or not step.is_Integer:
        return None
    return int(step) * buffer.dtype.itemsize
