"""Workers around whole programs: scripts without a guard, forks, spawned processes, interrupts, parents that die."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torch_mlc.runtime.triton.worker_pool import worker_command

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(not worker_command(), reason="no interpreter that can be run as a program of its own"),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ends of processes are waited for by descriptors"),
]
# A graph of several kernels for a GPU that is not here, by a program that has no guard and prints what it does.
PROGRAM = """
import os, sys
import torch, torch_mlc
from torch_mlc.dynamo_backend.entry.capture import capture
from torch_mlc.dynamo_backend.entry.compile import compile_graph
from torch_mlc.dynamo_backend.tracing.fake_device import retarget
from torch_mlc.runtime.settings.options import Options
from torch_mlc.runtime.triton.worker_pool import worker_pool

# Torch's ops run while a graph is captured, and the threads that share them are not there after a fork.
torch.set_num_threads(1)


def kernels(seed=0, workers=2):
    '''Names and hashes of a graph's kernels, compiled through the cache.'''
    def f(x):
        for k in range(6):
            x = (x * (seed + k + 1)).exp().cumsum(k % 2)
        return x

    (gm,) = capture(f, (torch.rand(64, 64),))
    retarget([gm], "cuda")
    options = Options.resolve(None, {"target": "cuda:sm_90", "compile_workers": workers}, os.environ)
    compiled = compile_graph(gm, (), options=options, load=False)
    return {v: hash(k.payload) for v, k in kernel_codes(options).items()}


def kernel_codes(options):
    # Without the library that kernels are compiled with: who finds all kernels on disk never asks for it.
    from torch_mlc.runtime.compile.kernels import kernel_store_of
    return {v: k for v, k in sorted(kernel_store_of(options)._codes.items()) if k.language == "triton"}
"""


@contextmanager
def program(folder: Path, text: str, **how: object) -> Iterator[subprocess.Popen[str]]:
    file = folder / "program.py"
    file.write_text(PROGRAM + text)
    environment = {**os.environ, "MLC_CACHE_DIR": str(folder / "cache"), "PYTHONHASHSEED": "0"}
    started = subprocess.Popen(
        [sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True, cwd=folder, **how,  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


def said(started: subprocess.Popen[str], given: str = "") -> str:
    out, errors = started.communicate(given, 500)
    assert started.returncode == 0, errors
    return out


@contextmanager
def descriptors(pids: str) -> Iterator[list[int]]:
    """What can be read from once processes have ended."""
    found = [os.pidfd_open(int(pid)) for pid in pids.split()]
    try:
        yield found
    finally:
        for descriptor in found:
            os.close(descriptor)


def ended(descriptors: list[int]) -> bool:
    return all(select.select([d], [], [], 60)[0] for d in descriptors)


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None and started.stderr is not None
    found = started.stdout.readline()
    assert found, started.stderr.read()
    return found


def test_a_script_without_a_guard_is_run_once_and_keeps_its_input_and_output(tmp_path):
    text = """
print("begun")
found = kernels()
print(len(found) > 2, len(worker_pool().pids) > 0)
print(sys.stdin.read(), end="")
"""
    with program(tmp_path, text) as started:
        assert said(started, "a line\nanother\n") == "begun\nTrue True\na line\nanother\n"


@pytest.mark.slow
def test_graphs_are_the_same_with_workers_and_without(tmp_path):
    text = "print(sorted(kernels(workers=2).items()))\n"
    made = []
    for name, content in (("with", text), ("without", text.replace("=2", "=0"))):
        (tmp_path / name).mkdir()
        with program(tmp_path / name, content) as started:
            made.append(said(started))
    assert made[0] == made[1] and made[0].count(",") > 4


@pytest.mark.slow
def test_two_processes_on_one_cache(tmp_path):
    text = "print(sorted(kernels().items()))\n"
    with program(tmp_path, text) as one, program(tmp_path, text) as other:
        assert said(one) == said(other)


@pytest.mark.slow
def test_forks_and_spawned_processes_have_workers_of_their_own(tmp_path):
    text = """
import multiprocessing
def made(pipe):
    pipe.send((kernels(1), worker_pool().pids))

if __name__ == "__main__":
    multiprocessing.freeze_support()
    kernels(2)
    mine = worker_pool().pids
    found = []
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        ours, theirs = context.Pipe()
        os.environ["MLC_CACHE_DIR"] += how
        child = context.Process(target=made, args=(theirs,))
        child.start()
        found.append(ours.recv())
        child.join()
        assert child.exitcode == 0 and not set(found[-1][1]) & set(mine)
    kernels(3)
    assert {*worker_pool().pids} == {*mine}
    print(found[0][0] == found[1][0], [len(f[1]) for f in found])
"""
    with program(tmp_path, text) as started:
        assert said(started) == "True [2, 2]\n"


# Workers that are there, the one in the midst of a kernel that takes long, the other with nothing to do.
HELD = """
import threading
kernels()
pool = worker_pool()
long = "".join(f"    x = libdevice.erf(x) * {k}\\n" for k in range(3000))
from torch_mlc.runtime.triton.triton_stages import Request
text = f'''import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def long(p):
    i = tl.arange(0, 1024)
    x = tl.load(p + i)
{long}    tl.store(p + i, x)
'''
request = Request("long", text, {"p": "*fp32"}, {}, {}, "cuda", "sm_90", 32)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fork", ["", "\nif os.fork() == 0:\n    signal.pause()\n"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path, fork):
    """Even where a fork of it still holds what they hear from it."""
    text = f"""{HELD}
import signal
threading.Thread(target=lambda: pool.run(request, threading.Event()), daemon=True).start()
while not pool._busy:
    pass
{fork}
print(*pool.pids, flush=True)
signal.pause()
"""
    with program(tmp_path, text) as started, descriptors(line(started)) as gone:
        assert len(gone) == 2
        os.kill(started.pid, signal.SIGKILL)
        assert ended(gone)
        os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.slow
def test_an_interrupt_at_the_terminal_leaves_no_worker(tmp_path):
    text = f"""{HELD}
from torch_mlc.runtime.compile.compilers import Compilers
try:
    with Compilers(workers=2) as compilers:
        for name in "abc":
            compilers.start(name, lambda: compilers.run_triton(request), gpu=True)
        while len(pool._busy) < 2:
            pass
        print(*pool.pids, flush=True)
        compilers.making("a").result()
except KeyboardInterrupt:
    print(len(pool.pids), flush=True)
    raise SystemExit(0)
"""
    with program(tmp_path, text) as started, descriptors(line(started)) as gone:
        assert len(gone) == 2
        os.killpg(started.pid, signal.SIGINT)
        assert said(started) == "0\n" and ended(gone)


@pytest.mark.slow
def test_an_interrupt_while_a_graph_is_compiled(tmp_path):
    text = """
import signal, threading
def interrupt():
    while len(worker_pool().pids) < 2:
        pass
    print(*worker_pool().pids, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    kernels()
except KeyboardInterrupt:
    ours = [t for t in threading.enumerate() if t.name != "tqdm_monitor"]  # torch may show a bar
    print(len(ours), flush=True)
print(len(kernels()) > 2)
"""
    with program(tmp_path, text) as started, descriptors(line(started)) as gone:
        assert said(started) == "1\nTrue\n" and ended(gone)
