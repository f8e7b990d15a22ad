"""Measuring in a process of its own: whatever a candidate does there, it is told about that candidate, tuning goes on,
and this process launches nothing."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.played_driver import PlayedLibrary
from tests.runtime.tuning.test_measure import DOUBLE, nest_of
from torch_mlc.dynamo_backend.compiling.tuning import Budget, Tuning
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.ir.text.structure import structural_key
from torch_mlc.runtime.gpu import launch as gpu_launch
from torch_mlc.runtime.gpu.driver import CDriver
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.timing import PhaseTimer
from torch_mlc.runtime.triton.compile import GpuCompileError
from torch_mlc.runtime.triton.triton_stages import Answer, Request
from torch_mlc.runtime.triton.worker_process import worker_command
from torch_mlc.runtime.tuning import measure
from torch_mlc.runtime.tuning.measure import MeasureError
from torch_mlc.runtime.tuning.measuring import SERVICE, WorkerMeasurer
from torch_mlc.runtime.tuning.worker_race import MeasuringProcess
from torch_mlc.scheduler.rules import default_schedule
from torch_mlc.scheduler.schedule.carry import applied
from torch_mlc.scheduler.schedule.schedule import Schedule
from torch_mlc.scheduler.tuning.database import Database, Verdict
from torch_mlc.scheduler.tuning.measurer import Entered, Failure, Measurement, MeasuringError
from torch_mlc.scheduler.tuning.tune import tune

pytestmark = pytest.mark.skipif(
    not worker_command(Path()), reason="no interpreter that can be run as a program of its own"
)
SM90 = gpu_target("cuda:sm_90")
# Which word a candidate is compiled to, by its warps.
WORDS = ("double 0.004", "double 0.002", "illegal 0", "crash 0", "wrong 0.001", "leave 0", "hang 0", "refused 0")


@pytest.fixture(scope="module")
def played() -> Iterator[MeasuringProcess]:
    process = MeasuringProcess("tests.runtime.played_measuring")
    yield process
    process.end()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> PlayedLibrary:
    """The driver of this process, which nobody is to ask for anything."""
    library = PlayedLibrary()
    monkeypatch.setattr(gpu_launch, "driver_of", lambda kind: CDriver(kind, library))
    return library


def compiler(words: Callable[[int], str]) -> Callable[[Request], Answer]:
    """What stands for Triton: a kernel of so many warps is a word."""

    def run(request: Request) -> Answer:
        word = words(int(request.options["num_warps"] or 0))
        if word.startswith("refused"):
            raise ValueError("no such kernel")
        return Answer(request.name, 4, 0, 0, 3, word.encode(), "")

    return run


def candidates(count: int) -> list[Schedule]:
    """Of one warp, of two, and so on."""
    nest = default_schedule(DOUBLE, SM90).nest
    rest = [(key, value) for key, value in nest.annotations if key != "num_warps"]
    return [Schedule(replace(nest, annotations=(*rest, ("num_warps", k + 1)))) for k in range(count)]


def measurer(process: MeasuringProcess, words: Sequence[str], limit: float = 60.0) -> WorkerMeasurer:
    return WorkerMeasurer(DOUBLE, SM90, process=process, run=compiler(lambda warps: words[warps - 1]), limit=limit)


def test_every_fault_is_told_about_its_candidate(played: MeasuringProcess, own: PlayedLibrary) -> None:
    pids = set()
    found: list[Measurement] = []
    words = [w for w in WORDS if not w.startswith("hang")]
    made = measurer(played, [*words, "double 0.003"])
    for result in made.measure(candidates(len(words) + 1)):
        found.append(result)
        pids.add(played.pid)
    texts = [str(r) for r in found]
    assert found[:2] == [0.004, 0.002] and found[-1] == 0.003
    assert "illegal memory access" in texts[2] and isinstance(found[2], MeasureError)
    assert texts[3] == "the process that ran it crashed (SIGSEGV)"
    assert texts[4] == "output 0 differs from the default schedule's"
    assert texts[5] == "the process that measures ended with 3"
    assert isinstance(found[6], GpuCompileError)
    # It was lost three times, once before it was seen, and otherwise asked again.
    assert len(pids - {None}) == 3
    assert not own.launches and not own.functions and not own.errors


def test_what_hangs_is_given_up(played: MeasuringProcess) -> None:
    # The process is there before a second is all that it has.
    assert [*measurer(played, ["double 0.1"]).measure(candidates(1))] == [0.1]
    made = measurer(played, ["double 0.3", "hang 0", "double 0.2"], limit=1.0)
    first, second, third = made.measure(candidates(3))
    assert (first, third) == (0.3, 0.2) and str(second) == "it did not end within 1 s"


def test_tuning_records_verdicts_and_takes_the_fastest_that_is_right(
    played: MeasuringProcess, own: PlayedLibrary, tmp_path: Path
) -> None:
    """The fastest gives a wrong answer, others do not compile; what is won was measured."""
    words = {1: "wrong 0.0001", 2: "refused 0", 4: "double 0.004", 8: "double 0.002"}
    database = Database(tmp_path / "tuning.sqlite")
    made = WorkerMeasurer(DOUBLE, SM90, process=played, run=compiler(lambda k: words.get(k, "double 0.003")))
    found = tune(DOUBLE, SM90, made, 10.0, database)
    known = [m.record for m in database.of_workload(structural_key(DOUBLE))]
    times = {applied(r.trace, DOUBLE).trace.to_json(): r.seconds for r in known if r.verdict.has_time}
    assert times[found.trace.to_json()] == min(times.values()) >= 0.002
    assert {Verdict.WRONG, Verdict.FAILED} <= {r.verdict for r in known} and not own.launches
    assert len(times) > 1
    again = measurer(played, ["double 0.1"])
    again.close()  # another's arguments are not its own to give up
    assert played.session is made
    made.close()
    assert played.session is None


def test_an_interrupt_loses_nothing_and_ends_the_process(
    played: MeasuringProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "tuning.sqlite")
    ask, asked = played.ask, []

    def interrupted(request: dict[str, Any], seconds: float, *parts: bytes, again: bool) -> Any:
        asked.append(request["do"])
        if asked.count("time") == 3:
            raise KeyboardInterrupt
        return ask(request, seconds, *parts, again=again)

    monkeypatch.setattr(played, "ask", interrupted)
    made = WorkerMeasurer(DOUBLE, SM90, process=played, run=compiler(lambda k: f"double 0.{k}"))
    with pytest.raises(KeyboardInterrupt):
        tune(DOUBLE, SM90, made, 30.0, database)
    known = database.measured(structural_key(DOUBLE), SM90)
    assert len(known) > 1 and None not in known.values()
    assert played.pid is None


def entered(made: WorkerMeasurer, count: int) -> list[int]:
    found = [*made.enter(candidates(count))]
    assert all(isinstance(e, Entered) for e in found)
    return [e.number for e in found if isinstance(e, Entered)]


def test_a_process_that_dies_in_a_race_loses_one_trial(played: MeasuringProcess) -> None:
    """The third runs once, and crashes, or hangs, when it is to be timed; the others have their samples."""
    words = {"crash-later 0": ("crashed (SIGSEGV)", Verdict.CRASHED), "illegal-later 0": ("illegal", Verdict.CRASHED)}
    for word, (told, verdict) in words.items():
        made = measurer(played, ["double 0.4", "double 0.2", word, "double 0.1"])
        numbers = entered(made, 4)
        found = made.samples(numbers, 3)
        failed = found[numbers[2]]
        assert isinstance(failed, Failure) and failed.verdict is verdict and told in failed.reason
        assert [found[n] for n in (numbers[0], numbers[1], numbers[3])] == [[0.4] * 3, [0.2] * 3, [0.1] * 3]
        made.leave(numbers[1:])
        assert made.samples(numbers[:1], 2) == {numbers[0]: [0.4] * 2}


def test_what_hangs_in_a_race_is_late(played: MeasuringProcess) -> None:
    made = measurer(played, ["double 0.4", "hang-later 0"], limit=1.0)
    numbers = entered(made, 2)
    found = made.samples(numbers, 3)
    late = found[numbers[1]]
    assert isinstance(late, Failure) and late.verdict is Verdict.LATE and found[numbers[0]] == [0.4] * 3


def test_copies_and_equal_code_have_one_hash(played: MeasuringProcess) -> None:
    made = measurer(played, ["double 0.4", "double 0.4", "double 0.2"])
    found = [*made.enter(candidates(3))]
    assert all(isinstance(e, Entered) for e in found)
    hashes = [e.code_hash for e in found if isinstance(e, Entered)]
    assert hashes[0] == hashes[1] != hashes[2]
    again = made.copy(1)
    assert isinstance(again, Entered) and again.code_hash == hashes[0] and again.number not in (1, 2, 3)


@pytest.mark.parametrize(
    ("command", "what"),
    [(["/nowhere/python"], "cannot be started"), ([], "cannot be started"),
     ([sys.executable, "-c", "raise SystemExit(3)"], "ended with 3")],
)  # fmt: skip
def test_a_process_that_does_not_start_gives_the_kernel_up(
    command: list[str], what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(nest: LoopNest, target: Target, workers: int) -> WorkerMeasurer:
        process = MeasuringProcess("tests.runtime.played_measuring", command)
        return WorkerMeasurer(nest, target, process=process, run=compiler(lambda k: "double 0.1"))

    database = Database(tmp_path / "tuning.sqlite")
    tuning = Tuning(database, Budget(10.0, {"double": 1.0}), PhaseTimer(), made)
    with caplog.at_level(logging.WARNING):
        found = tuning.schedule("double", DOUBLE, SM90)
    (line,) = (r.getMessage() for r in caplog.records)
    assert found.nest == default_schedule(DOUBLE, SM90).nest
    assert "double is not tuned" in line and what in line and "\n" not in line
    assert not database.measured(structural_key(DOUBLE), SM90)


def test_a_default_that_fails_has_nothing_to_be_compared_with(played: MeasuringProcess) -> None:
    with pytest.raises(MeasuringError, match=r"the default schedule cannot be measured: .* illegal memory access"):
        [*measurer(played, ["illegal 0", "double 0.1"]).measure(candidates(2))]


def test_arguments_that_are_too_large_are_not_made(played: MeasuringProcess) -> None:
    huge = nest_of(
        f"@nest(outputs=['out0'])\ndef huge(in0: float32[{1 << 32}], out0: float32[{1 << 32}]):\n"
        f"    for a in serial({1 << 32}):\n        with block('b0'):\n            i = spatial({1 << 32}, a)\n"
        "            out0[i] = in0[i]\n"
    )
    assert measure.MAX_BYTES < 8 << 32
    made = WorkerMeasurer(huge, SM90, process=played, run=compiler(lambda k: "double 0.1"))
    with pytest.raises(MeasuringError, match="MiB of arguments"):
        [*made.measure([default_schedule(huge, SM90)])]


def test_candidates_are_compiled_side_by_side_while_others_are_measured(played: MeasuringProcess) -> None:
    """Two are being compiled at a time, and the last of them while the first is already measured."""
    together, first = threading.Barrier(2, timeout=30), threading.Event()

    def words(warps: int) -> str:
        if warps < 3:
            together.wait()
        elif not first.wait(30):
            raise ValueError("the first was not measured before")
        return f"double 0.{warps}"

    made = WorkerMeasurer(DOUBLE, SM90, process=played, run=compiler(words), workers=2)
    found = []
    for result in made.measure(candidates(4)):
        first.set()
        found.append(result)
    assert found == [0.1, 0.2, 0.3, 0.4]


# --- the CPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processor() -> Iterator[MeasuringProcess]:
    process = MeasuringProcess(SERVICE)
    yield process
    process.end()


def cpu_seconds(process: MeasuringProcess, nest: LoopNest, *schedules: Schedule) -> list[Measurement]:
    return [*WorkerMeasurer(nest, cpu_target(), process=process).measure(schedules)]


def test_times_on_the_cpu_are_seconds_a_call(processor: MeasuringProcess) -> None:
    slow, fast = Schedule(DOUBLE), Schedule(DOUBLE)
    _, lanes = fast.split("a", [None, 16])
    fast.vectorize(lanes)
    found = cpu_seconds(processor, DOUBLE, slow, fast)
    assert all(isinstance(r, float) and 1e-9 < r < 1e-1 for r in found)


def test_a_candidate_with_other_results_is_an_error_and_the_others_are_timed(processor: MeasuringProcess) -> None:
    other = nest_of(
        "@nest(outputs=['out0'])\ndef double(in0: float32[s0], out0: float32[s0]):\n    s0 = size(lower=2, hint=1000)\n"
        "    for a in serial(s0):\n        with block('b0'):\n            i = spatial(s0, a)\n"
        "            out0[i] = mul(in0[i], float32(3.0))\n"
    )
    first, second, third = cpu_seconds(processor, DOUBLE, *(Schedule(n) for n in (DOUBLE, other, DOUBLE)))
    assert isinstance(first, float) and isinstance(third, float)
    assert isinstance(second, MeasureError) and "differs" in str(second)


def test_every_candidate_of_an_update_in_place_starts_from_the_same_content(processor: MeasuringProcess) -> None:
    nest = replace(
        nest_of("""
@nest(outputs=["out0"])
def grow(in0: float32[100], out0: float32[100]):
    for a in serial(100):
        with block("b0"):
            i = spatial(100, a)
            out0[i] = add(mul(out0[i], float32(2.0)), in0[i])
"""),
        annotations=(("in_place", "out0"),),
    )
    split = Schedule(nest)
    split.split(split.get_loops("b0")[0], [None, 8])
    assert all(isinstance(r, float) for r in cpu_seconds(processor, nest, Schedule(nest), split))


def test_a_candidate_that_does_not_compile_is_an_error(processor: MeasuringProcess) -> None:
    schedule = Schedule(DOUBLE)
    schedule.bind("a", "blockIdx.x")
    failed, timed = cpu_seconds(processor, DOUBLE, schedule, Schedule(DOUBLE))
    assert isinstance(failed, Exception) and isinstance(timed, float) and timed < math.inf


def test_a_crash_on_the_cpu_is_a_verdict_and_those_beside_it_are_timed(processor: MeasuringProcess) -> None:
    """Its index has nothing to do with its array, which its nest promises."""
    wild = nest_of(
        "@nest(outputs=['out0'])\ndef double(in0: float32[s0], out0: float32[s0]):\n    s0 = size(lower=2, hint=1000)\n"
        "    for a in serial(s0):\n        with block('b0'):\n            i = spatial(s0, a)\n"
        f"            out0[i] = in0[i * {1 << 40}]\n"
    )
    first, second, third = cpu_seconds(processor, DOUBLE, *(Schedule(n) for n in (DOUBLE, wild, DOUBLE)))
    assert isinstance(first, float) and isinstance(third, float)
    assert str(second) == "the process that ran it crashed (SIGSEGV)"
