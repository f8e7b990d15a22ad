"""Training the model of tuning from recorded candidates, and saying how good it is on kernels that it has not seen.

Three forms are compared: ranks within a group (lambdarank), logarithms of times (regression), and membership in the
best tenth. Of each ensemble the form with the least regret on held-out kernels is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ...ir.errors import MlcError
from ...scheduler.tuning.ranker import FOLDER, KINDS, Of, parse_rankers, plain_trees, rankers_text
from . import boosting
from .metrics import Choosing, Figures, GroupError, choosing, figures, group_sizes
from .records import Recorded, RecordsError, read_folder

Array: TypeAlias = "np.ndarray[Any, Any]"
Holdout: TypeAlias = Literal["kernel", "family"]
ENSEMBLES: tuple[Of, ...] = ("draft", "nest")
ROUNDS, FOLDS = 200, 5
# Batches whose equal candidates differ by more than this (as a logarithm) are left out.
NOISY = 0.05
# What a model may take of a package.
MAX_BYTES = 1_000_000


class TrainingError(MlcError):
    """No model can be trained: the text says why."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Candidates in groups that lie together: features by ensemble, ``times`` relative to the default's (infinite where
    a candidate failed), ``sizes`` of groups, and of each group its kernel and family."""

    features: Mapping[Of, Array]
    times: Array
    sizes: tuple[int, ...]
    kernels: tuple[str, ...]
    families: tuple[str, ...]
    drafts: tuple[Mapping[str, Any], ...]
    noise: float
    # Of each group whether its first row is the default.
    has_default: tuple[bool, ...] = ()

    @property
    def quality(self) -> Array:
        """The best time of its group divided by each row's own: 1 for the best, 0 for what failed."""
        return np.concatenate([_quality(self.times[s]) for s in self.spans()])

    def spans(self) -> list[slice]:
        """The rows of each group."""
        ends = np.cumsum(self.sizes)
        return [slice(int(e) - n, int(e)) for n, e in zip(self.sizes, ends, strict=True)]


def _quality(times: Array) -> Array:
    finite = times[np.isfinite(times)]
    return np.where(np.isfinite(times), (finite.min() if len(finite) else 1.0) / times, 0.0)


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What was trained, for people and for the file: figures on held-out kernels by ensemble and form."""

    kind: str
    rows: int
    groups: int
    failed: int
    # By how much equal candidates differ in the median, as a logarithm.
    noise: float
    # The default's time divided by the best recorded one, its geometric mean over groups.
    gap: float
    holdout: str
    figures: Mapping[Of, Mapping[str, Figures]]
    chosen: Mapping[Of, str]
    path: Path | None = None
    # By ensemble, what comes of leaving the default where it is clearly behind.
    choosing: Mapping[Of, Choosing] = field(default_factory=dict)
    # Scores of each row by models that have not seen its kernel, in the order of ``Rows``.
    scores: Mapping[Of, Array] = field(default_factory=dict, repr=False)


def rows_of(records: Sequence[Recorded]) -> Rows:
    """Candidates of all files as arrays, in groups of workload, target and session.

    Raises TrainingError where groups are none, or targets are of different kinds.
    """
    if len({r.head.kind for r in records}) > 1:
        raise TrainingError("records of CPUs and of GPUs: train one kind at a time")
    ids, draft, nest, times, drafts = [], [], [], [], []
    controls: list[float] = []
    about: dict[str, tuple[str, str]] = {}
    has_default: list[bool] = []
    for r in records:
        off = {(c.session, c.batch): abs(math.log(c.speedup)) for c in r.lines if c.control and c.speedup is not None}
        controls += off.values()
        quiet = [line for line in r.lines if off.get((line.session, line.batch), 0.0) <= NOISY]
        # The default first, once a group, whose time is 1: others are measured in it.
        for line in sorted(quiet, key=lambda line: (line.group, not line.control)):
            name = f"{r.head.workload} {r.head.target} {line.group}"
            if line.control and name in about:
                continue
            about.setdefault(name, (r.head.kernel, r.head.family))
            if len(has_default) < len(about):
                # Predictions have no noise to be controlled: their first candidate is the default.
                predicted = not r.head.here and not line.draft["edits"] and abs((line.speedup or 0.0) - 1.0) < 1e-9
                has_default.append(line.control or predicted)
            ids.append(name)
            draft.append(line.draft_row)
            nest.append(line.nest_row)
            drafts.append(line.draft)
            if line.control:
                times.append(1.0)
            else:
                times.append(math.inf if line.speedup is None else 1.0 / line.speedup)
    try:
        sizes = group_sizes(ids)
    except GroupError as error:
        raise TrainingError(f"no groups of candidates: {error}") from error
    names = list(dict.fromkeys(ids))
    features: dict[Of, Array] = {"draft": np.asarray(draft, np.float32), "nest": np.asarray(nest, np.float32)}
    kernels, families = zip(*(about[n] for n in names), strict=True)
    noise = float(np.median(controls)) if controls else 0.0
    return Rows(features, np.asarray(times), tuple(sizes), kernels, families, tuple(drafts), noise, tuple(has_default))


def train(
    records: Sequence[Recorded],
    out: Path | None,
    *,
    holdout: Holdout = "kernel",
    rounds: int = ROUNDS,
    threads: int | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> TrainingReport:
    """Compare the forms on held-out kernels (five folds) or families, and write the best ones to ``out``/KIND.json.

    With ``out`` None nothing is written. Raises TrainingError and RecordsError.
    """
    rows = rows_of(records)
    kind = records[0].head.kind
    folds = _folds(rows, holdout)
    if len(set(folds)) < 2:
        raise TrainingError("fewer than two kernels: none can be held out")
    threads = threads or max((os.cpu_count() or 2) // 2, 1)
    told(f"{len(rows.times)} candidates in {len(rows.sizes)} groups; {len(set(folds))} folds by {holdout}")
    jobs = {
        f"{of}/{objective}/{fold}": _job(rows, of, objective, [f == fold for f in folds], rounds, threads)
        for of in ENSEMBLES
        for objective in boosting.OBJECTIVES
        for fold in sorted(set(folds))
    }
    scores, _ = _boosted(rows, jobs)
    by_form = {(of, o): _gathered(rows, jobs, scores, of, o) for of in ENSEMBLES for o in boosting.OBJECTIVES}
    found: dict[Of, dict[str, Figures]] = {
        of: {o: _figures(rows, by_form[of, o]) for o in boosting.OBJECTIVES} for of in ENSEMBLES
    }
    chosen = {of: min(found[of], key=lambda o, of=of: _loss(found[of][o])) for of in ENSEMBLES}  # type: ignore[misc]
    default = {s.start: _quality(rows.times[s]) for s in rows.spans()}
    gap = float(np.exp(np.mean([np.log(max(_speedups(rows.times[s]))) for s in rows.spans()])))
    report = TrainingReport(
        kind, len(rows.times), len(default), int(np.isinf(rows.times).sum()), rows.noise, gap, holdout, found, chosen,
        None, {of: choosing(_beside_default(rows, by_form[of, chosen[of]])) for of in ENSEMBLES},
        {of: by_form[of, chosen[of]] for of in ENSEMBLES},
    )  # fmt: skip
    return report if out is None else _written(rows, report, out, rounds, threads)


def _beside_default(rows: Rows, scores: Array) -> list[tuple[Array, Array]]:
    """Of each group that has one, scores and times, the default's first."""
    found = []
    for span, has_default in zip(rows.spans(), rows.has_default, strict=True):
        timed = np.isfinite(rows.times[span])
        if has_default and timed.sum() >= 2:
            found.append((scores[span][timed], rows.times[span][timed]))
    return found


def _speedups(times: Array) -> list[float]:
    """Of a group, beside the default's own."""
    return [1.0, *(1.0 / times[np.isfinite(times)])]


def _loss(f: Figures) -> float:
    return math.log(f.regret1) + math.log(f.regret8)


def _folds(rows: Rows, holdout: Holdout) -> list[str]:
    """The fold of each group: kernels by chance, but the same ones wherever this runs, or families."""
    if holdout == "family":
        return list(rows.families)
    order = sorted(set(rows.kernels), key=lambda n: hashlib.sha256(n.encode()).hexdigest())
    return [str(order.index(k) % FOLDS) for k in rows.kernels]


def _job(rows: Rows, of: Of, objective: str, held: Sequence[bool], rounds: int, threads: int) -> dict[str, Any]:
    spans = rows.spans()
    train = [i for s, h in zip(spans, held, strict=True) if not h for i in range(s.start, s.stop)]
    score = [i for s, h in zip(spans, held, strict=True) if h for i in range(s.start, s.stop)]
    sizes = [n for n, h in zip(rows.sizes, held, strict=True) if not h]
    return {
        "of": of, "objective": objective, "train": train, "score": score, "sizes": sizes, "rounds": rounds,
        "threads": threads, "keep": not any(held),
    }  # fmt: skip


def _boosted(rows: Rows, jobs: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Scores and trees of the jobs, from a process of its own. Raises TrainingError with what it said."""
    with tempfile.TemporaryDirectory(prefix="torch-mlc-train-") as name:
        folder = Path(name)
        np.savez(folder / "data.npz", quality=rows.quality, draft=rows.features["draft"], nest=rows.features["nest"])
        (folder / "jobs.json").write_text(json.dumps(jobs))
        done = subprocess.run([sys.executable, boosting.__file__, name], capture_output=True, text=True)
        if done.returncode:
            missing = "No module named 'lightgbm'" in done.stderr
            why = "LightGBM is missing: pip install 'torch-mlc[tune]'" if missing else done.stderr.strip()[-2000:]
            raise TrainingError(f"training failed: {why}")
        with np.load(folder / "scores.npz") as data:
            scores = {n: data[n] for n in data.files}
        return scores, json.loads((folder / "trees.json").read_text())


def _gathered(rows: Rows, jobs: Mapping[str, Any], scores: Mapping[str, Array], of: Of, objective: str) -> Array:
    """The score of each row by the model that has not seen its kernel."""
    result = np.full(len(rows.times), np.nan)
    for name, job in jobs.items():
        if (job["of"], job["objective"]) == (of, objective):
            result[job["score"]] = scores[name]
    assert np.isfinite(result).all(), "every row is held out once"
    return result


def _figures(rows: Rows, scores: Array) -> Figures:
    pairs = []
    for s in rows.spans():
        timed = np.isfinite(rows.times[s])
        if timed.sum() >= 2:
            pairs.append((scores[s][timed], rows.times[s][timed]))
    return figures(pairs)


def _written(rows: Rows, report: TrainingReport, out: Path, rounds: int, threads: int) -> TrainingReport:
    jobs: dict[str, Any] = {
        of: _job(rows, of, report.chosen[of], [False] * len(rows.sizes), rounds, threads) for of in ENSEMBLES
    }
    _, trees = _boosted(rows, jobs)
    training = {
        "date": datetime.now(timezone.utc).date().isoformat(), "rows": report.rows, "groups": report.groups,
        "noise": _rounded(report.noise),
    }  # fmt: skip
    parts: dict[Of, dict[str, Any]] = {}
    for of in ENSEMBLES:
        held = {k: _rounded(v) for k, v in asdict(report.figures[of][report.chosen[of]]).items()}
        margin = report.choosing[of].margin
        told = {k: _rounded(v) for k, v in asdict(report.choosing[of]).items() if k != "margin"}
        parts[of] = {
            "training": {"form": report.chosen[of], "held_out": held, "choosing": told},
            "margin": None if math.isinf(margin) else _rounded(margin), **plain_trees(trees[of]),
        }  # fmt: skip
    text = rankers_text(report.kind, training, parts)
    if len(text) > MAX_BYTES:
        raise TrainingError(f"a model of {len(text)} bytes; {MAX_BYTES} are the most, so train fewer rounds")
    read = parse_rankers(text)
    for of in ENSEMBLES:  # what is read back ranks as what was trained
        assert len(read[of].roots) == len(trees[of])
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{report.kind}.json"
    path.write_text(text, encoding="utf-8")
    return TrainingReport(**{**_fields(report), "path": path})


def _fields(report: TrainingReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in TrainingReport.__dataclass_fields__}


def _rounded(value: float) -> float | int | None:
    """JSON has no NaN."""
    return value if isinstance(value, int) else None if math.isnan(value) else float(f"{value:.4g}")


def described(report: TrainingReport) -> str:
    """A report in plain text."""
    lines = [
        f"{report.kind}: {report.rows} candidates in {report.groups} groups, {report.failed} failed; equal candidates "
        f"differ by {report.noise:.1%} in the median; the best recorded is {report.gap:.3f} times as fast as defaults",
        f"on held-out {report.holdout}s:",
    ]
    for of, forms in report.figures.items():
        for form, f in forms.items():
            lines.append(
                f"  {of:5} {form:10} pairs {f.pairwise:.3f}  regret@1 {f.regret1:.3f} (median {f.median1:.3f})  "
                f"regret@8 {f.regret8:.3f} (median {f.median8:.3f})"
                + ("  <- kept" if report.chosen[of] == form else "")
            )
        c = report.choosing[of]
        lines.append(
            f"  {of:5} in the default's place where it is ahead by {c.margin:.3g}: {c.taken} of {c.groups}, all "
            f"together {c.gain:.3f} times as fast, the slowest {c.worst:.2f}"
        )
    if report.path is not None:
        lines.append(f"wrote {report.path}")
    return "\n".join(lines)


def main(arguments: Sequence[str], database: Path | None = None) -> int:
    """``python -m torch_mlc tune train FOLDER``: the exit status. ``database`` is the measurements of this machine,
    which hold no features and are not trained on."""
    parser = argparse.ArgumentParser(
        prog="torch-mlc tune train",
        description="Train the model that ranks schedules, from candidates that python -m benchmarks --suite tuning "
        "--record FOLDER has recorded.",
    )
    parser.add_argument("records", type=Path, help="a folder of recorded candidates")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where KIND.json goes; the package by default")
    parser.add_argument("--kind", choices=KINDS, help="train for targets of this kind alone")
    parser.add_argument("--holdout", choices=("kernel", "family"), default="kernel")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="trees of each ensemble")
    parser.add_argument("--dry-run", action="store_true", help="say the figures and write nothing")
    try:
        given = parser.parse_args([*arguments])
    except SystemExit as end:
        return int(end.code or 0)
    try:
        records = read_folder(given.records)
        kinds = [k for k in KINDS if any(r.head.kind == k for r in records) and given.kind in (None, k)]
        if not kinds:
            raise TrainingError(f"{given.records}: no records for {given.kind}")
        for kind in kinds:
            chosen = [r for r in records if r.head.kind == kind]
            out = None if given.dry_run else given.out
            report = train(chosen, out, holdout=given.holdout, rounds=given.rounds, told=_say)
            _say(described(report))
    except (TrainingError, RecordsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    print(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
