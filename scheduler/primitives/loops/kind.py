"""bind, parallel, vectorize, unroll: what a loop's iterations become on the machine."""

from __future__ import annotations

from dataclasses import replace

from ....ir.nest.hints import Place, misfit
from ....ir.nest.loops import BLOCK_KINDS, Loop, LoopKind, LoopNest, Node, walk_nodes
from ...error import ScheduleError
from ..analysis.dependence import accesses, carried, check_pairs, is_atomic, mixed, pairs_under, scanned, scattered
from ..analysis.tree import blocks_under, find_loop, with_node

MAX_UNROLL = 64
MAX_LANES = 256
_BINDINGS = {k.value: k for k in (*BLOCK_KINDS, LoopKind.THREAD_X)}


def bind(nest: LoopNest, loop: str, thread: str) -> LoopNest:
    """Bind a loop to a program id of the grid ("blockIdx.x", ".y", ".z") or to an axis of the program's tile
    ("threadIdx.x").

    Rewrites::

        for i in range(n):     ->     for i in blockIdx.x(n):

    Requires: a serial loop, whose iterations do not need each other. A grid axis is bound at most once around any
    block, and carries no reduction; a tile axis has a constant extent, and if a block scans along it, no loop inside
    along which it scans too.
    Raises: ScheduleError.    Source: TVM ``Schedule.bind``. Tiles are laid over threads by Triton.
    """
    asked = f"bind({loop}, {thread!r})"
    kind = _BINDINGS.get(thread)
    if kind is None:
        raise ScheduleError(asked, f"there is no {thread!r}; there are {', '.join(_BINDINGS)}")
    node, outer = find_loop(nest, loop, asked)
    if kind in BLOCK_KINDS:
        _refuse_reduction(nest, node, asked)
    elif not node.extent.is_Integer:
        raise ScheduleError(asked, f"extent {node.extent} is not constant", nest, loop, "split the loop first")
    else:
        _refuse_mixed(nest, node, asked)
        _refuse_scan(nest, node, asked)
        if any(node.var in scattered(b) and not is_atomic(b) for b in blocks_under(node)):
            _refuse_scatter(nest, node, asked)
    _refuse_dependence(nest, node, outer, asked)
    return _with_kind(nest, node, kind, asked)


def parallel(nest: LoopNest, loop: str) -> LoopNest:
    """Give the iterations of a loop to the threads of a team.

    Rewrites::

        for i in range(n):     ->     for i in parallel(n):

    Requires: a serial loop, outermost, whose iterations do not need each other; it carries no reduction.
    Raises: ScheduleError.    Source: Halide ``Func.parallel``.
    """
    asked = f"parallel({loop})"
    node, outer = find_loop(nest, loop, asked)
    _refuse_reduction(nest, node, asked)
    _refuse_scatter(nest, node, asked)
    _refuse_dependence(nest, node, outer, asked)
    return _with_kind(nest, node, LoopKind.PARALLEL, asked)


def vectorize(nest: LoopNest, loop: str) -> LoopNest:
    """Run the iterations of a loop in the lanes of vectors. Over a reduction the lanes keep a partial result each;
    along a scan each has the state up to it.

    Rewrites::

        for i in range(8):     ->     for i in vectorized(8):

    Requires: a serial loop of a constant extent, no loop inside, and iterations that do not need each other, nor the
    order in which a block scatters along it.
    Raises: ScheduleError.    Source: Halide ``Func.vectorize``.
    """
    asked = f"vectorize({loop})"
    node, outer = find_loop(nest, loop, asked)
    _refuse_long(nest, node, asked, MAX_LANES)
    _refuse_mixed(nest, node, asked)
    _refuse_scatter(nest, node, asked)
    _refuse_dependence(nest, node, outer, asked)
    return _with_kind(nest, node, LoopKind.VECTORIZED, asked)


def unroll(nest: LoopNest, loop: str) -> LoopNest:
    """Write out the iterations of a loop. Over a reduction each copy keeps a partial result; along a scan
    they hand one state on.

    Rewrites::

        for i in range(4):     ->     for i in unrolled(4):

    Requires: a serial loop of a constant extent.
    Raises: ScheduleError.    Source: Halide ``Func.unroll``.
    """
    asked = f"unroll({loop})"
    node, _ = find_loop(nest, loop, asked)
    _refuse_long(nest, node, asked, MAX_UNROLL)
    _refuse_bound(nest, node, asked)
    return _with_kind(nest, node, LoopKind.UNROLLED, asked)


def check_kinds(nest: LoopNest, asked: str, shown: LoopNest) -> None:
    """Refuse a nest whose kinds of loops no machine nests so; the error shows the nest ``shown``."""

    def visit(body: tuple[Node, ...], outer: tuple[Loop, ...]) -> None:
        for n in body:
            if isinstance(n, Loop):
                if outer:
                    _check_kind(n, outer, asked, shown)
                # Serial loops constrain nothing inside, but that a team is not outermost there.
                visit(n.body, (*outer, n) if n.kind is not LoopKind.SERIAL or not outer else outer)

    visit(nest.body, ())


def _check_kind(node: Loop, outer: tuple[Loop, ...], asked: str, shown: LoopNest) -> None:
    name = node.var.name
    for lp in outer:
        if lp.kind is LoopKind.VECTORIZED:
            raise ScheduleError(
                asked, f"the loop {name} would be inside {lp.var}, which is vectorized", shown, lp.var.name,
                "lanes are innermost",
            )  # fmt: skip
        if node.kind in BLOCK_KINDS and (lp.kind in _INSIDE_BLOCKS or lp.kind is node.kind):
            raise ScheduleError(
                asked, f"{name}, {node.kind.value}, would be inside {lp.var}, which is {lp.kind.value}", shown, name
            )
    if node.kind is LoopKind.PARALLEL:
        raise ScheduleError(
            asked, f"{name} would be inside {outer[-1].var}; a team of threads runs outermost loops", shown, name
        )


_INSIDE_BLOCKS = (LoopKind.PARALLEL, LoopKind.VECTORIZED, LoopKind.UNROLLED, LoopKind.THREAD_X)


def _with_kind(nest: LoopNest, node: Loop, kind: LoopKind, asked: str) -> LoopNest:
    for key, value in node.annotations:
        if wrong := misfit(key, value, Place.LOOP, kind):
            raise ScheduleError(asked, f"{node.var} has a hint: {wrong[0]}", nest, node.var.name, wrong[1])
    result = with_node(nest, node, replace(node, kind=kind))
    check_kinds(result, asked, nest)
    return result


def _refuse_long(nest: LoopNest, node: Loop, asked: str, limit: int) -> None:
    name = node.var.name
    if not node.extent.is_Integer:
        raise ScheduleError(asked, f"extent {node.extent} is not constant", nest, name, "split the loop first")
    if int(node.extent) > limit:
        raise ScheduleError(
            asked, f"{node.extent} iterations are more than {limit}", nest, name, "split the loop first"
        )


def _refuse_bound(nest: LoopNest, node: Loop, asked: str) -> None:
    if node.kind is not LoopKind.SERIAL:
        raise ScheduleError(asked, f"the loop is {node.kind.value} already", nest, node.var.name)


def _refuse_reduction(nest: LoopNest, node: Loop, asked: str) -> None:
    outputs = set(nest.outputs)
    for b in blocks_under(node):
        if node.var in carried(b):
            raise ScheduleError(
                asked, f"{b.name} reduces over it", nest, node.var.name,
                "use rfactor, then bind the loop over partial results",
            )  # fmt: skip
        if b.is_reduction and accesses(b).written & outputs and all(node.var not in e.free_symbols for e in b.bindings):
            raise ScheduleError(asked, f"each iteration would accumulate {b.name} anew in one place", nest, b.name)


def _refuse_scan(nest: LoopNest, node: Loop, asked: str) -> None:
    """The lanes of a tile stand in order, so that a scan along them is one of neighbours."""
    inside = {n.var for n, _ in walk_nodes(node.body) if isinstance(n, Loop) and n.extent != 1}
    for b in blocks_under(node):
        along = scanned(b) if b.is_scan else set()
        if node.var in along and along & inside:
            raise ScheduleError(
                asked, f"{b.name} scans along loops inside it too", nest, node.var.name, "bind the innermost one"
            )


def _refuse_scatter(nest: LoopNest, node: Loop, asked: str) -> None:
    """A CPU runs what may write the same places in order."""
    for b in blocks_under(node):
        if node.var in scattered(b):
            raise ScheduleError(asked, f"iterations of {b.name} may write the same places", nest, node.var.name)


def _refuse_mixed(nest: LoopNest, node: Loop, asked: str) -> None:
    for b in blocks_under(node):
        if node.var in mixed(b):
            raise ScheduleError(
                asked, f"it carries a reduction of {b.name} and another axis at once", nest, node.var.name
            )


def _refuse_dependence(nest: LoopNest, node: Loop, outer: tuple[Loop, ...], asked: str) -> None:
    _refuse_bound(nest, node, asked)
    check_pairs(nest, pairs_under(node, outer), asked, nest, len(outer) + 1)
