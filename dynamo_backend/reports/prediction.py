"""What is predicted of one kernel: its machine code and its loops, brought to the model of ``runtime/model``."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from ...codegen.kernel import KernelSource
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...runtime.gpu.launch import grid_function
from ...runtime.machine_code.issue import counted_code
from ...runtime.model.predict import Prediction, predict
from ...runtime.model.work import ArrayTraffic, Work, work_of
from ...runtime.triton.compile import GpuBinary, resource_report
from ...runtime.triton.occupancy import resident_programs
from .segments import contiguous_by_array
from .sharing import Sharing, sharing_by_array
from .traffic import kept_near, traffic_of


def arrays_of(nest: LoopNest, warp: int, at_once: int) -> tuple[ArrayTraffic, ...]:
    """The arrays in memory of a nest that is scheduled for a GPU, as its programs visit them, ``at_once`` at a time."""
    together, sharing = contiguous_by_array(nest, warp), sharing_by_array(nest, at_once)
    found, kept = [], kept_near(nest)
    for name, v in traffic_of(nest).arrays.items():
        of = sharing.get(name, Sharing())
        found.append(
            ArrayTraffic(v.touched, v.read, v.written, of.programs, of.rounds, together.get(name), name in kept)
        )
    return tuple(found)


def kernel_work(
    binary: GpuBinary, source: KernelSource, nest: LoopNest, target: Target, rows: float = 1.0
) -> Work | None:
    """What a launch at typical sizes asks of a target; ``nest`` is as it was scheduled. A launch over a table does
    ``rows`` times as much.

    None where nothing here reads the machine code.
    """
    hint = nest.symbols.hint
    return _kernel_work(binary, source, nest, target, tuple((s.name, hint(s)) for s in nest.symbols.symbols), rows)


# Typical sizes are given beside the nest, for nests that differ in them alone are equal.
@lru_cache(maxsize=512)
def _kernel_work(
    binary: GpuBinary,
    source: KernelSource,
    nest: LoopNest,
    target: Target,
    typical: tuple[tuple[str, int], ...],
    rows: float,
) -> Work | None:
    sizes = dict(typical)
    counted = counted_code(binary, source, sizes)
    machine = target.machine
    if counted is None or machine.pipes is None:
        return None
    programs = round(math.prod(grid_function(source)(*(sizes.get(s, 0) for s in source.symbols))) * rows)
    resources = resource_report(binary)
    resident = resident_programs(machine, resources.registers, resources.shared, resources.threads)
    arrays = arrays_of(nest, machine.warp, machine.cores * resident)
    if rows != 1.0:
        arrays = tuple(
            replace(a, touched=round(a.touched * rows), read=round(a.read * rows), written=round(a.written * rows))
            for a in arrays
        )
    return work_of(counted, binary, programs, resident, arrays, machine)


def predicted(
    binary: GpuBinary, source: KernelSource, nest: LoopNest, target: Target, rows: float = 1.0
) -> Prediction | None:
    """The time of a launch at typical sizes, ``rows`` times as much over a table; None where nothing here reads the
    machine code, and where a multiprocessor of the target has not what one program takes."""
    work = kernel_work(binary, source, nest, target, rows)
    return None if work is None or work.resident < 1 else predict(work, target.machine)
