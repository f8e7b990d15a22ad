"""The JSON that a run writes: a versioned record of machine, settings, cases and every sample."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .peers import EAGER
from .stats import Geomean, Spread, geomean, spread

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

    def peer_names(self) -> list[str]:
        return list(dict.fromkeys(name for case in self.cases for name in case.peers))

    def geomeans(self) -> dict[str, Geomean]:
        """Geometric means of the speed-ups ``peer/base`` over all cases that both ran, for base eager and inductor."""
        names = self.peer_names()
        result = {}
        for base in (EAGER, "inductor"):
            for peer in names:
                ratios = [r for case in self.cases if (r := case.ratio(peer, base)) is not None]
                if peer != base and peer != EAGER and ratios:
                    result[f"{peer}/{base}"] = geomean(ratios)
        return result

    def to_json(self) -> str:
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        body["summary"] = {name: g._asdict() for name, g in self.geomeans().items()}
        return json.dumps(_finite(body), indent=1, allow_nan=False)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n")


def from_json(text: str) -> Report:
    """Read what ``Report.to_json`` wrote. Raises: ValueError for another schema or a newer version."""
    body = json.loads(text)
    if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
        raise ValueError(f"not a benchmark report: the field 'schema' is not {SCHEMA!r}")
    if (version := body.pop("version", None)) != VERSION:
        raise ValueError(f"report version {version}; this program reads version {VERSION}")
    body.pop("summary", None)
    cases = body.pop("cases")
    report = Report(**body)
    for case in cases:
        peers = {name: PeerResult(**peer) for name, peer in case.pop("peers").items()}
        report.cases.append(CaseResult(**case, peers=peers))
    return report


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become the strings "nan", "inf" and "-inf"."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _finite(v) for key, v in value.items()}
        case list() | tuple():
            return [_finite(v) for v in value]
        case _:
            return value
