"""A report as plain data: what the page shows, and what ``Report.to_json`` gives to other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Protocol

from ....ir.target import Target
from ....ir.text.printer import show
from ..report import GraphBreak, GraphReport, KernelReport, LibraryReport

# Changes with the fields below.
SCHEMA = 1


class _Told(Protocol):
    """The reports of a model."""

    @property
    def graphs(self) -> Sequence[GraphReport]: ...

    @property
    def unmatched(self) -> Sequence[str]: ...

    @property
    def capture_s(self) -> float: ...

    @property
    def breaks(self) -> Sequence[GraphBreak]: ...


def report_data(report: _Told) -> dict[str, Any]:
    """All of a report as dictionaries, lists, texts and numbers. Times are seconds, memory is bytes; None where a
    figure is not known."""
    return {
        "schema": SCHEMA,
        "version": version("torch-mlc"),
        "capture_seconds": report.capture_s,
        "breaks": [{"reason": b.reason, "line": b.line} for b in report.breaks],
        "unmatched": list(report.unmatched),
        "graphs": [_graph(g) for g in report.graphs],
    }


def _graph(g: GraphReport) -> dict[str, Any]:
    t = g.traffic
    return {
        "name": g.name,
        "target": g.target,
        "launches": g.launches,
        "library_calls": sum(c.calls for c in g.libraries),
        "peak": {"bytes": g.typical_peak, "text": str(g.peak_bytes)},
        "moved": {"kernels": t.kernels, "libraries": t.libraries, "least": t.compulsory, "ratio": t.ratio},
        "frozen": [{"told": r.told, "bytes": r.nbytes, "calls": r.calls} for r in g.frozen],
        "host_program": g.python,
        "variants": [
            {
                "condition": v.condition, "launches": v.graph.launches, "kernels": len(v.graph.kernels),
                "library_calls": sum(c.calls for c in v.graph.libraries), "is_typical": v.is_typical,
            }
            for v in g.variants
        ],
        "proof": g.proof,
        "shared_kernels": g.shared_kernels,
        "phases": [{"name": name, "seconds": seconds} for name, seconds in g.times.items()],
        "roof": _roof(next((k.target for k in g.kernels if k.target is not None), None)),
        "kernels": [_kernel(k) for k in g.kernels],
        "libraries": [_library(c) for c in g.libraries],
        "missed": [
            {"first": m.first, "second": m.second, "reason": m.reason, "bytes": m.bytes} for m in g.not_fused
        ],
        "calls": [_with_kind(asdict(c)) for c in g.flow.calls],
        "results": list(g.flow.results),
        "steps": [
            {
                "level": s.level, "name": s.name, "of": s.of, "seconds": s.seconds, "before": s.before,
                "after": s.after, "changed": s.changed,
            }
            for s in g.steps
        ],
        "program": g.program,
    }  # fmt: skip


def _with_kind(call: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "library" if call.pop("is_library") else "kernel", **call}


def _kernel(k: KernelReport) -> dict[str, Any]:
    traffic, prediction = k.traffic, k.prediction
    arrays: Mapping[str, Any] = traffic.arrays if traffic is not None else {}
    return {
        "name": k.name,
        "calls": k.calls,
        "rule": k.rule,
        "ops": list(k.ops),
        "lines": list(k.lines),
        "notes": list(k.notes),
        "error": k.error,
        "language": k.language,
        "chosen": k.chosen,
        "workload": k.workload,
        "moved": traffic.moved if traffic is not None else None,
        "least": traffic.least if traffic is not None else None,
        "operations": traffic.operations if traffic is not None else None,
        "seconds": prediction.seconds if prediction is not None else None,
        "bound": prediction.bound if prediction is not None else "",
        "bounds": dict(prediction.bounds) if prediction is not None else {},
        "arrays": [
            {"name": name, "touched": v.touched, "read": v.read, "written": v.written} for name, v in arrays.items()
        ],
        "resources": asdict(k.resources) if k.resources is not None else None,
        "definition": k.definition,
        "schedule": k.schedule,
        "script": k.script,
        "loops": k.loops,
        "scheduled": show(k.scheduled) if k.scheduled is not None else "",
        "source": k.source,
        "candidates": list(k.candidates),
    }


def _library(c: LibraryReport) -> dict[str, Any]:
    return {
        "name": c.op,
        "calls": c.calls,
        "reason": c.plain_reason,
        "told": c.reason,
        "lines": list(c.lines),
        "moved": c.moved,
        "seconds": c.seconds,
    }


def _roof(target: Target | None) -> dict[str, Any] | None:
    """What the machine can do at most, in bytes and operations a second."""
    if target is None:
        return None
    bandwidth, operations = target.rates
    return {"name": str(target), "bandwidth": bandwidth, "operations": operations}
