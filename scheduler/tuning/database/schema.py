"""The tables of the tuning database, and how a file of an older form becomes one of this."""

from __future__ import annotations

import sqlite3
import time
import uuid

from .decisions import TABLE, has_table
from .rows import Provenance, Verdict, Workload, plain_json, trace_hash

SCHEMA = 3
_TABLES = (
    """CREATE TABLE workloads (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    text TEXT NOT NULL DEFAULT '',
    sketch TEXT NOT NULL DEFAULT '',
    features TEXT NOT NULL DEFAULT ''
)""",
    """CREATE TABLE targets (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    base TEXT NOT NULL,
    facts TEXT NOT NULL DEFAULT '{}'
)""",
    """CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    versions TEXT NOT NULL,
    date TEXT NOT NULL,
    facts TEXT NOT NULL DEFAULT '{}',
    provenance TEXT NOT NULL
)""",
    """CREATE TABLE measurements (
    id INTEGER PRIMARY KEY,
    workload INTEGER NOT NULL REFERENCES workloads,
    target INTEGER NOT NULL REFERENCES targets,
    session INTEGER NOT NULL REFERENCES sessions,
    predicted INTEGER NOT NULL,
    trace_hash TEXT NOT NULL,
    trace TEXT NOT NULL,
    seconds REAL,
    ratio REAL,
    count INTEGER NOT NULL DEFAULT 1,
    sigma REAL,
    verdict TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT '',
    code_hash TEXT NOT NULL DEFAULT '',
    against TEXT NOT NULL DEFAULT '',
    date TEXT NOT NULL,
    draft TEXT NOT NULL DEFAULT '',
    UNIQUE (workload, target, predicted, trace_hash, session)
)""",
)
# What the second form has not: what seeds of other workloads go by.
_THIRD = (("workloads", "sketch"), ("workloads", "features"), ("measurements", "draft"))
# The first form: a table of times, and one of predictions, which the file of an older version has not.
_FIRST = {"measurements": 0, "predictions": 1}


class NewerSchemaError(sqlite3.DatabaseError):
    """The file is of a later version of ours, which this one leaves alone."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"a newer torch-mlc wrote it: its schema is {found}, and this version knows those up to {SCHEMA}"
        )


def version_of(connection: sqlite3.Connection) -> int:
    """Which form a file has: 0 for one that is empty. Raises NewerSchemaError."""
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > SCHEMA:
        raise NewerSchemaError(found)
    return found or (1 if _first_tables(connection) else 0)


def write_ahead(connection: sqlite3.Connection, seconds: float) -> None:
    """Let readers and a writer go on at the same time. Of two processes that change the mode of one file at a time
    SQLite refuses one at once instead of waiting as it does elsewhere: that one tries again, for so many seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = NORMAL")


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables, of those of a first file where it is one: all of it or, after a kill, nothing.

    The connection is in autocommit mode. Raises NewerSchemaError."""
    if version_of(connection) == SCHEMA and has_table(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = version_of(connection)
        if found == 2:
            for table, column in _THIRD:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} TEXT NOT NULL DEFAULT ''")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        elif found != SCHEMA:  # else another process was here first
            old = _first_tables(connection)
            for table in old:
                connection.execute(f"ALTER TABLE {table} RENAME TO first_{table}")
            for statement in _TABLES:
                connection.execute(statement)
            for table in old:
                _migrate(connection, f"first_{table}", _FIRST[table])
                connection.execute(f"DROP TABLE first_{table}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute(TABLE)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _first_tables(connection: sqlite3.Connection) -> list[str]:
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return [name for (name,) in names if name in _FIRST]


def _migrate(connection: sqlite3.Connection, table: str, predicted: int) -> None:
    """What the first form knew: who measured is not, so that those with equal versions are taken for one session."""
    rows = connection.execute(f"SELECT workload, target, trace, seconds, error, versions, date FROM {table}")
    known: dict[tuple[str, str], int] = {}

    def number(kind: str, text: str, date: str = "") -> int:
        if (kind, text) not in known:
            match kind:
                case "workloads":
                    known[kind, text] = workload_number(connection, Workload(text))
                case "targets":
                    known[kind, text] = target_number(connection, text, text, "{}")
                case _:
                    facts = plain_json({"schema": "1"})
                    made = session_number(connection, uuid.uuid4().hex, text, date, facts, Provenance.OWN.value)
                    known[kind, text] = made
        return known[kind, text]

    for workload, target, trace, seconds, error, versions, date in rows.fetchall():
        verdict = Verdict.FAILED if seconds is None else Verdict.TIMED
        connection.execute(
            "INSERT OR REPLACE INTO measurements (workload, target, session, predicted, trace_hash, trace, seconds,"
            " verdict, error, date) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number("workloads", workload), number("targets", target), number("sessions", versions, date),
                predicted, trace_hash(trace), trace, seconds, verdict.value, error, date,
            ),
        )  # fmt: skip


# --- numbers of rows ------------------------------------------------------------------------------------------------


def workload_number(connection: sqlite3.Connection, workload: Workload, *, own: bool = False) -> int:
    """The number of a workload; our ``own`` text of it goes over what others said."""
    features = plain_json(list(workload.features)) if workload.features else ""
    connection.execute(
        "INSERT INTO workloads (key, text, sketch, features) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (key) DO UPDATE SET text = excluded.text"
        " WHERE excluded.text <> '' AND text <> excluded.text AND (text = '' OR ?)",
        (workload.key, workload.text, workload.sketch, features, own),
    )
    for column, value in (("sketch", workload.sketch), ("features", features)):
        if value:
            known = f"UPDATE workloads SET {column} = ? WHERE key = ? AND {column} <> ? AND ({column} = '' OR ?)"
            connection.execute(known, (value, workload.key, value, own))
    return _number(connection, "workloads", "key", workload.key)


def target_number(connection: sqlite3.Connection, key: str, base: str, facts: str) -> int:
    connection.execute(
        "INSERT INTO targets (key, base, facts) VALUES (?, ?, ?)"
        " ON CONFLICT (key) DO UPDATE SET facts = excluded.facts WHERE facts = '{}' AND excluded.facts <> '{}'",
        (key, base, facts),
    )
    return _number(connection, "targets", "key", key)


def session_number(
    connection: sqlite3.Connection, name: str, versions: str, date: str, facts: str, provenance: str
) -> int:
    connection.execute(
        "INSERT OR IGNORE INTO sessions (name, versions, date, facts, provenance) VALUES (?, ?, ?, ?, ?)",
        (name, versions, date, facts, provenance),
    )
    return _number(connection, "sessions", "name", name)


def _number(connection: sqlite3.Connection, table: str, column: str, value: str) -> int:
    found: int = connection.execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,)).fetchone()[0]
    return found
