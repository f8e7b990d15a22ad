"""The JSON that a run writes: a versioned record of machine, settings, cases and every sample."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .peers import EAGER
from .stats import Geomean, Spread, geomean, spread
from .steps import Progress, checked, read_json, same_run

# Half an interquartile range above this share of the median is told, and left out of means.
UNSTEADY = 1 / 3
SCHEMA, VERSION = "torch-mlc-benchmarks", 1


@dataclass(slots=True)
class PeerResult:
    """One peer on one case. Seconds per call in ``samples``, or the reason why there are none in ``error``.

    ``peak_bytes``: of the suite ``memory``, which takes no time, the most that a call holds.
    """

    samples: list[float] = field(default_factory=list)
    calls_per_sample: int = 1
    first_call_s: float | None = None
    accuracy: dict[str, Any] | None = None
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    peak_bytes: int | None = None

    @property
    def time(self) -> Spread | None:
        return spread(self.samples) if self.samples else None

    @property
    def is_unsteady(self) -> bool:
        """Whether half the interquartile range is above a third of the median: no time that a mean should have."""
        time = self.time
        return time is not None and (time.q75 - time.q25) / 2 > UNSTEADY * time.median

    @property
    def cost(self) -> float | None:
        """What is compared: the peak where it was measured, else the median time."""
        if self.peak_bytes is not None:
            return float(self.peak_bytes)
        return self.time.median if self.time is not None else None


@dataclass(slots=True)
class CaseResult:
    """One case: ``name`` and ``variant`` (its size) identify it within a mode.

    ``nbytes``: what a kernel has to move, or, of ``memory``, what is held before the call; the floor is for kernels.
    """

    name: str
    variant: str
    mode: str
    dtype: str
    nbytes: int | None = None
    flops: int | None = None
    floor_s: float | None = None
    peers: dict[str, PeerResult] = field(default_factory=dict)

    def ratio(self, peer: str, base: str) -> float | None:
        """How many times faster than ``base`` the peer is, or less memory it takes; None where either was not
        measured."""
        if peer not in self.peers or base not in self.peers:
            return None
        ours, theirs = self.peers[peer].cost, self.peers[base].cost
        return theirs / ours if ours and theirs else None

    def unsteady(self, *peers: str) -> bool:
        """Whether the time of one of the peers varies too much to be compared."""
        return any(name in self.peers and self.peers[name].is_unsteady for name in peers)

    def share(self, peer: str) -> float | None:
        """The floor as a fraction of the measured time: 1 is the machine's own rate, more means caches helped."""
        time = self.peers[peer].time if peer in self.peers else None
        return self.floor_s / time.median if self.floor_s is not None and time else None


@dataclass(slots=True)
class Report:
    """A whole run."""

    suite: str
    device: str
    command: list[str]
    created: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    settings: dict[str, Any]
    roofline: dict[str, Any] | None
    cases: list[CaseResult] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    def peer_names(self) -> list[str]:
        return list(dict.fromkeys(name for case in self.cases for name in case.peers))

    def geomeans(self) -> dict[str, Geomean]:
        """Geometric means of the speed-ups ``peer/base`` over all cases that both ran, and steadily, for base eager and
        inductor, and where models are exported all others that run them."""
        names = self.peer_names()
        result = {}
        for base in names if self.suite == "deploy" else (EAGER, "inductor"):
            for peer in names:
                steady = [case for case in self.cases if not case.unsteady(peer, base)]
                ratios = [r for case in steady if (r := case.ratio(peer, base)) is not None]
                if peer != base and peer != EAGER and ratios:
                    result[f"{peer}/{base}"] = geomean(ratios)
        return result

    def unsteady(self, peer: str, base: str) -> int:
        """How many cases both ran that the means leave out."""
        return sum(case.unsteady(peer, base) for case in self.cases if case.ratio(peer, base) is not None)

    def to_json(self) -> dict[str, Any]:
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self), **asdict(self.progress)}
        del body["progress"]
        return body | {"summary": {name: g._asdict() for name, g in self.geomeans().items()}}


def from_json(text: str) -> Report:
    """Read what ``Report.to_json`` made. Raises: ValueError for another schema or a newer version."""
    return _report(checked(json.loads(text), SCHEMA, VERSION))


def resume_report(path: Path, fresh: Report) -> tuple[Report, list[str]]:
    """The run in a file, and the versions that have changed since. Raises ValueError where it has not the suite, device
    and settings of ``fresh``."""
    body = read_json(path, SCHEMA, VERSION)
    changed = same_run(path, body, {name: getattr(fresh, name) for name in ("suite", "device", "settings", "versions")})
    return _report(body), changed


def _report(body: dict[str, Any]) -> Report:
    known = {name: body[name] for name in Report.__slots__ if name not in ("cases", "progress")}
    # A file of before runs were kept as they go is of a run that came to its end.
    progress = Progress(body.get("done", []), body.get("failed", {}), body.get("complete", True))
    report = Report(**known, progress=progress)
    for case in body["cases"]:
        peers = {name: PeerResult(**peer) for name, peer in case.pop("peers").items()}
        report.cases.append(CaseResult(**case, peers=peers))
    return report
