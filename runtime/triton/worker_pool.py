"""Processes that compile GPU kernels for this one (``triton_worker.py``), and what happens where they do not.

They are started when kernels are wanted, by running a file in a new interpreter: nothing is forked that has threads or
a GPU open, and a user's script is not run again. They end with this process however it ends, and when nobody has asked
for a minute. A worker that cannot be started, ends or does not answer costs one line in the log; its kernel is compiled
in this process. One that Triton or its assembler takes down with it fails as a kernel that does not compile, since it
would take this process down as well.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import threading
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path

from ..log import logger
from .compile import StoppedError
from .triton_stages import Answer, Request, answer_of, run_stages
from .worker_process import CRASHES, IDLE_SECONDS, LostError, RefusedError, Worker
from .worker_process import worker_command as process_command

_LOG = logger(__name__)
_FILE = Path(__file__).with_name("triton_worker.py")
ANSWER_SECONDS = 300.0
# So many losses in one process, and no worker is asked again.
_LOSSES = 3


class WorkerPool:
    """The workers of this process: as many as were asked for at once, each for one kernel at a time. Threads may ask.

    ``command`` starts a worker, ``seconds`` is how long it has for a kernel.
    """

    def __init__(self, command: list[str] | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self._command = worker_command() if command is None else command
        self._seconds = seconds
        self._lock = threading.Lock()
        self._here = threading.Lock()
        self._idle: list[Worker] = []
        self._busy: list[Worker] = []
        self._losses = 0 if self._command else _LOSSES

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that were alive when they were last looked at."""
        with self._lock:
            return tuple(w.pid for w in (*self._busy, *self._idle))

    def run(self, request: Request, stop: threading.Event) -> Answer:
        """Machine code of a kernel, from a worker or made here.

        Raises RefusedError or what Triton raises, and StoppedError once ``stop`` is set.
        """
        while self._losses < _LOSSES:
            try:
                return self._ask(request, stop)
            except LostError as lost:
                if lost.rested:
                    continue  # it went away just as it was asked
                self._losses += 1
                if lost.status in CRASHES:
                    name = signal.Signals(-lost.status).name
                    raise RefusedError(f"the compiler crashed ({name})") from lost
                given_up = ", and so are all others" if self._losses == _LOSSES else ""
                _LOG.warning(
                    "a worker that compiles GPU kernels %s; %s is compiled in this process%s. MLC_COMPILE_WORKERS=0 "
                    "starts none", lost, request.name, given_up,
                )  # fmt: skip
                break
        with self._here:
            return run_stages(request)

    def _ask(self, request: Request, stop: threading.Event) -> Answer:
        if stop.is_set():
            raise StoppedError
        worker = self._take()
        try:
            answer = self._answer(worker, request, stop)
        except RefusedError:
            self._put_back(worker)
            raise
        except BaseException:
            with self._lock:
                self._busy.remove(worker)
            worker.end()
            raise
        self._put_back(worker)
        return answer

    def _answer(self, worker: Worker, request: Request, stop: threading.Event) -> Answer:
        digest, text = (None, b"") if request.library is None else _library(request.library)
        new = digest is not None and digest not in worker.known
        plain = {**asdict(request), "library": digest}
        try:
            answer, (code, assembly) = worker.ask(plain, [text] if new else [], self._seconds, stop)
        except RefusedError:
            worker.known |= {digest} if digest is not None else set()
            raise
        worker.known |= {digest} if digest is not None else set()
        return answer_of(answer["answer"], code, assembly)

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    break
                worker.end()
            else:
                worker = Worker(self._command)
            self._busy.append(worker)
            return worker

    def _put_back(self, worker: Worker) -> None:
        with self._lock:
            self._busy.remove(worker)
            self._idle.append(worker)

    def end(self) -> None:
        """End all workers."""
        with self._lock:
            workers, self._idle, self._busy = [*self._idle, *self._busy], [], []
        for worker in workers:
            worker.end()

    def disown(self) -> None:
        """In a fork: the workers are the parent's, and whoever had the locks is not here."""
        self._lock, self._here = threading.Lock(), threading.Lock()
        for worker in (*self._idle, *self._busy):
            worker.disown()
        self._idle, self._busy = [], []


@cache
def worker_pool() -> WorkerPool:
    """The workers of this process, which end with it."""
    pool = WorkerPool()
    atexit.register(pool.end)
    return pool


def _forked() -> None:
    if worker_pool.cache_info().currsize:
        worker_pool().disown()
        worker_pool.cache_clear()


os.register_at_fork(after_in_child=_forked)


def worker_command(idle_seconds: float = IDLE_SECONDS) -> list[str]:
    """What starts a worker; nothing where no interpreter of ours can be run as a program of its own."""
    return process_command(_FILE, idle_seconds)


@lru_cache(maxsize=4)
def _library(file: str) -> tuple[str, bytes]:
    """The hash and the text of a file that stands in for libdevice."""
    text = Path(file).read_bytes()
    return hashlib.sha256(text).hexdigest(), text


def default_workers() -> int:
    """Workers where nobody says how many: one for each processor that this process may use, at most eight."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, 8)
