"""Whether schedules of a database are ones of the nests that they claim to be of."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from ....ir.errors import MlcError
from ....ir.nest.loops import LoopNest
from ....ir.text.parser import parse
from ....ir.text.structure import structural_key
from ...error import ScheduleError
from ...schedule.carry import applied
from ...schedule.schedule import Schedule
from ...schedule.trace import Trace
from .rows import POWER, checked_trace

# What foreign text can make Python raise, beside the errors that are meant for it.
_FOREIGN = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
            ValueError, SyntaxError, NotImplementedError)  # fmt: skip
_MAX_TEXT = 1 << 20
_TRACES = """
SELECT w.key, w.text, m.trace_hash, m.trace, GROUP_CONCAT(DISTINCT t.key)
FROM measurements m JOIN workloads w ON w.id = m.workload JOIN targets t ON t.id = m.target
GROUP BY w.key, m.trace_hash ORDER BY w.key, m.trace_hash
"""


@dataclass(frozen=True, slots=True)
class RefusedSchedule:
    """A schedule that is none of its workload's, on the targets (``target_key``) that it was recorded for; without a
    ``trace_hash`` the text of the workload itself is wrong."""

    workload: str
    targets: str
    rule: str
    reason: str
    trace_hash: str = ""


@dataclass(slots=True)
class Verified:
    """How many schedules replay, those that do not, and how many cannot be judged, since no text of their workload is
    known."""

    replayed: int = 0
    unknown: int = 0
    faults: list[RefusedSchedule] = field(default_factory=list)


def replayed(trace: Trace, nest: LoopNest) -> Schedule:
    """A schedule of unknown origin, applied: it has names of position, as tuning records it, or the nest's own. Raises
    ScheduleError, whatever its arguments are."""
    try:
        return applied(trace, nest)
    except ScheduleError:
        raise
    except (MlcError, *_FOREIGN) as error:
        reason = f"its arguments are none of a primitive's ({type(error).__name__}: {str(error)[:200]})"
        raise ScheduleError("replay", reason) from error


def nest_of(key: str, text: str) -> LoopNest:
    """The workload of a key. Raises ScheduleError where the text is not of it."""
    try:
        if len(text) > _MAX_TEXT or POWER.search(text):
            raise ScheduleError("workload", "its text is too large for a nest")
        nest = parse(text)
        if not isinstance(nest, LoopNest):
            raise ScheduleError("workload", "its text is no nest")
        if structural_key(nest) != key:
            raise ScheduleError("workload", "its text is of another nest than its key")
        return nest
    except ScheduleError:
        raise
    except (MlcError, *_FOREIGN) as error:
        raise ScheduleError("workload", f"its text is no nest ({type(error).__name__}: {str(error)[:200]})") from error


def verify(connection: sqlite3.Connection, progress: Callable[[int], None] | None = None) -> Verified:
    """Replay every schedule on its workload's text, once a workload. ``progress`` is told how many were seen."""
    found = Verified()
    seen = 0
    for (key, text), group in groupby(connection.execute(_TRACES), key=lambda row: row[:2]):
        rows = [row[2:] for row in group]
        seen += len(rows)
        if not text:
            found.unknown += len(rows)
        else:
            try:
                nest = nest_of(key, text)
            except ScheduleError as error:
                found.faults.append(RefusedSchedule(key, ",".join(sorted({r[2] for r in rows})), "", error.reason))
            else:
                found.faults += _faults(key, nest, rows, found)
        if progress is not None:
            progress(seen)
    return found


def _faults(key: str, nest: LoopNest, rows: list[tuple[str, str, str]], found: Verified) -> Iterator[RefusedSchedule]:
    for trace_hash, text, targets in rows:
        rule = ""
        try:
            trace = checked_trace(text)
            rule = trace.rule
            replayed(trace, nest)
        except ScheduleError as error:
            yield RefusedSchedule(key, targets, rule, error.reason, trace_hash)
        else:
            found.replayed += 1


def remove(connection: sqlite3.Connection, faults: list[RefusedSchedule]) -> int:
    """Forget schedules that do not replay, and the texts that are wrong; returns how many measurements that were."""
    count = 0
    of = "workload = (SELECT id FROM workloads WHERE key = ?)"
    for fault in faults:
        if fault.trace_hash:
            gone = f"DELETE FROM measurements WHERE {of} AND trace_hash = ?"
            count += connection.execute(gone, (fault.workload, fault.trace_hash)).rowcount
        else:
            count += connection.execute(f"DELETE FROM measurements WHERE {of}", (fault.workload,)).rowcount
            connection.execute("DELETE FROM workloads WHERE key = ?", (fault.workload,))
    return count
