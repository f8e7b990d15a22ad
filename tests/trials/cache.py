"""Trials of the disk cache: many processes at once, processes killed at any moment, entries and disks that go bad.

    python -m tests.trials.cache                    every trial, 100 kills (some minutes)
    python -m tests.trials.cache --kills 10

Every process compiles the same programs with the same cache folder and compares the answers with eager's. What may
never happen is a wrong answer, a hang, or an error; a rebuild may.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
import torch._dynamo
from rich.console import Console

import torch_mlc.dynamo_backend.entry.backend  # noqa: F401 - loaded once, before the processes are forked

PATIENCE = 240.0
"""Seconds after which a process counts as hanging."""


def work() -> None:
    """Compile and run a few programs, forward and backward. Raises AssertionError for an answer that is not eager's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    x = torch.randn(5, 6)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    actual = torch.autograd.grad(torch.compile(model, backend="mlc")(x).square().sum(), list(model.parameters()))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for n in (3, 17):
            y = torch.randn(n, 33)
            fn = torch.compile(lambda t, n=n: torch.softmax(t * n, -1) + t.cumsum(0), backend="mlc", dynamic=False)
            torch.testing.assert_close(fn(y), torch.softmax(y * n, -1) + y.cumsum(0), rtol=1e-4, atol=1e-5)


@dataclass
class Child:
    """A process forked from this one, which has torch loaded and has compiled nothing."""

    folder: Path
    # Bytes that a file may have, as if the disk were full behind them; 0: as many as it likes.
    most: int = 0
    pid: int = 0
    begun: float = field(default_factory=time.monotonic)

    def start(self) -> Child:
        """Fork; the child works and ends, with status 0 where all was right."""
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.environ["MLC_CACHE_DIR"] = str(self.folder)
                os.environ["MLC_STRICT"] = "1"
                if self.most:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (self.most, self.most))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return self

    def kill(self) -> None:
        """End it at once, whatever it is doing."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self) -> str:
        """Wait; "" where it was right, else what went wrong."""
        while time.monotonic() - self.begun < PATIENCE:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return "" if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"
            time.sleep(0.02)
        self.kill()
        return f"hangs (no end in {PATIENCE:g} s)"


@contextmanager
def folder() -> Iterator[Path]:
    """A cache folder."""
    with tempfile.TemporaryDirectory(prefix="mlc_trial_") as path:
        yield Path(path, "cache")


def entries(path: Path) -> list[Path]:
    """The files of all entries."""
    return [p for p in path.glob("v1/*/*") if p.is_file() and p.parent.name != "locks"]


def fill(path: Path) -> None:
    """Let a process compile everything into a folder."""
    fault = Child(path).start().end()
    assert not fault and entries(path), fault or "nothing was kept"


def at_once(count: int) -> list[str]:
    """Processes that begin together on an empty cache."""
    with folder() as path:
        children = [Child(path).start() for _ in range(count)]
        return [c.end() for c in children]


def killed(count: int, rng: random.Random) -> list[str]:
    """Processes killed at random moments of their work, each followed by one that must find nothing wrong."""
    with folder() as path:
        begun = time.monotonic()
        fill(path)
        whole = time.monotonic() - begun
    faults = []
    with folder() as path:
        for k in range(count):
            if k % 5 == 0:
                shutil.rmtree(path, ignore_errors=True)
            child = Child(path).start()
            time.sleep(rng.uniform(0.0, whole))
            child.kill()
            faults.append(Child(path).start().end())
            if (k + 1) % 10 == 0:
                print(f"    {k + 1} killed, {sum(map(bool, faults))} wrong", flush=True)
    return faults


def damaged(rng: random.Random) -> list[str]:
    """Entries cut short, with a bit turned, of somebody else's, of another version, or another entry's."""

    def cut(data: bytes) -> bytes:
        return data[: rng.randrange(len(data))]

    def turned(data: bytes) -> bytes:
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]

    def foreign(data: bytes) -> bytes:
        return rng.randbytes(len(data))

    def skewed(data: bytes) -> bytes:
        return data.replace(b"torch-mlc cache 1", b"torch-mlc cache 2", 1)

    faults = []
    for change in (cut, turned, foreign, skewed, lambda data: b""):
        with folder() as path:
            fill(path)
            for entry in entries(path):
                entry.write_bytes(change(entry.read_bytes()))
            faults += [Child(path).start().end(), Child(path).start().end()]
    with folder() as path:
        fill(path)
        for kind in ("graph", "kernel"):
            files = [p for p in entries(path) if p.parent.name == kind]
            for a, b in zip(files, files[1:] + files[:1]):
                shutil.copy(a, b.with_suffix(".new"))
            for b in files:
                b.with_suffix(".new").rename(b)
        faults += [Child(path).start().end(), Child(path).start().end()]
    return faults


def bad_disks() -> list[str]:
    """A folder that cannot be written, one that is a file, one on a full device, one that is full within an entry."""
    faults = []
    for most in (1, 300, 3000):
        with folder() as path:
            faults += [Child(path, most).start().end(), Child(path).start().end()]
    with folder() as path:
        fill(path)
        for p in (path, path / "v1", *(path / "v1").iterdir()):
            p.chmod(0o500)
        faults.append(Child(path).start().end())
        for p in (path, path / "v1", *(path / "v1").iterdir()):
            p.chmod(0o700)
    with folder() as path:
        path.parent.mkdir(exist_ok=True)
        path.write_text("no folder")
        faults.append(Child(path).start().end())
    faults.append(Child(Path("/dev/full")).start().end())
    faults.append(Child(Path("/proc/no_such_folder")).start().end())
    return faults


@click.command()
@click.option("--kills", default=100, help="processes to kill")
@click.option("--processes", default=8, help="processes that begin together")
@click.option("--seed", default=0)
def main(kills: int, processes: int, seed: int) -> None:
    """Run every trial; the status is 1 where one fails."""
    torch.set_num_threads(1)
    console = Console()
    rng = random.Random(seed)
    trials: dict[str, Callable[[], list[str]]] = {
        f"{processes} processes at once": lambda: at_once(processes),
        f"{kills} processes killed": lambda: killed(kills, rng),
        "damaged entries": lambda: damaged(rng),
        "disks that cannot be used": bad_disks,
    }
    failed = 0
    for name, trial in trials.items():
        begun = time.monotonic()
        faults = trial()
        bad = [f for f in faults if f]
        failed += len(bad)
        console.print(f"{name}: {len(faults) - len(bad)} of {len(faults)} right, {time.monotonic() - begun:.0f} s")
        for fault in bad:
            console.print(f"    {fault}", markup=False)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
