"""Every operator of torch's database once, forward and gradient in float32, each through ``torch.compile`` itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ..opinfo.cases import Job, jobs
from ..opinfo.sweep import FAULTS, Sweep
from .report import Finding, Part, Say

# Processor seconds for one sample, many times what the slowest takes.
PATIENCE = 60.0


def operators(part: Part, folder: Path, workers: int, say: Say, chosen: list[Job] | None = None) -> None:
    """Check them, or those that are ``chosen``. ``folder`` gets the results."""
    chosen = list(jobs(("float32",), ("forward", "gradient"))) if chosen is None else chosen
    counts: Counter[str] = Counter()
    finished = 0

    def told(record: dict[str, Any]) -> None:
        nonlocal finished
        if record["sample"] is not None:
            counts[record["status"]] += 1
        else:
            finished += 1
            if finished % 200 == 0:
                say(f"{finished} of {len(chosen)}: {_counted(counts)}")
        if (finding := _finding(record)) is not None:
            part.found.append(finding)
            say(str(finding))

    Sweep(chosen, folder / "operators.jsonl", workers=workers, patience=PATIENCE, telling=True, told=told).run()
    part.ran = f"{finished} of {len(chosen)} operators: {_counted(counts)}"
    if finished < len(chosen):
        part.found.append(Finding("not all operators were checked", "python -m tests.opinfo --telling"))


def _finding(record: dict[str, Any]) -> Finding | None:
    """Any fault of a sample; a job that has no sample, because its worker was lost or the database raises."""
    lost = record["sample"] is None and record["detail"]
    if not lost and record.get("status") not in FAULTS:
        return None
    job = Job.of(record)
    again = f"python -m tests.opinfo --ops '{job.op}' --dtypes {job.dtype} --modes {job.mode} --telling --workers 1"
    return Finding(f"{job} {'' if lost else record['status']}: {record['detail']}", again)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {k}" for k, n in counts.most_common())
