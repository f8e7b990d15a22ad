"""Every rule of a GPU on random functions: what it makes has code, and that gives the oracle's answer.

``PROPERTY_SCALE`` and ``PROPERTY_SEED`` in the environment are those of ``test_random_programs.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from random_programs import Program, make_program
from random_runs import Interpreter, InterpreterFault, expected

from torch_mlc.codegen.kernel import EmitError
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.ir.target import gpu_target
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import design_space
from torch_mlc.scheduler.schedule.schedule import Schedule

GPU = gpu_target("cuda:sm_90")
FIRST = int(os.environ.get("PROPERTY_SEED", "0"))
PROGRAMS = int(60 * float(os.environ.get("PROPERTY_SCALE", "1")))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    pytest.importorskip("triton")
    running = Interpreter()
    yield running
    running.close()


def schedules(program: Program) -> Iterator[Schedule]:
    """What each rule that fits makes by its default parameters."""
    for rule in design_space(program.nest, GPU).rules:
        schedule = Schedule(program.nest, rule.name)
        params = {k: v[0] for k, v in rule.parameters(program.nest, GPU).items()}
        try:
            rule.apply(schedule, GPU, params)
        except ScheduleError:
            continue
        yield schedule


def test_what_rules_make_of_random_functions(interpreter: Interpreter) -> None:
    """The first rule that applies makes something that has code, but where the last resort would have to make a value
    again for a second loop."""
    default, others, faults = Counter[str](), Counter[str](), 0
    for program in map(make_program, range(FIRST, FIRST + PROGRAMS)):
        wanted = expected(program)
        for k, schedule in enumerate(schedules(program)):
            verify(schedule.nest)
            try:
                source = emit_triton(schedule.nest, GPU)
            except EmitError as error:
                (others if k else default)[schedule.rule] += 1
                assert k or "outside the loop in which it was written" in str(error), f"seed {program.seed}: {error}"
                continue
            try:
                interpreter.check(program, source, wanted)
            except InterpreterFault:
                faults += 1
            except Exception as error:
                text = f"{show(program.nest)}\n{schedule.trace}\n{show(schedule.nest)}\n{source.text}"
                raise AssertionError(f"seed {program.seed}, {schedule.rule}: {error}\n{text}") from error
    assert set(default) <= {"gpu_plain"} and default.total() <= 1 + 0.05 * PROGRAMS, default
    assert others.total() <= 1 + 0.02 * PROGRAMS and faults <= 1 + 0.05 * PROGRAMS, (others, faults)
