"""The reader of boosted trees: it ranks as trees do, and refuses what it cannot trust."""

import json
import time

import numpy as np
import pytest

from torch_mlc.scheduler.tuning.features import DRAFT_FEATURES, FEATURES_VERSION, NEST_FEATURES
from torch_mlc.scheduler.tuning.ranker import (
    FOLDER,
    KINDS,
    RankerError,
    TreeRanker,
    content_hash,
    parse_rankers,
    plain_trees,
    rankers_text,
    read_rankers,
    shipped_rankers,
)


def random_tree(rng, features, depth):
    if depth == 0 or rng.random() < 0.15:
        return {"value": float(rng.normal())}
    left, right = (random_tree(rng, features, depth - 1) for _ in range(2))
    threshold = float(rng.normal())
    return {"feature": int(rng.integers(features)), "threshold": threshold, "left": left, "right": right}


def value_of(tree, row):
    while "value" not in tree:
        tree = tree["left"] if row[tree["feature"]] <= tree["threshold"] else tree["right"]
    return tree["value"]


def made(trees=20, depth=5, seed=0):
    rng = np.random.default_rng(seed)
    draft, nest = (
        [random_tree(rng, len(names), depth) for _ in range(trees)] for names in (DRAFT_FEATURES, NEST_FEATURES)
    )
    parts = {"draft": {"training": {}, **plain_trees(draft)}, "nest": {"training": {}, **plain_trees(nest)}}
    return draft, nest, rankers_text("cpu", {"rows": 3}, parts)


@pytest.mark.parametrize("shared", [0, 0.5, 0.95, 1])
@pytest.mark.parametrize("count", [0, 1, 2, 57])
def test_scores_are_those_of_the_trees_however_much_the_rows_have_in_common(shared, count):
    draft, nest, text = made(seed=count)
    rng = np.random.default_rng(7)
    for of, trees in (("draft", draft), ("nest", nest)):
        ranker = TreeRanker.loads(text, of)
        rows = rng.normal(size=(count, len(ranker.features))).astype(np.float32)
        if count:
            fixed = rng.random(rows.shape[1]) < shared
            rows[:, fixed] = rows[0, fixed]
        expected = [sum(value_of(t, row) for t in trees) for row in rows.astype(np.float64)]
        np.testing.assert_allclose(ranker.scores(rows), expected, rtol=1e-4, atol=1e-4)


def test_a_threshold_between_two_float32_numbers_divides_them_as_float64_does():
    low = np.float32(0.1)
    high = np.nextafter(low, np.float32(1))
    for threshold in ((float(low) + float(high)) / 2, float(low), float(high), np.nextafter(float(low), 0)):
        tree = {"feature": 0, "threshold": threshold, "left": {"value": 1.0}, "right": {"value": 2.0}}
        part = {"training": {}, **plain_trees([tree])}
        ranker = TreeRanker.loads(rankers_text("gpu", {}, {"draft": part, "nest": part}))
        rows = np.zeros((2, len(DRAFT_FEATURES)), np.float32)
        rows[:, 0] = low, high
        assert ranker.scores(rows).tolist() == [1.0 if float(x) <= threshold else 2.0 for x in (low, high)]


def test_rows_of_other_features_are_refused():
    ranker = TreeRanker.loads(made()[2])
    for shape in ((3, len(DRAFT_FEATURES) - 1), (len(DRAFT_FEATURES),)):
        with pytest.raises(ValueError, match="rows of shape"):
            ranker.scores(np.zeros(shape, np.float32))


def changed(change, sign=True):
    body = json.loads(made()[2])
    change(body)
    if sign:
        body["hash"] = content_hash(body)
    return json.dumps(body)


def first_loop(body):
    e = body["ensembles"]["draft"]
    inner = next(n for n, left in enumerate(e["left"]) if left != n)
    e["left"][inner] = e["roots"][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "damaged"),
        (made()[2][:-40], "damaged"),
        ("[]", "schema"),
        (json.dumps({"schema": "another"}), "schema"),
        (changed(lambda b: b.update(version=0)), "schema 0"),
        (changed(lambda b: b.update(kind="tpu")), "tpu"),
        (changed(lambda b: b.update(features_version=FEATURES_VERSION - 1)), "train it anew"),
        (changed(lambda b: b["ensembles"]["nest"]["features"].reverse()), "train it anew"),
        (changed(lambda b: b["training"].update(rows=4), sign=False), "hash"),
        (changed(lambda b: b["ensembles"].pop("nest")), "damaged"),
        (changed(lambda b: b["ensembles"]["draft"]["value"].pop()), "damaged"),
        (changed(lambda b: b["ensembles"]["draft"]["value"].__setitem__(0, float("inf"))), "damaged"),
        (changed(lambda b: b["ensembles"]["draft"]["feature"].__setitem__(0, len(DRAFT_FEATURES))), "damaged"),
        (changed(lambda b: b["ensembles"]["draft"]["feature"].__setitem__(0, 2**40)), "damaged"),
        (changed(lambda b: b["ensembles"]["draft"].update(roots=[])), "damaged"),
        (changed(lambda b: b["ensembles"]["draft"].update(left="none")), "damaged"),
        (changed(first_loop), "damaged"),
    ],
)
def test_what_is_damaged_foreign_or_older_is_refused(text, why):
    with pytest.raises(RankerError, match=why):
        parse_rankers(text)


def test_the_name_of_a_file_is_told(tmp_path):
    (tmp_path / "cpu.json").write_bytes(b"\xff\xfe")
    for name in ("cpu.json", "none.json"):
        with pytest.raises(RankerError, match=name):
            read_rankers(tmp_path / name)


def test_shipped_models_are_of_these_features_and_small():
    found = [kind for kind in KINDS if (rankers := shipped_rankers(kind)) is not None and rankers["draft"].kind == kind]
    assert found == [*KINDS]
    for kind in found:
        assert (FOLDER / f"{kind}.json").stat().st_size <= 1_000_000


def test_a_batch_of_drafts_takes_about_ten_milliseconds():
    """Counted in node visits, for times depend on the machine: this bounds the work, and the time is printed."""
    ranker = shipped_rankers("cpu")["draft"]
    rows = np.zeros((1024, len(ranker.features)), np.float32)
    rng = np.random.default_rng(0)
    place = [k for k, n in enumerate(ranker.features) if n.partition(".")[0] in ("draft", "base")]
    rows[:, place] = rng.integers(0, 6, (1024, len(place)))
    begun = time.perf_counter()
    scores = ranker.scores(rows)
    print(f"{(time.perf_counter() - begun) * 1e3:.1f} ms for 1,024 drafts")
    assert np.isfinite(scores).all()
    assert len(ranker.roots) <= 200
