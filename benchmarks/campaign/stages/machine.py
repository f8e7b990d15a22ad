"""What is measured on: versions, clocks, the rates of copies and of products."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from torch_mlc.runtime.targets import target_for

from ...machine import describe_machine, describe_versions, measure_roofline
from ..plan import Settings
from ..record import NOT_DONE, OK, Row

_CLOCKS = (
    "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu",
    "driver_version", "pstate",
)  # fmt: skip
_SECONDS = 20.0


def check(settings: Settings, name: str) -> Iterator[Row]:
    """One of "versions", "clocks", "rates"."""
    match name:
        case "versions":
            target = repr(target_for("cuda")) if settings.gpu else None
            yield {"status": OK, **describe_versions(), "machine": describe_machine(settings.device), "target": target}
        case "clocks":
            yield _clocks()
        case _:
            # Of half types where a GPU multiplies them; a CPU's libraries are slow at them.
            found = measure_roofline(settings.device, torch.bfloat16 if settings.gpu else torch.float32)
            yield {"status": OK, "device": settings.device, **found.to_json()}


def _clocks() -> Row:
    """What nvidia-smi tells; clocks are left as they are."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"status": NOT_DONE, "why": "there is no nvidia-smi here"}
    command = [program, f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"status": NOT_DONE, "why": f"nvidia-smi did not answer in {_SECONDS:g} s"}
    return parsed_clocks(done.stdout) if done.returncode == 0 else {"status": NOT_DONE, "why": done.stdout.strip()}


def parsed_clocks(text: str) -> Row:
    """The first GPU's line of nvidia-smi, by name; what is no number stays text."""
    lines = [[cell.strip() for cell in line] for line in csv.reader(io.StringIO(text)) if line]
    if not lines or len(lines[0]) != len(_CLOCKS):
        return {"status": NOT_DONE, "why": f"nvidia-smi told something else: {text.strip()[:200]}"}
    return {"status": OK, "gpus": len(lines), **dict(zip(_CLOCKS, map(_number, lines[0]), strict=True))}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
