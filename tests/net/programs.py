"""Random programs, half the time for the CPU and half of it for a GPU that is not here."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

from ..fuzz.campaign import FAULTS, Campaign
from .report import Finding, Part, Say

TARGETS = (None, "cuda:sm_90")
# What the net fails for. Other faults are only told: a program may ask for what nobody has promised.
GRAVE = ("wrong", "crash")
# Processor seconds for one program, and seconds and tries to make one that fails smaller.
PATIENCE, REDUCTION, TRIALS = 45.0, 45.0, 40
# How far from one another the seeds for the targets begin.
APART = 5000


def programs(part: Part, folder: Path, workers: int, seed: int, seconds: float, say: Say) -> None:
    """Check programs of the seeds from ``seed`` on for so many seconds. ``folder`` gets a script of each failure."""
    ran = []
    for k, target in enumerate(TARGETS):
        counts: Counter[str] = Counter()
        began = time.monotonic()

        def told(
            record: dict[str, Any], counts: Counter[str] = counts, target: str | None = target, began: float = began
        ) -> None:
            counts[record["status"]] += 1
            if counts.total() % 100 == 0:
                say(f"{counts.total()} programs for {target or 'cpu'} in {time.monotonic() - began:.0f} s")
            if record["status"] in FAULTS:
                part.found.append(finding(record, target))
                say(f"{part.found[-1]}\n{record.get('script', '')}")

        first = seed + k * APART
        campaign = Campaign(
            folder / (target or "cpu").replace(":", "_"), workers, PATIENCE, TRIALS, told, REDUCTION, target
        )
        campaign.run(first, seconds / len(TARGETS))
        said = ", ".join(f"{n} {status}" for status, n in counts.most_common())
        ran.append(f"{counts.total()} for {target or 'cpu'} from seed {first} ({said})")
        if not counts["equal"]:
            part.found.append(Finding(f"no program for {target or 'cpu'} was equal", "python -m tests.fuzz"))
    part.ran = "; ".join(ran)


def finding(record: dict[str, Any], target: str | None) -> Finding:
    """What is told of a program that is not as it should be."""
    again = f"python -m tests.fuzz --one {record['seed']}" + (f" --target {target}" if target else "")
    what = f"seed {record['seed']} for {target or 'cpu'} {record['status']}: {record['detail']}"
    return Finding(what, again, record["status"] in GRAVE)
