"""Workers that compile GPU kernels: what they make, and what happens where they die, hang, lie or never begin."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import sympy

from torch_mlc.codegen.kernel import KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.value import symbol
from torch_mlc.ir.nest.loops import Buffer
from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.compile.device_library import device_library
from torch_mlc.runtime.compile.kernels import KernelStore
from torch_mlc.runtime.triton import worker_pool
from torch_mlc.runtime.triton.compile import GpuBinary, GpuCompileError, StoppedError, compile_triton
from torch_mlc.runtime.triton.worker_pool import WorkerPool, worker_command

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not worker_command(), reason="no interpreter that can be run as a program of its own")
SM90 = gpu_target("cuda:sm_90")
LOGGER = "torch_mlc.runtime.triton.worker_pool"


def source(value: str = "x * 2") -> KernelSource:
    text = f"""import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def kernel(in0_ptr, out0_ptr, s0):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    m = i < s0
    x = tl.load(in0_ptr + i, mask=m, other=0)
    tl.store(out0_ptr + i, {value}, mask=m)
"""
    n = symbol("s0")
    buffers = tuple(Buffer(x, (n,), (sympy.S.One,), DType.FLOAT32) for x in ("in0", "out0"))
    meta = (("index", "i32"), ("num_warps", 4), ("num_stages", 1), ("enable_fp_fusion", True), ("divisor:s0", 16))
    return KernelSource("kernel", "triton", text, buffers, ("s0",), (), meta)


@contextmanager
def pool(command: list[str] | None = None, seconds: float = 300.0) -> Iterator[WorkerPool]:
    made = WorkerPool(command, seconds)
    try:
        yield made
    finally:
        made.end()


def script(text: str) -> list[str]:
    """A worker that does as it is told in Python; ``wire`` is what it speaks through."""
    return [sys.executable, "-c", f"import os, signal, socket, time\nwire = socket.socket(fileno=0)\n{text}"]


def compiled(workers: WorkerPool, kernel: KernelSource, stop: threading.Event | None = None) -> GpuBinary:
    return compile_triton(kernel, SM90, run=partial(workers.run, stop=stop or threading.Event()))


@contextmanager
def process(pid: int) -> Iterator[int]:
    """A descriptor that can be read from once a process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 60)[0])


def test_workers_make_what_this_process_makes():
    sources = [source(f"x * {k}") for k in range(8)]
    with pool() as workers:
        with ThreadPoolExecutor(2) as threads:
            made = list(threads.map(partial(compiled, workers), sources))
        assert len(workers.pids) <= 2
        for pid in workers.pids:
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        again = compiled(workers, sources[3])
    assert made == [compile_triton(s, SM90) for s in sources] and again == made[3]


def test_workers_link_the_library_that_was_made_ready():
    kernel, other = source("libdevice.erf(x)"), source("libdevice.erf(x) * 2")
    library = device_library(KernelStore(None), kernel, SM90)
    assert library is not None
    with pool() as workers:
        for k in (kernel, other):
            made = compile_triton(k, SM90, library=library, run=partial(workers.run, stop=threading.Event()))
            assert made == compile_triton(k, SM90, library=library)
        assert len(workers.pids) == 1


def test_a_worker_sees_what_the_environment_is_now(monkeypatch):
    def lines(made: GpuBinary) -> bool:
        return ".loc" in made.assembly

    with pool() as workers:
        before = compiled(workers, source())
        monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0" if not lines(before) else "1")
        after = compiled(workers, source())
        assert lines(before) != lines(after) and len(workers.pids) == 1


def test_what_triton_refuses_is_told_as_if_it_were_refused_here():
    wrong = source("tl.nothing(x)")
    told = []
    with pool() as workers:
        for run in (compile_triton, lambda s, _: compiled(workers, s)):
            with pytest.raises(GpuCompileError) as caught:
                run(wrong, SM90)
            told.append(str(caught.value))
        assert told[0] == told[1] and "tl.nothing" in told[0]
        assert compiled(workers, source()) == compile_triton(source(), SM90)


@pytest.mark.parametrize(
    "worker, what",
    [
        (["/nowhere/python"], "cannot be started"),
        (script("raise SystemExit(3)"), "ended with 3"),
        (script("raise SystemExit(0)"), "ended with 0"),
        (script("wire.recv(1); os.kill(os.getpid(), signal.SIGKILL)"), "ended with -9"),
        (script("time.sleep(1000)"), "did not answer in time"),
        (script("wire.recv(1000000); wire.sendall(b'{\"lengths\": [5')\ntime.sleep(1000)"), "did not answer in time"),
        (script("wire.recv(1000000); wire.sendall(b'no message\\n')\ntime.sleep(1000)"), "cannot be read"),
        (
            script(
                "wire.recv(1000000)\n"
                'wire.sendall(b\'{"answer": {}, "lengths": [1, 1], "hash": "0"}\\nab\')\n'
                "time.sleep(1000)"
            ),
            "arrived damaged",
        ),
    ],
)
def test_a_worker_that_is_lost_costs_a_line_in_the_log(worker, what, caplog):
    stuck = "time" in what
    with caplog.at_level(logging.WARNING, LOGGER), pool(worker, 0.5 if stuck else 300.0) as workers:
        assert compiled(workers, source()) == compile_triton(source(), SM90)
        assert not workers.pids
    (line,) = (r.getMessage() for r in caplog.records if r.name == LOGGER)
    assert what in line and "kernel is compiled in this process" in line


def test_who_does_not_read_is_not_waited_for(caplog, monkeypatch):
    """More than a socket holds is on its way to a process that takes none of it."""
    monkeypatch.setenv("MLC_TEST_PADDING", "x" * 100_000)
    monkeypatch.setenv("MLC_TEST_MORE", "x" * 100_000)
    monkeypatch.setenv("MLC_TEST_AND_MORE", "x" * 100_000)
    with caplog.at_level(logging.WARNING, LOGGER), pool(script("time.sleep(1000)"), 0.5) as workers:
        assert compiled(workers, source()).code
    assert "did not answer in time" in caplog.text


def test_after_three_losses_no_worker_is_started(caplog):
    with caplog.at_level(logging.WARNING, LOGGER), pool(script("raise SystemExit(3)")) as workers:
        for k in range(5):
            assert compiled(workers, source(f"x + {k}")).code
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert len(lines) == 3 and ["and so are all others" in x for x in lines] == [False, False, True]


def test_a_compiler_that_crashes_takes_its_worker_and_not_this_process():
    crashing = script("wire.recv(1); os.kill(os.getpid(), signal.SIGSEGV)")
    with pool(crashing) as workers, pytest.raises(GpuCompileError, match=r"the compiler crashed \(SIGSEGV\)"):
        compiled(workers, source())


def test_a_worker_that_is_killed_as_it_compiles(caplog):
    with caplog.at_level(logging.WARNING, LOGGER), pool() as workers, ThreadPoolExecutor(1) as threads:
        making = threads.submit(compiled, workers, source())
        while not workers.pids:
            assert not making.done()
        os.kill(workers.pids[0], signal.SIGKILL)
        assert making.result(300) == compile_triton(source(), SM90)
    assert caplog.text.count("ended with -9") == 1


def test_a_worker_goes_when_nobody_asks_and_another_takes_its_place(caplog):
    with caplog.at_level(logging.WARNING, LOGGER), pool(worker_command(0.01)) as workers:
        first = compiled(workers, source())
        (pid,) = workers.pids
        with process(pid) as gone:
            assert ended(gone)
        assert compiled(workers, source()) == first
        assert workers.pids != (pid,)
    assert not [r for r in caplog.records if r.name == LOGGER]


def test_who_no_longer_wants_the_answer_ends_the_worker():
    stop = threading.Event()
    with pool(script("time.sleep(1000)")) as workers, ThreadPoolExecutor(1) as threads:
        making = threads.submit(compiled, workers, source(), stop)
        while not workers.pids:
            assert not making.done()
        (pid,) = workers.pids
        with process(pid) as gone:
            stop.set()
            with pytest.raises(StoppedError):
                making.result(60)
            assert ended(gone)
        with pytest.raises(StoppedError):
            compiled(workers, source(), stop)


@pytest.mark.parametrize("executable, frozen", [("", False), ("/usr/bin/blender", False), ("/opt/app/python3", True)])
def test_a_program_that_only_contains_an_interpreter_is_not_started_again(executable, frozen, monkeypatch):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    assert worker_command() == []
    with pool() as workers:
        assert compiled(workers, source()).code and not workers.pids


def test_a_fork_leaves_the_workers_to_its_parent():
    first, stop = worker_pool.worker_pool(), threading.Event()
    made = compiled(first, source())
    (pid,) = first.pids
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        told = {}
        try:
            own = worker_pool.worker_pool()
            told = {"same": compiled(own, source(), stop) == made, "pids": own.pids, "old": first.pids}
            own.end()
            first.end()
        finally:
            os.write(write, json.dumps(told).encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert told["same"] and len(told["pids"]) == 1 and told["pids"] != [pid] and told["old"] == []
    assert compiled(first, source()) == made and first.pids == (pid,)
    first.end()
