"""What was measured of decisions: sets of ways for the places of a graph, and what the graph took with them.

A graph is known by a key in which no name counts. A set counts in that graph alone, for what is faster there may not be
so in another. The table came to the second schema later; a file without it has no decisions.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...decisions import DecisionError, DecisionOverrides, parse_overrides
from .rows import Provenance, Verdict, plain_json

TABLE = """CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY,
    graph TEXT NOT NULL,
    target INTEGER NOT NULL REFERENCES targets,
    session INTEGER NOT NULL REFERENCES sessions,
    chosen TEXT NOT NULL,
    seconds REAL,
    ratio REAL,
    count INTEGER NOT NULL DEFAULT 0,
    sigma REAL,
    verdict TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT '',
    date TEXT NOT NULL,
    UNIQUE (graph, target, session, chosen)
)"""
# Characters of a set: beyond them it is nobody's.
MAX_CHOSEN = 1 << 18
_COLUMNS = "d.chosen, d.seconds, d.ratio, d.count, d.sigma, d.verdict, d.error, d.date, s.versions, s.provenance"
_FROM = "FROM decisions d JOIN targets t ON t.id = d.target JOIN sessions s ON s.id = d.session"
# The last search speaks: of the part at hand before one of unknown name, ours before others'.
_ACCEPTED = f"""
SELECT {_COLUMNS} {_FROM} WHERE d.graph = :graph AND t.key IN (:target, :base) AND d.verdict = 'accepted'
ORDER BY t.key <> :target, s.provenance <> 'own', d.date DESC, d.id DESC LIMIT 1
"""
_ALL = f"""
SELECT d.graph, t.key, {_COLUMNS} {_FROM} WHERE :graph IS NULL OR substr(d.graph, 1, length(:graph)) = :graph
ORDER BY d.graph, t.key, d.verdict <> 'accepted', d.date DESC, d.id DESC
"""
_EXPORTED = f"""
SELECT t.key, t.base, t.facts, s.name, s.versions, s.date, s.facts, d.graph, d.chosen, d.seconds, d.ratio, d.count,
    d.sigma, d.verdict, d.error, d.date, d.id {_FROM}
WHERE d.id > :after AND (:target IS NULL OR t.key = :target) AND d.date >= :since ORDER BY d.id LIMIT 1000
"""
_OF_GRAPH = f"SELECT {_COLUMNS} {_FROM} WHERE d.graph = ? AND t.key = ? ORDER BY d.date, d.id"
_WRITE = """
INSERT INTO decisions (graph, target, session, chosen, seconds, ratio, count, sigma, verdict, error, date)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (graph, target, session, chosen) DO UPDATE SET
    seconds = excluded.seconds, ratio = excluded.ratio, count = excluded.count, sigma = excluded.sigma,
    verdict = excluded.verdict, error = excluded.error, date = excluded.date, id = (SELECT MAX(id) + 1 FROM decisions)
"""


@dataclass(frozen=True, slots=True)
class GraphDecisions:
    """A set of decisions of a graph and what the graph took: ``seconds`` a run, and ``ratio`` to the graph that it was
    raced against, below one where it is faster. ``ACCEPTED`` is what a search ended with, be it the empty set."""

    chosen: DecisionOverrides
    seconds: float | None
    ratio: float | None
    count: int
    sigma: float | None
    verdict: Verdict
    error: str
    date: str
    versions: str = ""
    provenance: Provenance = Provenance.OWN


def has_table(connection: sqlite3.Connection) -> bool:
    """Whether a file has any decisions."""
    asked = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'decisions'"
    return connection.execute(asked).fetchone() is not None


def accepted(connection: sqlite3.Connection, graph: str, key: str, base: str) -> GraphDecisions | None:
    """What the last search of a graph ended with. Raises ValueError for a damaged row."""
    row = connection.execute(_ACCEPTED, {"graph": graph, "target": key, "base": base}).fetchone()
    return None if row is None else _of_row(row)


def of_graph(connection: sqlite3.Connection, graph: str, key: str) -> list[GraphDecisions]:
    """All that was measured of a graph, the last first known first. Raises ValueError for a damaged row."""
    return [_of_row(row) for row in connection.execute(_OF_GRAPH, (graph, key)).fetchall()]


def of_all(connection: sqlite3.Connection, graph: str | None) -> list[tuple[str, str, GraphDecisions]]:
    """All that was measured of the graphs whose keys begin so, or of all graphs: the key, the target and the set, what
    the last search ended with first. Raises ValueError for a damaged row."""
    rows = connection.execute(_ALL, {"graph": graph}).fetchall()
    return [(graph, target, _of_row(row)) for graph, target, *row in rows]


def exported_decisions(
    connection: sqlite3.Connection, after: int, target: str | None = None, since: str = ""
) -> list[tuple[Any, ...]]:
    """The next sets after a number of a row (of one target, measured at a date or later), for ``sharing.exported``; the
    last element of each is its number."""
    if not has_table(connection):
        return []
    return connection.execute(_EXPORTED, {"after": after, "target": target, "since": since}).fetchall()


def write(connection: sqlite3.Connection, graph: str, numbers: tuple[int, int], found: GraphDecisions) -> None:
    """Keep a set, of a target and session by number, within a transaction of the caller's."""
    row = (
        graph, *numbers, plain_json(found.chosen.plain()), found.seconds, found.ratio, found.count, found.sigma,
        found.verdict.value, found.error[:1000], found.date,
    )  # fmt: skip
    connection.execute(_WRITE, row)


def take(connection: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> int:
    """Keep sets of others, as rows of the table; of one that is here the later stays. How many are new or later."""
    before = connection.total_changes
    connection.executemany(_WRITE + " WHERE excluded.date > date", rows)
    return connection.total_changes - before


def _of_row(row: Any) -> GraphDecisions:
    text, seconds, ratio, count, sigma, verdict, error, date, versions, provenance = row
    if not isinstance(text, str) or len(text) > MAX_CHOSEN:
        raise ValueError("a set of decisions is too long")
    given = json.loads(text)
    if not isinstance(given, Mapping):
        raise DecisionError("a set of decisions is no object")
    return GraphDecisions(
        parse_overrides(given), seconds, ratio, count, sigma, Verdict(verdict), error, date, versions,
        Provenance(provenance),
    )  # fmt: skip
