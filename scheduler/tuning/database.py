"""What was measured: schedules of workloads on targets, in one SQLite file that processes share.

What was predicted for machines that are not here stands in a table of its own, so that neither is taken for the other.

The file is data, read with suspicion: a record that is no trace is passed over, a file that is no database is left
alone, and one that cannot be written is read. Each of these costs one warning and never a wrong schedule, since a
trace is checked step by step when it is replayed.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

from ...ir.target import Target
from ..error import DatabaseWarning, ScheduleError
from ..schedule.trace import Trace

_SCHEMA = """
CREATE TABLE IF NOT EXISTS {table} (
    workload TEXT NOT NULL,
    target TEXT NOT NULL,
    trace TEXT NOT NULL,
    seconds REAL,
    error TEXT NOT NULL DEFAULT '',
    versions TEXT NOT NULL,
    date TEXT NOT NULL,
    PRIMARY KEY (workload, target, trace)
) WITHOUT ROWID
"""
# Records of the versions at hand come before older ones, which were timed with other code.
_BEST = """
SELECT trace, seconds, versions, date FROM {table}
WHERE workload = ? AND target = ? AND seconds IS NOT NULL
ORDER BY versions <> ?, seconds LIMIT 8
"""
_ALL = """
SELECT workload, target, trace, seconds, versions, date FROM {table} ORDER BY workload, target
"""
_WRITE = """
INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (workload, target, trace) DO UPDATE SET
    seconds = excluded.seconds, error = excluded.error, versions = excluded.versions, date = excluded.date
"""
_KNOWN = "SELECT trace, seconds FROM {table} WHERE workload = ? AND target = ? AND versions = ?"
_MEASURED, _PREDICTED = "measurements", "predictions"
BUSY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Record:
    """A schedule and what it took: ``seconds`` a call (median), with which versions, and when (UTC, ISO 8601)."""

    trace: Trace
    seconds: float
    versions: str
    date: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is known of one workload on one target (as ``target_key`` writes it): the fastest schedule, if any did not
    fail, how many were measured, and when the last was (UTC, ISO 8601). ``predicted``: no machine has measured them."""

    workload: str
    target: str
    best: Record | None
    measured: int
    date: str
    predicted: bool = False


class Database:
    """Measurements by workload (the structural key of an unscheduled nest) and target.

    Several processes may use one file at a time, and one that is killed loses at most the measurement that it was
    writing. The file is created for its owner alone. ``versions`` says what the times were taken with. One that is
    ``predicted`` knows the predictions in the file, and no measurement.
    """

    def __init__(self, path: str | os.PathLike[str], versions: str = "", *, predicted: bool = False) -> None:
        self.path = Path(path)
        self._table = _PREDICTED if predicted else _MEASURED
        self.versions = versions
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._owner = 0
        self._warned = False
        self._readable = self._writable = True

    def lookup(self, workload: str, target: Target) -> Record | None:
        """The fastest schedule known, or None."""
        found: list[tuple[str, float, str, str]] = []
        with self._access() as connection:
            if connection is not None:
                found = connection.execute(
                    _BEST.format(table=self._table), (workload, target_key(target), self.versions)
                ).fetchall()
        records = (self._record(*row) for row in found)
        return next((record for record in records if record is not None), None)

    def measured(self, workload: str, target: Target) -> dict[str, float | None]:
        """Every schedule that these versions measured, by the JSON of its trace; None for one that failed."""
        with self._access() as connection:
            if connection is not None:
                asked = (workload, target_key(target), self.versions)
                rows = connection.execute(_KNOWN.format(table=self._table), asked)
                return dict(rows.fetchall())
        return {}

    def record(self, workload: str, target: Target, trace: Trace, seconds: float | None, error: str = "") -> None:
        """Keep one measurement, on disk before this returns; ``seconds`` is None for a schedule that failed."""
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{seconds} is no measured time")
        with self._access(write=True) as connection:
            if connection is not None:
                now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                row = (workload, target_key(target), trace.to_json(), seconds, error[:1000], self.versions, now)
                with connection:
                    connection.execute(_WRITE.format(table=self._table), row)

    def tuned(self) -> list[Tuned]:
        """What is known of every workload on every target, the workloads in order."""
        rows: list[tuple[str, str, str, float | None, str, str]] = []
        with self._access() as connection:
            if connection is not None:
                rows = connection.execute(_ALL.format(table=self._table)).fetchall()
        found = []
        for (workload, target), group in groupby(rows, key=lambda row: row[:2]):
            measured = list(group)
            timed = [(text, seconds, made, date) for _, _, text, seconds, made, date in measured if seconds is not None]
            timed.sort(key=lambda t: (t[2] != self.versions, t[1]))
            records = (self._record(*t) for t in timed)
            best = next((record for record in records if record is not None), None)
            last, predicted = max(r[5] for r in measured), self._table == _PREDICTED
            found.append(Tuned(workload, target, best, len(measured), last, predicted))
        return found

    def clear(self) -> int:
        """Forget every measurement (prediction), and say how many there were."""
        with self._access(write=True) as connection:
            if connection is not None:
                with connection:
                    count: int = connection.execute(f"DELETE FROM {self._table}").rowcount
                connection.execute("VACUUM")
                return count
        return 0

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        with self._lock:
            if self._connection is not None and self._owner == os.getpid():
                self._connection.close()
            self._connection = None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, text: str, seconds: float, versions: str, date: str) -> Record | None:
        try:
            return Record(Trace.from_json(text), float(seconds), versions, date)
        except ScheduleError as error:
            self._warn(f"a record of {self.path} is damaged and passed over ({error.reason})")
            return None

    # --- the file -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _access(self, write: bool = False) -> Iterator[sqlite3.Connection | None]:
        """The connection, or None where the file does not serve; what SQLite finds wrong becomes the one warning."""
        with self._lock:
            connection: sqlite3.Connection | None = None
            try:
                if self._writable if write else self._readable:
                    connection = self._connected()
            except sqlite3.Error as error:
                self._give_up(error, write=False)
            try:
                yield connection if self._writable or not write else None
            except sqlite3.Error as error:
                self._give_up(error, write)

    def _give_up(self, error: sqlite3.Error, write: bool) -> None:
        self._writable = False
        if write:
            self._warn(f"{self.path} cannot be written ({error}); measurements are not kept")
        else:
            self._readable = False
            self._warn(f"{self.path} cannot be read ({error}); schedules are the default ones")

    def _connected(self) -> sqlite3.Connection:
        # A connection must not cross a fork; the child's copy is dropped without closing, which would unlock the file.
        if self._connection is None or self._owner != os.getpid():
            self._connection = self._open()
            self._owner = os.getpid()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            connection = self._connect(str(self.path), False)
        except OSError as error:
            if not self.path.exists():
                raise sqlite3.OperationalError(str(error)) from None
            self._writable = False
            self._warn(f"{self.path} cannot be written ({error.strerror}); measurements are not kept")
            return self._connect(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", True)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA.format(table=self._table))
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _connect(self, name: str, uri: bool) -> sqlite3.Connection:
        return sqlite3.connect(name, timeout=BUSY_SECONDS, check_same_thread=False, uri=uri)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"tuning database: {text}", DatabaseWarning, stacklevel=3)


def target_key(target: Target) -> str:
    """What of a machine makes times comparable, as one short text."""
    features = hashlib.sha256(target.features.encode()).hexdigest()[:8] if target.features else "-"
    return f"{target.kind}:{target.arch}:{target.cores}:{target.vector_bytes}:{features}"
