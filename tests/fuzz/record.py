"""What a campaign found, as a row of the table in docs/campaigns.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from ..workers import ROOT
from .campaign import FAULTS

PAGE = ROOT / "docs" / "campaigns.md"
_HEAD = """# Campaigns of random programs

Another campaign is that of measurements on a GPU: `python -m benchmarks --suite campaign`
([benchmarks/README.md](../benchmarks/README.md#campaign)). `torch-mlc doctor` looks at one machine in a minute.

Each row is one run of `python -m tests.fuzz --record`. *Equal*: values, types, shapes, strides, writes, shared memory
and gradients are eager's. *torch alike*: torch's own tracing (`aot_eager`) or its fake tensors differ from eager in the
same way. *Invalid*: eager itself refuses, no program could be made, or nobody would wait for it. *Found*: wrong
answers, errors and crashes, by seed, which names a program of the commit that adds the row; what was mended is kept in
`tests/fuzz/test_found.py`. Seeds *on* a GPU are compiled for one that is not here (`--target`), and their kernels run
in Triton's interpreter.

| Day | Seeds | Programs | Equal | torch alike | Invalid | Found |
|---|---|---:|---:|---:|---:|---|
"""


def read(results: Path) -> list[dict[str, Any]]:
    """The outcomes in a folder, [] where there are none."""
    path = results / "outcomes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(outcomes: Iterable[Mapping[str, Any]], day: str, target: str | None = None) -> str:
    """A line of the table. ``target`` names the GPU, which need not be here, that programs were compiled for.

    Raises: ValueError where there are no outcomes.
    """
    outcomes = sorted(outcomes, key=lambda o: o["seed"])
    if not outcomes:
        raise ValueError("a campaign without programs has no row")
    counts = Counter(o["status"] for o in outcomes)
    found = [f"{o['seed']} {o['status']}" for o in outcomes if o["status"] in FAULTS]
    invalid = len(outcomes) - counts["equal"] - counts["torch"] - len(found)
    seeds = f"{outcomes[0]['seed']} to {outcomes[-1]['seed']}"
    cells = (
        day, f"{seeds} on {target}" if target else seeds, str(len(outcomes)), str(counts["equal"]),
        str(counts["torch"]), str(invalid), ", ".join(found) or "none",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def add(page: Path, line: str) -> None:
    """Append a row to the table, which begins where there is none."""
    text = page.read_text() if page.exists() else _HEAD
    page.write_text(text + line)


def record(results: Path, page: Path = PAGE, target: str | None = None) -> str:
    """Append the row of the campaign in a folder, and give it."""
    line = row(read(results), date.today().isoformat(), target)
    add(page, line)
    return line
