"""Measurements as JSON lines: what a database writes for others, and takes from them.

A line is a workload, a target, a session, a measurement that names one of each, or a set of decisions of a graph, which
names a target and a session. What is named stands before it.
A writer only appends, so that a file that was cut off loses its last line. Lines of others are data, each checked by
itself: what is none of these is left out and said so. Their traces are checked when they are replayed.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...decisions import parse_overrides
from .decisions import MAX_CHOSEN, take
from .rows import MAX_TRACE, Provenance, Verdict, Workload, plain_json, trace_hash
from .schema import SCHEMA, session_number, target_number, workload_number

# Characters of a line; a nest's text is the longest thing in one.
MAX_LINE = 1 << 22
# Characters of a draft; features of a workload.
MAX_DRAFT, MAX_FEATURES = 1 << 14, 1000
# Faults that are named; the rest is counted.
MAX_NAMED = 20
_CHUNK = 2000
_HEX = re.compile(r"[0-9a-zA-Z_.:-]{1,200}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d|Z)?)?")
_PATH = re.compile(r"(?<![\w/])~?(?:/[\w.@+-]+)+/(?=[\w.@+-])|\b[A-Za-z]:\\(?:[^\\\s]+\\)*")
_EXPORTED = """
SELECT w.key, w.text, w.sketch, w.features, t.key, t.base, t.facts, s.name, s.versions, s.date, s.facts,
    m.predicted, m.trace, m.seconds, m.ratio, m.count, m.sigma, m.verdict, m.error, m.code_hash, m.against, m.date,
    m.draft, m.id
FROM measurements m JOIN workloads w ON w.id = m.workload JOIN targets t ON t.id = m.target
JOIN sessions s ON s.id = m.session
WHERE m.id > :after AND (:target IS NULL OR t.key = :target) AND m.date >= :since ORDER BY m.id LIMIT 1000
"""
_IMPORT = """
INSERT INTO measurements (workload, target, session, predicted, trace_hash, trace, seconds, ratio, count, sigma,
    verdict, error, code_hash, against, date, draft)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (workload, target, predicted, trace_hash, session) DO UPDATE SET
    seconds = excluded.seconds, ratio = excluded.ratio, count = excluded.count, sigma = excluded.sigma,
    verdict = excluded.verdict, error = excluded.error, code_hash = excluded.code_hash, against = excluded.against,
    date = excluded.date, draft = excluded.draft WHERE excluded.date > date
"""


class LineError(ValueError):
    """A line that is no part of a tuning database."""


@dataclass(slots=True)
class Imported:
    """What came of some lines: measurements, of schedules and of sets of decisions, that are new or newer, those that
    were known, and lines left out, of which the first ``MAX_NAMED`` say where and why."""

    added: int = 0
    known: int = 0
    left_out: int = 0
    faults: list[str] = field(default_factory=list)

    def fault(self, where: str, why: str) -> None:
        self.left_out += 1
        if len(self.faults) < MAX_NAMED:
            self.faults.append(f"{where}: {why}")


def exported_rows(
    connection: sqlite3.Connection, after: int, target: str | None = None, since: str = ""
) -> list[tuple[Any, ...]]:
    """The next measurements after a number of a row (of one target, made at a date or later), for ``exported``; the
    last element of each is its number."""
    return connection.execute(_EXPORTED, {"after": after, "target": target, "since": since}).fetchall()


def exported(rows: Iterable[tuple[Any, ...]], decided: Iterable[tuple[Any, ...]] = ()) -> Iterator[str]:
    """Measurements, and sets of decisions (``exported_decisions``), as lines without their ends. Messages of errors
    have no folders: those are nobody else's business."""
    yield plain_json({"schema": SCHEMA})
    told: set[tuple[str, str]] = set()
    for row in rows:
        workload, text, sketch, features, *machine = row[:11]
        yield from _defined(told, "workload", workload, _told_workload(text, sketch, features))
        yield from _defined_machine(told, machine)
        predicted, trace, seconds, ratio, count, sigma, verdict, error, code, against, date, draft, _ = row[11:]
        yield _line(
            of=[workload, machine[0], machine[3]], trace=trace, seconds=seconds, ratio=ratio, count=count, sigma=sigma,
            verdict=verdict, error=_PATH.sub("", error), code=code, against=against, date=date,
            predicted=bool(predicted), draft=draft,
        )  # fmt: skip
    for row in decided:
        machine = list(row[:7])
        yield from _defined_machine(told, machine)
        graph, chosen, seconds, ratio, count, sigma, verdict, error, date, _ = row[7:]
        yield _line(
            graph=graph, on=[machine[0], machine[3]], chosen=json.loads(chosen), seconds=seconds, ratio=ratio,
            count=count, sigma=sigma, verdict=verdict, error=_PATH.sub("", error), date=date,
        )  # fmt: skip


def _defined(told: set[tuple[str, str]], kind: str, key: str, more: dict[str, Any]) -> Iterator[str]:
    """What a measurement names, at its first mention."""
    if (kind, key) not in told:
        told.add((kind, key))
        yield plain_json({kind: key, **more})


def _defined_machine(told: set[tuple[str, str]], columns: list[Any]) -> Iterator[str]:
    target, base, target_facts, session, versions, day, facts = columns
    yield from _defined(told, "target", target, {"base": base, "facts": json.loads(target_facts)})
    yield from _defined(told, "session", session, {"versions": versions, "date": day, "facts": json.loads(facts)})


def _line(**given: Any) -> str:
    return plain_json({k: v for k, v in given.items() if v not in (None, "", False)})


def _told_workload(text: str, sketch: str, features: str) -> dict[str, Any]:
    told: dict[str, Any] = {"text": text}
    if sketch:
        told["sketch"] = sketch
    if features:
        told["features"] = json.loads(features)
    return told


def import_lines(
    connection: sqlite3.Connection, lines: Iterable[str], where: str, found: Imported | None = None
) -> Imported:
    """Take lines into a database, within a transaction of the caller's. Their sessions are others', except those that
    are known already. ``where`` names the lines in faults."""
    found = Imported() if found is None else found
    numbers: dict[tuple[str, str], int] = {}
    waiting: list[tuple[Any, ...]] = []
    decided: list[tuple[Any, ...]] = []

    def flush() -> None:
        before = connection.total_changes
        connection.executemany(_IMPORT, waiting)
        changed = connection.total_changes - before + take(connection, decided)
        found.added += changed
        found.known += len(waiting) + len(decided) - changed
        waiting.clear()
        decided.clear()

    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            if len(line) > MAX_LINE:
                raise LineError(f"{len(line)} characters are more than {MAX_LINE}")
            data = json.loads(line)
            if not isinstance(data, dict):
                raise LineError("it is no object")
            if "of" in data:
                waiting.append(_measurement(data, numbers))
            elif "graph" in data:
                decided.append(_decisions(data, numbers))
            else:
                _define(connection, data, numbers)
            if len(waiting) + len(decided) >= _CHUNK:
                flush()
        except (LineError, ValueError, RecursionError) as error:
            found.fault(f"{where}:{number}", str(error)[:200])
            if isinstance(error, _NewerLinesError):
                break
    flush()
    return found


class _NewerLinesError(LineError):
    pass


def _define(connection: sqlite3.Connection, data: dict[str, Any], numbers: dict[tuple[str, str], int]) -> None:
    match data:
        case {"schema": int() as schema}:
            if schema > SCHEMA:
                raise _NewerLinesError(f"a newer torch-mlc wrote it: its schema is {schema}; {SCHEMA} is read here")
        case {"workload": str() as key, "text": str() as text}:
            workload = Workload(key, text, _sketch(data.get("sketch", "")), _numbers(data.get("features", [])))
            numbers["workload", _name(key)] = workload_number(connection, workload)
        case {"target": str() as key, "base": str() as base, "facts": dict() as facts}:
            numbers["target", _name(key)] = target_number(connection, key, _name(base), _facts(facts))
        case {"session": str() as key, "versions": str() as versions, "date": str() as date, "facts": dict() as facts}:
            numbers["session", _name(key)] = session_number(
                connection, key, versions[:200], _date(date), _facts(facts), Provenance.IMPORTED.value
            )
        case _:
            raise LineError(
                f"it is no workload, target, session, measurement or set of decisions: {plain_json(data)[:60]}"
            )


def _measurement(data: dict[str, Any], numbers: dict[tuple[str, str], int]) -> tuple[Any, ...]:
    """A row of the table. Raises LineError."""
    given = data.get
    try:
        workload, target, session = data["of"]
        row = numbers["workload", workload], numbers["target", target], numbers["session", session]
    except (KeyError, TypeError, ValueError):
        raise LineError("it names a workload, target or session that no line before it has defined") from None
    trace = given("trace")
    if not isinstance(trace, str) or len(trace) > MAX_TRACE:
        raise LineError("it has no trace" if not isinstance(trace, str) else f"a trace of {len(trace)} characters")
    verdict, *times = _timed(data, least=1)
    texts = given("error", ""), given("code", ""), given("against", ""), given("draft", "")
    if not all(isinstance(t, str) for t in texts) or type(given("predicted", False)) is not bool:
        raise LineError("its words are none")
    return (
        *row, given("predicted", False), trace_hash(trace), trace, *times, verdict.value, texts[0][:1000],
        texts[1][:200], texts[2][:200], _date(given("date")), texts[3] if len(texts[3]) <= MAX_DRAFT else "",
    )  # fmt: skip


def _decisions(data: dict[str, Any], numbers: dict[tuple[str, str], int]) -> tuple[Any, ...]:
    """A row of the table of decisions. Raises LineError."""
    given = data.get
    try:
        target, session = data["on"]
        row = numbers["target", target], numbers["session", session]
    except (KeyError, TypeError, ValueError):
        raise LineError("it names a target or session that no line before it has defined") from None
    graph, chosen, error = given("graph"), given("chosen", {}), given("error", "")
    if not isinstance(graph, str) or not isinstance(chosen, dict) or not isinstance(error, str):
        raise LineError("its graph, decisions or words are none")
    text = plain_json(parse_overrides(chosen).plain())
    if len(text) > MAX_CHOSEN:
        raise LineError(f"decisions of {len(text)} characters")
    verdict, seconds, ratio, count, sigma = _timed(data, least=0)
    return (
        _name(graph), *row, text, seconds, ratio, count, sigma, verdict.value, error[:1000], _date(given("date"))
    )  # fmt: skip


def _timed(data: dict[str, Any], *, least: int) -> tuple[Verdict, float | None, float | None, int, float | None]:
    """The verdict, seconds, ratio, samples (at least so many) and noise of a measurement. Raises LineError."""
    given = data.get
    verdict = _VERDICTS.get(given("verdict", "")) if isinstance(given("verdict"), str) else None
    if verdict is None:
        raise LineError(f"{str(given('verdict'))[:40]!r} is no verdict; there are {', '.join(_VERDICTS)}")
    seconds, ratio, sigma, count = given("seconds"), given("ratio"), given("sigma"), given("count", least)
    for value in (seconds, ratio, sigma):
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise LineError(f"{str(value)[:40]} is no measurement")
    if verdict.has_time != (seconds is not None) or type(count) is not int or not least <= count < 1 << 31:
        raise LineError("its verdict, time and count do not fit each other")
    return verdict, seconds, ratio, count, sigma


_VERDICTS = {v.value: v for v in Verdict}


def _name(text: str) -> str:
    if not _HEX.fullmatch(text):
        raise LineError(f"{text[:40]!r} is no name")
    return text


def _sketch(text: Any) -> str:
    return _name(text) if isinstance(text, str) and text else ""


def _numbers(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > MAX_FEATURES:
        raise LineError("its features are none")
    if not all(type(v) in (int, float) and math.isfinite(v) for v in values):
        raise LineError("its features are no numbers")
    return tuple(map(float, values))


def _date(text: Any) -> str:
    if not isinstance(text, str) or not _DATE.fullmatch(text):
        raise LineError(f"{str(text)[:40]!r} is no date")
    return text


def _facts(facts: dict[str, Any]) -> str:
    text = plain_json(facts)
    if len(text) > 1 << 14:
        raise LineError(f"facts of {len(text)} characters")
    return text
