"""Whether kernels ask memory for enough at a time: bytes in flight, and bytes that lie together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_mlc.dynamo_backend.reports.report import KernelReport

from .report import Row

# What keeps the memory of an H200 busy: KiB of loads on their way to each of its multiprocessors.
IN_FLIGHT = 25.0
# Bytes of a line of its caches.
LINE = 128
# Kernels that together move less of a workload's bytes than this are not looked at, nor are those that read less than
# so many times what ought to be on its way: they are over before it can be.
_SHARE, _TIMES = 1 / 16, 4
# Rules that go over rows, with columns side by side.
COLUMN_RULES = ("gpu_column_reduction", "gpu_column_pieces", "gpu_cross_reduction")


def memory_rows(name: str, kernels: Sequence[KernelReport]) -> list[Row]:
    """Of a workload's kernels that memory ought to bind: the least in flight, and the least contiguous bytes of those
    that reduce columns. What has no such kernel has no row."""
    whole = sum(k.traffic.moved * k.rows * k.calls for k in kernels if k.traffic is not None)
    bound = [k for k in kernels if _counts(k, whole)]
    rows = []
    flights = [(f / 1024, k.name) for k in bound if (f := k.bytes_in_flight) is not None]
    if flights:
        value, worst = min(flights)
        detail = f"least in {worst}"
        if guessed := [k.name for k in bound if k.issue is not None and k.issue.guessed]:
            value, detail = math.inf, f"not known: how often loops of {', '.join(guessed)} run"
        rows.append(Row(f"{name}: KiB in flight", value, IN_FLIGHT, at_least=True, detail=detail, digits=1))
    segments = [(c, k.name) for k in bound if k.rule in COLUMN_RULES and (c := k.contiguous_bytes) is not None]
    if segments:
        together, worst = min(segments)
        detail = f"least in {worst}"
        rows.append(Row(f"{name}: contiguous bytes of columns", together, LINE, at_least=True, detail=detail, digits=0))
    return rows


def _counts(kernel: KernelReport, whole: float) -> bool:
    t = kernel.traffic
    if t is None or kernel.target is None or "tl.dot(" in kernel.source:
        return False
    read = sum(v.read for v in t.arrays.values())
    least = _TIMES * IN_FLIGHT * 1024 * kernel.target.machine.cores
    return t.moved * kernel.rows * kernel.calls >= _SHARE * whole and read * kernel.rows >= least
