"""The shipped model of tuning: boosted trees that say which of several drafts, or nests, is faster.

Trained by ``runtime/tuning/train.py``; read here with NumPy alone, from text in a schema of our own. One file holds two
ensembles for one kind of target: ``draft`` scores drafts by DRAFT_FEATURES, ``nest`` scores scheduled nests by
NEST_FEATURES. What is damaged, foreign or of other features is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ...ir.errors import MlcError
from .features import DRAFT_FEATURES, FEATURES_VERSION, NEST_FEATURES

Array: TypeAlias = "np.ndarray[Any, Any]"
Of: TypeAlias = Literal["draft", "nest"]
SCHEMA, VERSION = "torch-mlc-tuning-ranker", 2
FOLDER = Path(__file__).with_name("models")
NAMES: Mapping[str, tuple[str, ...]] = {"draft": DRAFT_FEATURES, "nest": NEST_FEATURES}
KINDS = ("cpu", "gpu")


class RankerError(MlcError):
    """A file holds no model that serves here: the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeRanker:
    """An ensemble of trees. Node ``n`` sends a row to ``children[2 * n]`` where its feature is at most the threshold,
    else to ``children[2 * n + 1]``; a leaf sends it to itself. A child's number is greater than its parent's."""

    of: Of
    kind: str
    features_version: int
    features: tuple[str, ...]
    training: Mapping[str, Any]
    roots: Array
    feature: Array
    threshold: Array
    children: Array
    value: Array
    is_leaf: Array = field(repr=False)
    # How far a candidate's score must be above the default's for it to be faster, going by kernels that the model had
    # not seen; infinite where that never was so.
    margin: float = math.inf

    @staticmethod
    def load(path: Path, of: Of = "draft") -> TreeRanker:
        """One ensemble of a file. Raises RankerError."""
        return read_rankers(path)[of]

    @staticmethod
    def loads(text: str, of: Of = "draft") -> TreeRanker:
        """One ensemble of a text. Raises RankerError."""
        return parse_rankers(text)[of]

    def scores(self, features: Array) -> Array:
        """float32 ``[n]`` for rows ``[n, len(self.features)]``: higher is faster. Raises ValueError else."""
        rows = np.ascontiguousarray(features, np.float32)
        if rows.ndim != 2 or rows.shape[1] != len(self.features):
            raise ValueError(f"rows of shape {rows.shape}; this model reads [n, {len(self.features)}]")
        if not len(rows):
            return np.zeros(0, np.float32)
        roots, children = self._narrowed(rows)
        live = roots[~self.is_leaf[roots]]
        total = np.full(len(rows), self.value[roots[self.is_leaf[roots]]].sum(dtype=np.float64))
        if not len(live):
            return total.astype(np.float32)
        flat, width = rows.ravel(), np.int32(rows.shape[1])
        begin = (np.arange(len(rows), dtype=np.int32) * width)[:, None]
        node = np.broadcast_to(live, (len(rows), len(live)))
        while True:
            right = flat.take(begin + self.feature.take(node)) > self.threshold.take(node)
            node = children.take(2 * node + right)
            if self.is_leaf.take(node).all():
                return (total + self.value.take(node).sum(axis=1, dtype=np.float64)).astype(np.float32)

    def _narrowed(self, rows: Array) -> tuple[Array, Array]:
        """Roots and children without the nodes at which all rows go the same way. The drafts of one nest have most
        features in common, which makes trees a few nodes deep."""
        first = rows[0]
        same = (rows == first).all(axis=0)
        way = np.arange(len(self.feature), dtype=np.int32)
        fixed = np.flatnonzero(same[self.feature] & ~self.is_leaf)
        way[fixed] = self.children[2 * fixed + (first[self.feature[fixed]] > self.threshold[fixed])]
        while True:  # each step doubles how far nodes are passed over
            further = way[way]
            if np.array_equal(further, way):
                return way[self.roots], way[self.children]
            way = further


def read_rankers(path: Path) -> dict[Of, TreeRanker]:
    """Both ensembles of a file. Raises RankerError."""
    try:
        return parse_rankers(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RankerError(f"{path} cannot be read: {error}") from error
    except RankerError as error:
        raise RankerError(f"{path}: {error}") from None


def parse_rankers(text: str) -> dict[Of, TreeRanker]:
    """Both ensembles of a text. Raises RankerError."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise RankerError(f"the model is damaged: {error}") from None
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise RankerError(f"no model of tuning: the field 'schema' is not {SCHEMA!r}")
    if body.get("version") != VERSION:
        raise RankerError(f"a model in schema {body.get('version')}; this program reads schema {VERSION}")
    if body.get("hash") != content_hash(body):
        raise RankerError("the model is damaged: its hash is another")
    if body.get("features_version") != FEATURES_VERSION:
        raise RankerError(
            f"a model of features {body.get('features_version')}, and these are features {FEATURES_VERSION}: "
            "train it anew (python -m torch_mlc tune train)"
        )
    if body.get("kind") not in KINDS:
        raise RankerError(f"a model for {body.get('kind')!r}; the kinds of targets are {', '.join(KINDS)}")
    try:
        return {of: _ensemble(of, body, body["ensembles"][of]) for of in ("draft", "nest")}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RankerError(f"the model is damaged: {type(error).__name__}: {error}") from error


def _ensemble(of: Of, body: Mapping[str, Any], part: Mapping[str, Any]) -> TreeRanker:
    if tuple(part["features"]) != NAMES[of]:
        other = next((n for n in part["features"] if n not in NAMES[of]), "their order")
        raise RankerError(f"a model of other {of} features ({other}): train it anew (python -m torch_mlc tune train)")
    numbers = {k: np.asarray(part[k], np.int32) for k in ("roots", "feature", "left", "right")}
    threshold, value = (np.asarray(part[k], np.float32) for k in ("threshold", "value"))
    roots, feature, left, right = numbers.values()
    count = len(feature)
    own = np.arange(count, dtype=np.int32)
    leaf = left == own
    if not (
        all(a.shape == (count,) for a in (left, right, threshold, value))
        and roots.ndim == 1
        and len(roots)
        and _within(roots, 0, count)
        and _within(feature, 0, len(NAMES[of]))
        and _within(left, 0, count)
        and _within(right, 0, count)
        and np.array_equal(leaf, right == own)
        and (leaf | ((left > own) & (right > own))).all()
        and np.isfinite(threshold).all()
        and np.isfinite(value).all()
    ):
        raise RankerError("the model is damaged: its trees are none")
    children = np.stack([left, right], axis=1).ravel()
    return TreeRanker(
        of, body["kind"], body["features_version"], NAMES[of], {**body["training"], **part["training"]}, roots, feature,
        threshold, children, value, leaf, math.inf if part["margin"] is None else float(part["margin"]),
    )  # fmt: skip


def _within(numbers: Array, begin: int, end: int) -> bool:
    return bool(((numbers >= begin) & (numbers < end)).all())


def content_hash(body: Mapping[str, Any]) -> str:
    """Of all that a file says but its hash."""
    rest = {k: v for k, v in body.items() if k != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def rankers_text(kind: str, training: Mapping[str, Any], ensembles: Mapping[Of, Mapping[str, Any]]) -> str:
    """The text of a file. ``ensembles`` have the arrays of their trees as lists, and facts about their training."""
    parts = {of: {"features": [*NAMES[of]], "margin": None, **e} for of, e in ensembles.items()}
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "kind": kind,
        "features_version": FEATURES_VERSION,
        "training": dict(training),
        "ensembles": parts,
    }
    return json.dumps({**body, "hash": content_hash(body)}, separators=(",", ":")) + "\n"


@lru_cache(maxsize=len(KINDS))
def shipped_rankers(kind: str) -> dict[Of, TreeRanker] | None:
    """Both ensembles that come with this version for targets of a kind, "cpu" or "gpu"; None where none does.

    Raises RankerError where the file is damaged.
    """
    path = FOLDER / f"{kind}.json"
    return read_rankers(path) if path.exists() else None


def plain_trees(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Trees as one list of nodes. A tree is a node: a ``value``, or a ``feature`` by number, a ``threshold``, and what
    is to its ``left`` (at most the threshold) and ``right``."""
    made: dict[str, list[Any]] = {k: [] for k in ("roots", "feature", "threshold", "left", "right", "value")}

    def add(node: Mapping[str, Any]) -> int:
        number = len(made["feature"])
        leaf = "value" in node
        made["feature"].append(0 if leaf else int(node["feature"]))
        made["threshold"].append(0.0 if leaf else _at_most(float(node["threshold"])))
        made["value"].append(float(f"{node['value']:.6g}") if leaf else 0.0)
        made["left"].append(number)
        made["right"].append(number)
        if not leaf:
            made["left"][number] = add(node["left"])
            made["right"][number] = add(node["right"])
        return number

    for tree in trees:
        made["roots"].append(add(tree))
    return made


def _at_most(threshold: float) -> float:
    """The greatest float32 that is not above: float32 numbers compare with both alike. In nine digits."""
    nearest = np.float32(threshold)
    if float(nearest) > threshold:
        nearest = np.nextafter(nearest, np.float32(-np.inf))
    return float(f"{float(nearest):.9g}")
