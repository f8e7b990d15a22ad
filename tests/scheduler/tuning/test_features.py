"""Features: their names, that they are numbers, the same in every process, and that they tell what they are for."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from torch_mlc.ir.nest.hints import HINTS, Changes
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.scheduler.rules import RULES
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning import features
from torch_mlc.scheduler.tuning.edits import TraceEdit
from torch_mlc.scheduler.tuning.features import DRAFT_FEATURES, NEST_FEATURES, draft_features, nest_features
from torch_mlc.scheduler.tuning.loop_features import LOOP_FEATURES, loop_features
from torch_mlc.scheduler.tuning.measures import lines, measured
from torch_mlc.scheduler.tuning.space import Draft, Space

from .typical_nests import NAMES, TEXTS, lower, nest

AVX2 = Target("cpu", "znver3", 8)
GPU = gpu_target("cuda:sm_90")
# What the features are called, by their version: other names, or another order, are another version.
NAMED = {1: "9dd4f169f8ecb33a", 2: "9dd4f169f8ecb33a", 3: "114ece15674ab072"}


def drafts_of(space: Space, count: int = 40) -> list[Draft]:
    rng = random.Random(0)
    return list(dict.fromkeys(space.random(rng) for _ in range(count)))


def value(row: np.ndarray, name: str, names: tuple[str, ...] = NEST_FEATURES) -> float:  # type: ignore[type-arg]
    return float(row[names.index(name)])


def test_names_belong_to_a_version() -> None:
    text = "\n".join((*DRAFT_FEATURES, "", *NEST_FEATURES))
    assert NAMED[features.FEATURES_VERSION] == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert len(set(DRAFT_FEATURES)) == len(DRAFT_FEATURES) and len(set(NEST_FEATURES)) == len(NEST_FEATURES)


def test_every_rule_and_every_hint_has_its_place() -> None:
    assert {r.name for r in RULES} == {*features.RULES, *features.ALIKE} and {*features.ALIKE.values()} < {
        *features.RULES
    }
    named = {n.removeprefix("draft.hint.") for n in DRAFT_FEATURES if n.startswith("draft.hint.")}
    assert {h.name for h in HINTS.values() if h.given_by == "annotate" and h.changes is not Changes.ROUNDING} <= named


@pytest.mark.parametrize("target", [AVX2, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_numbers(name: str, target: Target) -> None:
    space = Space(nest(name), target)
    drafts = drafts_of(space)
    found = draft_features(space, drafts)
    assert found.shape == (len(drafts), len(DRAFT_FEATURES)) and found.dtype == np.float32
    assert np.isfinite(found).all() and np.abs(found).max() < 1e3
    for draft in drafts:
        schedule = space.replayed(draft)
        if schedule is not None:
            row = nest_features(space, schedule)
            assert row.shape == (len(NEST_FEATURES),) and row.dtype == np.float32
            assert np.isfinite(row).all() and np.abs(row).max() < 1e3


def test_no_drafts_have_no_rows() -> None:
    assert draft_features(Space(nest("gelu"), AVX2), []).shape == (0, len(DRAFT_FEATURES))


def test_they_are_the_same_for_a_draft_whatever_was_asked_before() -> None:
    one, other = Space(nest("softmax"), AVX2), Space(nest("softmax"), AVX2)
    drafts = drafts_of(one)
    for draft in drafts:
        one.replayed(draft)
    assert np.array_equal(draft_features(one, drafts), draft_features(other, drafts[::-1])[::-1])


_SCRIPT = """
import hashlib, random, sys
sys.path.insert(0, sys.argv[1])
from typical_nests import TEXTS, lower
from torch_mlc.ir.target import Target
from torch_mlc.scheduler.tuning.features import draft_features, nest_features
from torch_mlc.scheduler.tuning.space import Space
space, rng, h = Space(lower(TEXTS["layer norm"]), Target("cpu", "znver3", 8)), random.Random(0), hashlib.sha256()
drafts = [space.random(rng) for _ in range(40)]
h.update(draft_features(space, drafts).tobytes())
for d in drafts:
    s = space.replayed(d)
    if s is not None:
        h.update(nest_features(space, s).tobytes())
print(h.hexdigest())
"""


def test_they_are_the_same_in_every_process() -> None:
    def run(seed: str) -> str:
        command = [sys.executable, "-c", _SCRIPT, os.path.dirname(__file__)]
        return subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout

    assert run("1") == run("2") != ""


# --- what they tell ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_measures_keep_is_what_they_would_find(name: str) -> None:
    space = Space(nest(name), AVX2)
    for draft in drafts_of(space, 8):
        schedule = space.replayed(draft)
        if schedule is None:
            continue
        kept = measured(schedule.nest)
        loop_features(kept, AVX2)
        for w in kept.works:
            for lp in w.path:
                assert kept.held(lp) == sum(measured(schedule.nest).touched(kept.inside(lp)).values())
            for r in w.references:
                assert kept.lines(w, r) == lines(r, w.extents, w.extents)


def test_what_the_default_is_like_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(nest("softmax"), AVX2)
    looked: list[object] = []
    monkeypatch.setattr(features, "measured", lambda n: looked.append(n) or measured(n))
    default = space.replayed(space.default())
    assert default is not None
    rows = [nest_features(space, default) for _ in range(2)]
    assert np.array_equal(*rows) and len(looked) == 2  # the nest as it was lowered, and the schedule


def test_drafts_that_differ_are_told_apart() -> None:
    space = Space(nest("column sum"), AVX2)
    drafts = drafts_of(space, 300)
    rows = np.unique(draft_features(space, drafts), axis=0)
    assert len(rows) >= 0.9 * len(drafts)


def test_edits_of_a_draft() -> None:
    space = Space(nest("row sum"), AVX2)
    first = space.default()
    edits = (
        TraceEdit("factor", "b0_r0.2", 64),
        TraceEdit("chunk", "b0_i0", 4),
        TraceEdit("hint", "b0_i0:prefetch", 512),
    )
    plain, edited = draft_features(space, [first, Draft(first.rule, first.params, edits)])
    changed = {n for n, a, b in zip(DRAFT_FEATURES, plain, edited, strict=True) if a != b}
    assert {"draft.edits", "draft.edit.factor", "draft.edit.chunk", "draft.chunk", "draft.hint.prefetch"} <= changed
    assert value(edited, "draft.chunk", DRAFT_FEATURES) == 2.0
    assert not any(n.startswith(("work.", "target.", "base.")) for n in changed)


def test_symbolic_sizes_count_as_their_typical_values() -> None:
    """A nest of symbolic sizes has the features of the static one, but for what says that they are symbols."""
    static, symbolic = Space(nest("softmax"), AVX2), Space(nest("symbolic softmax"), AVX2)
    drafts = [d for d in drafts_of(static, 60) if static.replayed(d) and symbolic.replayed(d)]
    assert len(drafts) >= 10
    told = {"work.symbolic", "work.innermost.divisor"}
    a, b = draft_features(static, drafts), draft_features(symbolic, drafts)
    assert {n for n, x, y in zip(DRAFT_FEATURES, a.T, b.T, strict=True) if not np.allclose(x, y, atol=0.5)} <= told
    for draft in drafts[:10]:
        one, other = static.replayed(draft), symbolic.replayed(draft)
        assert one is not None and other is not None
        x, y = nest_features(static, one), nest_features(symbolic, other)
        assert {n for n, p, q in zip(NEST_FEATURES, x, y, strict=True) if abs(p - q) > 0.5} <= told


def test_what_a_scheduled_nest_tells() -> None:
    space = Space(nest("transpose"), AVX2)
    schedule = space.replayed(space.default())
    assert schedule is not None
    row = nest_features(space, schedule)
    assert value(row, "buffer.0.bytes") == value(row, "buffer.1.bytes") == pytest.approx(np.log2(1 + 4 * 60 * 53))
    assert value(row, "work.monoid.sum") == 0 and value(row, "work.reductions") == 0
    assert value(row, "loops.parallel") == 1
    # 53 rows in tiles of 16, 60 columns in tiles of 8: 64 x 64 iterations of 53 x 60.
    assert value(row, "loops.waste") == pytest.approx(np.log2(1 + 64 * 64 / (53 * 60)), abs=0.02)


def test_what_differs_from_the_default_is_told_beside_it() -> None:
    """Of the default nothing; of another what its loops are, less what the default's are. Nothing else is compared."""
    space = Space(nest("row sum"), AVX2)
    default = space.replayed(space.default())
    edited = (replace(space.default(), edits=(e,)) for s in space.sites(space.default()) for e in s.edits())
    assert default is not None
    other = next(s for d in edited if (s := space.replayed(d)) is not None and s.nest != default.nest)
    for schedule in (default, other):
        row = nest_features(Space(nest("row sum"), AVX2), schedule)
        ours, theirs = (dict(zip(NEST_FEATURES, r, strict=True)) for r in (row, nest_features(space, default)))
        beside = {n.removeprefix("beside."): v for n, v in ours.items() if n.startswith("beside.")}
        assert beside == {n: pytest.approx(ours[n] - theirs[n], abs=1e-5) for n in LOOP_FEATURES}
        assert any(beside.values()) is (schedule is other)
    rows = draft_features(space, space.first())
    assert not rows[0, [k for k, n in enumerate(DRAFT_FEATURES) if n.startswith("beside.")]].any()


def test_what_a_body_is() -> None:
    """A row of 530 elements in registers of 8 lanes, and then in two of them: half as many trips, twice the body."""
    found = []
    for lanes in (8, 16):
        rows = nest("row sum")
        schedule = Schedule(rows)
        schedule.vectorize(schedule.split("b0_r0", [None, lanes])[1])
        row = nest_features(Space(rows, AVX2), schedule)
        found.append([2 ** value(row, f"loops.{n}") - 1 for n in ("trips", "body")] + [value(row, "loops.masked")])
    trips, body = (b / a for a, b in zip(found[0][:2], found[1][:2], strict=True))
    assert trips == pytest.approx(34 / 67, rel=0.01) and body == pytest.approx(2.0, rel=0.01)
    assert found[0][2] == 1.0  # 530 is no multiple of 8


def test_a_row_that_stays_in_the_cache_is_told_from_one_that_does_not() -> None:
    found = []
    for elements in ("530", "5300000"):
        rows = lower(TEXTS["row sum"].replace("530", elements))
        schedule = Schedule(rows)
        schedule.parallel("b0_i0")
        found.append(value(nest_features(Space(rows, AVX2), schedule), "footprint.0.l2"))
    assert found[0] < 0 < found[1]
