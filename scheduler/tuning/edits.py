"""Edits: changes of a rule's trace that keep what the nest means, or are refused.

An edit names a place of the trace by the loops and blocks that stand there, and what is to be there instead. It is made
without looking at a nest, and can be carried to the nest of other sizes. Whether it is legal is seen when it is
applied: each step is a primitive, which proves or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir.nest.loops import BLOCK_KINDS, Block, Loop, LoopKind
from ..error import ScheduleError
from ..schedule.schedule import Schedule
from ..schedule.trace import VARIADIC, Step, Trace

# Every kind, in the order in which edits are applied: before the rule, while its steps are taken, behind them.
BEFORE = ("inline",)
WITHIN = ("omit", "factor", "lanes", "chunk", "team")
BEHIND = (
    "compute_at", "reverse_compute_at", "order", "tile", "jam", "cache_read", "cache_write", "pack", "unroll", "hint",
)  # fmt: skip
KINDS = (*BEFORE, *WITHIN, *BEHIND)
# Those behind which blocks are others.
OTHER_BLOCKS = ("inline", "cache_read", "cache_write", "pack")
_RANK = {kind: k for k, kind in enumerate(KINDS)}
# Stands between the loops of several blocks that are split alike.
AND = "+"


@dataclass(frozen=True, slots=True)
class TraceEdit:
    """One change: what kind of change, where, and the value there.

    ``inline``: block ``at`` is computed where it is read, before the rule looks at the nest.
    ``omit``: the rule's step ``at`` (as ``step_name`` writes it) is left out.
    ``factor``: the split of a loop has ``value`` at a place, ``at`` is "loop.place"; of several loops that are split
    alike "loop+loop.place".
    ``lanes``: a loop that the rule makes lanes, or a tile, as a whole has ``value`` of them.
    ``chunk``: what a thread of a team, or a program of a grid, takes of loop ``at`` are ``value`` iterations in a row.
    ``team``: loop ``at`` and the one inside it become a team together.
    ``compute_at``, ``reverse_compute_at``: block ``at`` moves to loop ``value``.
    ``order``: loop ``at`` moves inside loop ``value``, which stands directly in it.
    ``tile``: ``value`` iterations of loop ``at`` are done inside the loop that stands directly in it.
    ``jam``: ``value`` iterations of loop ``at`` are written out inside all serial loops under it.
    ``unroll``: ``value`` iterations of loop ``at`` are written out, all with 0.
    ``cache_read``, ``cache_write``, ``pack``: block ``at`` goes through a copy of a buffer, ``value`` is "buffer@loop".
    ``hint``: ``at`` is "place:hint" with the hint's ``value``.
    """

    kind: str
    at: str
    value: int | str = 1

    def __str__(self) -> str:
        return f"{self.kind}({self.at}={self.value})"


def arranged(edits: Iterable[TraceEdit]) -> tuple[TraceEdit, ...]:
    """Edits in the order in which they are applied, one a place: the last of several."""
    edits = tuple(edits)
    if len(edits) < 2:
        return edits
    places = {(e.kind, e.at): e for e in edits}
    return tuple(sorted(places.values(), key=lambda e: (_RANK[e.kind], e.at)))


def step_name(step: Step) -> str:
    """A step as edits name it: the primitive and what it is applied to."""
    args = dict(step.args)
    match step.primitive:
        case "merge":
            return f"merge:{args['first']},{args['second']}"
        case "annotate":
            return f"annotate:{args['at']}:{args['key']}"
        case "fuse" | "reorder":
            return f"{step.primitive}:{','.join(args['loops'])}"
    return f"{step.primitive}:{args.get('loop', args.get('block', args.get('buffer', '')))}"


# --- while the rule's steps are taken ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Base:
    """A rule's own schedule, and the states on the way there: ``states[k]`` is what step k is applied to."""

    trace: Trace
    states: tuple[Schedule, ...]
    schedule: Schedule


def followed(base: Base, edits: Sequence[TraceEdit]) -> tuple[Schedule, dict[str, str]]:
    """A rule's steps with edits of the kinds ``WITHIN``, and what became of its loops that have other names now. Raises
    ScheduleError."""
    if not edits:
        return base.schedule.copy(), {}
    steps = base.trace.steps
    first = next((k for k, s in enumerate(steps) if any(_concerns(e, s) for e in edits)), None)
    if first is None:
        raise ScheduleError(str(edits[0]), "no step of the rule is there")
    schedule, names, used = base.states[first].copy(), dict[str, str](), set[TraceEdit]()
    for step in steps[first:]:
        here = [e for e in edits if _concerns(e, step)]
        used.update(here)
        if any(e.kind == "omit" for e in here):
            continue
        _step(schedule, step, here, names)
    if len(used) < len(edits):
        missing = next(e for e in edits if e not in used)
        raise ScheduleError(str(missing), "no step of the rule is there")
    return schedule, names


def _concerns(edit: TraceEdit, step: Step) -> bool:
    args = dict(step.args)
    match edit.kind:
        case "omit":
            return step_name(step) == edit.at
        case "factor":
            loop, place = edit.at.rsplit(".", 1)
            if step.primitive != "split" or int(place) >= len(args["factors"]):
                return False
            given = args["factors"][int(place)]
            return args["loop"] in loop.split(AND) and isinstance(given, int)
        case "lanes":
            return is_tile(step) and args["loop"] == edit.at
        case "chunk" | "team":
            return is_team(step) and args["loop"] == edit.at
    return False


def is_tile(step: Step) -> bool:
    """Whether a step makes lanes, or an axis of a program's tile, of a loop."""
    return step.primitive == "vectorize" or dict(step.args).get("thread") == LoopKind.THREAD_X.value


def is_team(step: Step) -> bool:
    """Whether a step gives the iterations of a loop to threads of a team, or to programs of a grid."""
    return step.primitive == "parallel" or dict(step.args).get("thread") in [k.value for k in BLOCK_KINDS]


def _step(schedule: Schedule, step: Step, edits: Sequence[TraceEdit], names: dict[str, str]) -> None:
    args = {k: _renamed(schedule.given(v), names) for k, v in step.args}
    for e in edits:
        match e.kind:
            case "factor":
                place = int(e.at.rsplit(".", 1)[1])
                factors = list(args["factors"])
                factors[place] = e.value
                args["factors"] = factors
            case "lanes":
                whole = args["loop"]
                outer, args["loop"] = schedule.split(whole, [None, int(e.value)])
                names[dict(step.args)["loop"]] = outer
            case "team":
                inside = schedule.loop(args["loop"]).body
                if len(inside) != 1 or not isinstance(inside[0], Loop):
                    raise ScheduleError(str(e), "no loop stands alone in it")
                args["loop"] = schedule.fuse(args["loop"], inside[0].var.name)
                names[dict(step.args)["loop"]] = args["loop"]
            case "chunk":
                args["loop"], _ = schedule.split(args["loop"], [None, int(e.value)])
                names[dict(step.args)["loop"]] = args["loop"]
    perform(schedule, step.primitive, args)
    made = schedule.trace.steps[-1].results
    if len(made) != len(step.results):
        raise ScheduleError(str(step), "it makes other loops now")
    names.update((old, new) for old, new in zip(step.results, made, strict=True) if old != new)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    return tuple(_renamed(v, names) for v in value) if isinstance(value, tuple) else value


def perform(schedule: Schedule, primitive: str, args: Mapping[str, Any]) -> None:
    """One primitive by its name. Raises ScheduleError."""
    try:
        if primitive in VARIADIC:
            getattr(schedule, primitive)(*args[VARIADIC[primitive]])
        else:
            getattr(schedule, primitive)(**args)
    except (TypeError, KeyError) as error:
        raise ScheduleError(primitive, f"the arguments do not fit the primitive ({error})") from None


# --- before and behind them -------------------------------------------------------------------------------------------


def inline(schedule: Schedule, edit: TraceEdit) -> None:
    schedule.compute_inline(edit.at)


def finished(schedule: Schedule, edits: Sequence[TraceEdit], names: Mapping[str, str]) -> None:
    """Take the steps of edits of the kinds ``BEHIND``; ``names`` are loops that have other names now. Raises
    ScheduleError."""
    outer = dict(names)
    for e in edits:
        APPLY[e.kind](schedule, e, outer)


def _compute_at(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    schedule.compute_at(edit.at, _now(outer, str(edit.value)))


def _reverse_compute_at(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    schedule.reverse_compute_at(edit.at, _now(outer, str(edit.value)))


def _order(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    schedule.reorder(_now(outer, str(edit.value)), _now(outer, edit.at))


def _tile(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    loop = _now(outer, edit.at)
    (inside,) = _alone(schedule, loop, str(edit))
    _needs_more(schedule, loop, int(edit.value), edit)
    whole, part = schedule.split(loop, [None, int(edit.value)])
    outer[edit.at] = whole
    schedule.reorder(inside, part)


def _jam(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    loop = _now(outer, edit.at)
    below: list[str] = []
    node = schedule.loop(loop)
    while len(node.body) == 1 and isinstance(child := node.body[0], Loop) and child.kind is LoopKind.SERIAL:
        below.append(child.var.name)
        node = child
    if not below:
        raise ScheduleError(str(edit), "no serial loop stands in it")
    _needs_more(schedule, loop, int(edit.value), edit)
    whole, part = schedule.split(loop, [None, int(edit.value)])
    outer[edit.at] = whole
    schedule.reorder(*below, part)
    schedule.unroll(part)


def _unroll(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    loop, count = _now(outer, edit.at), int(edit.value)
    if count:
        _needs_more(schedule, loop, count, edit)
        outer[edit.at], loop = schedule.split(loop, [None, count])
    schedule.unroll(loop)


def _copy(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    buffer, loop = str(edit.value).split("@")
    loop = _now(outer, loop)
    if edit.kind == "cache_write":
        schedule.reverse_compute_at(schedule.cache_write(edit.at, buffer), loop)
    elif edit.kind == "cache_read":
        schedule.compute_at(schedule.cache_read(edit.at, buffer), loop)
    else:
        block = schedule.block(edit.at)
        moving = {s for ld in block.reads if ld.buffer == buffer for i in ld.indices for s in _symbols(i)}
        order = [a.var.name for a in block.axes if a.var in moving]
        schedule.compute_at(schedule.pack(edit.at, buffer, order), loop)


def _hint(schedule: Schedule, edit: TraceEdit, outer: dict[str, str]) -> None:
    at, key = edit.at.split(":", 1)
    schedule.annotate(_now(outer, at), key, edit.value)


APPLY: Mapping[str, Callable[[Schedule, TraceEdit, dict[str, str]], None]] = {
    "compute_at": _compute_at, "reverse_compute_at": _reverse_compute_at, "order": _order, "tile": _tile, "jam": _jam,
    "cache_read": _copy, "cache_write": _copy, "pack": _copy, "unroll": _unroll, "hint": _hint,
}  # fmt: skip


def _symbols(index: Any) -> Iterable[Any]:
    return getattr(index, "free_symbols", ())


def _now(outer: Mapping[str, str], loop: str) -> str:
    """The name of a loop that earlier edits have split: its outer part."""
    while loop in outer and outer[loop] != loop:
        loop = outer[loop]
    return loop


def _alone(schedule: Schedule, loop: str, asked: str) -> tuple[str]:
    inside = schedule.loop(loop).body
    if len(inside) != 1 or isinstance(inside[0], Block) or inside[0].kind is not LoopKind.SERIAL:
        raise ScheduleError(asked, "no serial loop stands alone in it")
    return (inside[0].var.name,)


def _needs_more(schedule: Schedule, loop: str, factor: int, edit: TraceEdit) -> None:
    """Parts of a loop that are no smaller than the loop itself would only be tails."""
    extent = schedule.extent(loop)
    if extent.is_Integer and int(extent) <= factor:
        raise ScheduleError(str(edit), f"there are only {extent} iterations")
