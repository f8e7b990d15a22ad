"""Whatever legal trace is thrown at whatever program, the answer stays: by the oracle, as machine code, as Triton.

``PROPERTY_SCALE`` in the environment multiplies the number of traces (2,000 for the oracle, of which some also run
as machine code, and some others as Triton), and ``PROPERTY_SEED`` moves on to other programs. A failure names the seed
and shows the shortest trace that still fails.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from random_programs import Array, Program, compare, make_program
from random_runs import Interpreter, InterpreterFault, check_compiled, check_oracle, expected
from random_traces import DRAWN, random_schedule, shortened, undrawn

from torch_mlc.codegen.kernel import EmitError, KernelSource, wide_source
from torch_mlc.codegen.llvm.module import emit_llvm
from torch_mlc.codegen.triton.emit import emit_triton
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify
from torch_mlc.runtime.cpu import compile_kernels, load_kernels
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.scheduler.schedule.schedule import PRIMITIVES, Schedule, replay
from torch_mlc.scheduler.schedule.trace import Trace

SCALE = float(os.environ.get("PROPERTY_SCALE", "1"))
FIRST = int(os.environ.get("PROPERTY_SEED", "0"))
# Programs in each of the three tests, and traces of each.
ORACLE, COMPILED, INTERPRETED = (int(n * SCALE) for n in (1000, 150, 75))
TRACES = 2
# Kernels of one LLVM module.
BATCH = 25
CPU, GPU = cpu_target(4), gpu_target("cuda:sm_90")
# What needs a nest of a kind that these programs are not, and so may never go through.
SELDOM = {"atomic", "tensorize", "decompose_online", "transform_layout", "pad", "pipeline", "fuse_reductions",
          "powers_of_two"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A trace of a program, and what the program computes."""

    program: Program
    schedule: Schedule
    wanted: Sequence[Mapping[str, Array]]

    @property
    def nest(self) -> LoopNest:
        return self.schedule.nest


def cases(count: int, salt: int, targets: Sequence[Target | None], done: Counter[str] | None = None) -> Iterator[Case]:
    """Traces of ``count`` programs, each replayed from JSON."""
    for seed in range(FIRST, FIRST + count):
        program, rng = make_program(seed), random.Random(f"{salt} {seed}")
        wanted = expected(program)
        for _ in range(TRACES):
            schedule = random_schedule(program.nest, rng, rng.choice(targets), done)
            verify(schedule.nest)
            again = replay(Trace.from_json(schedule.trace.to_json()), program.nest)
            assert again.nest == schedule.nest, f"seed {seed}: the trace replays to another nest\n{schedule.trace}"
            yield Case(program, schedule, wanted)


def explained(case: Case, error: Exception, run: Callable[[Case, LoopNest], Any]) -> AssertionError:
    """The error with the shortest trace that has one of its kind."""

    def fails(nest: LoopNest) -> bool:
        try:
            run(case, nest)
        except EmitError:
            return False
        except type(error):
            return True
        return False

    trace = shortened(case.program.nest, case.schedule.trace, fails)
    scheduled = show(replay(trace, case.program.nest).nest)
    return AssertionError(
        f"seed {case.program.seed}: {type(error).__name__}: {error}\n{show(case.program.nest)}\n{trace}\n{scheduled}"
    )


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_every_primitive_takes_part(primitive: str) -> None:
    missing = undrawn(primitive)
    assert not missing, (
        f"nothing draws {', '.join(missing)} of {primitive}: add to BY_NAME or DRAWS in random_traces.py"
    )


def test_random_traces_keep_the_oracles_answer() -> None:
    done: Counter[str] = Counter()
    count = 0

    def run(case: Case, nest: LoopNest) -> None:
        check_oracle(case.program, nest, case.wanted)

    for case in cases(ORACLE, 0, (None, CPU, GPU), done):
        count += 1
        try:
            run(case, case.nest)
        except Exception as error:
            raise explained(case, error, run) from error
    assert count == TRACES * ORACLE
    if SCALE >= 1:
        assert not [p for p in DRAWN if p not in SELDOM and not p.startswith("sample_") and done[p] < 3], done


def _emitted(case: Case, name: str) -> KernelSource | None:
    try:
        return emit_llvm(replace(case.nest, name=name), CPU)
    except EmitError:
        return None


def _compiled(case: Case, nest: LoopNest) -> None:
    source = emit_llvm(nest, CPU)
    check_compiled(case.program, load_kernels(compile_kernels([source], CPU), [source.name])[source.name], case.wanted)


def test_machine_code_of_random_traces_gives_the_oracles_answer() -> None:
    """Kernels share modules; what fails is compiled by itself again, shorter."""
    batch: list[tuple[Case, KernelSource]] = []
    ran = refused = 0

    def run() -> None:
        nonlocal ran
        kernels = load_kernels(compile_kernels([s for _, s in batch], CPU), [s.name for _, s in batch])
        for case, source in batch:
            ran += 1
            try:
                check_compiled(case.program, kernels[source.name], case.wanted)
            except AssertionError as error:
                raise explained(case, error, _compiled) from error
        batch.clear()

    for k, case in enumerate(cases(COMPILED, 1, (None, CPU, CPU))):
        source = _emitted(case, f"f{k}")
        if source is None:
            refused += 1
            continue
        batch.append((case, source))
        if len(batch) == BATCH:
            run()
    if batch:
        run()
    assert ran + refused == TRACES * COMPILED and refused <= 0.1 * ran, (ran, refused)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    pytest.importorskip("triton")
    running = Interpreter()
    yield running
    running.close()


def test_interpreted_triton_of_random_traces_gives_the_oracles_answer(interpreter: Interpreter) -> None:
    """Nests that the emitter says it has no code for do not count; most do."""
    ran = refused = faults = 0

    def run(case: Case, nest: LoopNest) -> None:
        source = emit_triton(nest, GPU)
        interpreter.check(case.program, source, case.wanted)
        if source.reach is not None:
            interpreter.check(case.program, wide_source(source), case.wanted)

    for case in cases(INTERPRETED, 2, (GPU,)):
        try:
            run(case, case.nest)
            ran += 1
        except EmitError:
            refused += 1
        except InterpreterFault:
            faults += 1
        except Exception as error:
            raise explained(case, error, run) from error
    assert ran >= 0.35 * TRACES * INTERPRETED and faults <= 2 + 0.05 * ran, (ran, refused, faults)


def test_the_checks_see_a_wrong_nest() -> None:
    """An answer of another program is no answer."""
    program = next(p for p in map(make_program, range(100)) if len(expected(p)[0]["out0"].shape) > 0)
    (want, *_) = expected(program)
    wrong = {**want, "out0": want["out0"].astype(want["out0"].dtype) * 0 + 77}
    with pytest.raises(AssertionError):
        compare(program.nest, wrong, want)
