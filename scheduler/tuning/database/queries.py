"""What the tuning database is asked, and which of several schedules it takes for the best."""

from __future__ import annotations

import math
import sqlite3
from typing import Any

from .rows import Provenance, Record, Verdict, Workload, checked_trace

# What a schedule has to gain before it counts, where nobody has confirmed it: 1 %, and twice its noise.
_GAIN = 0.01
_COLUMNS = """
m.trace, m.seconds, s.versions, m.date, m.ratio, m.count, m.sigma, m.verdict, m.code_hash, m.against, m.error,
s.provenance, s.name"""
_FROM = """
FROM measurements m JOIN workloads w ON w.id = m.workload JOIN targets t ON t.id = m.target
JOIN sessions s ON s.id = m.session
"""
# Of a schedule that was measured in several sessions the last one speaks, and none that was imported before ours. The
# part at hand comes before one of unknown name, what was measured here before what was imported, what was confirmed
# before what was not, the versions at hand before others, ratios before times without one.
_RANKED = f"""
WITH found AS (
    SELECT w.key AS workload_key, t.key AS target_key, m.id AS number, {_COLUMNS},
        ROW_NUMBER() OVER (
            PARTITION BY m.workload, m.target, m.trace_hash ORDER BY s.provenance <> 'own', m.date DESC, m.id DESC
        ) AS age
    {_FROM} WHERE m.predicted = :predicted {{where}}
)
SELECT workload_key, target_key, trace, seconds, versions, date, ratio, count, sigma, verdict, code_hash, against,
    error, provenance, name
FROM found WHERE age = 1
ORDER BY {{order}} target_key <> :target, provenance <> 'own', verdict <> 'accepted', versions <> :versions,
    ratio IS NULL, ratio, seconds, number
"""
_TIMED = f"""
seconds IS NOT NULL AND verdict IN ('accepted', 'timed')
AND (verdict = 'accepted' OR ratio IS NULL OR ratio <= 1 - MAX({_GAIN}, 2 * IFNULL(sigma, 0)))
"""
_OF_ONE = "AND w.key = :workload AND t.key IN (:target, :base)"
BEST = _RANKED.format(where=_OF_ONE, order="").replace("WHERE age = 1", f"WHERE age = 1 AND {_TIMED}") + "LIMIT 8"
ALL = _RANKED.format(where="", order="workload_key, target_key,")
KNOWN = f"SELECT m.trace, m.seconds {_FROM} WHERE m.predicted = ? AND w.key = ? AND t.key = ? AND s.versions = ?"
BY_CODE = f"""
SELECT {_COLUMNS} {_FROM} WHERE m.predicted = ? AND w.key = ? AND t.key = ? AND m.code_hash <> '' ORDER BY m.date, m.id
"""
OF_WORKLOAD = f"""
SELECT w.key, w.text, t.key, m.predicted, {_COLUMNS} {_FROM} WHERE substr(w.key, 1, length(?)) = ?
ORDER BY w.key, t.key, m.predicted, m.seconds IS NULL, IFNULL(m.ratio, 1), m.seconds, m.id
"""
# The two best of each workload on each target, the same workload first, then those that differ in sizes alone.
_SIMILAR = f"""
WITH found AS (
    SELECT w.key AS key, w.sketch AS sketch, w.features AS features, t.key AS target, IFNULL(m.ratio, 1) AS ratio,
        m.draft AS draft, ROW_NUMBER() OVER (PARTITION BY m.workload, m.target ORDER BY verdict <> 'accepted', m.ratio)
        AS place
    {_FROM} WHERE m.predicted = :predicted AND m.draft <> '' AND m.ratio < 1 AND {_TIMED}
)
SELECT key, sketch, features, target, ratio, draft FROM found WHERE place <= 2
ORDER BY key <> :key, sketch = '' OR sketch <> :sketch, ratio LIMIT {{most}}
"""
# Schedules of others that are looked at.
MOST_SIMILAR = 1000
SIMILAR = _SIMILAR.format(most=MOST_SIMILAR)
WRITE = """
INSERT INTO measurements (workload, target, session, predicted, trace_hash, trace, seconds, ratio, count, sigma,
    verdict, error, code_hash, against, date, draft)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (workload, target, predicted, trace_hash, session) DO UPDATE SET
    seconds = excluded.seconds, ratio = excluded.ratio, count = excluded.count, sigma = excluded.sigma,
    verdict = excluded.verdict, error = excluded.error, code_hash = excluded.code_hash, against = excluded.against,
    date = excluded.date
"""


def best_rows(
    connection: sqlite3.Connection, workload: str, key: str, base: str, *, predicted: bool = False, versions: str = ""
) -> list[Any]:
    """Rows of the best schedules of a workload, on the target of a key or on one of its ``base``, for ``record_of``."""
    asked = {"predicted": predicted, "workload": workload, "target": key, "base": base, "versions": versions}
    return [row[2:] for row in connection.execute(BEST, asked).fetchall()]


def similar_rows(connection: sqlite3.Connection, workload: Workload, *, predicted: bool = False) -> list[Any]:
    """Rows of what was faster than the default, for ``Similar.of``."""
    asked = {"predicted": predicted, "key": workload.key, "sketch": workload.sketch}
    return connection.execute(SIMILAR, asked).fetchall()


def record_of(row: Any) -> Record:
    """A row as data. Raises ScheduleError, ValueError and TypeError for what is none."""
    text, seconds, versions, date, ratio, count, sigma, verdict, code_hash, against, error, provenance, session = row
    return Record(
        checked_trace(text), math.inf if seconds is None else float(seconds), versions, date, ratio, count, sigma,
        Verdict(verdict), code_hash, against, error, Provenance(provenance), session,
    )  # fmt: skip


def serves(row: Any) -> bool:
    """Whether a row of a search has a time that a schedule is chosen by."""
    seconds, ratio, sigma, verdict = row[3], row[6], row[8], row[9]
    if seconds is None or verdict not in (Verdict.ACCEPTED.value, Verdict.TIMED.value):
        return False
    return verdict == Verdict.ACCEPTED.value or ratio is None or ratio <= 1 - max(_GAIN, 2 * (sigma or 0.0))
