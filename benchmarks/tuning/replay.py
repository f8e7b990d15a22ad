"""Replaying: strategies on recorded times, so that nothing is noise but the strategies' own chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from torch_mlc.runtime.tuning.records import Recorded
from torch_mlc.runtime.tuning.train import Holdout, Rows, TrainingError, TrainingReport, rows_of, train
from torch_mlc.scheduler.tuning.space import Draft, Space
from torch_mlc.scheduler.tuning.strategies import BeamSearch, Evolution, RandomSearch, Strategy

from .pool import Facts, Pool

Array: TypeAlias = "np.ndarray[Any, Any]"
# Candidates that a strategy is asked for at once; how many it may measure; what counts as near to the best.
BATCH, TRIALS, NEAR = 8, 64, 1.02
# Trials whose regret is told.
TOLD = (1, 8, 16, 32, 64)
# Groups with fewer timed candidates say nothing about search.
LEAST = 24


class _Known:
    """A ranker that has scored every recorded candidate before: the pool's rows are their numbers."""

    def __init__(self, scores: Array) -> None:
        self._scores = scores

    def scores(self, features: Array) -> Array:
        return self._scores[features[:, 0].astype(np.int64)]


class _Ours(Evolution):
    """Evolution as it is, but that the features of recorded drafts are looked up."""

    def __init__(self, pool: Pool, rng: random.Random, draft: Array, nest: Array) -> None:
        super().__init__(cast(Space, pool), rng, mutants=256)
        self._pool, self._draft, self._nest = pool, draft, nest

    def _diverse(self, drafts: list[Draft], count: int) -> list[Draft]:
        order = sorted(drafts, key=lambda d: -self._draft[self._pool.number[d]])
        return order

    def _verified(self, drafts: list[Draft], count: int) -> list[Draft]:
        few = drafts[: self._replayed]
        return self.fresh(sorted(few, key=lambda d: -self._nest[self._pool.number[d]]), count)


class Ranked:
    """The default, then what the model of nests ranks first: the search where every candidate can be replayed."""

    def __init__(self, pool: Pool, scores: Array) -> None:
        default = pool.first()[0]
        order = [pool.drafts[int(k)] for k in np.argsort(-scores, kind="stable")]
        self._rest = [default, *(d for d in order if d != default)]

    def propose(self, count: int) -> list[Draft]:
        chosen, self._rest = self._rest[:count], self._rest[count:]
        return chosen

    def observe(self, draft: Draft, speedup: float | None) -> None:
        """Ranks do not change by what is measured."""

    def suggest(self, drafts: Sequence[Draft]) -> None:
        """Nor by what others say."""


class Tpe:
    """Optuna's tree-structured Parzen estimator over the choices that drafts are made of. What it suggests need not
    have been recorded; then the nearest that was and is new is measured, and it is told which that is."""

    def __init__(self, pool: Pool, seed: int) -> None:
        import optuna  # of the extra `bench`, and slow to load

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._pool = optuna, pool
        names = list(dict.fromkeys(k for f in pool.facts for k in f))
        self._choices = {n: list(dict.fromkeys(str(f.get(n)) for f in pool.facts)) for n in names}
        self._kinds = {n: optuna.distributions.CategoricalDistribution(c) for n, c in self._choices.items()}
        self._rows = np.array([[self._choices[n].index(str(f.get(n))) for n in names] for f in pool.facts])
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=BATCH))
        self._left = set(range(len(pool.drafts)))
        self._begun = False

    def propose(self, count: int) -> list[Draft]:
        chosen: list[int] = []
        if not self._begun:
            self._begun = True
            chosen = [self._pool.number[d] for d in self._pool.first()[:1]]
            self._left -= {*chosen}
        while len(chosen) < count and self._left:
            trial = self._study.ask(self._kinds)
            asked = np.array([self._choices[n].index(trial.params[n]) for n in self._choices])
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            rest = sorted(self._left)
            nearest = rest[int((self._rows[rest] != asked).sum(axis=1).argmin())]
            self._left.discard(nearest)
            chosen.append(nearest)
        return [self._pool.drafts[k] for k in chosen]

    def suggest(self, drafts: Sequence[Draft]) -> None:
        """It begins with the defaults alone."""

    def observe(self, draft: Draft, speedup: float | None) -> None:
        of: Facts = self._pool.facts[self._pool.number[draft]]
        params = {n: str(of.get(n)) for n in self._choices}
        value = 10.0 if speedup is None else -float(np.log(speedup))
        made = self._optuna.trial.create_trial(params=params, distributions=self._kinds, value=value)
        self._study.add_trial(made)


STRATEGIES = ("random", "evolution", "tpe", "beam", "ours", "ranked")


def strategy_of(name: str, pool: Pool, seed: int, draft: Array, nest: Array) -> Strategy:
    """A strategy over a pool; ``draft`` and ``nest`` are the models' scores of its candidates."""
    space, rng = cast(Space, pool), random.Random(seed)
    match name:
        case "random":
            return RandomSearch(space, rng)
        case "evolution":
            return Evolution(space, rng, mutants=256)
        case "beam":
            return BeamSearch(space, rng)
        case "tpe":
            return Tpe(pool, seed)
        case "ranked":
            return Ranked(pool, nest)
        case "ours":
            return _Ours(pool, rng, draft, nest)
    raise ValueError(f"{name!r} is no strategy; they are {', '.join(STRATEGIES)}")


@dataclass(frozen=True, slots=True)
class Curve:
    """One search: ``regret[n]`` is the best time after n + 1 trials, divided by the best of all; ``near`` is how many
    trials it took to come within 2 % of it, TRIALS + 1 where it did not."""

    regret: tuple[float, ...]
    near: int


def searched(strategy: Strategy, pool: Pool, trials: int) -> Curve:
    """Run a strategy to its end, or to so many trials."""
    best = np.inf
    regret: list[float] = []
    while len(regret) < trials:
        batch = strategy.propose(min(BATCH, trials - len(regret)))
        if not batch:
            break
        for draft in batch:
            time = float(pool.times[pool.number[draft]])
            strategy.observe(draft, 1.0 / time if np.isfinite(time) else None)
            best = min(best, time)
            regret.append(best / pool.best)
    regret += [regret[-1]] * (trials - len(regret))
    near = next((k + 1 for k, r in enumerate(regret) if r <= NEAR), trials + 1)
    return Curve(tuple(regret), near)


@dataclass(frozen=True, slots=True)
class Replay:
    """What strategies did on all groups: curves by strategy and kernel, one a seed."""

    report: TrainingReport
    kernels: tuple[str, ...]
    curves: Mapping[str, Mapping[str, tuple[Curve, ...]]]

    def near(self, name: str) -> tuple[float, float, float]:
        """Trials to within 2 % of the best: the median over kernels and seeds, and the quartiles."""
        found = [c.near for curves in self.curves[name].values() for c in curves]
        q = np.quantile(found, (0.25, 0.5, 0.75))
        return float(q[1]), float(q[0]), float(q[2])

    def regret(self, name: str, trials: int) -> tuple[float, float, float]:
        """The geometric mean over kernels and seeds, and its interval of 95 % by drawing kernels anew."""
        of = [np.mean([np.log(c.regret[trials - 1]) for c in curves]) for curves in self.curves[name].values()]
        rng = np.random.default_rng(0)
        means = np.mean(rng.choice(of, (2000, len(of))), axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        return float(np.exp(np.mean(of))), float(np.exp(low)), float(np.exp(high))

    def to_json(self) -> dict[str, Any]:
        return {
            name: {
                "near": dict(zip(("median", "q25", "q75"), self.near(name), strict=True)),
                "regret": {str(n): dict(zip(("mean", "low", "high"), self.regret(name, n), strict=True)) for n in TOLD},
                "curve": [self.regret(name, n) for n in range(1, TRIALS + 1)],
                "kernels": {k: [c.near for c in curves] for k, curves in self.curves[name].items()},
            }
            for name in self.curves
        }


def replay(
    records: Sequence[Recorded],
    strategies: Sequence[str],
    seeds: int,
    holdout: Holdout,
    told: Callable[[str, int, int], object] = lambda *_: None,
) -> Replay:
    """Search every group by every strategy. Models have not seen the kernel, or its family, that they rank."""
    report = train(records, None, holdout=holdout)
    rows = rows_of(records)
    pools = _pools(rows)
    if not pools:
        raise TrainingError(f"no nest has {LEAST} timed candidates yet: record on")
    curves: dict[str, dict[str, tuple[Curve, ...]]] = {s: {} for s in strategies}
    for k, (kernel, span, pool) in enumerate(pools):
        told(kernel, k, len(pools))
        scores = [report.scores[of][span] for of in ("draft", "nest")]
        for name in strategies:
            count = 1 if name == "ranked" else seeds  # nothing of it is chance
            curves[name][kernel] = tuple(
                searched(strategy_of(name, pool, seed, *scores), pool, TRIALS) for seed in range(count)
            )
    return Replay(report, tuple(k for k, _, _ in pools), curves)


def _pools(rows: Rows) -> list[tuple[str, slice, Pool]]:
    found = []
    for kernel, span in zip(rows.kernels, rows.spans(), strict=True):
        if np.isfinite(rows.times[span]).sum() >= LEAST:
            drafts = [Draft.from_plain(d) for d in rows.drafts[span]]
            if len({*drafts}) == len(drafts):
                found.append((kernel, span, Pool(drafts, rows.times[span])))
    return found
