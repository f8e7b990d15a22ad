"""A kernel that takes more of a GPU than there is, made again with smaller tiles.

What a schedule takes is known when it has been compiled: shared memory beyond a block's limit makes code that no device
loads, and registers beyond a thread's go to memory. Rules choose tiles by estimates of both, so this is rare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from ...codegen.kernel import KernelSource
from ...codegen.triton.emit import emit_triton
from ...ir.errors import MlcError
from ...ir.nest.loops import LoopNest
from ...ir.target import Target
from ...runtime.compile.kernels import KernelCode, gpu_binary, is_made_of
from ...runtime.counters import counters
from ...runtime.triton.compile import SharedMemoryError, spilled_bytes
from ...scheduler.rules import Scarce, default_schedule, lighter_schedules
from ...scheduler.schedule.schedule import Schedule

# Lighter schedules that are compiled, each in as long as the first, before the next best is taken.
TRIES = {Scarce.SHARED: 8, Scarce.REGISTERS: 4}


def fitting_code(
    nest: LoopNest,
    target: Target,
    schedule: Schedule,
    source: KernelSource,
    make: Callable[[KernelSource], KernelCode],
) -> KernelCode:
    """The code of a kernel by ``make``; where that takes too much of the target, of the first lighter schedule that
    does not, or of the one that spills least.

    A schedule that was measured may spill: it was the fastest. Raises what ``make`` does; SharedMemoryError where no
    lighter schedule fits either.
    """
    try:
        best = make(source)
    except SharedMemoryError as error:
        found = _lightest(nest, target, schedule, Scarce.SHARED, make, None)
        if found is None:
            raise SharedMemoryError(f"{error}; nor does a lighter schedule fit") from error
        return found
    if best.language == "triton" and _spills(best) and schedule.nest == default_schedule(nest, target).nest:
        return _lightest(nest, target, schedule, Scarce.REGISTERS, make, best) or best
    return best


def _lightest(
    nest: LoopNest,
    target: Target,
    schedule: Schedule,
    scarce: Scarce,
    make: Callable[[KernelSource], KernelCode],
    best: KernelCode | None,
) -> KernelCode | None:
    """The first lighter code that does not spill, or the one that spills least, ``best`` among them."""
    least, first = (_spills(best) if best is not None else 0), best
    for source in islice(_sources(nest, target, schedule, scarce), TRIES[scarce]):
        try:
            code = make(source)
        except MlcError:  # too heavy still, or refused for another reason
            continue
        spilled = _spills(code)
        if best is None or spilled < least:
            best, least = code, spilled
        if spilled == 0:
            break
    if best is not first:
        counters.add("kernels_lightened")
    return best


def _spills(code: KernelCode) -> int:
    return spilled_bytes(gpu_binary(code))


def _sources(nest: LoopNest, target: Target, schedule: Schedule, scarce: Scarce) -> Iterator[KernelSource]:
    return (source for _, source in _written(nest, target, schedule, scarce))


def _written(
    nest: LoopNest, target: Target, schedule: Schedule, scarce: Scarce
) -> Iterator[tuple[Schedule, KernelSource]]:
    for lighter in lighter_schedules(nest, target, schedule.rule, scarce):
        try:
            yield lighter, emit_triton(lighter.nest, target)
        except MlcError:  # loops that there is no code for
            continue


def written_as(
    code: KernelCode, nest: LoopNest, target: Target, schedule: Schedule, source: KernelSource
) -> tuple[Schedule, KernelSource | None]:
    """The schedule and the source that code was made of: those given, or lighter ones; no source where it is of neither
    (another process made it of a schedule that it had measured)."""
    if code.language == "llvm" or is_made_of(code, source):
        return schedule, source
    for scarce in Scarce:
        for lighter, text in islice(_written(nest, target, schedule, scarce), TRIES[scarce]):
            if is_made_of(code, text):
                return lighter, text
    return schedule, None
