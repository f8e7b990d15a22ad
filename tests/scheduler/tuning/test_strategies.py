"""Strategies on a made-up landscape: what they propose, that it is repeatable, and that they find what is good."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from torch_mlc.ir.target import Target
from torch_mlc.scheduler.tuning.features import DRAFT_FEATURES, NEST_FEATURES
from torch_mlc.scheduler.tuning.space import Draft, Space
from torch_mlc.scheduler.tuning.strategies import BeamSearch, Evolution, RandomSearch, Strategy

from .typical_nests import nest

AVX2 = Target("cpu", "znver3", 8)
Make = Callable[[Space, random.Random], Strategy]


class ByName:
    """A ranker that knows one feature."""

    def __init__(self, names: tuple[str, ...], name: str) -> None:
        self.place, self.asked = names.index(name), 0

    def scores(self, features: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        self.asked += len(features)
        found: Any = features[:, self.place]
        return found


STRATEGIES: dict[str, Make] = {
    "random": RandomSearch,
    "evolution": Evolution,
    "evolution with rankers": lambda s, r: Evolution(
        s, r, ByName(DRAFT_FEATURES, "draft.chunk"), ByName(NEST_FEATURES, "loops.serial"), mutants=128, replayed=24
    ),
    "beam": lambda s, r: BeamSearch(s, r, ByName(DRAFT_FEATURES, "draft.chunk")),
}


def speed(draft: Draft) -> float | None:
    """Chunks are good, unrolled loops are bad, jams fail."""
    kinds = [e.kind for e in draft.edits]
    if "jam" in kinds:
        return None
    chunk = sum(float(np.log2(int(e.value))) for e in draft.edits if e.kind == "chunk")
    return 1.0 + 0.1 * chunk - 0.2 * kinds.count("unroll")


def play(make: Make, rounds: int = 6, count: int = 8, name: str = "softmax") -> tuple[Space, list[Draft]]:
    space = Space(nest(name), AVX2)
    strategy = make(space, random.Random(5))
    proposed: list[Draft] = []
    for _ in range(rounds):
        batch = strategy.propose(count)
        assert len(batch) <= count
        for draft in batch:
            strategy.observe(draft, speed(draft))
        proposed += batch
    return space, proposed


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_proposals_replay_to_different_nests_and_begin_with_the_default(make: Make) -> None:
    space, proposed = play(make)
    assert proposed[: len(space.rules)] == space.first() and len(proposed) == 48
    replayed = [space.replayed(d) for d in proposed]
    assert len({space.key(s) for s in replayed if s is not None}) == len(proposed)


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_the_same_seed_proposes_the_same(make: Make) -> None:
    assert play(make)[1] == play(make)[1]


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_an_exhausted_space_proposes_less_and_less(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "sites", lambda self, draft: ())
    space, proposed = play(make, rounds=30)
    points = sum(len(v["unroll"]) if "unroll" in v else 1 for v in space.values.values())
    assert 2 <= len(proposed) <= points
    assert make(space, random.Random(0)).propose(0) == []


@pytest.mark.parametrize("name", ["evolution", "evolution with rankers", "beam"])
def test_what_learns_beats_chance(name: str) -> None:
    def best(make: Make) -> float:
        return max(s for d in play(make, rounds=10)[1] if (s := speed(d)) is not None)

    assert best(STRATEGIES[name]) >= best(RandomSearch)


def test_evolution_scores_many_drafts_and_replays_few() -> None:
    drafts, nests = ByName(DRAFT_FEATURES, "draft.edits"), ByName(NEST_FEATURES, "loops.serial")
    play(lambda s, r: Evolution(s, r, drafts, nests, mutants=256, replayed=32), rounds=3)
    assert drafts.asked > 256 and 0 < nests.asked <= 3 * 32


def test_seeds_are_proposed_after_the_defaults() -> None:
    space = Space(nest("softmax"), AVX2)
    rng = random.Random(9)
    seed = next(d for d in iter(lambda: space.random(rng), None) if d.edits and space.replayed(d) is not None)
    foreign = Draft("no_such_rule", ())
    proposed = Evolution(space, random.Random(0), seeds=[foreign, seed]).propose(4)
    assert proposed[len(space.rules)] == seed and foreign not in proposed


def test_what_another_has_measured_is_not_proposed_again() -> None:
    space = Space(nest("softmax"), AVX2)
    strategy = RandomSearch(space, random.Random(0))
    for draft in space.first():
        strategy.observe(draft, 1.0)
    assert not set(strategy.propose(8)) & set(space.first())
