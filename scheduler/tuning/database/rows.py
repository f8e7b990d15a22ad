"""What the tuning database holds, as data: workloads, targets, sessions, measurements."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from ....ir.nest.loops import LoopNest
from ....ir.target import Target
from ....ir.text.printer import show
from ....ir.text.structure import sizeless_key, structural_key
from ...error import ScheduleError
from ...schedule.trace import Trace

# A trace beyond these is nobody's schedule: characters of its JSON and of one expression, lists in lists, steps,
# items of a step.
MAX_TRACE, MAX_SIZE, MAX_DEPTH, MAX_STEPS, MAX_ITEMS = 1 << 18, 1000, 12, 4096, 256
# A power other than a small one: the number that it is may not fit into memory.
POWER = re.compile(r"\*\*(?!\s*\d(?!\d|\s*\)*\s*\*\*))")


class Verdict(Enum):
    """What became of a candidate.

    ``ACCEPTED`` is what a search ended with, by samples of its own, be it the default; ``REJECTED`` seemed faster than
    the default and was not when looked at again. ``FAILED`` was not compiled, ``WRONG`` had other results than the
    default, ``CRASHED`` ended its process, ``LATE`` did not end in time.
    """

    TIMED = "timed"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    FAILED = "failed"
    WRONG = "wrong"
    CRASHED = "crashed"
    LATE = "late"

    @property
    def has_time(self) -> bool:
        return self in (Verdict.TIMED, Verdict.ACCEPTED, Verdict.REJECTED)


class Provenance(Enum):
    """Where a session is from; the first ranks highest."""

    OWN = "own"
    IMPORTED = "imported"
    SHIPPED = "shipped"


@dataclass(frozen=True, slots=True)
class Workload:
    """An unscheduled nest: its structural key, and its text, without which it can be used but not verified.

    ``sketch`` is the same for nests that differ in sizes alone, ``features`` what a model knows of it: by both others
    find what is similar.
    """

    key: str
    text: str = ""
    sketch: str = ""
    features: tuple[float, ...] = ()

    @staticmethod
    def of(nest: LoopNest, features: tuple[float, ...] = ()) -> Workload:
        return Workload(structural_key(nest), show(nest), sizeless_key(nest), features)


def no_rates() -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Part:
    """The processor or GPU that a target is here: its vendor's name. ``rates`` measures what it does a nanosecond:
    ``copy`` in bytes to and from memory, ``float32`` in operations; it is asked once a machine and database."""

    name: str = ""
    rates: Callable[[], Mapping[str, float]] = no_rates


NO_PART = Part()


@dataclass(frozen=True, slots=True)
class Session:
    """One process that measured on one machine. Times are compared within a session, ratios between sessions too.

    ``id`` is random; ``versions`` a fingerprint of the code that made the kernels; ``facts`` are versions of libraries
    and what the operating system is: no names of people, hosts or paths.
    """

    id: str
    versions: str
    date: str
    facts: tuple[tuple[str, str], ...] = ()
    provenance: Provenance = Provenance.OWN

    @staticmethod
    def new(versions: str = "", facts: tuple[tuple[str, str], ...] = ()) -> Session:
        return Session(uuid.uuid4().hex, versions, now(), facts)

    def of_provenance(self, provenance: Provenance) -> Session:
        return replace(self, provenance=provenance)


@dataclass(frozen=True, slots=True)
class Record:
    """A schedule and what it took: ``seconds`` a call (median), with which versions, and when (UTC, ISO 8601).

    ``ratio`` is its time over the default's in the same race, None where no race was run: below one it is faster.
    ``sigma`` is the ratio's noise, relative (0.01 is 1 %), ``count`` the samples. ``code_hash`` is that of its machine
    code, ``against`` that of the default's; "" where nobody told. What failed has infinite ``seconds``.
    """

    trace: Trace
    seconds: float
    versions: str
    date: str
    ratio: float | None = None
    count: int = 1
    sigma: float | None = None
    verdict: Verdict = Verdict.TIMED
    code_hash: str = ""
    against: str = ""
    error: str = ""
    provenance: Provenance = Provenance.OWN
    session: str = ""

    @property
    def speedup(self) -> float | None:
        """The default's time over its own."""
        return 1.0 / self.ratio if self.ratio else None


@dataclass(frozen=True, slots=True)
class Similar:
    """A schedule of some workload that was faster than its default: ``draft`` is what it was made of, as data, which
    serves nests of other sizes too. ``ratio`` is its time over the default's."""

    workload: Workload
    target: str
    ratio: float
    draft: Mapping[str, Any]

    @staticmethod
    def of(row: Any) -> Similar | None:
        """A row of a search; None where it is damaged."""
        key, sketch, features, target, ratio, draft = row
        try:
            numbers = tuple(map(float, json.loads(features or "[]")))
            made = json.loads(draft)
            return Similar(Workload(key, "", sketch, numbers), target, float(ratio), made)
        except (ValueError, TypeError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class Tuned:
    """What is known of one workload on one target (as ``target_key`` writes it): the schedule that compilations get, if
    any is better than the default for sure, how many were measured, how many of them failed, and when the last was
    (UTC, ISO 8601). ``predicted``: no machine has measured them."""

    workload: str
    target: str
    best: Record | None
    measured: int
    date: str
    predicted: bool = False
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What was told of a workload: one measurement, or prediction, of it on a target (as ``target_key`` writes it)."""

    workload: Workload
    target: str
    record: Record
    predicted: bool


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def target_key(target: Target, part: Part = NO_PART) -> str:
    """What of a machine makes times comparable, as one short text; that of a part begins with that of its target."""
    features = hashlib.sha256(target.features.encode()).hexdigest()[:8] if target.features else "-"
    base = f"{target.kind}:{target.arch}:{target.cores}:{target.vector_bytes}:{features}"
    name = re.sub(r"[^a-z0-9]+", "-", part.name.lower()).strip("-")
    return f"{base}:{name}" if name else base


def target_facts(target: Target, part: Part) -> dict[str, Any]:
    """What is kept of a machine: the target whole, the part's name and rates."""
    return {"target": asdict(target), "part": part.name, "rates": dict(part.rates())}


def trace_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def checked_trace(text: str) -> Trace:
    """A trace of any origin. Raises ScheduleError where the text is none, or is too large or deep to be one."""
    if len(text) > MAX_TRACE:
        raise ScheduleError("trace", f"{len(text)} characters are no schedule; {MAX_TRACE} is the most")
    try:
        reason = _excess(json.loads(text))
        found = Trace.from_json(text) if not reason else Trace()
    except (RecursionError, MemoryError, ArithmeticError, ValueError) as error:
        raise ScheduleError("trace", f"this is no trace ({type(error).__name__}: {error})") from None
    if reason:
        raise ScheduleError("trace", reason)
    return found


def _excess(data: Any) -> str:
    """Why some JSON is too much of a trace to be one; "" where it is not."""
    if isinstance(data, dict) and isinstance(data.get("steps"), list) and len(data["steps"]) > MAX_STEPS:
        return f"{len(data['steps'])} steps are no schedule; {MAX_STEPS} is the most"
    level = [data]
    for depth in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            match value:
                case list():
                    if depth > 1 and len(value) > MAX_ITEMS:
                        return f"a list of {len(value)} is no argument of a step; {MAX_ITEMS} is the most"
                    inner += value
                case int() if abs(value) >> 63:
                    return "a number of more than 64 bits is no argument of a step"
                case dict():
                    size = value.get("size")
                    if isinstance(size, str) and (len(size) > MAX_SIZE or POWER.search(size)):
                        return f"{size[:40]!r} is no size of a loop"
                    inner += value.values()
        if not inner:
            return ""
        level = inner
    return f"its lists are deeper than {MAX_DEPTH}"


def plain_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
