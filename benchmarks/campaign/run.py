"""Runs the stages of a campaign and keeps what they tell."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_mlc.dynamo_backend.doctor.examine import plain_environment
from torch_mlc.runtime.stages.process import run_checks

from ..steps import write_json
from .plan import PlannedStage, Settings
from .record import LOST, NOT_DONE, OK, WRONG, Record, Row

ROOT = Path(__file__).resolve().parents[2]
_CHILD = (sys.executable, "-m", f"{__package__}.child")
STATUSES = (OK, WRONG, LOST, NOT_DONE)


def now() -> str:
    """The time, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def environment_of(settings: Settings) -> dict[str, str]:
    """What processes see: none of the user's settings, nothing that falls back, and the cache that was filled."""
    environment = {**plain_environment(os.environ), "MLC_STRICT": "1"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH", "")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if settings.cache:
        environment |= {"MLC_CACHE_DIR": settings.cache, "MLC_TARGET": settings.target}
    return environment


def run_campaign(
    settings: Settings,
    stages: Sequence[PlannedStage],
    record: Record,
    tell: Callable[[PlannedStage, str, Row], None],
    begin: Callable[[PlannedStage, int], None],
    child: Sequence[str] = _CHILD,
) -> None:
    """Run the checks that ``record`` has not got, each row written as it comes. What an interrupt leaves is in the
    record. ``begin`` is told of each stage and how many checks are left of it."""
    environment = environment_of(settings)
    for stage in stages:
        left = [name for name in stage.checks if (stage.name, name) not in record.ended]
        begin(stage, len(left))
        if not left:
            continue

        def on_row(check: str, told: Row, stage: PlannedStage = stage) -> None:
            row = row_of(told)
            record.add(stage.name, check, row)
            tell(stage, check, row)

        def on_end(check: str, stage: PlannedStage = stage) -> None:
            record.end(stage.name, check)

        command = (*child, stage.name, json.dumps(settings.to_json()))
        beyond = run_checks(
            command, left, on_row, each=stage.each, seconds=stage.seconds, environment=environment, on_end=on_end
        )
        for check in beyond:
            on_row(check, {"status": NOT_DONE, "why": "not begun in the time of the stage"})


def row_of(told: Mapping[str, Any]) -> Row:
    """A row of a check, with a status in any case."""
    if "lost" in told:
        return {"status": LOST, "why": told["lost"], "output": told.get("output", "")[-2000:]}
    if "error" in told and "status" not in told:
        return {"status": WRONG, "why": told["error"]}
    if told.get("status") not in STATUSES:
        return {"status": WRONG, "why": f"told something that is no row: {str(dict(told))[:200]}"}
    return dict(told)


def write_results(record: Record, began: float) -> Path:
    """The results beside the record."""
    path = record.path.with_suffix(".json")
    results = {**record.results(now()), "seconds_of_last_run": round(time.monotonic() - began, 1)}
    write_json(path, results)
    return path


def print_campaign(record: Record, stages: Sequence[PlannedStage], console: Console) -> None:
    """A line a stage, then what was wrong or lost."""
    about = record.about
    table = Table(title=f"campaign, {about['device_name']}, {about['settings']['minutes']} minutes, size "
                  f"{about['settings']['size']}", title_style="")  # fmt: skip
    table.add_column("stage", no_wrap=True)
    for column in ("checks", "done", *STATUSES):
        table.add_column(column, justify="right")
    table.add_column("what it tells", style="dim")
    for stage in stages:
        counts = Counter(row.get("status") for row in record.of(stage.name))
        done = sum(name == stage.name for name, _ in record.ended)
        cells = [str(counts[s] or "") for s in STATUSES]
        table.add_row(
            stage.name, str(len(stage.checks)), str(done), *cells, summary(stage, list(record.of(stage.name)))
        )
    console.print(table)
    console.print(Text(f"{', '.join(STATUSES)}: rows, of which a check may have several", "dim"))
    for stage in stages:
        if stage.without:
            console.print(Text(f"{stage.name}, without a GPU: {stage.without}", "yellow"))
    for row in record.failures:
        why = " ".join(str(row.get("why") or row.get("faults") or "").split())[:300]
        console.print(Text(f"{row['stage']}: {row['check']}: {row['status']}: {why}", "bold red"))


def summary(stage: PlannedStage, rows: Sequence[Row]) -> str:
    """The figures of a stage in a few words."""
    match stage.name:
        case "machine":
            rates = [r for r in rows if "copy_bytes_per_s" in r]
            return "".join(
                f"copies {r['copy_bytes_per_s'] / 1e9:.1f} GB/s, products {r['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s "
                f"in {r['matmul_dtype']} on {r['device']}" for r in rates
            )  # fmt: skip
        case "tests":
            return f"{sum(r.get('passed', 0) for r in rows)} tests passed" if any("passed" in r for r in rows) else ""
        case "kernels" | "sanitizer" | "fill":
            verified, kernels = (sum(r.get(of, 0) for r in rows) for of in ("verified", "kernels"))
            return f"{verified} kernels interpreted" if verified else f"{kernels} kernels" if kernels else ""
        case "sweep":
            timed = sum(r.get("seconds") is not None for r in rows)
            return f"{len(rows)} schedules, {timed} timed"
        case "models" if not any(r.get("speedup") for r in rows):
            return "; ".join(f"{r['check']}: {r['launches']} launches" for r in rows if "launches" in r)
        case _:
            ratios = [r["speedup"] for r in rows if r.get("speedup")]
            spilled = sum(bool((r.get("resources") or {}).get("spills")) for r in rows)
            if ratios:
                return f"median of eager over ours {median(ratios):.2f}"
            return f"{spilled} kernels spill" if any("resources" in r for r in rows) else ""
