"""Counters of the GPU for kernels, by NVIDIA's ncu where it is found, beside what machine code tells of them."""

from __future__ import annotations

import csv
import io
import subprocess
from collections.abc import Iterator
from typing import Any

from ..cases import NamedKernel
from ..figures import kernel_figures
from ..plan import AND, WITHOUT, Settings
from ..record import NOT_DONE, OK, Row
from .sanitizer import found_tool, some_kernels
from .tests import ROOT
from .timing import explained

METRICS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed", "lts__t_sectors.sum", "l1tex__t_sectors.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed", "smsp__inst_executed.sum",
    "smsp__thread_inst_executed.sum", "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread",
    "launch__shared_mem_per_block", "launch__occupancy_limit_registers",
)  # fmt: skip
# Our kernels begin so; the toolkit's profiler leaves torch's out.
_OURS = "regex:^fused_"


def check(settings: Settings, name: str) -> Iterator[Row]:
    """Some kernels by their names: a row for each launch, and one for each kernel's machine code."""
    if not settings.gpu:
        yield {"status": NOT_DONE, "why": "no GPU: " + WITHOUT["counters"]}
        return
    program = found_tool("ncu")
    if program is None:
        yield {"status": NOT_DONE, "why": "there is no ncu here; it comes with the CUDA toolkit (Nsight Compute)"}
        return
    command = [program, "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--kernel-name", _OURS,
               "--target-processes", "all", *some_kernels(name, "cuda")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    yield from counted_rows(done.stdout + done.stderr)
    for one in name.split(AND):
        for k in explained(NamedKernel.of(one), settings.target).kernels:
            yield {"status": OK, "static": True, "of": one, **kernel_figures(k)}


def counted_rows(text: str) -> Iterator[Row]:
    """What ncu printed: a row a launch."""
    if "ERR_NVGPUCTRPERM" in text:
        mend = "run as root, or load nvidia with NVreg_RestrictProfilingToAdminUsers=0"
        yield {"status": NOT_DONE, "why": f"counters are for administrators here: {mend}"}
        return
    lines = text.splitlines()
    begin = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        yield {"status": NOT_DONE, "why": f"ncu told no counters: {text.strip()[-300:]}"}
        return
    rows = [r for r in csv.DictReader(io.StringIO("\n".join(lines[begin:]))) if (r.get("ID") or "").isdigit()]
    units = next(csv.DictReader(io.StringIO("\n".join(lines[begin : begin + 2]))), {})
    for r in rows:
        found = {m: number(r.get(m)) for m in METRICS}
        yield {"status": OK, "kernel": r.get("Kernel Name", ""), "units": {m: units.get(m) for m in METRICS}, **found}
    if not rows:
        yield {"status": NOT_DONE, "why": "none of our kernels was launched"}


def number(text: Any) -> float | None:
    """A number as ncu writes it, with commas between thousands."""
    try:
        return float(str(text).replace(",", ""))
    except ValueError:
        return None
