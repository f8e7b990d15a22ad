"""What machine code and loops tell of kernels, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch_mlc.dynamo_backend.compiling.kernels import emit
from torch_mlc.dynamo_backend.reports.report import KernelReport
from torch_mlc.dynamo_backend.reports.segments import contiguous_bytes
from torch_mlc.dynamo_backend.reports.traffic import traffic_by
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target
from torch_mlc.runtime.compile.kernels import compile_source, gpu_binary
from torch_mlc.runtime.machine_code.issue import issue_report
from torch_mlc.runtime.triton.compile import resource_report
from torch_mlc.scheduler.schedule.schedule import Schedule

from .record import Row


def kernel_figures(k: KernelReport) -> Row:
    """Of a kernel that was compiled: registers, spills, slots, bytes in flight, traffic."""
    return {
        "kernel": k.name, "rule": k.rule, "calls": k.calls, "target": str(k.target),
        "moved_bytes": round(k.traffic.moved * k.rows) if k.traffic else None,
        "least_bytes": round(k.traffic.least * k.rows) if k.traffic else None,
        "contiguous_bytes": k.contiguous_bytes, "bytes_in_flight": k.bytes_in_flight, "slots_a_byte": k.slots_a_byte,
        "resources": asdict(k.resources) if k.resources is not None else None,
        "issue": asdict(k.issue) if k.issue is not None else None,
    }  # fmt: skip


def totals(kernels: Sequence[KernelReport]) -> Row:
    """Of all kernels of a program together."""
    known = [k.resources for k in kernels if k.resources is not None]
    slots = [s for k in kernels if (s := k.slots_a_byte) is not None]
    return {
        "kernels": len(kernels), "spills": max((r.spills for r in known), default=0),
        "registers": max((r.registers for r in known), default=0), "slots_a_byte": max(slots, default=None),
        "errors": [f"{k.name}: {k.error}" for k in kernels if k.error],
    }  # fmt: skip


def schedule_figures(schedule: Schedule, nest: LoopNest, target: Target) -> Row:
    """Of a schedule: it is written and compiled for a target. Raises what compiling raises."""
    source = emit(schedule.nest, target)
    binary = gpu_binary(compile_source(source, target, nest.name))
    resources = resource_report(binary)
    traffic = traffic_by(schedule.nest, target.machine, resources)
    symbols = nest.symbols
    issue = issue_report(binary, source, {s.name: symbols.hint(s) for s in symbols.symbols})
    in_flight: Any = None
    if issue is not None and resources.occupancy is not None:
        in_flight = issue.on_multiprocessor(resources.threads, resources.occupancy, target.machine)
    return {
        "moved_bytes": traffic.moved, "least_bytes": traffic.least,
        "contiguous_bytes": contiguous_bytes(schedule.nest, traffic, target.warp), "bytes_in_flight": in_flight,
        "resources": asdict(resources), "issue": asdict(issue) if issue is not None else None,
        "options": {k: v for k, v in source.meta if isinstance(v, int | float | str | bool)},
    }  # fmt: skip
