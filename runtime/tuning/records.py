"""Recorded candidates: what a model is trained on, one file of JSON lines a nest.

The first line says which nest on which machine, and what the columns of the features are; each further line is one
candidate of one batch. A line that was cut off by a stop is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ir.errors import MlcError
from ...scheduler.tuning.features import DRAFT_FEATURES, FEATURES_VERSION, NEST_FEATURES

SCHEMA, VERSION = "torch-mlc-tuning-records", 1


class RecordsError(MlcError):
    """A file holds no records that serve here: the text says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all candidates of a file share.

    ``family`` is what kernels alike have in common, such as "norms"; ``workload`` the structural key of the nest, whose
    text is ``nest``; ``target`` the key of the target, of the kind "cpu" or "gpu". ``here``: the times were measured,
    not predicted.
    """

    kernel: str
    family: str
    workload: str
    target: str
    kind: str
    here: bool
    nest: str
    machine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A candidate of one batch: ``speedup`` is the default's time divided by its own in the same batch, None where it
    failed, and ``error`` says why. ``control`` marks the default itself, measured once more. The rows are of
    DRAFT_FEATURES and NEST_FEATURES."""

    session: str
    batch: int
    draft: Mapping[str, Any]
    key: str
    speedup: float | None
    seconds: float | None
    error: str
    control: bool
    draft_row: tuple[float, ...]
    nest_row: tuple[float, ...]

    @property
    def group(self) -> str:
        """What was measured together, apart from the nest and the target."""
        return self.session


@dataclass(frozen=True, slots=True)
class Recorded:
    """The contents of a file."""

    head: Head
    lines: tuple[Line, ...]


def head_text(head: Head) -> str:
    """The first line of a file."""
    features = {"version": FEATURES_VERSION, "draft": DRAFT_FEATURES, "nest": NEST_FEATURES}
    return json.dumps({"schema": SCHEMA, "version": VERSION, "features": features, **asdict(head)}) + "\n"


def line_text(line: Line) -> str:
    """A further line."""
    return json.dumps(asdict(line)) + "\n"


def read_records(path: Path) -> Recorded:
    """Raises RecordsError where a file is of something else, or of other features."""
    try:
        texts = path.read_text().splitlines()
        body = json.loads(texts[0])
    except (OSError, ValueError, IndexError) as error:
        raise RecordsError(f"{path}: no records of tuning ({error})") from error
    if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
        raise RecordsError(f"{path}: no records of tuning: the field 'schema' is not {SCHEMA!r}")
    if (version := body.pop("version", None)) != VERSION:
        raise RecordsError(f"{path}: records of version {version}; this program reads version {VERSION}")
    features = body.pop("features", {})
    ours = {"version": FEATURES_VERSION, "draft": [*DRAFT_FEATURES], "nest": [*NEST_FEATURES]}
    if features != ours:
        raise RecordsError(
            f"{path}: features of version {features.get('version')}, and these are of version {FEATURES_VERSION}; "
            "record again, which computes features anew and measures nothing twice"
        )
    return Recorded(Head(**body), tuple(_lines(texts[1:])))


def _lines(texts: Iterable[str]) -> Iterator[Line]:
    for text in texts:
        try:
            body = json.loads(text)
        except ValueError:
            continue
        if len(body["draft_row"]) != len(DRAFT_FEATURES) or len(body["nest_row"]) != len(NEST_FEATURES):
            continue
        yield Line(**{**body, "draft_row": tuple(body["draft_row"]), "nest_row": tuple(body["nest_row"])})


def read_folder(folder: Path) -> list[Recorded]:
    """All files of a folder, by name. Raises RecordsError where one does not serve, and where there is none."""
    found = [read_records(p) for p in sorted(folder.glob("*.jsonl"))]
    if not found:
        raise RecordsError(f"{folder}: no records (*.jsonl)")
    return found
