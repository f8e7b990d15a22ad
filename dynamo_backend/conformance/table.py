"""Results of a run as a table and as JSON, and the list of cases."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .registry import CASES
from .runner import CaseVerdict

# As the table names them, in its order. "known" are failures that were said to be known (``--conformance-xfail``).
STATUSES = ("passed", "failed", "known", "skipped")
_BY_NAME = {c.name: c for c in CASES}


@dataclass(frozen=True, slots=True)
class CaseRow:
    """How one case ended; ``seconds`` are the processor's."""

    name: str
    status: str
    told: str
    seconds: float

    @property
    def topic(self) -> str:
        return self.name.partition("::")[0]


def row_of(report: Any) -> CaseRow | None:
    """The row of a report of pytest; None where the report is not the one that says how a case ended."""
    name = report.nodeid.partition("::")[2]
    if name not in _BY_NAME or not (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
        return None
    found = {key: value for key, value in report.user_properties}.get("mlc_conformance", [name, 0.0, ""])
    status = str(report.outcome)
    told = str(found[2])
    if hasattr(report, "wasxfail"):
        status, told = "known", f"{report.wasxfail}: {told}".removeprefix("reason: ")
    elif status == "failed" and not told:
        told = "was said to fail, and does not"
    elif status == "skipped" and not told:
        told = "left out"
    return CaseRow(name, status, told, float(found[1]))


def row(name: str, verdict: CaseVerdict, reason: str | None = None) -> CaseRow:
    """The row of a case that ran; ``reason`` where it was said to fail."""
    status, told = str(verdict.status), verdict.told
    if reason is not None and status == "failed":
        status, told = "known", f"{reason}: {told}"
    elif reason is not None and status == "passed":
        status, told = "failed", "was said to fail, and does not"
    return CaseRow(name, status, told, verdict.seconds)


def summary(rows: Sequence[CaseRow]) -> str:
    """A line a topic with its counts and seconds, the whole, and a line for each case that did not pass."""
    topics: dict[str, list[CaseRow]] = {}
    for r in rows:
        topics.setdefault(r.topic, []).append(r)
    width = max((len(t) for t in topics), default=5)
    lines = [f"{'topic':<{width}}  " + "  ".join(f"{s:>7}" for s in (*STATUSES, "CPU s"))]
    for topic, of in [*topics.items(), ("all", list(rows))]:
        counts = Counter(r.status for r in of)
        cells = [f"{counts[s] or '.':>7}" for s in STATUSES]
        lines.append(f"{topic:<{width}}  " + "  ".join([*cells, f"{sum(r.seconds for r in of):>7.1f}"]))
    for status, title in (("failed", "failed"), ("known", "failed as said"), ("skipped", "skipped")):
        of = [r for r in rows if r.status == status]
        if of:
            lines += ["", f"{title}:", *(f"  {r.name}: {r.told.splitlines()[0] if r.told else ''}" for r in of)]
    return "\n".join(lines)


def write_json(file: str, rows: Sequence[CaseRow], backend: str, options: Mapping[str, Any] | None) -> None:
    """Write everything that is known of a run."""
    cases = [asdict(r) | {"trap": _BY_NAME[r.name].trap, "why": _BY_NAME[r.name].why} for r in rows]
    counts = Counter(r.status for r in rows)
    told = {
        "backend": backend, "options": dict(options or {}), "passed": not counts["failed"],
        "counts": {s: counts[s] for s in STATUSES}, "seconds": sum(r.seconds for r in rows), "cases": cases,
    }  # fmt: skip
    Path(file).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def listing() -> str:
    """Every case: its name, what goes wrong, and why that matters."""
    lines = [f"{len(CASES)} cases"]
    for topic in dict.fromkeys(c.topic for c in CASES):
        lines.append(f"\n{topic}")
        lines += [f"  {c.name.partition('::')[2]}: {c.trap} {c.why}" for c in CASES if c.topic == topic]
    return "\n".join(lines)
