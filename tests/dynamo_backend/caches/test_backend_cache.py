"""What one process compiled, the next one finds: nothing is imported, lowered, scheduled or emitted again."""

import json
from pathlib import Path

import pytest

from tests import warm_processes
from tests.warm_processes import Started

SCRIPT = """
import json, sys, warnings
import torch
from torch_mlc.runtime.counters import counters

caught = []
warnings.showwarning = lambda message, category, *_: caught.append(f"{category.__name__}: {message}")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Dropout(0.0))
x = torch.randn(int(sys.argv[1]), 6)
run = torch.compile(model, backend="mlc", dynamic=len(sys.argv) > 2)
loss = run(x).square().sum()
loss.backward()
grads = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x).square().sum().backward()
error = max((a - p.grad).abs().max().item() for a, p in zip(grads, model.parameters()))
print(json.dumps({"error": error, "counts": counters.snapshot(), "warnings": caught}))
"""


def start(folder: Path, *args: str) -> Started:
    return warm_processes.start(SCRIPT, *(args or ("5",)), env={"MLC_CACHE_DIR": str(folder)})


def outcome(process: Started) -> dict[str, object]:
    found = json.loads(process.output().splitlines()[-1])
    assert found["error"] < 1e-5
    return found


def warned(found: dict[str, object]) -> list[str]:
    return [w for w in found["warnings"] if "CacheWarning" in w]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    counts = outcome(start(folder))["counts"]
    assert counts["graphs_compiled"] == 2 and counts["kernels_generated"] > 2  # type: ignore[index]
    return folder


def test_a_second_process_builds_nothing(filled: Path) -> None:
    found = outcome(start(filled))
    counts = found["counts"]
    assert counts["graph_cache_hits"] == 2  # type: ignore[index]
    assert counts["graphs_compiled"] == counts["kernels_generated"] == counts["graph_cache_misses"] == 0  # type: ignore[index]
    assert warned(found) == []


def test_truncated_entries_are_rebuilt_with_one_warning(filled: Path) -> None:
    for path in (*(filled / "v1" / "graph").iterdir(), *(filled / "v1" / "kernel").iterdir()):
        path.write_bytes(path.read_bytes()[:-9])
    found = outcome(start(filled))
    assert len(warned(found)) == 1 and "damaged" in warned(found)[0]
    assert found["counts"]["graphs_compiled"] == 2 and found["counts"]["kernels_generated"] > 2  # type: ignore[index]


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path: Path) -> None:
    # A plain file stands where the folder should be: permissions would not stop root.
    (tmp_path / "file").write_text("")
    found = outcome(start(tmp_path / "file"))
    assert len(warned(found)) == 1 and "cannot" in warned(found)[0]


def test_two_processes_at_once(tmp_path: Path) -> None:
    both = [start(tmp_path), start(tmp_path)]
    results = [outcome(p) for p in both]
    assert [warned(r) for r in results] == [[], []]
    counts = outcome(start(tmp_path))["counts"]
    assert counts["graph_cache_hits"] == 2 and counts["kernels_generated"] == 0  # type: ignore[index]
