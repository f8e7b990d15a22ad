"""Programs in a process of their own: results are compared, inputs put back, and a crash is a verdict about one of
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.dynamo_backend.searching.played_programs import load
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.importing.importer import import_graph
from torch_mlc.dynamo_backend.searching.inputs import TypicalInputs, index_limit, typical_inputs
from torch_mlc.dynamo_backend.searching.program_service import ProgramService, made_inputs
from torch_mlc.dynamo_backend.searching.programs import ProgramRace
from torch_mlc.runtime.triton.worker_process import worker_command
from torch_mlc.runtime.tuning.worker_race import MeasuringProcess
from torch_mlc.scheduler.tuning.database import Verdict
from torch_mlc.scheduler.tuning.measurer import Entered, Failure, MeasuringError

VECTOR = {"shape": [64], "strides": [1], "dtype": "float32", "static": False}
INPUTS = TypicalInputs((VECTOR, 7), 2)


@pytest.fixture(scope="module")
def played() -> Iterator[MeasuringProcess]:
    process = MeasuringProcess("tests.dynamo_backend.searching.played_programs")
    yield process
    process.end()


@pytest.mark.skipif(not worker_command(Path()), reason="no interpreter that can be run as a program of its own")
def test_every_fault_is_told_about_its_program(played: MeasuringProcess) -> None:
    race = ProgramRace(INPUTS, played)
    first = race.enter(b"double")
    assert isinstance(first, Entered)
    found = {word: race.enter(word.encode()) for word in ("slow", "wrong", "raise", "crash")}
    told = {word: (f.verdict, f.reason) for word, f in found.items() if isinstance(f, Failure)}
    assert told == {
        "wrong": (Verdict.WRONG, "result 0 differs from the default program's"),
        "raise": (Verdict.FAILED, "RuntimeError: it is refused"),
        "crash": (Verdict.CRASHED, "the process that ran it crashed (SIGSEGV)"),
    }
    slow, twin = found["slow"], race.copy(first.number)
    assert isinstance(slow, Entered) and isinstance(twin, Entered) and twin.code_hash == first.code_hash
    times = race.samples([first.number, twin.number, slow.number], 3)
    seconds = {n: median(s) for n, s in times.items() if not isinstance(s, Failure)}
    assert seconds[slow.number] > 0.009 > seconds[first.number]
    race.close()


@pytest.mark.skipif(not worker_command(Path()), reason="no interpreter that can be run as a program of its own")
def test_a_default_that_crashes_says_nothing_of_others(played: MeasuringProcess) -> None:
    race = ProgramRace(INPUTS, played)
    assert race.enter(b"crash") == Failure(Verdict.CRASHED, "the process that ran it crashed (SIGSEGV)")
    assert isinstance(race.enter(b"double"), Entered)


def answered(service: ProgramService, **request: Any) -> dict[str, Any]:
    parts = [request.pop("program").encode()] if "program" in request else []
    return service(request, parts)[0]


@pytest.mark.parametrize("consumed", [(), (0,)])
def test_what_a_program_writes_to_is_put_back(consumed: tuple[int, ...]) -> None:
    service = ProgramService(load)
    inputs = TypicalInputs((VECTOR, 7), 2, consumed)
    answered(service, do="begin", inputs=inputs.plain(), threads=torch.get_num_threads())
    assert answered(service, do="prepare", id=0, program="add") == {}
    before = service._inputs[0].clone()
    for number in (1, 2):
        assert answered(service, do="prepare", id=number, program="add") == {}, "the second sees what the first did"
    samples = answered(service, do="time", ids=[0, 1], rounds=2, begun=0)["samples"]
    assert set(samples) == {"0", "1"} and all(len(of_one_size) == 2 for (of_one_size,) in samples.values())
    assert service._inputs[0].sub(before).abs().max() <= (0 if consumed else 1)
    assert answered(service, do="prepare", id=3, program="double")["verdict"] == "wrong"
    assert answered(service, do="drop", ids=[0, 1]) == answered(service, do="end") == {}


def test_inputs_are_in_range_and_positive_where_they_are_variances() -> None:
    def looked_up(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(at, table)

    with torch.no_grad():
        (gm,) = capture(looked_up, (torch.randn(5, 3), torch.tensor([0, 4, 2])))
    graph = import_graph(gm)
    assert index_limit(graph) == 5
    found = typical_inputs(graph, 2, ["cpu"])
    at, table = sorted(made_inputs(found.plain()), key=torch.is_floating_point)
    assert at.dtype is torch.int64 and int(at.min()) >= 0 and int(at.max()) < 5 and table.shape == (5, 3)
    positive = made_inputs({"items": [{**VECTOR, "static": True}], "limit": 2})[0]
    assert float(positive.min()) >= 0.5
    with pytest.raises(MeasuringError, match="neither tensors nor sizes"):
        typical_inputs(graph, 3, ["cpu"])
    with pytest.raises(MeasuringError, match="inputs on cpu, where no program is raced"):
        typical_inputs(graph, 2, ["cuda:0"])
