"""Random programs compiled for a GPU that is not here, by a worker in whose process Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.campaign import Campaign
from tests.fuzz.program import Input, Program, Step, on_target
from tests.workers import ROOT, Worker

TARGET = "cuda:sm_90"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker("tests.fuzz.worker", tmp_path_factory.mktemp("cache"))
    yield made
    made.end()


def test_random_programs_equal_eager_on_a_gpu_that_is_not_here(worker: Worker, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, target=TARGET)
    for seed in (5, 7, 8, 9):
        program, outcome = campaign.first(worker, seed)
        assert program is not None and program.options["target"] == TARGET
        assert Program.of(json.loads(json.dumps(program.record()))) == program
        assert outcome["status"] == "equal", outcome


def test_kernels_are_run_by_triton(worker: Worker, tmp_path: Path) -> None:
    """One that would take too long says so; as machine code of the CPU it is done in a moment."""
    step = Step("x0 + 1", ("t0",), ("x0",))
    large = Program(0, (Input("x0", "torch.zeros(A, A)"),), (step,), ("t0",), ({"A": 3000},))
    campaign = Campaign(tmp_path)
    assert campaign.again(worker, large)["status"] == "equal"
    outcome = campaign.again(worker, on_target(large, TARGET))
    assert outcome["status"] == "invalid" and "programs" in outcome["detail"]
    assert "import interpreted" in on_target(large, TARGET).snippet("x")
    assert "import interpreted" not in replace(large, options={}).snippet("x")


def test_sizes_that_take_too_long_are_not_verified(worker: Worker, tmp_path: Path) -> None:
    """A program is not given up for sizes that its kernels are only verified at."""
    step = Step("x0 + 1", ("t0",), ("x0",))
    small = Program(
        0, (Input("x0", "numbers((A, 12, B), torch.float32, 7)"),), (step,), ("t0",), ({"A": 5, "B": 6},),
        dynamic=True, options={"verify": 1},
    )  # fmt: skip
    outcome = Campaign(tmp_path).again(worker, on_target(small, TARGET))
    assert outcome["status"] == "equal", outcome


def test_a_script_chooses_the_interpreter_by_itself(tmp_path: Path) -> None:
    """As whoever reads of a failing program runs it: nothing in the environment says so."""
    step = Step("x0.exp().sum(-1)", ("t0",), ("x0",))
    program = Program(0, (Input("x0", "torch.zeros(A, A)"),), (step,), ("t0",), ({"A": 3},), options={"verify": 1})
    script = tmp_path / "script.py"
    script.write_text(on_target(program, TARGET).snippet("A sum."))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)], env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    eager, ours = (line.partition(":")[2].strip() for line in done.stdout.splitlines())
    assert eager == ours == "(tensor([3., 3., 3.]),)"


FOUND = {
    # The mask that left out the elements left out the result.
    "no elements": Program(
        0, (Input("x0", "numbers((1, A, B), torch.uint8, 7)"),),
        (Step("x0[1:].fill_(2).sum()", ("t0",), ("x0",)),), ("t0",), ({"A": 1, "B": 1}, {"A": 5, "B": 3}),
    ),
    # What verifies a kernel by ATen's ops read a result at other rows than its own, which are summed in groups.
    "groups of rows": Program(
        0,
        (
            Input("x0", "numbers((4, 8, A), torch.float32, 7)", True),
            Input("x1", "numbers((A,), torch.float32, 8)", True),
        ),
        (Step("F.rms_norm(x0, x0.shape[-1:], x1, eps=0.1)", ("t0",), ("x0", "x1")),), ("t0",), ({"A": 32},),
        gradient=True, options={"verify": 1},
    ),
    # An atomic sum of many lanes at one place.
    "all in one place": Program(
        0, (Input("x0", "numbers((A, B), torch.float32, 7)"),),
        (
            Step("torch.zeros(5, x0.shape[1]).index_add(0, torch.full((x0.shape[0],), 2), x0)", ("t0",), ("x0",)),
            Step("torch.zeros(5).index_add(0, torch.full((x0.numel(),), 3), x0.flatten())", ("t1",), ("x0",)),
            Step("x0.new_zeros(70, x0.shape[1]).index_add(0, torch.arange(x0.shape[0]) + 1, x0)", ("t2",), ("x0",)),
        ),
        ("t0", "t1", "t2"), ({"A": 37, "B": 5}, {"A": 64, "B": 1}),
    ),
    # Where groups unite, what a scan reads may join after it: raised on GPUs.
    "a scan before what it reads": Program(
        0, (Input("x0", "numbers((A, 1, 5, B), torch.float32, 7)", True),),
        (
            Step("recomputed(lambda p: thrice(p.cumsum(-1)), x0)", ("t0",), ("x0",)),
            Step("x0.chunk(2, -1)[0]", ("t1",), ("x0",)),
        ),
        ("t1", "t0"), ({"A": 13, "B": 5}, {"A": 2, "B": 6}), dynamic=None, gradient=True,
    ),
    # Attention that is written out for a GPU that is not here took a query that begins later in memory for its storage.
    "a query in the middle": Program(
        0,
        (
            Input("x0", "numbers((A + 3, 2), torch.float32, 7)[1:A + 1]"),
            Input("x1", "numbers((1, 1, 33, 2), torch.float32, 8)"),
        ),
        (Step("flex(x0[None, None], x1, x1, None, lambda b, h, i, j: i // 2 == j // 2)", ("t0",), ("x0", "x1")),),
        ("t0",), ({"A": 6},),
    ),
    # A tile of queries had lanes for the keys and values that lie beside them in memory: it did not compile.
    "a head's queries, keys and values in one row": Program(
        0,
        (
            Input("x0", "numbers((2, A, 2, 3 * B), torch.float32, 7)", True),
            Input("x1", "numbers((2, A, A), torch.float32, 8)", True),
        ),
        (
            Step("x0.transpose(1, 2).chunk(3, -1)", ("t0", "t1", "t2"), ("x0",), "view"),
            Step("((t0 @ t1.mT) / 6 + x1).softmax(-1) @ t2", ("t3",), ("t0", "t1", "x1", "t2"), eps=2.0**-23),
        ),
        ("t3",), ({"A": 4, "B": 32}, {"A": 49, "B": 16}, {"A": 64, "B": 33}), gradient=True,
    ),
    # Masked loads of eight bits were of zeros that are integers, of which Triton makes no such float.
    "keys of eight bits": Program(
        0, (Input("x0", "numbers((A, 33), torch.float32, 7)"),),
        (
            Step("x0.to(torch.float8_e4m3fn).float() * 0.5", ("t0",), ("x0",)),
            Step("torch.softmax(x0 @ t0.mT, -1) @ x0", ("t1",), ("x0", "t0"), eps=2.0**-23),
            Step("x0.to(torch.float8_e5m2).float() + 1", ("t2",), ("x0",)),
        ),
        ("t1", "t2"), ({"A": 3}, {"A": 40}),
    ),
    # Atomic maxima of floats had no code, of which a library's place was not taken.
    "the greatest of a bag": Program(
        0, (Input("x0", "numbers((A, B), torch.float32, 7)"), Input("x1", "places((3, 4), A, 8, torch.int64)")),
        (
            Step("F.embedding_bag(x1, x0, mode='max')", ("t0",), ("x0", "x1")),
            Step("x0.half().scatter_reduce(0, x1[:, :2], x0.half(), 'amin')", ("t1",), ("x0", "x1")),
        ),
        ("t0", "t1"), ({"A": 17, "B": 8}, {"A": 5, "B": 2}),
    ),
    # A number between two stages of elements kept their loops apart, and the tile of the first from the second.
    "a number among elements": Program(
        0,
        (
            Input("x0", "numbers((), torch.float32, 7)", True), Input("x1", "numbers((A,), torch.float32, 8)", True),
            Input("x2", "numbers((A,), torch.float32, 9)", True),
        ),
        (Step("torch.special.i1(torch.lerp(x1, x2, x0) * 0.5) * 0.5", ("t0",), ("x0", "x1", "x2"), eps=2.0**-23),),
        ("t0",), ({"A": 40}, {"A": 1}), gradient=True,
    ),
    # Scores that all of a batch shares were no product for a matrix instruction, nor for a rule.
    "queries that a batch shares": Program(
        0, (Input("x0", "numbers((4, A), torch.float32, 7)"),),
        (
            Step("x0.expand(3, -1, -1)", ("t0",), ("x0",), "view"),
            Step("F.scaled_dot_product_attention(t0, t0, t0)", ("t1",), ("t0",), eps=2.0**-23),
        ),
        ("t1",), ({"A": 17},),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_found(worker: Worker, tmp_path: Path, name: str) -> None:
    """Programs that were wrong."""
    outcome = Campaign(tmp_path).again(worker, on_target(FOUND[name], TARGET))
    assert outcome["status"] == "equal", outcome
