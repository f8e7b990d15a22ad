"""Several processes on one machine, on gloo: compiled programs equal eager ones (``processes.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(world: int, *programs: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLC_STRICT": "1"}
    script = Path(__file__).with_name("processes.py")
    done = subprocess.run(
        [sys.executable, str(script), str(world), *programs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]


def test_two_processes() -> None:
    """Everything that many use, in one start of the processes."""
    run(2, "collectives", "collectives_over_what_is_written", "data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "name",
    ["collectives", "collectives_by_their_usual_names", "data_parallel", "fully_sharded", "tensor_parallel",
     "distributed_tensors"],
)  # fmt: skip
def test_each_program(name: str, world: int) -> None:
    run(world, name)
