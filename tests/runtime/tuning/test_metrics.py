"""Figures of rankings, against what they say in words."""

import itertools
import math

import numpy as np
import pytest

from torch_mlc.runtime.tuning.metrics import GroupError, figures, group_sizes, pairwise_accuracy, regret


def test_pairs_are_counted_one_by_one():
    rng = np.random.default_rng(0)
    times, scores = rng.uniform(1, 1.4, 40), rng.integers(0, 5, 40).astype(float)
    right = all_ = 0.0
    for a, b in itertools.permutations(range(40), 2):
        if times[a] * 1.05 < times[b]:
            all_ += 1
            right += 1.0 if scores[a] > scores[b] else 0.5 if scores[a] == scores[b] else 0.0
    assert pairwise_accuracy(scores, times) == pytest.approx(right / all_)


def test_a_perfect_order_and_its_reverse():
    times = np.array([1.0, 2.0, 3.0, 10.0])
    assert pairwise_accuracy(-times, times) == 1
    assert pairwise_accuracy(times, times) == 0
    assert regret(-times, times, 1) == 1
    assert regret(times, times, 1) == 10
    assert regret(times, times, 3) == 2
    assert regret(times, times, 99) == 1


def test_times_that_are_alike_are_no_pairs():
    assert math.isnan(pairwise_accuracy(np.array([1.0, 2.0]), np.array([1.0, 1.04])))


def test_equal_scores_take_the_first():
    assert regret(np.zeros(3), np.array([4.0, 2.0, 1.0]), 1) == 4
    assert regret(np.zeros(3), np.array([4.0, 2.0, 1.0]), 2) == 2


@pytest.mark.parametrize("times", [[1.0, np.inf], [0.0, 1.0], [np.nan, 1.0], [1.0]])
def test_what_was_not_timed_is_refused(times):
    with pytest.raises(ValueError):
        regret(np.zeros(2), np.array(times), 1)


def test_means_are_over_groups():
    groups = [(np.array([1.0, 0.0]), np.array([1.0, 2.0])), (np.array([1.0, 0.0]), np.array([4.0, 1.0]))]
    found = figures(groups)
    assert (found.pairwise, found.regret1, found.regret8, found.groups) == (0.5, 2.0, 1.0, 2)


def test_groups_lie_together_and_have_something_to_compare():
    assert group_sizes(["a", "a", "b", "c", "c", "c"]) == [2, 1, 3]
    with pytest.raises(GroupError, match="lie together"):
        group_sizes(["a", "a", "b", "a"])
    for ids in ([], ["a", "b"]):
        with pytest.raises(GroupError, match="two rows"):
            group_sizes(ids)
