"""The space of a nest's schedules: rules, their parameters, and edits of what they make.

A draft is a point that nobody has applied yet: cheap to make, to change and to compare. ``Space.replayed`` applies it,
or says that it is illegal.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random
from typing import Any, Literal, TypeAlias

from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...ir.text.structure import structural_key
from ..error import ScheduleError
from ..rules import design_space
from ..rules.registry import Rule, Value
from ..schedule.carry import applied
from ..schedule.schedule import Schedule
from ..schedule.trace import Trace
from .edits import BEFORE, OTHER_BLOCKS, WITHIN, Base, TraceEdit, arranged, finished, followed, inline
from .order import Combining, combining
from .sites import EditSite, sites_of

Numerics: TypeAlias = Literal["same", "any"]
Params: TypeAlias = tuple[tuple[str, Value], ...]
# Rules with more points than this have the sites of their default at each of them.
MAX_POINTS = 64
# How often a random draft is of the first rule, goes on to another edit, and how many edits it has at most.
FIRST_RULE, ANOTHER_EDIT, MOST_EDITS = 0.8, 0.7, 6
# Replayed schedules, and rules' own, that are kept.
_KEPT = 512


@dataclass(frozen=True, slots=True)
class Draft:
    """A point of the space that was not replayed: a rule by its name, a value of each of its parameters, and edits in
    the order in which they are applied."""

    rule: str
    params: Params
    edits: tuple[TraceEdit, ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"{k}={v}" for k, v in self.params)
        return " ".join((f"{self.rule}({given})", *map(str, self.edits)))

    def to_plain(self) -> dict[str, Any]:
        """The draft as data that JSON holds; ``from_plain`` gives an equal one back."""
        edits = [[e.kind, e.at, e.value] for e in self.edits]
        return {"rule": self.rule, "params": dict(self.params), "edits": edits}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Draft:
        """Raises KeyError, TypeError and ValueError where the data are no draft."""
        edits = (TraceEdit(str(kind), str(at), value) for kind, at, value in data["edits"])
        return Draft(str(data["rule"]), tuple(dict(data["params"]).items()), arranged(edits))


class Space:
    """Every schedule that rules and edits offer for a nest.

    With ``numerics="same"`` only those that combine in the default's order, so that results have the same bits.
    Raises ScheduleError where no rule applies.
    """

    def __init__(self, nest: LoopNest, target: Target, numerics: Numerics = "any") -> None:
        self.nest, self.target, self.numerics = nest, target, numerics
        rules = design_space(nest, target).rules
        self._rules: dict[str, Rule] = {}
        self.values: dict[str, Mapping[str, tuple[Value, ...]]] = {}
        self._bases: OrderedDict[tuple[str, Params, tuple[TraceEdit, ...]], Base | None] = OrderedDict()
        self._sites: dict[tuple[str, Params], dict[tuple[str, str], EditSite]] = {}
        # What others compute once for the whole space, by their names.
        self.memo: dict[str, Any] = {}
        self._replayed: OrderedDict[Draft, Schedule | None] = OrderedDict()
        # By rule: its default, and whether it has many points.
        self._firsts: dict[str, Draft] = {}
        self._large: dict[str, bool] = {}
        for rule in rules:
            self._rules[rule.name] = rule
            self.values[rule.name] = rule.parameters(nest, target)
        for rule in rules:
            if self._base(self._first(rule.name)) is None:
                del self._rules[rule.name], self.values[rule.name]
        if not self._rules:
            raise ScheduleError("Space", f"no rule applies to {nest.name}", nest)
        self._order: Combining | None = None
        if numerics == "same":
            base = self._base(self.default())
            assert base is not None
            self._order = combining(base.schedule.nest)
            kept = {n for n in self._rules if n == self.default().rule or self.replayed(self._first(n)) is not None}
            self._rules = {n: r for n, r in self._rules.items() if n in kept}
            self.values = {n: self._alike(n) for n in self._rules}
            self._firsts, self._large = {}, {}

    # --- points -------------------------------------------------------------------------------------------------------

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules that apply, best first."""
        return tuple(self._rules)

    def default(self) -> Draft:
        """What the nest gets without tuning."""
        return self._first(next(iter(self._rules)))

    def first(self) -> list[Draft]:
        """The default, then the other rules' defaults."""
        return [self._first(name) for name in self._rules]

    def listed(self, limit: int) -> Iterator[Draft]:
        """Drafts nearest to the defaults first, ``limit`` at most: with no change, with one, with two, and so on, those
        of the first rule before those of others."""
        count = 0
        for changes in range(MOST_EDITS + 1):
            some = False
            for name in self._rules:
                for draft in self._changed(name, changes):
                    if count >= limit:
                        return
                    some = True
                    count += 1
                    yield draft
            if not some:
                return

    def random(self, rng: Random) -> Draft:
        """A point by chance: a rule, its parameters, some edits."""
        names = list(self._rules)
        name = names[0] if len(names) == 1 or rng.random() < FIRST_RULE else rng.choice(names[1:])
        draft = self._first(name)
        if rng.random() < 0.6:
            draft = replace(draft, params=tuple((k, rng.choice(v)) for k, v in self.values[name].items()))
        while len(draft.edits) < MOST_EDITS and rng.random() < ANOTHER_EDIT:
            draft = self._edited(draft, rng)
        return draft

    def mutated(self, draft: Draft, rng: Random) -> Draft:
        """A neighbour: another value of a parameter or an edit, an edit more or less, seldom another rule."""
        moves = [self._edited, self._edited]
        if any(len(v) > 1 for v in self.values[draft.rule].values()):
            moves += [self._tuned, self._tuned]
        if draft.edits:
            moves += [self._revalued, self._plainer]
        if len(self._rules) > 1 and rng.random() < 0.05:
            return self._first(rng.choice([n for n in self._rules if n != draft.rule]))
        return rng.choice(moves)(draft, rng)

    def crossed(self, a: Draft, b: Draft, rng: Random) -> Draft:
        """A point between two: of each parameter and each place that is edited what one of them has."""
        if a.rule != b.rule:
            return self.mutated(rng.choice((a, b)), rng)
        other = dict(b.params)
        params = tuple((k, v if rng.random() < 0.5 else other[k]) for k, v in a.params)
        places: dict[tuple[str, str], list[TraceEdit | None]] = {}
        for k, parent in enumerate((a, b)):
            for e in parent.edits:
                places.setdefault((e.kind, e.at), [None, None])[k] = e
        chosen = (rng.choice(pair) for pair in places.values())
        edits = [e for e in chosen if e is not None]
        return Draft(a.rule, params, arranged(edits[:MOST_EDITS]))

    def size(self) -> int:
        """Drafts with no more than ``MOST_EDITS`` edits by the default parameters' sites: an estimate, from above."""
        total = 0
        for name, values in self.values.items():
            ways = [len(s.values) for s in self.sites(self._first(name))]
            sums = [1] + [0] * MOST_EDITS
            for w in ways:
                for k in range(MOST_EDITS, 0, -1):
                    sums[k] += w * sums[k - 1]
            total += math.prod(map(len, values.values())) * sum(sums)
        return total

    # --- schedules ----------------------------------------------------------------------------------------------------

    def replayed(self, draft: Draft) -> Schedule | None:
        """The schedule of a draft; None where a primitive refuses, and where the order of combining would be another's
        though it has to be the default's."""
        if draft in self._replayed:
            self._replayed.move_to_end(draft)
        else:
            self._replayed[draft] = self._applied(draft)
            if len(self._replayed) > _KEPT:
                self._replayed.popitem(last=False)
        found = self._replayed[draft]
        return None if found is None else found.copy()

    def schedule(self, trace: Trace) -> Schedule | None:
        """The schedule of a trace, such as one that was measured for an equal nest, under the same conditions."""
        try:
            schedule = applied(trace, self.nest)
        except ScheduleError:
            return None
        return schedule if self._fits(schedule) else None

    def key(self, schedule: Schedule) -> str:
        """The same for schedules whose nests are equal: they are one point."""
        return structural_key(schedule.nest)

    def plain(self, draft: Draft) -> Draft:
        """The rule's own schedule that stands for a draft's: by its parameters, without edits; by the default ones
        where the rule has too many points to look at each."""
        if self._is_large(draft.rule):
            return self._first(draft.rule)
        return Draft(draft.rule, draft.params) if draft.edits else draft

    def base(self, draft: Draft) -> Schedule | None:
        """The rule's own schedule by a draft's parameters, without its edits."""
        found = self._base(Draft(draft.rule, draft.params))
        return None if found is None else found.schedule

    def sites(self, draft: Draft) -> tuple[EditSite, ...]:
        """Where a draft may be edited, and by what."""
        return tuple(self.site_table(draft).values())

    def site_table(self, draft: Draft) -> Mapping[tuple[str, str], EditSite]:
        """The sites of a draft by what an edit has of them: its kind and place."""
        params = self._first(draft.rule).params if self._is_large(draft.rule) else draft.params
        key = (draft.rule, params)
        if key not in self._sites:
            base = self._base(Draft(draft.rule, params))
            found = () if base is None else sites_of(base, self.nest, self.target)
            if self.numerics == "same":
                found = tuple(s for s in found if not s.reduces and s.kind not in OTHER_BLOCKS)
            self._sites[key] = {(s.kind, s.at): s for s in found}
        return self._sites[key]

    def _is_large(self, rule: str) -> bool:
        found = self._large.get(rule)
        if found is None:
            found = self._large[rule] = math.prod(map(len, self.values[rule].values())) > MAX_POINTS
        return found

    # --- within -------------------------------------------------------------------------------------------------------

    def _first(self, name: str) -> Draft:
        found = self._firsts.get(name)
        if found is None:
            found = self._firsts[name] = Draft(name, tuple((k, v[0]) for k, v in self.values[name].items()))
        return found

    def _alike(self, name: str) -> Mapping[str, tuple[Value, ...]]:
        """The values of a rule's parameters that leave the order of combining as it is, one changed at a time."""
        first = self._first(name)
        kept: dict[str, tuple[Value, ...]] = {}
        for k, (param, values) in enumerate(first.params):
            points = (
                (v, replace(first, params=(*first.params[:k], (param, v), *first.params[k + 1 :])))
                for v in self.values[name][param]
            )
            kept[param] = tuple(v for v, d in points if v == values or self.replayed(d) is not None)
        return kept

    def _changed(self, name: str, changes: int) -> Iterator[Draft]:
        """Points of a rule that differ from its default in so many parameters and edits."""
        first, values = self._first(name), self.values[name]
        for of_params in range(min(changes, len(values)), -1, -1):
            for chosen in combinations(values, of_params):
                for picked in product(*(values[k][1:] for k in chosen)):
                    new = dict(zip(chosen, picked, strict=True))
                    draft = replace(first, params=tuple((k, new.get(k, v)) for k, v in first.params))
                    if changes == of_params:  # whose sites nobody asks for: they take longest
                        yield draft
                        continue
                    for places in combinations(self.sites(draft), changes - of_params):
                        for edits in product(*(s.edits() for s in places)):
                            yield Draft(draft.rule, draft.params, arranged(edits))

    def _edited(self, draft: Draft, rng: Random) -> Draft:
        sites = self.sites(draft)
        if not sites or len(draft.edits) >= MOST_EDITS:
            return draft
        # Kinds are alike likely, however many places each has.
        kind = rng.choice(list(dict.fromkeys(s.kind for s in sites)))
        site = rng.choice([s for s in sites if s.kind == kind])
        return replace(draft, edits=arranged((*draft.edits, TraceEdit(site.kind, site.at, rng.choice(site.values)))))

    def _tuned(self, draft: Draft, rng: Random) -> Draft:
        values = self.values[draft.rule]
        name = rng.choice([k for k, v in values.items() if len(v) > 1])
        other = rng.choice([v for v in values[name] if v != dict(draft.params)[name]])
        return replace(draft, params=tuple((k, other if k == name else v) for k, v in draft.params))

    def _revalued(self, draft: Draft, rng: Random) -> Draft:
        edit = rng.choice(draft.edits)
        site = next((s for s in self.sites(draft) if (s.kind, s.at) == (edit.kind, edit.at)), None)
        others = [v for v in site.values if v != edit.value] if site is not None else []
        if not others:
            return self._plainer(draft, rng)
        return replace(draft, edits=arranged((*draft.edits, replace(edit, value=rng.choice(others)))))

    def _plainer(self, draft: Draft, rng: Random) -> Draft:
        gone = rng.randrange(len(draft.edits))
        return replace(draft, edits=draft.edits[:gone] + draft.edits[gone + 1 :])

    def _base(self, draft: Draft) -> Base | None:
        """The rule's own schedule by the draft's parameters, behind the edits that come before the rule."""
        before = tuple(e for e in draft.edits if e.kind in BEFORE)
        key = (draft.rule, draft.params, before)
        if key in self._bases:
            self._bases.move_to_end(key)
            return self._bases[key]
        base: Base | None
        try:
            base = self._made(draft, before)
        except ScheduleError:
            base = None
        self._bases[key] = base
        if len(self._bases) > _KEPT:
            self._bases.popitem(last=False)
        return base

    def _made(self, draft: Draft, before: Sequence[TraceEdit]) -> Base:
        begun = Schedule(self.nest, draft.rule)
        for e in before:
            inline(begun, e)
        schedule = _Followed(begun)
        self._rules[draft.rule].apply(schedule, self.target, dict(draft.params))
        steps = schedule.trace.steps[len(begun.trace.steps) :]
        return Base(Trace(steps, draft.rule), tuple(schedule.states), schedule.plain())

    def _applied(self, draft: Draft) -> Schedule | None:
        base = self._base(draft)
        if base is None:
            return None
        try:
            schedule, names = followed(base, [e for e in draft.edits if e.kind in WITHIN])
            finished(schedule, [e for e in draft.edits if e.kind not in BEFORE and e.kind not in WITHIN], names)
        except ScheduleError:
            return None
        return schedule if self._fits(schedule) else None

    def _fits(self, schedule: Schedule) -> bool:
        return self._order is None or combining(schedule.nest) == self._order


class _Followed(Schedule):
    """A schedule that keeps what it was before each of its steps."""

    def __init__(self, begun: Schedule) -> None:
        super().__init__(begun.nest, begun.rule)
        self._steps = list(begun.trace.steps)
        self.states: list[Schedule] = []

    def _take(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        before = self.plain()
        made = super()._take(*args, **kwargs)
        self.states.append(before)
        return made

    def plain(self) -> Schedule:
        """The schedule as it is now, which keeps nothing."""
        return Schedule.copy(self)
