"""The rows of a campaign: a file to which each is written as it comes, and the results that it becomes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..steps import replace_text

SCHEMA, VERSION = "torch-mlc-campaign", 1
Row: TypeAlias = dict[str, Any]
# How a check went: it found what it should, or not, was lost with its process, or could not be done here.
OK, WRONG, LOST, NOT_DONE = "ok", "wrong", "lost", "not done"


@dataclass(slots=True)
class Record:
    """A file of rows, JSON a line. The first is about the run: ``about``. ``ended`` are the checks that are done, by
    stage: a run that goes on does not repeat them."""

    path: Path
    about: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    ended: set[tuple[str, str]] = field(default_factory=set)
    damaged: int = 0

    @classmethod
    def begin(cls, path: Path, about: Mapping[str, Any]) -> Record:
        """A new file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        record = cls(path, {"schema": SCHEMA, "version": VERSION, **about})
        with path.open("x") as file:
            file.write(json.dumps(record.about) + "\n")
        return record

    @classmethod
    def read(cls, path: Path) -> Record:
        """A file as far as it was written. Raises ValueError where it is no record of this version."""
        lines = path.read_bytes().splitlines(keepends=True)
        try:
            about = json.loads(lines[0]) if lines else None
        except ValueError:
            about = None
        if not isinstance(about, dict) or about.get("schema") != SCHEMA or about.get("version") != VERSION:
            raise ValueError(f"{path} is no record of a campaign of this version")
        record = cls(path, about)
        for line in lines[1:]:
            row = _row(line)
            if row is None:
                record.damaged += 1
            elif row.get("ended"):
                record.ended.add((row["stage"], row["check"]))
            else:
                record.rows.append(row)
        return record

    @classmethod
    def resume(cls, path: Path) -> Record:
        """A file to go on with: rows of checks that did not end, and what is damaged, are no longer in it. Raises
        ValueError as ``read``."""
        record = cls.read(path)
        record.rows = [r for r in record.rows if (r["stage"], r["check"]) in record.ended]
        lines = [record.about, *record.rows, *(_ended(*which) for which in sorted(record.ended))]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        return record

    def add(self, stage: str, check: str, row: Row) -> None:
        """Write a row, to the disk."""
        self.rows.append({"stage": stage, "check": check, **row})
        self._write(self.rows[-1])

    def end(self, stage: str, check: str) -> None:
        """A check is done."""
        self.ended.add((stage, check))
        self._write(_ended(stage, check))

    def _write(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, stage: str) -> Iterator[Row]:
        """The rows of a stage."""
        return (r for r in self.rows if r["stage"] == stage)

    @property
    def failures(self) -> list[Row]:
        """Rows of what was wrong or lost."""
        return [r for r in self.rows if r.get("status") in (WRONG, LOST)]

    def results(self, finished: str) -> dict[str, Any]:
        """What the file of results holds; ``finished`` is when."""
        return {**self.about, "finished": finished, "damaged_rows": self.damaged, "rows": self.rows}


def _ended(stage: str, check: str) -> Row:
    return {"stage": stage, "check": check, "ended": True}


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("stage"), str) and "check" in row else None
