"""The suite ``tuning``: what is recorded and again, strategies on what was recorded, and what the command refuses."""

import math
import random

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.tuning.pool import Pool, facts
from benchmarks.tuning.programs import random_program
from benchmarks.tuning.record import AGAIN, BATCH, record
from benchmarks.tuning.replay import NEAR, STRATEGIES, Curve, Replay, searched, strategy_of
from torch_mlc.ir.errors import MlcError
from torch_mlc.runtime.tuning.records import read_folder
from torch_mlc.scheduler.tuning.edits import TraceEdit
from torch_mlc.scheduler.tuning.space import Draft

NAME = "program 3"


class Played:
    """Measures by the length of a schedule's trace; ``loud`` times of equals differ; every fifth candidate fails."""

    calls = 0

    def __init__(self, loud=False):
        self.loud = loud

    def measure(self, candidates):
        type(self).calls += 1
        for k, c in enumerate(candidates):
            if k % 5 == 4:
                yield MlcError("it does not end")
            else:
                yield 1e-6 * len(c.trace.to_json()) * (1 + 0.5 * (k == 1 and self.loud))

    def close(self):
        pass


def recorded(folder, candidates, loud=False):
    return record(
        folder, "cpu", candidates, lambda names: [n for n in names if n == NAME], lambda *_: None,
        lambda nest, target, workers: Played(loud),
    )  # fmt: skip


def test_candidates_are_recorded_beside_the_default_and_a_stopped_run_goes_on(tmp_path):
    assert recorded(tmp_path, 2 * BATCH) == {}
    (first,) = read_folder(tmp_path)
    assert (first.head.kernel, first.head.family, first.head.kind) == (NAME, "programs", "cpu")
    candidates = [x for x in first.lines if not x.control]
    assert len(candidates) == 2 * BATCH and sum(x.control for x in first.lines) == 2
    assert len({x.key for x in candidates}) == 2 * BATCH
    assert candidates[0].speedup == pytest.approx(1)
    for x in candidates:
        assert (x.speedup is None) == bool(x.error)
    path = next(tmp_path.glob("*.jsonl"))
    path.write_text(path.read_text() + '{"session": "half a li')
    assert recorded(tmp_path, 3 * BATCH) == {}
    (second,) = read_folder(tmp_path)
    assert second.lines[: len(first.lines)] == first.lines
    assert len({x.key for x in second.lines if not x.control}) == 3 * BATCH
    assert len({x.session for x in second.lines}) == 1


def test_batches_whose_equals_differ_are_measured_again(tmp_path):
    Played.calls = 0
    recorded(tmp_path, BATCH, loud=True)
    assert Played.calls == 3 <= 2 + AGAIN  # the default alone, the batch, and that again in another order
    (found,) = read_folder(tmp_path)
    # The second default is slow only where it comes second, and the least time counts.
    assert [x.speedup for x in found.lines if x.control] == [1]


def test_a_random_program_is_the_same_for_the_same_seed():
    for seed in range(30):
        (f, inputs), (g, others) = random_program(seed), random_program(seed)
        result = f(*inputs)
        np.testing.assert_array_equal(result.float().numpy(), g(*others).float().numpy())


def pool(count=60, seed=0):
    rng = random.Random(seed)
    drafts = {}
    while len(drafts) < count:
        edits = tuple(TraceEdit("unroll", f"b{k}", 2 ** rng.randint(1, 3)) for k in range(3) if rng.random() < 0.5)
        rule = "slow" if drafts and rng.random() < 0.2 else "fast"
        drafts[Draft(rule, (("n", rng.choice((1, 2, 4, 8))),), edits if drafts else ())] = None
    times = [1.0 + abs(facts(d)["rule"] == "slow") + rng.random() for d in drafts]
    times[5] = math.inf
    return Pool(list(drafts), np.array(times))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_measures_each_candidate_once_and_comes_to_an_end(name):
    if name == "tpe":
        pytest.importorskip("optuna", reason="of the extra `bench`")
    found = pool()
    strategy = strategy_of(name, found, 0, -found.times, -found.times)
    seen = []
    while batch := strategy.propose(BATCH):
        for d in batch:
            seen.append(d)
            time = found.times[found.number[d]]
            strategy.observe(d, 1 / time if math.isfinite(time) else None)
    assert len({*seen}) == len(seen)
    assert seen[0] == found.drafts[0]
    # Chance may end before the last few were drawn.
    assert len(seen) >= 0.8 * len(found.drafts)


def test_a_perfect_model_is_near_the_best_at_once_and_the_same_seed_gives_the_same():
    found = pool()
    scores = -np.where(np.isinf(found.times), 1e9, found.times)
    assert searched(strategy_of("ranked", found, 0, scores, scores), found, 40).near <= 2
    curves = [searched(strategy_of("ours", found, 3, scores, scores), found, 40) for _ in range(2)]
    assert curves[0] == curves[1] and curves[0].near <= 2 * BATCH
    assert all(a >= b for a, b in zip(curves[0].regret, curves[0].regret[1:]))
    assert curves[0].regret[curves[0].near - 1] <= NEAR


def test_regret_is_a_mean_over_kernels_with_an_interval():
    curves = {"a": (Curve((2.0,) * 64, 65),), "b": (Curve((1.0,) * 64, 1), Curve((1.0,) * 64, 3))}
    found = Replay(None, ("a", "b"), {"s": curves})
    mean, low, high = found.regret("s", 8)
    assert mean == pytest.approx(2**0.5) and low == pytest.approx(1) and high == pytest.approx(2)
    assert found.near("s")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "takes one of"),
        (("--record", "a", "--replay", "b"), "takes one of"),
        (("--replay", "no such folder"), "no records"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, why, tmp_path):
    result = CliRunner().invoke(main, ["--suite", "tuning", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 2 and why in result.output
