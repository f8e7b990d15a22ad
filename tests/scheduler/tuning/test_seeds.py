"""Seeds: what similar nests have chosen comes first in a search, and is never taken without measuring."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.nest.positions import named_by_position
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.ir.text.structure import sizeless_key, structural_key
from torch_mlc.scheduler.tuning.database import Database, Similar, Workload, target_key
from torch_mlc.scheduler.tuning.seeds import MOST_SEEDS, seeds, seeds_of, workload_of
from torch_mlc.scheduler.tuning.space import Draft, Space
from torch_mlc.scheduler.tuning.strategies import BeamSearch, Evolution, RandomSearch

from .typical_nests import NAMES, TEXTS, lower, nest

CPU = Target("cpu", "znver3", 8)
LARGER = {"11": "640", "150": "1024"}


def resized(name: str, sizes: dict[str, str]) -> LoopNest:
    text = TEXTS[name]
    for old, new in sizes.items():
        text = text.replace(old, new)
    return lower(text)


def winner(of: LoopNest, seed: int = 0) -> tuple[Draft, Any]:
    """Some legal draft with edits, and its schedule."""
    space, rng = Space(of, CPU), random.Random(seed)
    while True:
        draft = space.mutated(space.default(), rng)
        schedule = space.replayed(draft)
        if schedule is not None and draft.edits:
            return draft, schedule


def keep(database: Database, of: LoopNest, draft: Draft, schedule: Any, ratio: float, target: Target = CPU) -> None:
    database.record(
        workload_of(of), target, schedule.trace, 1e-3, ratio=ratio, sigma=0.001, count=36,
        draft=json.dumps(draft.to_plain()),
    )  # fmt: skip


def test_a_sketch_is_of_structure_alone() -> None:
    keys = {name: sizeless_key(nest(name)) for name in NAMES}
    # Sizes that are symbols are sizes too.
    assert keys.pop("symbolic softmax") == keys["softmax"] == sizeless_key(resized("softmax", LARGER))
    assert len(set(keys.values())) == len(keys)
    # A mean divides by a size: the constant goes with it.
    longer = resized("layer norm", {"200": "4096", "0.005": "0.000244140625"})
    assert sizeless_key(nest("layer norm")) == sizeless_key(longer)


def test_the_same_structure_with_other_sizes_gives_its_draft(tmp_path: Path) -> None:
    """And no schedule: ``lookup`` is for what was measured."""
    small, large = nest("softmax"), resized("softmax", LARGER)
    draft, schedule = winner(small)
    with Database(tmp_path / "t.sqlite") as db:
        keep(db, small, draft, schedule, 0.7)
        space = Space(large, CPU)
        found = seeds_of(space, workload_of(large), db)
        assert len(found) == 1 and found[0].edits == draft.edits and found[0].rule == draft.rule
        assert space.replayed(found[0]) is not None and db.lookup(structural_key(large), CPU) is None
        # What was slower than the default is no seed, nor what is within the noise.
        rows = nest("row sum")
        for seed, ratio in enumerate((1.1, 0.995)):
            keep(db, rows, *winner(rows, seed), ratio)
        assert [s.ratio for s in db.similar(workload_of(rows))] == [0.7]


def similar(of: LoopNest, draft: Draft, target: Target = CPU, ratio: float = 0.8) -> Similar:
    return Similar(replace(workload_of(of), text=""), target_key(target) + ":some-part", ratio, draft.to_plain())


def test_structure_comes_before_features_and_other_targets_last() -> None:
    own, large = nest("softmax"), resized("softmax", LARGER)
    far = nest("layer norm")
    near = resized("layer norm", {"10,200": "700,1000", "10)": "700)", "200)": "1000)", "[200": "[1000"})
    space = Space(large, CPU)
    drafts: list[Draft] = []
    for seed in range(100):
        draft, schedule = winner(large, seed)
        if all(space.key(schedule) != space.key(space.replayed(d)) for d in drafts):  # type: ignore[arg-type]
            drafts.append(draft)
        if len(drafts) == 5:
            break
    elsewhere = replace(CPU, arch="znver9")
    given = [
        similar(large, drafts[0], elsewhere), similar(far, drafts[1]), similar(near, drafts[2]),
        similar(own, drafts[3], ratio=0.9), similar(large, drafts[4], ratio=0.95),
    ]  # fmt: skip
    assert seeds(space, workload_of(large), given) == [drafts[4], drafts[3], drafts[2], drafts[1], drafts[0]]


def test_what_does_not_serve_is_left_out() -> None:
    """Rules of others, values that a parameter has not, places that are not there, and what is no draft at all."""
    large = resized("softmax", LARGER)
    space, workload = Space(large, CPU), workload_of(large)
    draft, _ = winner(large)
    gone = Draft(draft.rule, (*draft.params, ("nonsense", 3)), draft.edits)
    other = replace(draft, rule="gpu_pointwise")
    nowhere = Draft.from_plain({**draft.to_plain(), "edits": [["unroll", "b9_r9", 4], *draft.to_plain()["edits"]]})
    assert seeds(space, workload, [similar(large, other)]) == []
    assert (
        seeds(space, workload, [similar(large, gone)]) == seeds(space, workload, [similar(large, nowhere)]) == [draft]
    )
    for plain in ({}, {"rule": 3}, {"rule": draft.rule, "params": [], "edits": 5}, []):
        bad = replace(similar(large, draft), draft=plain)  # type: ignore[arg-type]
        assert seeds(space, workload, [bad]) == []
    assert seeds(space, workload, [similar(large, space.default())]) == []  # it is there anyway
    many = [similar(large, winner(large, k)[0]) for k in range(60)]
    found = seeds(space, workload, many)
    assert len(found) == MOST_SEEDS and seeds(space, workload, many, 2) == found[:2]


def test_a_gpu_has_no_drafts_of_a_processor() -> None:
    draft, _ = winner(nest("softmax"))
    space = Space(nest("softmax"), gpu_target("cuda:sm_90"))
    assert seeds(space, workload_of(nest("softmax")), [similar(nest("softmax"), draft)]) == []


@pytest.mark.parametrize("strategy", [Evolution, RandomSearch, BeamSearch])
def test_strategies_begin_with_them_behind_the_defaults(strategy: type[Evolution]) -> None:
    space = Space(nest("softmax"), CPU)
    draft, _ = winner(nest("softmax"))
    made = strategy(space, random.Random(0))
    made.suggest([draft])
    first = made.propose(8)
    assert first[0] == space.default() and first.index(draft) <= len(space.rules)


def test_equal_nests_with_other_names_are_one_workload() -> None:
    own = nest("layer norm")
    assert workload_of(named_by_position(own)) == Workload.of(named_by_position(own), workload_of(own).features)
    assert workload_of(own).key == workload_of(named_by_position(own)).key
