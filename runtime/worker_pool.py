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
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from .gpu import StoppedError
from .log import logger
from .triton_stages import Answer, Request, answer_of, run_stages
from .triton_worker import message_bytes

_LOG = logger(__name__)
_FILE = Path(__file__).with_name("triton_worker.py")
IDLE_SECONDS, ANSWER_SECONDS = 60.0, 300.0
# How often a worker is asked whether whoever waits still wants the answer.
_SLICE_SECONDS = 0.2
# So many losses in one process, and no worker is asked again.
_LOSSES = 3
# The descriptor of standard error.
_ERRORS = 2
_CRASHES = tuple(-s for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


class RefusedError(Exception):
    """Triton, in a worker, refused a kernel; the text is what it said."""


class LostError(Exception):
    """A worker could not be started, ended or did not answer. ``status`` is that of a process that ended; one that had
    ``rested`` went away because it had nothing to do."""

    def __init__(self, text: str, status: int | None = None, *, rested: bool = False) -> None:
        super().__init__(text)
        self.status, self.rested = status, rested


class _Worker:
    """One process. It is told what it does not know yet of this one's environment and libraries."""

    def __init__(self, command: list[str]) -> None:
        # A socket rather than pipes: who writes to a process that has ended gets an error whatever the program has
        # decided about signals, and who writes to one that does not read need not wait for ever.
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(_SLICE_SECONDS)
        # A session of its own: an interrupt at the terminal is for this process, which ends its workers, and what a
        # worker runs ends with it. Standard output is where standard error is: a user's own is for the user.
        try:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=_ERRORS, start_new_session=True, cwd="/"
            )
        except OSError as error:
            self._wire.close()
            raise LostError(f"cannot be started ({error})") from error
        finally:
            theirs.close()
        self._known: set[str] = set()
        self._environment: dict[str, str] | None = None
        self._path: list[str] | None = None
        self._answered = False

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, request: Request, seconds: float, stop: threading.Event) -> Answer:
        """What Triton makes of a kernel. Raises RefusedError, LostError and StoppedError; after the last two the
        worker is to be ended."""
        message: dict[str, Any] = {}
        path, environment = [str(Path(p).absolute()) for p in sys.path], dict(os.environ)
        if path != self._path:
            message["path"] = path
        if environment != self._environment:
            message["environment"] = environment
        digest, text = (None, b"") if request.library is None else _library(request.library)
        new = digest is not None and digest not in self._known
        message["request"] = {**asdict(request), "library": digest}
        deadline = time.monotonic() + seconds
        self._send(message_bytes(message, *([text] if new else [])), deadline, stop)
        self._path, self._environment = path, environment
        self._known |= {digest} if digest is not None else set()
        answer = self._answer(deadline, stop)
        self._answered = True
        return answer

    def _send(self, data: bytes, deadline: float, stop: threading.Event) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._wire.send(rest, getattr(socket, "MSG_NOSIGNAL", 0)) :]
            except TimeoutError:
                self._wait(deadline, stop)
            except OSError as error:
                raise self._lost() from error

    def _answer(self, deadline: float, stop: threading.Event) -> Answer:
        data = b""
        while b"\n" not in data:
            data += self._some(deadline, stop)
        line, _, rest = data.partition(b"\n")
        try:
            message = json.loads(line)
            lengths, digest = message["lengths"], message["hash"]
        except (ValueError, KeyError, TypeError) as error:
            raise LostError("gave an answer that cannot be read") from error
        body = bytearray(rest)
        while len(body) < sum(lengths):
            body += self._some(deadline, stop)
        if hashlib.sha256(body).hexdigest() != digest:
            raise LostError("gave an answer that arrived damaged")
        if "error" in message:
            self._answered = True
            raise RefusedError(message["error"])
        return answer_of(message["answer"], bytes(body[: lengths[0]]), bytes(body[lengths[0] :]))

    def _some(self, deadline: float, stop: threading.Event) -> bytes:
        while True:
            try:
                data = self._wire.recv(1 << 20)
            except TimeoutError:
                self._wait(deadline, stop)
                continue
            except OSError as error:
                raise self._lost() from error
            if not data:
                raise self._lost()
            return data

    def _wait(self, deadline: float, stop: threading.Event) -> None:
        if stop.is_set():
            raise StoppedError
        if time.monotonic() > deadline:
            raise LostError("did not answer in time")

    def _lost(self) -> LostError:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return LostError("hung up")
        return LostError(f"ended with {status}", status, rested=self._answered and status == 0)

    def end(self) -> None:
        """Kill the process, and whatever it runs."""
        with suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._wire.close()

    def disown(self) -> None:
        """Let go of the process in a fork, where it is nobody's child."""
        self._process.returncode = 0
        self._wire.close()


class WorkerPool:
    """The workers of this process: as many as were asked for at once, each for one kernel at a time. Threads may ask.

    ``command`` starts a worker, ``seconds`` is how long it has for a kernel.
    """

    def __init__(self, command: list[str] | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self._command = worker_command() if command is None else command
        self._seconds = seconds
        self._lock = threading.Lock()
        self._here = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
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
                if lost.status in _CRASHES:
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
            answer = worker.ask(request, self._seconds, stop)
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

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    break
                worker.end()
            else:
                worker = _Worker(self._command)
            self._busy.append(worker)
            return worker

    def _put_back(self, worker: _Worker) -> None:
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
    """What starts a worker that goes when nobody has asked for so long; nothing where no interpreter of ours can be run
    as a program of its own."""
    name = Path(sys.executable or "").name
    if os.name != "posix" or not name.startswith(("python", "pypy")) or getattr(sys, "frozen", False):
        return []
    return [sys.executable, "-I", "-W", "ignore", str(_FILE), str(os.getpid()), str(idle_seconds)]


@lru_cache(maxsize=4)
def _library(file: str) -> tuple[str, bytes]:
    """The hash and the text of a file that stands in for libdevice."""
    text = Path(file).read_bytes()
    return hashlib.sha256(text).hexdigest(), text


def default_workers() -> int:
    """Workers where nobody says how many: one for each processor that this process may use, at most eight."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, 8)
