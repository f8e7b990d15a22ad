"""Several processes on one machine, on gloo: compiled programs equal eager ones (``processes.py``)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests import warm_processes


def run(world: int, *programs: str) -> None:
    script = "import sys\nfrom tests.distributed.processes import work\n"
    script += "work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])\n"
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        for process in [warm_processes.start(script, str(k), str(world), store, *programs) for k in range(world)]:
            process.output(300)


def test_two_processes() -> None:
    """Everything that many use, in one start of the processes."""
    run(2, "collectives", "collectives_over_what_is_written", "data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "name",
    ["collectives", "collectives_by_their_usual_names", "data_parallel", "fully_sharded", "tensor_parallel", "pipeline",
     "distributed_tensors"],
)  # fmt: skip
def test_each_program(name: str, world: int) -> None:
    run(world, name)
