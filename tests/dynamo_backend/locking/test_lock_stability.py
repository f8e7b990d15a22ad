"""Lock files are equal whoever writes them: another process, another seed of Python's hashes, a warm cache, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dynamo_backend.locking.stable import COUNT, cases
from torch_mlc.dynamo_backend.locking.lock_text import LockText

ROOT = Path(__file__).resolve().parents[3]


def written(folder: Path, cache: Path, seed: int, only: str = "", threads: int = 1) -> dict[str, str]:
    """The files that a process of its own writes, by name."""
    environ = {
        **os.environ, "PYTHONHASHSEED": str(seed), "MLC_CACHE_DIR": str(cache), "MLC_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.dynamo_backend.locking.stable", str(folder), "--only", only]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failed = [line for line in done.stdout.splitlines() if not line.endswith(": written")]
    assert not failed, failed
    return {path.name: path.read_text() for path in sorted(folder.glob("*.lock"))}


def same(one: dict[str, str], other: dict[str, str]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def test_small_models_with_a_cold_and_a_warm_cache(tmp_path: Path) -> None:
    cold = written(tmp_path / "a", tmp_path / "cache", 1, "small")
    warm = written(tmp_path / "b", tmp_path / "cache", 2, "small")
    assert len(cold) == len([name for name in cases() if "small" in name])
    same(cold, warm)


def test_processes_write_one_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from torch_mlc.dynamo_backend.locking.lock_store import write_graph\n"
        "from torch_mlc.dynamo_backend.locking.lock_text import Section\n"
        "for k in range(12): write_graph(Path(sys.argv[1]), [Section.of(f'g{sys.argv[2]}.{k}', ['  calls'])])"
    )
    path = tmp_path / "model.mlc.lock"
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(k)], cwd=ROOT) for k in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert len(LockText.parse(path.read_text(), path).sections) == 4 * 12
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "something was left beside the file"


@pytest.mark.slow
def test_a_hundred_models(tmp_path: Path) -> None:
    """Twice with a cold cache, and once more with a warm one."""
    one = written(tmp_path / "a", tmp_path / "cache", 1)
    assert len(one) == COUNT == 100
    same(one, written(tmp_path / "b", tmp_path / "other", 2))
    same(one, written(tmp_path / "c", tmp_path / "cache", 3))
