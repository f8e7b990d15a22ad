"""Random traces: primitives with random arguments, of which those that are legal are kept.

A new primitive of ``scheduler.schedule.schedule.PRIMITIVES`` takes part by itself: its parameters are drawn by their
names (``loop``, ``block``, ``buffer``, …). One whose arguments make no sense that way gets an entry in ``DRAWS``.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch_mlc.ir.expr.value import is_value
from torch_mlc.ir.nest.hints import NUM_WARPS, PREFETCH
from torch_mlc.ir.nest.loops import Loop, LoopNest, walk_nodes
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import design_space
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES, Schedule, replay
from torch_mlc.scheduler.schedule.trace import VARIADIC, Step, Trace

FACTORS: tuple[list[int | None], ...] = (
    [None, 2], [None, 2], [None, 4], [None, 4], [None, 3], [None, 8], [3, None], [2, None], [None, 2, 2], [2, None, 3],
    [None, 16], [1, None], [None, 1], [2, 3], [4, 4],
)  # fmt: skip
# How often a primitive is tried, 4 where nothing is said: those that go through always, and seldom matter, are rare.
WEIGHTS = {
    "split": 6,
    "merge": 8,
    "compute_at": 10,
    "reverse_compute_at": 8,
    "reorder": 6,
    "annotate": 1,
    "blockize": 1,
}
# Attempts for each step that is wanted.
PATIENCE = 5
# What a CPU has no notion of, and its emitter refuses.
FOR_GPUS = ("pipeline", "tensorize", "atomic")
GPU_BINDINGS = ("blockIdx.x", "blockIdx.y", "threadIdx.x", "threadIdx.x")


class Player:
    """Draws steps for one schedule. ``gpu`` allows bindings to a grid instead of teams and lanes."""

    def __init__(self, schedule: Schedule, rng: random.Random, gpu: bool) -> None:
        self.s, self.rng, self.gpu = schedule, rng, gpu

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def loops(self) -> list[str]:
        return [n.var.name for n, _ in walk_nodes(self.s.nest.body) if isinstance(n, Loop)]

    def loop(self) -> str:
        return self.rng.choice(self.loops or ["none"])

    def block(self) -> str:
        return self.rng.choice(self.s.get_blocks())

    def buffer(self) -> str:
        names = [b.name for b in (*self.s.nest.locals, *self.s.nest.locals, *self.s.nest.params)]
        return self.rng.choice(names)

    def chain(self, least: int = 2) -> list[str]:
        """Loops directly inside one another."""
        around = self.s.get_loops(self.block())
        if len(around) < least:
            return around
        first = self.rng.randint(0, len(around) - least)
        return around[first : first + self.rng.randint(least, least + 1)]

    def siblings(self) -> tuple[str, str]:
        """Two loops of one body, near one another where there are such."""
        bodies = [self.s.nest.body, *(n.body for n, _ in walk_nodes(self.s.nest.body) if isinstance(n, Loop))]
        several = [x for x in ([n.var.name for n in b if isinstance(n, Loop)] for b in bodies) if len(x) > 1]
        if not several or self.rng.random() < 0.1:
            return self.loop(), self.loop()
        body = self.rng.choice(several)
        k = self.rng.randrange(len(body) - 1)
        return body[k], body[self.rng.randint(k + 1, min(k + 2, len(body) - 1))]

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Draw a primitive and try it. Raises ScheduleError where it is not legal."""
        drawn = [p for p in DRAWN if self.gpu or p not in FOR_GPUS]
        (name,) = self.rng.choices(drawn, [WEIGHTS.get(p, 4) for p in drawn])
        if self.gpu and name in ("parallel", "vectorize"):
            name = "bind"
        elif not self.gpu and name == "bind":
            name = self.rng.choice(("parallel", "vectorize", "unroll"))
        args = DRAWS[name](self) if name in DRAWS else self.by_name(name)
        if name in VARIADIC:
            getattr(self.s, name)(*args[VARIADIC[name]])
        else:
            getattr(self.s, name)(**args)

    def by_name(self, primitive: str) -> dict[str, Any]:
        """Arguments of a primitive, from the names of its parameters."""
        found = {}
        for p in inspect.signature(getattr(Schedule, primitive)).parameters.values():
            if p.name == "self":
                continue
            if p.name in BY_NAME:
                found[p.name] = BY_NAME[p.name](self)
            elif isinstance(p.default, bool):
                found[p.name] = self.rng.random() < 0.5
        return found


BY_NAME: dict[str, Callable[[Player], Any]] = {
    "loop": Player.loop,
    "block": Player.block,
    "buffer": Player.buffer,
    "scope": lambda p: p.rng.choice(("local", "global", "shared")),
    "multiple": lambda p: p.rng.choice((2, 4, 8)),
    "stages": lambda p: p.rng.choice((2, 3)),
    "choices": lambda p: [1, 2, 4],
    "mapping": lambda p: p.rng.choice(("i, j -> j, i", "i, j -> j // 2, i, j % 2", "i -> i // 4, i % 4")),
    "intrinsic": lambda p: "dot",
}


def _merge(p: Player) -> dict[str, Any]:
    first, second = p.siblings()
    return {"first": first, "second": second}


def _permuted(p: Player) -> dict[str, Any]:
    chain = p.chain()
    p.rng.shuffle(chain)
    return {"loops": chain}


def _pair(p: Player) -> dict[str, Any]:
    blocks = p.s.get_blocks()
    k = p.rng.randrange(len(blocks))
    return {"first": blocks[k], "second": blocks[min(k + p.rng.randint(1, 2), len(blocks) - 1)]}


def _pack(p: Player) -> dict[str, Any]:
    """An operand that a block reads, along the axes with which it moves."""
    block = p.s.block(p.block())
    reads = block.reads
    if not reads:
        return {"block": block.name, "buffer": p.buffer(), "order": []}
    read = p.rng.choice(reads)
    moves = {s for i in read.indices if not is_value(i) for s in i.free_symbols}
    axes = [a.var.name for a in block.axes if a.var in moves]
    p.rng.shuffle(axes)
    return {"block": block.name, "buffer": read.buffer, "order": axes}


def _window(p: Player) -> dict[str, Any]:
    """An operand, and an axis for each dimension of its copy where no two axes are summed, or one fewer."""
    args = _pack(p)
    if len(args["order"]) > 1 and p.rng.random() < 0.8:
        args["order"].pop()
    return args


def _storage(p: Player) -> dict[str, Any]:
    name = p.buffer()
    order = list(range(len(p.s.nest.buffer(name).shape)))
    p.rng.shuffle(order)
    return {"buffer": name, "order": order}


def _partition(p: Player) -> dict[str, Any]:
    """A loop, and one or two points within it or near its end."""
    loop = p.loop()
    try:
        extent = p.s.extent(loop)
    except ScheduleError:
        return {"loop": loop, "points": [1]}
    last = int(extent) if extent.is_Integer else 4
    points: list[Any] = sorted({p.rng.randint(1, max(last, 1)) for _ in range(p.rng.randint(1, 2))})
    if not extent.is_Integer and p.rng.random() < 0.6:
        points[-1:] = [extent - p.rng.randint(0, 1)]
    return {"loop": loop, "points": points}


def _annotate(p: Player) -> dict[str, Any]:
    place, hint, value = ("", NUM_WARPS, 8) if p.gpu else (p.loop(), PREFETCH, 64)
    return {"at": p.rng.choice((place, place, p.block())), "key": hint, "value": p.rng.choice((value, value, True))}


DRAWS: dict[str, Callable[[Player], dict[str, Any]]] = {
    "split": lambda p: {
        "loop": p.loop(), "factors": p.rng.choice(FACTORS),
        "tail": p.rng.choice(("predicate", "predicate", "predicate", "perfect")),
    },
    "fuse": lambda p: {"loops": p.chain()},
    "reorder": _permuted,
    "merge": _merge,
    "bind": lambda p: {"loop": p.loop(), "thread": p.rng.choice(GPU_BINDINGS)},
    "annotate": _annotate,
    "powers_of_two": lambda p: {"block": p.block(), "function": p.rng.choice(("exp2", "exp2_approx"))},
    "partition": _partition,
    "fuse_reductions": _pair,
    "pack": _pack,
    "cache_window": _window,
    "reorder_storage": _storage,
}  # fmt: skip


def undrawn(primitive: str) -> list[str]:
    """The parameters of a primitive that nothing draws."""
    if primitive in DRAWS:
        return []
    parameters = list(inspect.signature(getattr(Schedule, primitive)).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.name not in BY_NAME]


DRAWN = tuple(p for p in PRIMITIVES if not undrawn(p))


def random_schedule(
    nest: LoopNest, rng: random.Random, target: Target | None, done: Counter[str] | None = None
) -> Schedule:
    """A schedule of a few random legal steps; with ``target`` around a random point of a rule's design space."""
    schedule = Schedule(nest, "random")
    player = Player(schedule, rng, target is not None and target.is_gpu)
    if target is not None and rng.random() < 0.75:
        if rng.random() < 0.4:
            _play(player, rng.randint(1, 2), done)
        _apply_rule(schedule, rng, target)
        _play(player, rng.randint(0, 4), done)
    else:
        _play(player, rng.randint(1, 12), done)
    return schedule


def _play(player: Player, count: int, done: Counter[str] | None) -> None:
    for _ in range(count * PATIENCE):
        before, steps = player.s.nest, len(player.s.trace.steps)
        if count == 0:
            return
        try:
            player.step()
        except ScheduleError as error:
            assert error.reason and player.s.nest is before and len(player.s.trace.steps) == steps
            continue
        count -= player.s.nest is not before
        if done is not None:
            done[player.s.trace.steps[-1].primitive] += player.s.nest is not before


def _apply_rule(schedule: Schedule, rng: random.Random, target: Target) -> None:
    """A rule's own steps, with parameters drawn from its design space; as far as they go."""
    try:
        space = design_space(schedule.nest, target)
        rule = rng.choice(space.rules)
        values = rule.parameters(schedule.nest, target)
        rule.apply(schedule, target, {k: rng.choice(v) for k, v in values.items()})
    except ScheduleError:
        pass


def shortened(nest: LoopNest, trace: Trace, fails: Callable[[LoopNest], bool]) -> Trace:
    """A trace from which no step can be left out without the failure going away; ``fails`` tells of a nest."""
    steps = list(trace.steps)
    k = len(steps) - 1
    while k >= 0:
        fewer = _replayed(nest, [*steps[:k], *steps[k + 1 :]])
        if fewer is not None and fails(fewer.nest):
            steps = list(fewer.trace.steps)
        k -= 1
    return Trace(tuple(steps), trace.rule)


def _replayed(nest: LoopNest, steps: list[Step]) -> Schedule | None:
    try:
        return replay(Trace(tuple(steps)), nest)
    except ScheduleError:
        return None
