"""Schedule: a nest, the primitives that rewrite it, and the trace of those that were applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import sympy

from ..ir.loops import Block, Loop, LoopNest, walk_nodes
from .error import ScheduleError
from .primitives.annotate import annotate
from .primitives.compute_at import compute_at
from .primitives.compute_inline import compute_inline
from .primitives.fuse import fuse
from .primitives.kind import bind, parallel, unroll, vectorize
from .primitives.merge import merge
from .primitives.reorder import reorder
from .primitives.reverse_compute_at import reverse_compute_at
from .primitives.rfactor import rfactor
from .primitives.set_scope import set_scope
from .primitives.split import split
from .primitives.tree import find_block, find_loop
from .trace import Step, Trace, make_step

# A loop is known by its variable's name, a block by its own; both are unique in a nest.
LoopRef: TypeAlias = str
BlockRef: TypeAlias = str


class Schedule:
    """Rewrites one nest step by step.

    Each method applies the primitive of its name (the docstrings with the nests before and after are theirs, in
    ``scheduler/primitives``), records it, and raises ScheduleError, leaving the nest as it was, where it is not legal.
    """

    def __init__(self, nest: LoopNest, rule: str = "") -> None:
        self.nest = nest
        self.rule = rule
        self._steps: list[Step] = []

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self._steps), self.rule)

    # --- looking ------------------------------------------------------------------------------------------------------

    def get_blocks(self) -> list[BlockRef]:
        """Every block, in order."""
        return [n.name for n, _ in walk_nodes(self.nest.body) if isinstance(n, Block)]

    def get_block(self, name: str) -> BlockRef:
        """The block of that name. Raises ScheduleError."""
        return find_block(self.nest, name, f"get_block({name})")[0].name

    def get_loop(self, name: str) -> LoopRef:
        """The loop over the variable of that name. Raises ScheduleError."""
        return find_loop(self.nest, name, f"get_loop({name})")[0].var.name

    def get_loops(self, block: BlockRef) -> list[LoopRef]:
        """The loops around a block, outermost first."""
        return [lp.var.name for lp in find_block(self.nest, block, f"get_loops({block})")[1]]

    def loop(self, loop: LoopRef) -> Loop:
        """The loop itself, as it is now."""
        return find_loop(self.nest, loop, f"loop({loop})")[0]

    def block(self, block: BlockRef) -> Block:
        """The block itself, as it is now."""
        return find_block(self.nest, block, f"block({block})")[0]

    def extent(self, loop: LoopRef) -> sympy.Expr:
        return self.loop(loop).extent

    # --- primitives ---------------------------------------------------------------------------------------------------

    def split(
        self, loop: LoopRef, factors: Sequence[int | sympy.Expr | None], tail: str = "predicate"
    ) -> tuple[LoopRef, ...]:
        self.nest, names = split(self.nest, loop, factors, tail)
        return self._record("split", {"loop": loop, "factors": list(factors), "tail": tail}, names)

    def fuse(self, *loops: LoopRef) -> LoopRef:
        self.nest, names = fuse(self.nest, list(loops))
        return self._record("fuse", {"loops": list(loops)}, names)[0]

    def reorder(self, *loops: LoopRef) -> None:
        self.nest = reorder(self.nest, list(loops))
        self._record("reorder", {"loops": list(loops)})

    def merge(self, first: LoopRef, second: LoopRef) -> None:
        self.nest = merge(self.nest, first, second)
        self._record("merge", {"first": first, "second": second})

    def bind(self, loop: LoopRef, thread: str) -> None:
        self.nest = bind(self.nest, loop, thread)
        self._record("bind", {"loop": loop, "thread": thread})

    def parallel(self, loop: LoopRef) -> None:
        self.nest = parallel(self.nest, loop)
        self._record("parallel", {"loop": loop})

    def vectorize(self, loop: LoopRef) -> None:
        self.nest = vectorize(self.nest, loop)
        self._record("vectorize", {"loop": loop})

    def unroll(self, loop: LoopRef) -> None:
        self.nest = unroll(self.nest, loop)
        self._record("unroll", {"loop": loop})

    def annotate(self, at: str, key: str, value: bool | int | float | str) -> None:
        self.nest = annotate(self.nest, at, key, value)
        self._record("annotate", {"at": at, "key": key, "value": value})

    def set_scope(self, buffer: str, scope: str) -> None:
        self.nest = set_scope(self.nest, buffer, scope)
        self._record("set_scope", {"buffer": buffer, "scope": scope})

    def compute_inline(self, block: BlockRef) -> None:
        self.nest = compute_inline(self.nest, block)
        self._record("compute_inline", {"block": block})

    def compute_at(self, block: BlockRef, loop: LoopRef, preserve_unit_loops: bool = False) -> None:
        self.nest = compute_at(self.nest, block, loop, preserve_unit_loops)
        self._record("compute_at", {"block": block, "loop": loop, "preserve_unit_loops": preserve_unit_loops})

    def reverse_compute_at(self, block: BlockRef, loop: LoopRef, preserve_unit_loops: bool = False) -> None:
        self.nest = reverse_compute_at(self.nest, block, loop, preserve_unit_loops)
        self._record("reverse_compute_at", {"block": block, "loop": loop, "preserve_unit_loops": preserve_unit_loops})

    def rfactor(self, loop: LoopRef) -> BlockRef:
        self.nest, names = rfactor(self.nest, loop)
        return self._record("rfactor", {"loop": loop}, names)[0]

    # --- recording ----------------------------------------------------------------------------------------------------

    def _record(self, primitive: str, args: dict[str, Any], results: Sequence[str] = ()) -> tuple[str, ...]:
        self._steps.append(make_step(primitive, args, tuple(results)))
        return tuple(results)


_LISTS = {"fuse": "loops", "reorder": "loops"}
PRIMITIVES = (
    "split", "fuse", "reorder", "merge", "bind", "parallel", "vectorize", "unroll", "annotate", "compute_inline",
    "compute_at", "reverse_compute_at", "rfactor", "set_scope",
)  # fmt: skip


def replay(trace: Trace, nest: LoopNest) -> Schedule:
    """Apply a trace to a nest: the same steps, which must be legal and make the same names. Raises ScheduleError."""
    schedule = Schedule(nest, trace.rule)
    for step in trace.steps:
        if step.primitive not in PRIMITIVES:
            known = ", ".join(PRIMITIVES)
            raise ScheduleError(str(step), f"there is no primitive {step.primitive!r}; there are {known}")
        args = dict(step.args)
        try:
            if step.primitive in _LISTS:
                getattr(schedule, step.primitive)(*args[_LISTS[step.primitive]])
            else:
                getattr(schedule, step.primitive)(**args)
        except (TypeError, KeyError) as error:
            raise ScheduleError(str(step), f"the arguments do not fit the primitive ({error})") from None
        made = schedule.trace.steps[-1].results
        if made != step.results:
            raise ScheduleError(str(step), f"it now makes {made}: the trace is of another nest")
    return schedule
