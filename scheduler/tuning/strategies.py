"""Strategies: which drafts to measure next.

Each is asked for drafts (``propose``) and told what became of them (``observe``). What is proposed replays, and no two
proposals make equal nests. A strategy is deterministic: the same space, seed and observations give the same proposals.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np

from .features import draft_features, nest_features
from .space import Draft, Space

Array: TypeAlias = "np.ndarray[Any, Any]"

# Drafts that evolution makes for a batch, those of them that are replayed, and the share of these that chance picks.
MUTANTS, REPLAYED, BY_CHANCE = 1024, 48, 0.05
# Drafts that were measured and go on as parents, and the share of drafts that two of them make.
PARENTS, CROSSED = 24, 0.3
# How often a draft is drawn anew before a space counts as exhausted.
PATIENCE = 64
# Points of a beam, and neighbours of each that are scored.
BEAM, NEIGHBOURS = 8, 64


class Ranker(Protocol):
    """Says which of several drafts, or nests, is faster."""

    def scores(self, features: Array) -> Array:
        """A score for each row of features: higher is faster."""
        ...


class Strategy(Protocol):
    """What a search asks for its next candidates."""

    def propose(self, count: int) -> list[Draft]:
        """Drafts to measure, never the same twice; fewer, or none, when the space is exhausted."""
        ...

    def observe(self, draft: Draft, speedup: float | None) -> None:
        """What became of a draft: the default's time divided by its own; None where it failed."""
        ...

    def suggest(self, drafts: Sequence[Draft]) -> None:
        """Drafts to begin with, behind the rules' own, such as those that similar nests have chosen."""
        ...


class _Proposals:
    """What all strategies keep: what was proposed, and how it did."""

    def __init__(self, space: Space, rng: random.Random) -> None:
        self.space, self.rng = space, rng
        self.found: dict[Draft, float | None] = {}
        self._drafts: set[Draft] = set()
        self._nests: set[str] = set()
        self._first: Iterator[Draft] = iter(space.first())

    def suggest(self, drafts: Sequence[Draft]) -> None:
        """Begin with these, behind the rules' defaults."""
        self._first = chain(self._first, (d for d in drafts if d.rule in self.space.rules))

    def observe(self, draft: Draft, speedup: float | None) -> None:
        """Keep what became of a draft, of whoever proposed it."""
        self.found[draft] = speedup
        if draft not in self._drafts:
            self.is_new(draft)

    def is_new(self, draft: Draft) -> bool:
        """Whether a draft replays to a nest that was not proposed yet; it counts as proposed from now on."""
        if draft in self._drafts:
            return False
        self._drafts.add(draft)
        schedule = self.space.replayed(draft)
        if schedule is None:
            return False
        key = self.space.key(schedule)
        if key in self._nests:
            return False
        self._nests.add(key)
        return True

    def is_known(self, draft: Draft) -> bool:
        """Whether a draft was looked at, and needs no second look."""
        return draft in self._drafts

    def begin(self, count: int) -> list[Draft]:
        """The defaults of rules and what was suggested, as far as they were not proposed."""
        return self.fresh(self._first, count)

    def fresh(self, drafts: Iterable[Draft], count: int) -> list[Draft]:
        """The first ``count`` new ones."""
        chosen: list[Draft] = []
        if count <= 0:
            return chosen
        for d in drafts:
            if self.is_new(d):
                chosen.append(d)
                if len(chosen) == count:
                    break
        return chosen

    def draws(self, wanted: int) -> Iterator[Draft]:
        """Random drafts, until many in a row were known."""
        failures = 0
        while failures < PATIENCE * max(wanted, 1):
            draft = self.space.random(self.rng)
            failures = failures + 1 if self.is_known(draft) else 0
            yield draft

    def best(self, count: int) -> list[Draft]:
        """The fastest so far, the first of equals."""
        timed = [(s, -k, d) for k, (d, s) in enumerate(self.found.items()) if s is not None]
        return [d for _, _, d in sorted(timed, key=lambda t: t[:2], reverse=True)[:count]]


class RandomSearch(_Proposals):
    """The rules' defaults, then points by chance."""

    def propose(self, count: int) -> list[Draft]:
        chosen = self.begin(count)
        return chosen + self.fresh(self.draws(count), count - len(chosen))


class Evolution(_Proposals):
    """Mutants and crossovers of the fastest so far: many drafts, of which few are replayed, and fewer measured.

    ``draft_ranker`` scores drafts by ``DRAFT_FEATURES``, ``nest_ranker`` replayed ones by ``NEST_FEATURES``; without
    them chance decides, among what is diverse. ``seeds`` are drafts to begin with, such as those that similar nests
    have chosen.
    """

    def __init__(
        self,
        space: Space,
        rng: random.Random,
        draft_ranker: Ranker | None = None,
        nest_ranker: Ranker | None = None,
        seeds: Sequence[Draft] = (),
        mutants: int = MUTANTS,
        replayed: int = REPLAYED,
    ) -> None:
        super().__init__(space, rng)
        self.draft_ranker, self.nest_ranker = draft_ranker, nest_ranker
        self.suggest(seeds)
        self._mutants, self._replayed = mutants, replayed

    def propose(self, count: int) -> list[Draft]:
        chosen = self.begin(count)
        wanted = count - len(chosen)
        if wanted <= 0:
            return chosen
        drafts = self._drafted()
        # What chance picks keeps the models honest about what they have not seen.
        by_chance = sum(self.rng.random() < BY_CHANCE for _ in range(wanted))
        some = self.fresh(self.draws(by_chance), by_chance)
        ranked = self._verified(self._diverse(drafts, max(self._replayed, wanted)), wanted - len(some))
        chosen += ranked + some
        return chosen + self.fresh(self.draws(count), count - len(chosen))

    def _drafted(self) -> list[Draft]:
        """New drafts of this round, in the order in which they were made."""
        parents = self.best(PARENTS) or self.space.first()
        made: dict[Draft, None] = {}
        for _ in range(2 * self._mutants):
            if len(made) >= self._mutants:
                break
            # Earlier parents are faster, and chosen more often.
            k = min(int(self.rng.random() ** 2 * len(parents)), len(parents) - 1)
            if len(parents) > 1 and self.rng.random() < CROSSED:
                draft = self.space.crossed(parents[k], self.rng.choice(parents), self.rng)
            else:
                draft = self.space.mutated(parents[k], self.rng)
                while self.rng.random() < 0.4:
                    draft = self.space.mutated(draft, self.rng)
            if not self.is_known(draft):
                made[draft] = None
        return list(made)

    def _diverse(self, drafts: list[Draft], count: int) -> list[Draft]:
        """Drafts in the order in which they are to be replayed: good ones that differ from those before them."""
        if self.draft_ranker is None or len(drafts) <= 1:
            self.rng.shuffle(drafts)
            return drafts
        scores = np.asarray(self.draft_ranker.scores(draft_features(self.space, drafts)), np.float64)
        order = [int(k) for k in np.argsort(-scores, kind="stable")]
        first: list[Draft] = []
        later: list[Draft] = []
        seen: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        for k in order:
            draft = drafts[k]
            # Drafts of one rule that are edited in the same places are alike: a few of them will do for one round.
            alike = (draft.rule, tuple((e.kind, e.at) for e in draft.edits))
            seen[alike] = seen.get(alike, 0) + 1
            (first if seen[alike] <= max(count // 16, 1) else later).append(draft)
        return first + later

    def _verified(self, drafts: list[Draft], count: int) -> list[Draft]:
        """Replay, and keep those nests that the ranker takes for the fastest."""
        if self.nest_ranker is None:
            return self.fresh(drafts, count)
        replayed = []
        for draft in drafts:
            schedule = None if self.is_known(draft) else self.space.replayed(draft)
            if schedule is not None:
                replayed.append((draft, nest_features(self.space, schedule)))
                if len(replayed) >= self._replayed:
                    break
        if not replayed:
            return []
        scores = np.asarray(self.nest_ranker.scores(np.stack([f for _, f in replayed])), np.float64)
        order = [int(k) for k in np.argsort(-scores, kind="stable")]
        return self.fresh((replayed[k][0] for k in order), count)


class BeamSearch(_Proposals):
    """Neighbours of the best few, by one change at a time; nobody goes back.

    A beam holds the fastest drafts so far. Of each a number of neighbours is made, the ranker (or chance) puts them in
    order, and those measured faster take the places of the slower ones.
    """

    def __init__(
        self,
        space: Space,
        rng: random.Random,
        draft_ranker: Ranker | None = None,
        width: int = BEAM,
        neighbours: int = NEIGHBOURS,
    ) -> None:
        super().__init__(space, rng)
        self.draft_ranker, self._width, self._neighbours = draft_ranker, width, neighbours

    def propose(self, count: int) -> list[Draft]:
        chosen = self.begin(count)
        if len(chosen) < count:
            drafts: dict[Draft, None] = {}
            for parent in self.best(self._width) or self.space.first():
                around = (self.space.mutated(parent, self.rng) for _ in range(self._neighbours))
                drafts.update((d, None) for d in around if not self.is_known(d))
            ordered = list(drafts)
            self.rng.shuffle(ordered)
            if self.draft_ranker is not None and len(ordered) > 1:
                scores = np.asarray(self.draft_ranker.scores(draft_features(self.space, ordered)), np.float64)
                ordered = [ordered[int(k)] for k in np.argsort(-scores, kind="stable")]
            chosen += self.fresh(ordered, count - len(chosen))
        return chosen + self.fresh(self.draws(count), count - len(chosen))
