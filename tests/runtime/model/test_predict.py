"""The time of a launch: the slowest part of a GPU bounds it, and a faster machine never takes longer."""

from dataclasses import replace

import pytest

from torch_mlc.ir.machine import Machine
from torch_mlc.ir.target import gpu_target, usual_target
from torch_mlc.runtime.model.opcodes import Pipe
from torch_mlc.runtime.model.predict import EFFICIENCY, Prediction, predict
from torch_mlc.runtime.model.work import Work

H200 = gpu_target("cuda:sm_90").machine
TARGETS = (
    "cuda:sm_75",
    "cuda:sm_80",
    "cuda:sm_89",
    "cuda:sm_90",
    "cuda:sm_100",
    "cuda:sm_120",
    "hip:gfx90a",
    "hip:gfx942",
)
# A launch of many programs in which nothing takes long.
LITTLE = Work(
    132 * 80, 8, slots=1e4, lanes=dict.fromkeys(Pipe, 1e3), products=1e5, grouped=True, cached=1e4,
    alone=(800.0, 900.0), moved=1e6, memory=1e6,
)  # fmt: skip


def of(work: Work, machine: Machine = H200) -> Prediction:
    return predict(work, machine)


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        (replace(LITTLE, slots=1e6), "issue"),
        *((replace(LITTLE, lanes={**LITTLE.lanes, pipe: 1e6}), pipe.value) for pipe in Pipe),
        (replace(LITTLE, products=1e8), "tensor cores"),
        (replace(LITTLE, cached=1e6), "shared memory"),
        (replace(LITTLE, moved=1e9), "L2"),
        (replace(LITTLE, memory=1e9), "memory"),
        (replace(LITTLE, alone=(5e4, 6e4)), "latency"),
        (replace(LITTLE, programs=1), "launch"),
        (Work(0, 8), "launch"),
    ],
)  # fmt: skip
def test_the_slowest_part_bounds(more: Work, bound: str) -> None:
    found = of(more)
    assert found.bound == bound and f"bound by {bound}" in str(found)
    assert found.seconds >= max(found.bounds.values())


def test_seconds_of_a_bound() -> None:
    slots = of(replace(LITTLE, slots=1e6)).bounds["issue"]
    assert slots == pytest.approx(80 * 1e6 / 128 / (H200.clock * 1e9))
    memory = of(Work(132, 1, memory=4.3e9))
    assert memory.bounds["memory"] == pytest.approx(1e-3)
    assert memory.seconds == pytest.approx(1e-3 / EFFICIENCY + 2e-6)


def test_one_program_more_than_multiprocessors_takes_twice_as_long() -> None:
    work = Work(132, 1, slots=1e7)
    assert of(replace(work, programs=133)).bounds["issue"] == pytest.approx(2 * of(work).bounds["issue"])


def test_programs_that_are_resident_together_hide_waiting() -> None:
    work = replace(LITTLE, alone=(5e4, 5e4))
    few, many = (of(replace(work, resident=n)).bounds["latency"] for n in (2, 8))
    assert few == pytest.approx(4 * many)


def test_bytes_in_flight_fill_memory_by_the_law_of_little() -> None:
    """A program that loads 16 KB and waits once: so many are resident that 25 KB are in flight, and fewer."""
    pipes = H200.pipes
    assert pipes is not None
    size, programs = 16 << 10, 132 * 1000
    alone = (float(pipes.memory_latency), float(pipes.loaded_latency))
    for resident, bound in ((1, "latency"), (4, "memory")):
        found = of(Work(programs, resident, alone=alone, memory=size * programs))
        assert found.bound == bound, found
    one = of(Work(programs, 1, alone=alone, memory=size * programs))
    assert 0.6 < one.bounds["memory"] / one.bounds["latency"] < 0.7


@pytest.mark.parametrize("target", TARGETS)
def test_faster_machines_never_take_longer(target: str) -> None:
    machine = gpu_target(target).machine
    works = [LITTLE, replace(LITTLE, memory=1e9), replace(LITTLE, slots=1e6), replace(LITTLE, alone=(5e4, 9e4))]
    for work in works:
        before = predict(work, machine).seconds
        for share in (1.2, 2.0, 10.0):
            for faster in (
                replace(machine, issued=machine.issued * share),
                replace(machine, bandwidth=machine.bandwidth * share),
                replace(machine, launch=machine.launch / share),
            ):
                assert predict(work, faster).seconds <= before


def test_what_has_no_pipes_or_no_room() -> None:
    with pytest.raises(ValueError, match="no pipes"):
        predict(LITTLE, usual_target("cpu").machine)
    with pytest.raises(ValueError, match="takes more than"):
        predict(replace(LITTLE, resident=0), H200)
