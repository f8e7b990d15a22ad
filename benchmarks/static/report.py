"""What the suite ``static`` found, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_mlc.dynamo_backend.reports.model_report import Report
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.runtime.model.predict import Prediction
from torch_mlc.scheduler.cost.products.gpu_tiles import GROUP_ROWS
from torch_mlc.scheduler.rules.contraction import extent, find_contraction
from torch_mlc.scheduler.rules.gpu.common import typical

from ..models.spec import Size
from ..steps import Progress
from .widths import wide_bytes

SCHEMA, VERSION = "torch-mlc-static", 1


@dataclass(frozen=True, slots=True)
class Row:
    """One figure with its target. ``inductor`` is Inductor's, None where it is not known.

    Value and target are compared after rounding to ``digits`` after the point, as targets are given.
    """

    name: str
    value: float
    target: float
    inductor: float | None = None
    at_least: bool = False
    detail: str = ""
    digits: int = 2

    @property
    def met(self) -> bool:
        if not math.isfinite(self.value):
            return False
        value, target = round(self.value, self.digits), round(self.target, self.digits)
        return value >= target if self.at_least else value <= target

    def text(self, value: float | None) -> str:
        """Ratios with two digits at least, whatever they are compared with."""
        if value is not None and math.isinf(value):
            return "not known"
        return "-" if value is None else f"{value:.{max(self.digits, 2) if self.digits else 0}f}"


@dataclass(slots=True)
class StaticReport:
    """A whole run. ``workloads`` holds what was compiled, graph by graph and kernel by kernel."""

    target: str
    size: Size
    command: list[str]
    created: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    inductor_source: str
    rows: list[Row] = field(default_factory=list)
    workloads: dict[str, Any] = field(default_factory=dict)
    # Rows of single workloads about memory, by workload.
    memory: dict[str, list[Row]] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    @property
    def about(self) -> Mapping[str, Any]:
        return {"target": self.target, "size": self.size, "created": self.created}

    def to_json(self) -> dict[str, Any]:
        body = {"schema": SCHEMA, "version": VERSION, **asdict(self), **asdict(self.progress)}
        del body["progress"]
        body["rows"] = [_row_json(r) for r in self.rows]
        body["memory"] = {name: [_row_json(r) for r in rows] for name, rows in self.memory.items()}
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> StaticReport:
        """What ``to_json`` made. Raises ValueError where it is of before runs could go on."""
        if "done" not in body:
            raise ValueError("the file does not hold what rows are made of: it is of an older program")
        own = ("rows", "memory", "progress")
        kept = {name: body[name] for name in cls.__dataclass_fields__ if name not in own}
        memory = {name: [_row(r) for r in rows] for name, rows in body["memory"].items()}
        progress = Progress(list(body["done"]), dict(body["failed"]), body["complete"])
        return cls(**kept, rows=[_row(r) for r in body["rows"]], memory=memory, progress=progress)


def _row_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "value": row.value if math.isfinite(row.value) else None, "met": row.met}


def _row(body: Mapping[str, Any]) -> Row:
    value = math.inf if body["value"] is None else body["value"]
    return Row(**{name: v for name, v in body.items() if name != "met"} | {"value": value})


def workload_json(report: Report, seconds: Sequence[float]) -> dict[str, Any]:
    """Graphs and kernels of one workload; ``seconds`` by kernel."""
    by_kernel = iter(seconds)
    return {
        g.name: {
            "launches": g.launches,
            "library_calls": {f"{c.op}: {c.reason}": c.calls for c in g.libraries},
            "library_call_bytes": {f"{c.op}: {c.reason}": c.moved for c in g.libraries},
            "kernel_bytes": g.traffic.kernels,
            "library_bytes": g.traffic.libraries,
            "compulsory_bytes": g.traffic.compulsory,
            "reads": dict(g.traffic.reads),
            "predicted_s": g.predicted.seconds,
            "predicted_library_s": sum(s for _, _, s in g.predicted.libraries),
            "kernels": [kernel_json(k, next(by_kernel)) for k in g.kernels],
        }
        for g in report.graphs
    }


def kernel_json(kernel: KernelReport, seconds: float) -> dict[str, Any]:
    """What the JSON says of a kernel; ``seconds`` of CPU time to compile it, infinite where that is not known."""
    traffic = kernel.traffic
    return {
        "name": kernel.name,
        "calls": kernel.calls,
        "rule": kernel.rule,
        "ops": kernel.ops,
        "error": kernel.error,
        "compile_cpu_s": round(seconds, 4) if math.isfinite(seconds) else None,
        "moved_bytes": round(traffic.moved * kernel.rows) if traffic else None,
        "least_bytes": round(traffic.least * kernel.rows) if traffic else None,
        "reads": {n: round(v.times, 3) for n, v in traffic.arrays.items() if v.read} if traffic else {},
        "resources": asdict(kernel.resources) if kernel.resources is not None else None,
        "issue": asdict(kernel.issue) if kernel.issue is not None else None,
        "slots_a_byte": round(kernel.slots_a_byte, 3) if kernel.slots_a_byte is not None else None,
        "bytes_in_flight": round(kernel.bytes_in_flight) if kernel.bytes_in_flight is not None else None,
        "contiguous_bytes": kernel.contiguous_bytes,
        "wide_bytes": {"loads": wide_bytes(kernel, stores=False), "stores": wide_bytes(kernel, stores=True)},
        "product": "tl.dot(" in kernel.source,
        "few_rows": _has_few_rows(kernel),
        "predicted": _prediction_json(kernel.prediction),
    }


def _has_few_rows(kernel: KernelReport) -> bool:
    """Whether a product has fewer rows than tensor cores multiply that do so in groups of warps."""
    found = find_contraction(kernel.nest, vectors=True) if kernel.nest is not None else None
    if found is None:
        return False
    return min(typical(kernel.nest, extent(axes)) for axes in (found.rows, found.columns)) < GROUP_ROWS


def _prediction_json(prediction: Prediction | None) -> dict[str, Any] | None:
    """Seconds of a launch, what bounds it, and the seconds of each bound."""
    if prediction is None:
        return None
    return {"seconds": prediction.seconds, "bound": prediction.bound, "bounds": dict(prediction.bounds)}


def static_table(report: StaticReport) -> Table:
    """The rows; green where the target is met, red where it is not."""
    met = sum(r.met for r in report.rows)
    compiler = f"Triton {report.versions.get('triton') or 'of no known version'}"
    title = f"static, {report.target}, {compiler}, size {report.size}: {met} of {len(report.rows)} targets met"
    table = Table(title=title, title_style="")
    table.add_column("figure")
    for column in ("value", "target", "Inductor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    table.add_column("of what", style="dim")
    for row in report.rows:
        verdict = Text("yes", style="green") if row.met else Text("no", style="bold red")
        sign = "≥" if row.at_least else "≤"
        table.add_row(
            row.name,
            row.text(row.value),
            f"{sign} {row.target:.{row.digits}f}",
            row.text(row.inductor),
            verdict,
            row.detail,
        )
    return table


def print_static(report: StaticReport, console: Console) -> None:
    """The table, what failed, and where Inductor's figures come from."""
    console.print(static_table(report))
    if report.size != "full":
        console.print("sizes below full: targets and Inductor's figures are for the full ones", style="bold")
    console.print(f"Inductor: {report.inductor_source}", style="dim")
    for name, error in report.progress.failed.items():
        console.print(f"failed: {name}: {error}", style="bold red")
