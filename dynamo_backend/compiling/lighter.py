"""A kernel that takes more of a GPU than there is, made again with smaller tiles.

What a schedule takes is known when it has been compiled: shared memory beyond a block's limit makes code that no device
loads, and registers beyond a thread's go to memory. Rules choose tiles by estimates of both, so this is rare. A few
bytes in memory may cost less than the smaller tiles that do without: the static model of speed weighs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from ..reports.prediction import predicted

# Lighter schedules that are compiled, each in as long as the first, before the best of them is taken.
TRIES = {Scarce.SHARED: 8, Scarce.REGISTERS: 5}
# What code that spills has to save of the time of code that does not: times are those of a model.
WORTH = 0.1


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A schedule that was compiled, and the bytes of a thread's registers that its code keeps in memory."""

    schedule: Schedule
    source: KernelSource
    code: KernelCode
    spilled: int


def fitting_code(
    nest: LoopNest,
    target: Target,
    schedule: Schedule,
    source: KernelSource,
    make: Callable[[KernelSource], KernelCode],
) -> KernelCode:
    """The code of a kernel by ``make``. Where that takes too much of the target, lighter schedules are compiled until
    one does not, and the code that is fastest as predicted is taken, or that which spills least where times are not
    predicted here.

    A schedule that was measured may spill: it was the fastest. Raises what ``make`` does; SharedMemoryError where no
    lighter schedule fits either.
    """
    try:
        first = make(source)
    except SharedMemoryError as error:
        found = _lighter(nest, target, schedule, Scarce.SHARED, make)
        if not found:
            raise SharedMemoryError(f"{error}; nor does a lighter schedule fit") from error
        counters.add("kernels_lightened")
        return _best(found, target).code
    spilled = _spills(first) if first.language == "triton" else 0
    if not spilled or schedule.nest != default_schedule(nest, target).nest:
        return first
    best = _best(
        [_Compiled(schedule, source, first, spilled), *_lighter(nest, target, schedule, Scarce.REGISTERS, make)], target
    )
    if best.code is not first:
        counters.add("kernels_lightened")
    return best.code


def _lighter(
    nest: LoopNest, target: Target, schedule: Schedule, scarce: Scarce, make: Callable[[KernelSource], KernelCode]
) -> list[_Compiled]:
    """Lighter schedules that compile, up to the first that does not spill."""
    found: list[_Compiled] = []
    for lighter, source in islice(_written(nest, target, schedule, scarce), TRIES[scarce]):
        try:
            code = make(source)
        except MlcError:  # too heavy still, or refused for another reason
            continue
        found.append(_Compiled(lighter, source, code, _spills(code)))
        if not found[-1].spilled:
            break
    return found


def _best(made: Sequence[_Compiled], target: Target) -> _Compiled:
    """The fastest as predicted, of which those that spill have to save ``WORTH`` of the time; the one that spills least
    where a time is not known."""
    if len(made) > 1:
        times = [predicted(gpu_binary(m.code), m.source, m.schedule.nest, target) for m in made]
        known = [(t.seconds * (1 if m.spilled else 1 - WORTH), k) for k, (t, m) in enumerate(zip(times, made)) if t]
        if len(known) == len(made):
            return made[min(known)[1]]
    return min(made, key=lambda m: m.spilled)


def _spills(code: KernelCode) -> int:
    return spilled_bytes(gpu_binary(code))


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
