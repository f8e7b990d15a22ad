"""Compiled functions in worker processes: forked and spawned ones, and the threads that each may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm_processes

FORKED = """
import torch
from torch.utils.data import DataLoader

def f(x):
    return torch.softmax(x * 2 + 1, -1) @ x.t()

class Items(torch.utils.data.Dataset):
    # The process that forks has compiled items of 300 rows; those of others are compiled in the workers.
    def __init__(self, fn):
        self.fn = fn
    def __len__(self):
        return 3
    def __getitem__(self, k):
        x = torch.randn(300 if k % 2 else 200, 1000, generator=torch.Generator().manual_seed(k))
        return k, self.fn(x)

torch.set_num_threads(2)
for host in ("python", "native"):
    torch._dynamo.reset()
    fn = torch.compile(f, backend="mlc", dynamic=False, options={"host_program": host})
    items = Items(fn)
    items[1]
    loader = DataLoader(items, batch_size=None, num_workers=1, multiprocessing_context="fork")
    got = {int(k): y for k, y in loader}
    assert sorted(got) == list(range(3))
    for k, y in got.items():
        torch.testing.assert_close(y, Items(f)[k][1])
    torch.testing.assert_close(items[1][1], Items(f)[1][1])
"""


def test_workers_that_are_forked_run_what_was_compiled_and_compile():
    warm_processes.start(FORKED).output()


TEAMS = """
import contextlib, os, torch

with contextlib.suppress(ImportError):  # torch shows bars where it is there, and it has a thread of its own
    import tqdm

    tqdm.tqdm.monitor_interval = 0

def f(x):
    return (torch.sin(x) * 2).sum(-1)

def threads():
    return len(os.listdir("/proc/self/task"))

x = torch.randn(512, 4096)
torch.set_num_threads(3)
for host in ("python", "native"):
    torch._dynamo.reset()
    fn = torch.compile(f, backend="mlc", options={"host_program": host})
    torch.set_num_threads(1)
    before = threads()
    fn(x)
    first = fn(x)
    assert threads() == before, "a thread more than torch allows"
    torch.set_num_threads(3)
    assert torch.equal(fn(x), first), "the order of a sum depends on the team"
    if host == "python":
        assert threads() == before + 2, "fewer threads than torch allows"
    torch.set_num_threads(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux tells them")
def test_teams_are_as_large_as_torch_says_at_the_call():
    warm_processes.start(TEAMS).output()


SPAWNING = """
import sys
import torch
import torch.multiprocessing as multiprocessing

def f(x):
    return torch.softmax(x @ x.t(), -1) + 1

def work(k, results):
    fn = torch.compile(f, backend="mlc")
    x = torch.arange(12.0).view(3, 4) + k
    results.put((k, torch.allclose(fn(x), f(x))))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    workers = [context.Process(target=work, args=(k, results)) for k in range(2)]
    for w in workers:
        w.start()
    print(sorted(results.get() for _ in workers))
    for w in workers:
        w.join()
"""


@pytest.mark.slow
def test_workers_that_are_spawned_compile_at_once(tmp_path: Path):
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    done = subprocess.run([sys.executable, script], env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(0, True), (1, True)]"
