"""``torch_mlc.attribute``: which places make a compiled result another than eager's, measured by switching them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ...runtime.settings.options import OptionError, Options
from ...scheduler.numerics import REWRITE, NumericsByPlace, NumericsError, nearest
from ..aten_passes.rounding.numerics import placed_nodes
from ..entry.backend import settings_of
from ..explaining.compiled_model import asked_of
from .attribution import NOT_ATTRIBUTED, OF_EAGER, SHARE, TRACED, Attribution, AttributionRow
from .bisection import Path
from .results import Distance, Results, ResultSpace, share, total_elements
from .runs import Backward, CompiledPart, Runs, measured_settings
from .steps import Switch, entries, places_of, rewrites_of, with_entries

AGAINST = ("eager", "float64")
# Rows that are also measured alone, which says how much the order of steps counts.
ALONE = 6
_RANDOM = 'The model draws random numbers, and here they are eager\'s, as with options={"fallback_random": True}.'


def attribute(
    model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    against: str = "eager",
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    backward: Backward = False,
    budget: int = 64,
    layers: bool = False,
) -> Attribution:
    """Tell which conversions, orders of sums, approximate functions and rewrites make the compiled ``model(*inputs,
    **kwargs)`` another than eager's, and by how much each.

    Each of these is switched to what eager does, one after the other, until all are; every difference between two such
    programs is that of the places switched in between, so that all of them add up to the whole. Where many places are
    switched at once, those with a large difference are halved, until ``budget`` programs were compiled. Equal places of
    layers that repeat are switched together, unless ``layers`` are told apart.

    ``against="float64"`` measures from eager in float64, and tells which places are better or worse than eager. With
    ``backward`` gradients are results too: of the sum of the floating results, or of the loss that a function makes of
    the result. ``mode``, ``options`` and ``dynamic`` are those of torch.compile; of what it has compiled they are the
    ones that it was given. Random numbers are eager's, so that a seed gives the same ones.

    Buffers, arguments, gradients and random states are afterwards as they were, as with ``torch_mlc.explain``.
    Raises: OptionError for settings that do not exist, and for an entry of numerics that names no place of the model;
    what the model raises.
    """
    if against not in AGAINST:
        raise OptionError(f"attribute: against={against!r} is none of {', '.join(map(repr, AGAINST))}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 4:
        raise OptionError(f"attribute: budget={budget!r} is no number of programs; give 4 or more")
    asked = asked_of(model)
    if mode is None and options is None:
        mode, options = asked.mode, asked.options
    settings = measured_settings(settings_of(mode, options))
    dynamic = asked.dynamic if dynamic is None else dynamic
    began = time.perf_counter()
    runs = Runs(asked.call, inputs, kwargs or {}, settings, dynamic, backward)
    return _Measure(runs, settings, against, budget, layers, began).attribution()


@dataclass(slots=True)
class _Measure:
    runs: Runs
    settings: Options
    against: str
    budget: int
    layers: bool
    began: float
    notes: list[str] = field(default_factory=list)

    def attribution(self) -> Attribution:
        eager = self.runs.by_eager()
        first, parts = self.runs.compile(replace(self.settings, cache=False))
        again, _ = self.runs.compile(self.settings)
        goal = eager if self.against == "eager" else self.runs.in_double()
        if self.against != "eager":
            goal = Results({n: _in_type(goal.tensors[n], t) for n, t in eager.tensors.items()})
        space = ResultSpace(first, goal)
        _check_entries(self.settings, parts)
        whole, noise = space.size(first, goal), space.size(first, again)
        elements = total_elements(list(eager.tensors.values()))
        base = self.settings.numerics
        plain = base.plain() if isinstance(base, NumericsByPlace) else {"default": base}
        if whole.norm == 0 and whole.elements == 0:
            return self._made(whole, noise, (), 0.0, elements, 0, plain)
        if any(map(_draws, parts)):
            self.notes.append(_RANDOM)
        steps = self._steps(parts)
        path = Path(steps, lambda count: self._switched(steps[:count], steps), space, {0: first})
        last = path.at(len(steps))
        path.bisect(self._left - ALONE - 1, max(whole.norm, 1e-300) + whole.elements, self.layers)
        found = self._rows(path, whole)
        if not space.is_same(last, eager):
            traced = self.runs.traced()
            for kind, told, one, other in (
                (NOT_ATTRIBUTED, "the program with everything switched, and AOTAutograd's ops", last, traced),
                (TRACED, "AOTAutograd's ops, and eager's", traced, eager),
            ):
                if not space.is_same(one, other):
                    row = self._row(kind, one, other, space, whole)
                    found.append((replace(row, places=(told,)), one, other))
        if self.against != "eager":
            row = self._row(OF_EAGER, eager, goal, space, whole)
            found.append((replace(row, places=("eager, and eager in float64",)), eager, goal))
        found.sort(key=lambda f: (-abs(f[0].share), -f[0].size.elements))
        rows = tuple(row for row, _, _ in found)
        products = space.products([(one, other) for _, one, other in found], whole.norm)
        rest = sum(r.share for r in rows if r.kind == NOT_ATTRIBUTED)
        made = self._made(whole, noise, rows, rest, elements, len(steps), plain)
        made = replace(made, products=products, idle=_idle(path))
        made, ratio = self._measured(made, space, whole, plain)
        return replace(made, kept=ratio, programs=self.runs.compiled, seconds=time.perf_counter() - self.began)

    def _measured(
        self, made: Attribution, space: ResultSpace, whole: Distance, plain: Mapping[str, str]
    ) -> tuple[Attribution, float]:
        """What is left with the mapping that ``numerics()`` gives, as a share of the whole. Rows are measured in one
        order and named in another, in which they may make less, and what made nothing there may make something; then
        more are named, as far as the budget goes."""
        more = 1
        while True:
            switches = {n: v for n, v in made.numerics().items() if n not in plain}
            kept, _ = self.runs.compile(replace(self.settings, numerics=with_entries(self.settings.numerics, switches)))
            left = space.size(kept, space.last)
            ratio = left.norm / whole.norm if whole.norm else left.elements / whole.elements
            enough = ratio <= 1 - SHARE or made.named >= made.nameable
            if self.against != "eager" or enough or self._left < 1:
                return made, ratio
            made, more = replace(made, least=made.named + more), 2 * more

    @property
    def _left(self) -> int:
        return self.budget - self.runs.compiled

    def _steps(self, parts: Sequence[CompiledPart]) -> tuple[Switch, ...]:
        """The steps, the places among them those of the graphs that no pass has rewritten."""
        rewrites = rewrites_of(parts, self.settings)
        if any(step.lines is not None for step in rewrites):
            numerics = with_entries(self.settings.numerics, entries(rewrites, rewrites))
            _, parts = self.runs.compile(replace(self.settings, numerics=numerics, cache=False))
        return (*rewrites, *places_of(parts, self.settings))

    def _switched(self, on: Iterable[Switch], steps: Sequence[Switch]) -> Results:
        numerics = with_entries(self.settings.numerics, entries(on, steps))
        return self.runs.compile(replace(self.settings, numerics=numerics))[0]

    def _rows(self, path: Path, whole: Distance) -> list[tuple[AttributionRow, Results, Results]]:
        """Rows of what was measured, each with both of its ends; the largest are measured alone as well."""
        found: list[tuple[AttributionRow, Results, Results]] = []
        steps: dict[int, Sequence[Switch]] = {}
        for interval in path.intervals():
            on = path.steps[interval.begin : interval.end]
            one, other = path.measured[interval.begin], path.measured[interval.end]
            if not path.space.is_same(one, other):
                steps[len(found)] = on
                found.append((_named(self._row("", one, other, path.space, whole), on, path.steps), one, other))
        for k in sorted(steps, key=lambda k: -abs(found[k][0].share))[:ALONE]:
            row, one, other = found[k]
            if self._left > 1 and len(found) > 1:
                alone = self._row("", path.measured[0], self._switched(steps[k], path.steps), path.space, whole).share
                found[k] = replace(row, low=min(row.low, alone), high=max(row.high, alone)), one, other
        return found

    def _row(self, kind: str, one: Results, other: Results, space: ResultSpace, whole: Distance) -> AttributionRow:
        at, then, end = space.vector(one), space.vector(other), space.vector(space.last)
        part = share(at - then, space.vector(space.first) - end)
        if whole.norm == 0 and whole.elements:
            part = (space.counted(one, space.last) - space.counted(other, space.last)) / whole.elements
        error = None
        if self.against != "eager" and whole.norm:
            error = (_norm(then - end) - _norm(at - end)) / whole.norm
        return AttributionRow(kind, (), (), part, part, part, space.size(one, other), error)

    def _made(
        self, whole: Distance, noise: Distance, rows: tuple[AttributionRow, ...], rest: float, elements: int,
        steps: int, plain: Mapping[str, str],
    ) -> Attribution:  # fmt: skip
        seconds = time.perf_counter() - self.began
        return Attribution(
            self.against, whole, noise, rows, rest, elements, steps, self.runs.compiled, seconds, plain,
            notes=tuple(self.notes),
        )  # fmt: skip


def _named(row: AttributionRow, on: Sequence[Switch], every: Sequence[Switch]) -> AttributionRow:
    """A row with what its steps are about."""
    places = tuple(dict.fromkeys(str(s.place) if s.place is not None else f"pass {s.rewrite}" for s in on))
    groups = tuple(dict.fromkeys(s.group for s in on))
    kinds = tuple(dict.fromkeys(s.told for s in on))
    lines = tuple(
        dict.fromkeys([s.place.line for s in on if s.place is not None] + [x for s in on for x in s.lines or ()])
    )
    layers = tuple(dict.fromkeys(s.place.path for s in on if s.place is not None)) if len(groups) == 1 else ()
    if len(groups) == 1:
        places = places[:1]
    kind = kinds[0] if len(kinds) == 1 else "several kinds"
    return replace(row, kind=kind, places=places, lines=lines, layers=layers, entries=entries(on, every))


def _idle(path: Path) -> tuple[Mapping[str, str], ...]:
    """The entries of each switch that made no difference in its turn, passes that changed a graph first. The layers of
    a place are one."""
    groups: dict[tuple[str, str], list[Switch]] = {}
    for interval in path.intervals():
        if path.space.is_same(path.measured[interval.begin], path.measured[interval.end]):
            for step in path.steps[interval.begin : interval.end]:
                groups.setdefault(step.group, []).append(step)
    ordered = sorted(groups.values(), key=lambda on: (on[0].kind == REWRITE) * (1 if on[0].lines is None else -1))
    return tuple(entries(on, path.steps) for on in ordered)


def _draws(part: CompiledPart) -> bool:
    """Whether a graph draws random numbers."""
    return any(_is_random(n) for m in part.gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)


def _is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers; an attention does where it drops something."""
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _norm(vector: Tensor) -> float:
    return torch.linalg.vector_norm(vector).item()


def _in_type(wide: Tensor, like: Tensor) -> Tensor:
    """Results of float64 stay so; whole numbers are as eager's."""
    return wide if wide.is_floating_point() or wide.is_complex() else wide.to(like.dtype)


def _check_entries(settings: Options, parts: Sequence[CompiledPart]) -> None:
    """Raises OptionError where an entry of numerics is for no place of the model."""
    numerics = settings.numerics
    if not isinstance(numerics, NumericsByPlace):
        return
    places = [place for part in parts for _, place in placed_nodes(part.gm)]
    for name in numerics.unused(places):
        error = NumericsError(f"the entry {name!r} of numerics is for no place of the model.{nearest(name, places)}")
        raise OptionError(str(error))


__all__ = ["attribute"]
