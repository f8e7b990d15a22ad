"""The process that trains: LightGBM over arrays in a folder, apart from torch, whose OpenMP is another.

Run as a file: it imports nothing of ours, and neither torch nor sympy. ``jobs.json`` says what to train, on which rows
of ``data.npz``, and of which rows scores are wanted; ``trees.json`` and ``scores.npz`` are the answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Grades of lambdarank, of which the best candidate of a group has the highest, and what a grade is worth.
GRADES = 31
GAINS = [round(1.15**k - 1, 4) for k in range(GRADES)]
# Logarithms of ratios below this all count as bad.
FLOOR = -2.5
COMMON: dict[str, Any] = {
    "num_leaves": 15,
    "max_depth": 6,
    "learning_rate": 0.08,
    "min_data_in_leaf": 8,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "seed": 0,
    "deterministic": True,
    "force_row_wise": True,
    "verbose": -1,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "lambdarank": {"objective": "lambdarank", "label_gain": GAINS, "lambdarank_truncation_level": GRADES},
    "regression": {"objective": "regression"},
    "best tenth": {"objective": "binary", "is_unbalance": True},
}


def labels(objective: str, quality: Any, sizes: Any) -> Any:
    """What is learned, of quality: the best time of a group divided by a row's own, 0 where it failed."""
    if objective == "lambdarank":
        return np.rint(quality * (GRADES - 1)).astype(np.int32)
    if objective == "regression":
        return np.maximum(np.log(np.maximum(quality, 1e-6)), FLOOR)
    best = np.zeros(len(quality), np.int32)
    begin = 0
    for size in sizes:
        group = quality[begin : begin + size]
        best[begin : begin + size] = group >= np.sort(group)[-max(size // 10, 1)]
        begin += size
    return best


def trained(rows: Any, quality: Any, sizes: Any, objective: str, rounds: int, threads: int) -> Any:
    """A booster."""
    import lightgbm  # an extra, which this process alone needs

    group = sizes if objective == "lambdarank" else None
    # Groups are worth the same, however many candidates they have.
    weight = np.repeat(len(quality) / (len(sizes) * np.asarray(sizes, float)), sizes)
    label = labels(objective, quality, sizes)
    data = lightgbm.Dataset(rows, label, group=group, weight=None if group is not None else weight, free_raw_data=False)
    return lightgbm.train({**COMMON, **OBJECTIVES[objective], "num_threads": threads}, data, rounds)


def plain(node: Mapping[str, Any]) -> dict[str, Any]:
    """A tree in our schema. Raises ValueError for a split that this schema has not."""
    if "split_feature" not in node:
        return {"value": node["leaf_value"]}
    if node["decision_type"] != "<=":
        raise ValueError(f"a split by {node['decision_type']}")
    left, right = plain(node["left_child"]), plain(node["right_child"])
    return {"feature": node["split_feature"], "threshold": node["threshold"], "left": left, "right": right}


def main(folder: Path) -> None:
    """Do the jobs of a folder."""
    jobs = json.loads((folder / "jobs.json").read_text())
    trees: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    with np.load(folder / "data.npz") as data:
        arrays = {name: data[name] for name in data.files}
    for name, job in jobs.items():
        rows, quality = arrays[job["of"]], arrays["quality"]
        chosen, asked = np.asarray(job["train"]), np.asarray(job["score"], np.int64)
        booster = trained(rows[chosen], quality[chosen], job["sizes"], job["objective"], job["rounds"], job["threads"])
        if len(asked):
            scores[name] = booster.predict(rows[asked], raw_score=True, num_threads=job["threads"])
        if job["keep"]:
            trees[name] = [plain(t["tree_structure"]) for t in booster.dump_model()["tree_info"]]
    np.savez(folder / "scores.npz", **scores)
    (folder / "trees.json").write_text(json.dumps(trees))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
