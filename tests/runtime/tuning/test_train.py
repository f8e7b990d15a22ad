"""Training from recorded candidates: groups, what is left out, what is written, and what is refused."""

import json
import math
import random

import pytest

pytest.importorskip("lightgbm", reason="of the extra `tune`")

import numpy as np

from torch_mlc.runtime.tuning import boosting
from torch_mlc.runtime.tuning.metrics import choosing
from torch_mlc.runtime.tuning.records import Head, Line, Recorded, RecordsError, head_text, line_text, read_folder
from torch_mlc.runtime.tuning.train import TrainingError, described, main, rows_of, train
from torch_mlc.scheduler.tuning.features import DRAFT_FEATURES, NEST_FEATURES
from torch_mlc.scheduler.tuning.ranker import TreeRanker, plain_trees, rankers_text

WORKLOADS = 8


def line(rng, batch, session="s", control=False, failed=False, ratio=None):
    draft = [rng.randrange(8) for _ in DRAFT_FEATURES]
    nest = [rng.randrange(8) for _ in NEST_FEATURES]
    # Two features of each decide, and the others are noise; the default takes 5 seconds.
    if control:
        draft[-3], nest[-5], draft[4] = 4, 0, 0
    seconds = 1.0 + draft[-3] + 2 * nest[-5] + 0.2 * draft[4]
    speedup = None if failed else (ratio or 1.0) if control else 5.0 / seconds
    plain = {"rule": "r", "params": {"n": rng.random()}, "edits": []}
    return Line(
        session, batch, plain, str(rng.random()), speedup, speedup and 1.0 / speedup, "bad" if failed else "", control,
        tuple(map(float, draft)), tuple(map(float, nest)),
    )  # fmt: skip


def recorded(k, kind="cpu", count=40):
    rng = random.Random(k)
    lines = [line(rng, n // 8) for n in range(count)]
    head = Head(f"kernel {k}", f"family {k % 3}", f"key{k}", f"{kind}:x", kind, True, "nest", {})
    return Recorded(head, (*lines, line(rng, 0, control=True, ratio=1.001), line(rng, 0, failed=True)))


@pytest.fixture(scope="module")
def records():
    return [recorded(k) for k in range(WORKLOADS)]


def written(folder, records):
    for r in records:
        (folder / f"{r.head.workload}.jsonl").write_text(head_text(r.head) + "".join(map(line_text, r.lines)))


def test_records_are_read_as_they_were_written(tmp_path, records):
    written(tmp_path, records)
    with (tmp_path / "key0.jsonl").open("a") as file:
        file.write('{"session": "s", "bat')  # a stop in the middle of a line
    assert read_folder(tmp_path) == records


def test_records_of_other_features_are_refused(tmp_path, records):
    written(tmp_path, records[:1])
    path = tmp_path / "key0.jsonl"
    head, rest = path.read_text().split("\n", 1)
    body = json.loads(head)
    body["features"]["draft"] = body["features"]["draft"][1:]
    path.write_text(json.dumps(body) + "\n" + rest)
    with pytest.raises(RecordsError, match="record again"):
        read_folder(tmp_path)
    path.write_text("{}\n")
    with pytest.raises(RecordsError, match="schema"):
        read_folder(tmp_path)


def test_groups_are_workload_target_and_session(records):
    two = [line(random.Random(9), n // 8, session=s) for s in "ab" for n in range(10)]
    random.Random(0).shuffle(two)
    rows = rows_of([*records, Recorded(recorded(99).head, tuple(two))])
    assert rows.sizes == (42,) * WORKLOADS + (10, 10)
    assert rows.has_default == (True,) * WORKLOADS + (False, False)
    assert [rows.times[s.start] for s in rows.spans()][:WORKLOADS] == [1.0] * WORKLOADS
    for span in rows.spans():
        assert rows.quality[span].max() == 1
    assert np.isinf(rows.times).sum() == WORKLOADS
    assert (rows.quality[np.isinf(rows.times)] == 0).all()


def test_batches_whose_equals_differ_are_left_out():
    rng = random.Random(0)
    loud = [line(rng, 5) for _ in range(8)] + [line(rng, 5, control=True, ratio=1.3)]
    assert rows_of([Recorded(recorded(0).head, (*recorded(0).lines, *loud))]).sizes == (42,)


def test_kinds_are_not_mixed(records):
    with pytest.raises(TrainingError, match="one kind"):
        rows_of([records[0], recorded(1, "gpu")])


def test_a_model_is_kept_that_ranks_kernels_that_it_has_not_seen(tmp_path, records):
    report = train(records, tmp_path, rounds=60, threads=1)
    assert report.path == tmp_path / "cpu.json"
    for of, forms in report.figures.items():
        assert set(forms) == set(boosting.OBJECTIVES)
        assert forms[report.chosen[of]].pairwise > 0.6, described(report)
        best = min(f.regret1 * f.regret8 for f in forms.values())
        kept = forms[report.chosen[of]]
        assert kept.regret1 * kept.regret8 == pytest.approx(best)
    ranker = TreeRanker.load(report.path, "nest")
    fresh = recorded(50)
    scores = ranker.scores(np.array([x.nest_row for x in fresh.lines if x.speedup and not x.control]))
    speedups = [x.speedup for x in fresh.lines if x.speedup and not x.control]
    assert np.corrcoef(scores, speedups)[0, 1] > 0.4
    assert ranker.training["rows"] == 42 * WORKLOADS
    assert ranker.training["held_out"]["groups"] == WORKLOADS


def test_trees_that_are_read_back_score_as_the_booster_does(records):
    rows = rows_of(records)
    booster = boosting.trained(rows.features["draft"], rows.quality, [*rows.sizes], "lambdarank", 30, 1)
    trees = [boosting.plain(t["tree_structure"]) for t in booster.dump_model()["tree_info"]]
    part = {"training": {}, **plain_trees(trees)}
    nest = {"training": {}, **plain_trees([{"value": 0.0}])}
    ranker = TreeRanker.loads(rankers_text("cpu", {}, {"draft": part, "nest": nest}))
    expected = booster.predict(rows.features["draft"], raw_score=True)
    np.testing.assert_allclose(ranker.scores(rows.features["draft"]), expected, rtol=1e-4, atol=1e-4)


def test_families_are_held_out_as_wholes(records):
    report = train(records, None, holdout="family", rounds=5, threads=1)
    assert report.path is None and report.holdout == "family"
    assert len(report.scores["draft"]) == report.rows


def test_the_command_says_what_is_wrong_and_what_was_done(tmp_path, records, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no records" in capsys.readouterr().err
    written(tmp_path, records)
    assert main([str(tmp_path), "--kind", "gpu"]) == 1
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--rounds", "5"], database=tmp_path / "db") == 0
    assert "on held-out kernels" in capsys.readouterr().out
    assert (tmp_path / "out" / "cpu.json").exists()
    assert main(["--nonsense"]) == 2


def test_the_margin_is_what_held_out_kernels_say():
    """Groups of scores and times, the default's first: the best by score is taken where it is ahead by the margin."""
    times = np.array([1.0, 0.5, 2.0])
    wins = [(np.array([0.0, 1.0 + k, 0.0]), times) for k in range(9)]
    loses = [(np.array([0.0, 0.0, 0.5]), times)]
    found = choosing(wins + loses)
    assert found.margin == pytest.approx(0.75) and (found.taken, found.groups, found.worst) == (9, 10, 1.0)
    assert found.gain == pytest.approx(2**0.9)
    assert choosing(wins).margin == pytest.approx(0.5)
    assert choosing(loses).margin == math.inf and choosing([(np.zeros(3), times)]).taken == 0
