"""What was measured: schedules of workloads on targets, in one SQLite file that processes share.

What was predicted for machines that are not here is marked as that, so that neither is taken for the other.

The file is data, read with suspicion: a record that is no trace is passed over, a file that is no database is left
alone, and so is one of a newer version of ours; one that cannot be written is read. Each of these costs one warning and
never a wrong schedule, since a trace is checked step by step when it is replayed.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeAlias

from ....ir.target import Target
from ...decisions import DecisionOverrides
from ...error import DatabaseWarning, ScheduleError
from ...schedule.trace import Trace
from .decisions import GraphDecisions, accepted, exported_decisions, has_table, of_all, of_graph, write
from .queries import ALL, BY_CODE, KNOWN, OF_WORKLOAD, WRITE, best_rows, record_of, serves, similar_rows
from .rows import (
    NO_PART,
    Part,
    Record,
    Session,
    Similar,
    Told,
    Tuned,
    Verdict,
    Workload,
    now,
    plain_json,
    target_facts,
    target_key,
    trace_hash,
)
from .schema import SCHEMA, prepare, session_number, target_number, version_of, workload_number, write_ahead
from .sharing import Imported, exported, exported_rows, import_lines
from .shipped import Shipped
from .verify import Verified, remove, verify

BUSY_SECONDS = 10.0
# The next rows after a number, of a target and since a date, where those are given.
_NextRows: TypeAlias = Callable[[sqlite3.Connection, int, str | None, str], list[tuple[Any, ...]]]


class Database:
    """Measurements by workload (the structural key of an unscheduled nest) and target.

    Several processes may use one file at a time, and one that is killed loses at most the measurement that it was
    writing. The file is created for its owner alone, when something is first recorded. ``versions`` says what the times
    were taken with, ``facts`` on what (``Session``), and ``part`` which processor or GPU a target is here. One that is
    ``predicted`` knows the predictions in the file, and no measurement. What ``shipped`` knows ranks below the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        versions: str = "",
        *,
        predicted: bool = False,
        part: Callable[[Target], Part] | None = None,
        facts: tuple[tuple[str, str], ...] = (),
        shipped: Shipped | None = None,
    ) -> None:
        self.path = Path(path)
        self.predicted = predicted
        self.versions = versions
        self._part = part
        self._facts = facts
        self._shipped = shipped if not predicted else None
        self._sessions: dict[int, Session] = {}
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._owner = 0
        self._warned = False
        self._readable = self._writable = True

    def key_of(self, target: Target) -> str:
        """The target as rows name it, with the part that it is here."""
        return target_key(target, self._part_of(target))

    def lookup(self, workload: str, target: Target) -> Record | None:
        """The fastest schedule known, or None.

        What a search has accepted comes first. What was raced and not confirmed serves where it gains 1 % and twice its
        noise, and a time without a race where there is no ratio.
        """
        key, base, found = self.key_of(target), target_key(target), list[Any]()
        with self._access() as connection:
            if connection is not None:
                asked = (connection, workload, key, base)
                found = best_rows(*asked, predicted=self.predicted, versions=self.versions)
        records = map(self._record, found)
        best = next((record for record in records if record is not None), None)
        return self._shipped(workload, key, base) if best is None and self._shipped is not None else best

    def measured(self, workload: str, target: Target) -> dict[str, float | None]:
        """Every schedule that these versions measured, by the JSON of its trace; None for one that failed."""
        with self._access() as connection:
            if connection is not None:
                rows = connection.execute(KNOWN, (self.predicted, workload, self.key_of(target), self.versions))
                return dict(rows.fetchall())
        return {}

    def by_code(self, workload: str, target: Target) -> dict[str, Record]:
        """What is known of machine code on this part, whatever our sources were, by its hash: the last measurement of
        each. A ratio holds where ``against`` is the hash of the default's code at hand."""
        rows: list[Any] = []
        with self._access() as connection:
            if connection is not None:
                rows = connection.execute(BY_CODE, (self.predicted, workload, self.key_of(target))).fetchall()
        records = filter(None, map(self._record, rows))
        return {record.code_hash: record for record in records}

    def similar(self, workload: Workload) -> list[Similar]:
        """What was faster than the default, of any workload on any target, as far as its draft is known: of each the
        two best. What comes with the package is among them."""
        rows: list[Any] = []
        with self._access() as connection:
            if connection is not None:
                rows = similar_rows(connection, workload, predicted=self.predicted)
        if self._shipped is not None:
            rows += self._shipped.similar(workload)
        return [found for row in rows if (found := Similar.of(row)) is not None]

    def record(
        self,
        workload: str | Workload,
        target: Target,
        trace: Trace,
        seconds: float | None = None,
        error: str = "",
        *,
        ratio: float | None = None,
        count: int = 1,
        sigma: float | None = None,
        verdict: Verdict | None = None,
        code_hash: str = "",
        against: str = "",
        session: Session | None = None,
        key: str = "",
        draft: str = "",
    ) -> None:
        """Keep one measurement, on disk before this returns; a second one of a schedule in a session replaces the
        first.

        ``seconds`` (median of ``count`` samples) is None for a schedule that failed, for which ``error`` says why.
        ``ratio`` is its time over the default's in the same race, ``sigma`` the ratio's relative noise, ``code_hash``
        and ``against`` the hashes of its machine code and of the default's. ``session`` is this process unless another
        measured, and ``key`` names the machine then, as ``key_of`` does there. ``draft`` is the JSON of the draft that
        the trace was made of. Raises ValueError for what is no measurement.
        """
        verdict = (Verdict.FAILED if seconds is None else Verdict.TIMED) if verdict is None else verdict
        for value, what in ((seconds, "measured time"), (ratio, "ratio"), (sigma, "noise")):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{value} is no {what}")
        if verdict.has_time != (seconds is not None):
            raise ValueError(f"what is {verdict.value} has {'a' if verdict.has_time else 'no'} measured time")
        workload = workload if isinstance(workload, Workload) else Workload(workload)
        text = trace.to_json()
        with self._access(write=True) as connection:
            if connection is not None:
                key = key or self.key_of(target)
                facts = self._facts_of(connection, target, key)
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    numbers = self._row_numbers(connection, workload, (key, target_key(target), facts), session)
                    row = (
                        *numbers, self.predicted, trace_hash(text), text, seconds, ratio, count, sigma,
                        verdict.value, error[:1000], code_hash, against, now(), draft,
                    )  # fmt: skip
                    connection.execute(WRITE, row)

    def decisions(self, graph: str, target: Target) -> GraphDecisions | None:
        """What the last search among the decisions of a graph ended with; None where there was none."""
        with self._access() as connection:
            if connection is not None and not self.predicted and has_table(connection):
                try:
                    return accepted(connection, graph, self.key_of(target), target_key(target))
                except ValueError as error:
                    self._warn(f"decisions of {self.path} are damaged and passed over ({error})")
        return None

    def tried_decisions(self, graph: str, target: Target) -> dict[DecisionOverrides, GraphDecisions]:
        """What these versions know of sets of decisions of a graph on this part."""
        with self._access() as connection:
            if connection is not None and not self.predicted and has_table(connection):
                try:
                    found = of_graph(connection, graph, self.key_of(target))
                    return {d.chosen: d for d in found if d.versions == self.versions}
                except ValueError as error:
                    self._warn(f"decisions of {self.path} are damaged and passed over ({error})")
        return {}

    def record_decisions(
        self, graph: str, target: Target, chosen: DecisionOverrides, seconds: float | None = None, error: str = "", *,
        ratio: float | None = None, count: int = 0, sigma: float | None = None, verdict: Verdict = Verdict.TIMED,
    ) -> None:  # fmt: skip
        """Keep what a graph took with a set of decisions, on disk before this returns."""
        row = GraphDecisions(chosen, seconds, ratio, count, sigma, verdict, error, now())
        with self._access(write=True) as connection:
            if connection is not None:
                key = self.key_of(target)
                facts, session = self._facts_of(connection, target, key), self.session
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    told = plain_json(dict(session.facts))
                    numbers = (
                        target_number(connection, key, target_key(target), facts),
                        session_number(
                            connection, session.id, session.versions, session.date, told, session.provenance.value
                        ),
                    )  # fmt: skip
                    write(connection, graph, numbers, row)

    def searched(self, graph: str | None = None) -> list[tuple[str, str, GraphDecisions]]:
        """What is known of the decisions of graphs whose keys begin so, or of all: the key of the graph, the target and
        a set, by graph and target, what the last search ended with first."""
        with self._access() as connection:
            if connection is not None and not self.predicted and has_table(connection):
                try:
                    return of_all(connection, graph)
                except ValueError as error:
                    self._warn(f"decisions of {self.path} are damaged and passed over ({error})")
        return []

    def tuned(self) -> list[Tuned]:
        """What is known of every workload on every target, the workloads in order."""
        rows: list[Any] = []
        with self._access() as connection:
            if connection is not None:
                asked = {"predicted": self.predicted, "versions": self.versions, "target": ""}
                rows = connection.execute(ALL, asked).fetchall()
        found = []
        for (workload, target), group in groupby(rows, key=lambda row: row[:2]):
            measured = list(group)
            records = (self._record(row[2:]) for row in measured if serves(row))
            best = next((record for record in records if record is not None), None)
            failed = sum(row[3] is None for row in measured)
            last = max(row[5] for row in measured)
            found.append(Tuned(workload, target, best, len(measured), last, self.predicted, failed))
        return found

    def of_workload(self, prefix: str) -> list[Told]:
        """All measurements and predictions of the workloads whose keys begin so, by workload and target, the fastest
        first."""
        rows: list[Any] = []
        with self._access() as connection:
            if connection is not None:
                rows = connection.execute(OF_WORKLOAD, (prefix, prefix)).fetchall()
        records = ((row, self._record(row[4:])) for row in rows)
        return [
            Told(Workload(key, text), target, record, bool(predicted))
            for (key, text, target, predicted, *_), record in records
            if record is not None
        ]

    def holds(self, target: str | None = None, since: str = "") -> bool:
        """Whether ``exported`` has any measurement."""
        pages = (self._pages(which, target, since) for which in (exported_rows, exported_decisions))
        return any(map(any, pages))

    def exported(self, target: str | None = None, since: str = "") -> Iterator[str]:
        """Every measurement, of schedules and of sets of decisions, and every prediction (of one target, as
        ``target_key`` writes it; of a date or later) as lines of JSON without their ends."""
        measured, decided = (
            chain.from_iterable(self._pages(which, target, since)) for which in (exported_rows, exported_decisions)
        )
        return exported(measured, decided)

    def _pages(self, which: _NextRows, target: str | None, since: str) -> Iterator[list[Any]]:
        after = 0
        while True:
            rows: list[Any] = []
            with self._access() as connection:
                if connection is not None:
                    rows = which(connection, after, target, since)
            if not rows:
                return
            yield rows
            after = rows[-1][-1]

    def take(self, files: Iterable[tuple[str, Iterable[str]]]) -> Imported:
        """Take lines that ``exported`` wrote, of files with their names: all of them, or, where a file raises, none."""
        found = Imported()
        with self._access(write=True) as connection:
            if connection is not None:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    for name, lines in files:
                        import_lines(connection, lines, name, found)
        return found

    def verify(self, progress: Callable[[int], None] | None = None, *, forget: bool = False) -> Verified:
        """Replay every schedule on its workload's text; ``forget`` those that are none of it. ``progress`` is told how
        many were seen."""
        found = Verified()
        with self._access(write=forget, make=False) as connection:
            if connection is not None:
                found = verify(connection, progress)
                if forget:
                    with connection:
                        connection.execute("BEGIN IMMEDIATE")
                        remove(connection, found.faults)
        return found

    def clear(self) -> int:
        """Forget every measurement (prediction), and say how many there were."""
        with self._access(write=True, make=False) as connection:
            if connection is not None:
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    asked = "DELETE FROM measurements WHERE predicted = ?"
                    count: int = connection.execute(asked, (self.predicted,)).rowcount
                    if not self.predicted:
                        count += connection.execute("DELETE FROM decisions").rowcount
                    for table in ("workloads", "targets", "sessions"):
                        column = table[:-1]
                        held = f"SELECT {column} FROM measurements"
                        if table != "workloads":
                            held += f" UNION SELECT {column} FROM decisions"
                        connection.execute(f"DELETE FROM {table} WHERE id NOT IN ({held})")
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

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """This process, as its rows name it."""
        process = os.getpid()
        if process not in self._sessions:
            self._sessions[process] = Session.new(self.versions, self._facts)
        return self._sessions[process]

    def _part_of(self, target: Target) -> Part:
        return NO_PART if self._part is None else self._part(target)

    def _facts_of(self, connection: sqlite3.Connection, target: Target, key: str) -> str:
        """What is to be kept of a target; "{}" where it is known."""
        known = "SELECT 1 FROM targets WHERE key = ? AND facts <> '{}'"
        if connection.execute(known, (key,)).fetchone():
            return "{}"
        part = self._part_of(target)
        return plain_json(target_facts(target, part if key == target_key(target, part) else NO_PART))

    def _row_numbers(
        self,
        connection: sqlite3.Connection,
        workload: Workload,
        target: tuple[str, str, str],
        session: Session | None,
    ) -> tuple[int, int, int]:
        session = self.session if session is None else session
        told = plain_json(dict(session.facts))
        return (
            workload_number(connection, workload, own=True),
            target_number(connection, *target),
            session_number(connection, session.id, session.versions, session.date, told, session.provenance.value),
        )

    def _record(self, row: Any) -> Record | None:
        try:
            return record_of(row)
        except (ScheduleError, ValueError, TypeError) as error:
            told = error.reason if isinstance(error, ScheduleError) else error
            self._warn(f"a record of {self.path} is damaged and passed over ({told})")
            return None

    # --- the file -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _access(self, write: bool = False, make: bool = True) -> Iterator[sqlite3.Connection | None]:
        """The connection, or None where the file does not serve; what SQLite finds wrong becomes the one warning.

        A file that is not there is made to be written, unless ``make`` is false, and not to be read."""
        with self._lock:
            connection: sqlite3.Connection | None = None
            try:
                if (self._writable if write else self._readable) and ((write and make) or self.path.exists()):
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
            return self._read_only()
        try:
            version_of(connection)  # a newer file is not even put into another mode
            write_ahead(connection, BUSY_SECONDS)
            prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _read_only(self) -> sqlite3.Connection:
        """The file as it is, or, where it is of an older form, a copy in memory of this one."""
        connection = self._connect(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", True)
        if version_of(connection) == SCHEMA:
            return connection
        copy = self._connect(":memory:", False)
        connection.backup(copy)
        connection.close()
        prepare(copy)
        return copy

    def _connect(self, name: str, uri: bool) -> sqlite3.Connection:
        return sqlite3.connect(name, timeout=BUSY_SECONDS, check_same_thread=False, uri=uri, isolation_level=None)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"tuning database: {text}", DatabaseWarning, stacklevel=3)
