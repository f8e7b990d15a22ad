"""Schedule: a nest, the primitives that rewrite it, and the trace of those that were applied."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

import sympy

from ...ir.errors import IRError
from ...ir.nest.hints import Hint
from ...ir.nest.loops import Block, Loop, LoopNest, walk_nodes
from ...ir.text.parser_expr import index
from ..error import ScheduleError
from ..primitives.analysis.tree import find_block, find_loop
from ..primitives.loops.annotate import annotate
from ..primitives.loops.blockize import blockize, check_units
from ..primitives.loops.fuse import fuse
from ..primitives.loops.kind import bind, parallel, unroll, vectorize
from ..primitives.loops.merge import merge
from ..primitives.loops.partition import partition
from ..primitives.loops.pipeline import pipeline
from ..primitives.loops.powers_of_two import powers_of_two
from ..primitives.loops.reorder import reorder
from ..primitives.loops.sample import Choice, sample_categorical, sample_perfect_tile
from ..primitives.loops.split import split
from ..primitives.loops.tensorize import check_tensorized, tensorize
from ..primitives.memory.atomic import atomic
from ..primitives.memory.cache_read import cache_read
from ..primitives.memory.cache_window import cache_window
from ..primitives.memory.cache_write import cache_write
from ..primitives.memory.pack import pack
from ..primitives.memory.pad import pad
from ..primitives.memory.reorder_storage import reorder_storage
from ..primitives.memory.set_scope import set_scope
from ..primitives.memory.transform_layout import transform_layout
from ..primitives.placement.compute_at import compute_at
from ..primitives.placement.compute_inline import compute_inline
from ..primitives.placement.reverse_compute_at import reverse_compute_at
from ..primitives.placement.reverse_compute_inline import reverse_compute_inline
from ..primitives.reductions.decompose_online import decompose_online
from ..primitives.reductions.decompose_reduction import decompose_reduction
from ..primitives.reductions.fuse_reductions import fuse_reductions
from ..primitives.reductions.rfactor import rfactor
from .trace import VARIADIC, Argument, Drawn, Step, StepRef, Trace, drawn, make_step, settled

# A loop is known by its variable's name, a block by its own; both are unique in a nest.
LoopRef: TypeAlias = str
BlockRef: TypeAlias = str


class Schedule:
    """Rewrites one nest step by step.

    Each method applies the primitive of its name (the docstrings with the nests before and after are theirs, in
    ``scheduler/primitives``), records it, and raises ScheduleError, leaving the nest as it was, where it is not legal.
    What is drawn comes of a generator that ``seed`` starts.
    """

    def __init__(self, nest: LoopNest, rule: str = "", seed: int = 0) -> None:
        self.nest = nest
        self.rule = rule
        self._steps: list[Step] = []
        self._random = Random(seed)
        self._drawn: dict[str, Drawn] = {}

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self._steps), self.rule)

    def copy(self) -> Schedule:
        """The schedule as it is now; what is done to one of both the other does not see."""
        other = Schedule(self.nest, self.rule)
        other._steps, other._drawn = list(self._steps), dict(self._drawn)
        other._random.setstate(self._random.getstate())
        return other

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

    def size(self, text: str) -> sympy.Expr:
        """An expression in the nest's sizes from its text, ``s.size("s0 // 4")``: a factor of ``split``. Raises
        ScheduleError."""
        try:
            found = index(ast.parse(text, mode="eval").body)
        except (SyntaxError, IRError) as error:
            raise ScheduleError(f"size({text!r})", f"this is no expression in sizes ({error})") from None
        unknown = sorted(s.name for s in found.free_symbols - set(self.nest.symbols.symbols))
        if unknown:
            known = ", ".join(s.name for s in self.nest.symbols.symbols) or "none"
            raise ScheduleError(f"size({text!r})", f"the nest has no size {unknown[0]}; its sizes are: {known}")
        return found

    # --- primitives ---------------------------------------------------------------------------------------------------

    def split(
        self, loop: LoopRef, factors: Sequence[int | sympy.Expr | None], tail: str = "predicate"
    ) -> tuple[LoopRef, ...]:
        args = {"loop": loop, "factors": list(factors), "tail": tail}
        return self._take("split", args, *split(self.nest, loop, factors, tail))

    def fuse(self, *loops: LoopRef) -> LoopRef:
        return self._take("fuse", {"loops": list(loops)}, *fuse(self.nest, list(loops)))[0]

    def reorder(self, *loops: LoopRef) -> None:
        self._take("reorder", {"loops": list(loops)}, reorder(self.nest, list(loops)))

    def merge(self, first: LoopRef, second: LoopRef) -> None:
        self._take("merge", {"first": first, "second": second}, merge(self.nest, first, second))

    def partition(self, loop: LoopRef, points: Sequence[int | sympy.Expr]) -> tuple[LoopRef, ...]:
        return self._take("partition", {"loop": loop, "points": list(points)}, *partition(self.nest, loop, points))

    def bind(self, loop: LoopRef, thread: str) -> None:
        self._take("bind", {"loop": loop, "thread": thread}, bind(self.nest, loop, thread))

    def parallel(self, loop: LoopRef) -> None:
        self._take("parallel", {"loop": loop}, parallel(self.nest, loop))

    def vectorize(self, loop: LoopRef) -> None:
        self._take("vectorize", {"loop": loop}, vectorize(self.nest, loop))

    def unroll(self, loop: LoopRef) -> None:
        self._take("unroll", {"loop": loop}, unroll(self.nest, loop))

    def annotate(self, at: str, key: str | Hint[Any], value: bool | int | float | str) -> None:
        name = key.name if isinstance(key, Hint) else key
        args = {"at": at, "key": name, "value": value}
        self._take("annotate", args, annotate(self.nest, at, name, settled(value)))

    def atomic(self, block: BlockRef) -> None:
        self._take("atomic", {"block": block}, atomic(self.nest, block))

    def set_scope(self, buffer: str, scope: str) -> None:
        self._take("set_scope", {"buffer": buffer, "scope": scope}, set_scope(self.nest, buffer, scope))

    def compute_inline(self, block: BlockRef) -> None:
        self._take("compute_inline", {"block": block}, compute_inline(self.nest, block))

    def reverse_compute_inline(self, block: BlockRef) -> None:
        self._take("reverse_compute_inline", {"block": block}, reverse_compute_inline(self.nest, block))

    def cache_read(self, block: BlockRef, buffer: str, scope: str = "local") -> BlockRef:
        args = {"block": block, "buffer": buffer, "scope": scope}
        return self._take("cache_read", args, *cache_read(self.nest, **args))[0]

    def cache_write(self, block: BlockRef, buffer: str, scope: str = "local") -> BlockRef:
        args = {"block": block, "buffer": buffer, "scope": scope}
        return self._take("cache_write", args, *cache_write(self.nest, **args))[0]

    def compute_at(self, block: BlockRef, loop: LoopRef, preserve_unit_loops: bool = False) -> None:
        args: dict[str, Any] = {"block": block, "loop": loop, "preserve_unit_loops": preserve_unit_loops}
        self._take("compute_at", args, compute_at(self.nest, **args))

    def reverse_compute_at(self, block: BlockRef, loop: LoopRef, preserve_unit_loops: bool = False) -> None:
        args: dict[str, Any] = {"block": block, "loop": loop, "preserve_unit_loops": preserve_unit_loops}
        self._take("reverse_compute_at", args, reverse_compute_at(self.nest, **args))

    def rfactor(self, loop: LoopRef) -> BlockRef:
        return self._take("rfactor", {"loop": loop}, *rfactor(self.nest, loop))[0]

    def decompose_reduction(self, block: BlockRef, loop: LoopRef, skip: bool = False) -> BlockRef:
        args = {"block": block, "loop": loop, "skip": skip}
        return self._take("decompose_reduction", args, *decompose_reduction(self.nest, block, loop, skip))[0]

    def fuse_reductions(self, first: BlockRef, second: BlockRef) -> None:
        self._take("fuse_reductions", {"first": first, "second": second}, fuse_reductions(self.nest, first, second))

    def pipeline(self, loop: LoopRef, stages: int) -> None:
        self._take("pipeline", {"loop": loop, "stages": stages}, pipeline(self.nest, loop, settled(stages)))

    def transform_layout(self, buffer: str, mapping: str) -> None:
        args = {"buffer": buffer, "mapping": mapping}
        self._take("transform_layout", args, transform_layout(self.nest, buffer, mapping))

    def pad(self, loop: LoopRef, multiple: int) -> None:
        self._take("pad", {"loop": loop, "multiple": multiple}, pad(self.nest, loop, settled(multiple)))

    def sample_perfect_tile(
        self, loop: LoopRef, n: int = 2, max_innermost: int = 64, decision: Sequence[int | None] | None = None
    ) -> list[int | None]:
        found = sample_perfect_tile(self.nest, loop, n, max_innermost, self._random, decision)
        args = {"loop": loop, "n": n, "max_innermost": max_innermost, "decision": found}
        return self._draw("sample_perfect_tile", args, found)

    def sample_categorical(
        self, choices: Sequence[Choice], weights: Sequence[float] | None = None, decision: int | None = None
    ) -> Choice:
        found = sample_categorical(self.nest, choices, weights, self._random, decision)
        args = {"choices": list(choices), "weights": None if weights is None else list(weights), "decision": found}
        return self._draw("sample_categorical", args, [choices[found]])[0]

    def blockize(self, loop: LoopRef) -> None:
        self._take("blockize", {"loop": loop}, blockize(self.nest, loop))

    def tensorize(self, block: BlockRef, intrinsic: str) -> None:
        self._take("tensorize", {"block": block, "intrinsic": intrinsic}, tensorize(self.nest, block, intrinsic))

    def powers_of_two(self, block: BlockRef, function: str) -> None:
        self._take("powers_of_two", {"block": block, "function": function}, powers_of_two(self.nest, block, function))

    def decompose_online(
        self, block: BlockRef, loop: LoopRef, skip: bool = False, exponential: str = "exp", finite: bool = False
    ) -> tuple[BlockRef, ...]:
        args: dict[str, Any] = {"block": block, "loop": loop, "skip": skip}
        args |= {"exponential": exponential} if exponential != "exp" else {}
        args |= {"finite": finite} if finite else {}
        return self._take("decompose_online", args, *decompose_online(self.nest, **args))

    def pack(self, block: BlockRef, buffer: str, order: Sequence[str]) -> BlockRef:
        args = {"block": block, "buffer": buffer, "order": list(order)}
        return self._take("pack", args, *pack(self.nest, block, buffer, order))[0]

    def cache_window(self, block: BlockRef, buffer: str, order: Sequence[str]) -> BlockRef:
        args = {"block": block, "buffer": buffer, "order": list(order)}
        return self._take("cache_window", args, *cache_window(self.nest, block, buffer, order))[0]

    def reorder_storage(self, buffer: str, order: Sequence[int]) -> None:
        args = {"buffer": buffer, "order": list(order)}
        self._take("reorder_storage", args, reorder_storage(self.nest, buffer, order))

    # --- recording ----------------------------------------------------------------------------------------------------

    def _take(
        self, primitive: str, args: dict[str, Any], nest: LoopNest, results: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """One step: what it made of the nest, unless that breaks a unit or a tensorized block."""
        step = make_step(primitive, args, tuple(results))
        check_units(self.nest, nest, step)
        check_tensorized(self.nest, nest, step)
        self.nest = nest
        self._steps.append(step)
        return step.results

    def _draw(self, primitive: str, args: dict[str, Any], values: Sequence[Any]) -> list[Any]:
        """One step that draws values; what is no value (None) has no name."""
        start = len(self._drawn)
        names = [f"v{start + k}" for k, _ in enumerate(v for v in values if v is not None)]
        self._take(primitive, args, self.nest, names)
        rest = iter(names)
        found = [None if v is None else drawn(v, next(rest)) for v in values]
        self._drawn.update({v.name: v for v in found if v is not None})
        return found

    def given(self, argument: Argument) -> Argument:
        """An argument of a step with the values that this schedule has drawn in their places. Raises ScheduleError."""
        match argument:
            case tuple():
                return tuple(map(self.given, argument))
            case StepRef():
                if argument.name not in self._drawn:
                    raise ScheduleError("replay", f"nothing has drawn {argument.name}")
                return self._drawn[argument.name]
        return argument


PRIMITIVES = (
    "split", "fuse", "reorder", "merge", "partition", "bind", "parallel", "vectorize", "unroll", "annotate", "atomic",
    "compute_inline", "compute_at", "reverse_compute_at", "rfactor", "set_scope", "blockize", "tensorize",
    "powers_of_two",
    "cache_read", "cache_write", "reverse_compute_inline", "decompose_reduction", "fuse_reductions",
    "decompose_online", "pack", "cache_window", "reorder_storage",
    "transform_layout", "pad", "pipeline", "sample_perfect_tile", "sample_categorical",
)  # fmt: skip


# What a primitive does stands once, beside it; ``help(Schedule.split)`` shows it.
for _name in PRIMITIVES:
    getattr(Schedule, _name).__doc__ = getattr(Schedule, _name).__doc__ or globals()[_name].__doc__


def take_step(schedule: Schedule, step: Step, args: Mapping[str, Any]) -> None:
    """Apply the primitive of a step, with these arguments. Raises ScheduleError, also where none has its name."""
    if step.primitive not in PRIMITIVES:
        known = ", ".join(PRIMITIVES)
        raise ScheduleError(str(step), f"there is no primitive {step.primitive!r}; there are {known}")
    try:
        if step.primitive in VARIADIC:
            getattr(schedule, step.primitive)(*args[VARIADIC[step.primitive]])
        else:
            getattr(schedule, step.primitive)(**args)
    except (TypeError, KeyError) as error:
        raise ScheduleError(str(step), f"the arguments do not fit the primitive ({error})") from None


def replay(trace: Trace, nest: LoopNest) -> Schedule:
    """Apply a trace to a nest: the same steps, which must be legal and make the same names. Raises ScheduleError."""
    schedule = Schedule(nest, trace.rule)
    for step in trace.steps:
        take_step(schedule, step, {k: schedule.given(v) for k, v in step.args})
        made = schedule.trace.steps[-1].results
        if made != step.results:
            raise ScheduleError(str(step), f"it now makes {made}: the trace is of another nest")
    return schedule
