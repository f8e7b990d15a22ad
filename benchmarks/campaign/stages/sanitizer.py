"""Kernels under NVIDIA's compute-sanitizer, where it is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..plan import AND, WITHOUT, Settings
from ..record import NOT_DONE, OK, WRONG, Row
from .tests import ROOT

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_FAULT = re.compile(r"^=+ (Invalid .*|.*\bat .*fused.*)$", re.MULTILINE)


def check(settings: Settings, name: str) -> Iterator[Row]:
    """Some kernels by their names."""
    if not settings.gpu:
        yield {"status": NOT_DONE, "why": f"no GPU: {WITHOUT['sanitizer']}"}
        return
    program = found_tool("compute-sanitizer")
    if program is None:
        yield {"status": NOT_DONE, "why": "there is no compute-sanitizer here; it comes with the CUDA toolkit"}
        return
    yield sanitized((program, "--tool", "memcheck", "--print-limit", "3", "--target-processes", "all"), name)


def found_tool(name: str) -> str | None:
    """A tool of the CUDA toolkit: on the path, or where the toolkit is."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [Path(f) / place / name for f in folders if f for place in ("bin", "compute-sanitizer", "extras/ncu")]
    return shutil.which(name) or next((str(p) for p in places if os.access(p, os.X_OK)), None)


def some_kernels(names: str, kind: str) -> tuple[str, ...]:
    """What runs kernels in a process of its own."""
    return sys.executable, "-m", "benchmarks.campaign.one", kind, *names.split(AND)


def sanitized(tool: Sequence[str], names: str) -> Row:
    """Run kernels under a tool, each tensor in memory of its own so that what lies beside it is nobody's."""
    begin = time.perf_counter()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*tool, *some_kernels(names, "cpu")], cwd=ROOT, capture_output=True, text=True, env=environment
    )  # fmt: skip
    return sanitized_row(done.stdout + done.stderr, done.returncode, names) | {"seconds": time.perf_counter() - begin}


def sanitized_row(text: str, status: int, names: str) -> Row:
    """What the tool printed, as a row."""
    summary = _SUMMARY.search(text)
    if summary is None:
        return {"status": NOT_DONE, "why": f"compute-sanitizer told nothing (status {status}): {text.strip()[-300:]}"}
    errors = int(summary[1])
    if errors:
        return {"status": WRONG, "errors": errors, "why": "; ".join(_FAULT.findall(text)[:4]) or f"{errors} errors"}
    missing = [name for name in names.split(AND) if f"ran {name}\n" not in text]
    if missing:
        why = f"{missing[0]} did not end (status {status}): {text.strip()[-300:]}"
        return {"status": WRONG, "errors": 0, "why": why}
    return {"status": OK, "errors": 0, "kernels": len(names.split(AND))}
