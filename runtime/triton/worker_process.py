"""A process that works for this one, and the wire to it.

It is started by running a file in a new interpreter: nothing is forked that has threads or a GPU open, and a user's
script is not run again. It ends with this process however that ends, and when nobody has asked for a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from .compile import StoppedError
from .worker_wire import message_bytes

IDLE_SECONDS = 60.0
# How often a worker is asked whether whoever waits still wants the answer.
_SLICE_SECONDS = 0.2
# The descriptor of standard error.
_ERRORS = 2
CRASHES = tuple(-s for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))


class RefusedError(Exception):
    """A worker told an error; the text is what it said."""


class LostError(Exception):
    """A worker could not be started, ended or did not answer. ``status`` is that of a process that ended; one that had
    ``rested`` went away because it had nothing to do."""

    def __init__(self, text: str, status: int | None = None, *, rested: bool = False) -> None:
        super().__init__(text)
        self.status, self.rested = status, rested


class Worker:
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
        # Whatever who asks notes of what the process has.
        self.known: set[str] = set()
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

    def ask(
        self, request: dict[str, Any], parts: Sequence[bytes], seconds: float, stop: threading.Event
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to a request, both plain JSON with runs of bytes. Raises RefusedError where the worker tells an
        error, LostError and StoppedError; after the last two the worker is to be ended."""
        message: dict[str, Any] = {"request": request}
        path, environment = [str(Path(p).absolute()) for p in sys.path], dict(os.environ)
        if path != self._path:
            message["path"] = path
        if environment != self._environment:
            message["environment"] = environment
        deadline = time.monotonic() + seconds
        self._send(message_bytes(message, *parts), deadline, stop)
        self._path, self._environment = path, environment
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

    def _answer(self, deadline: float, stop: threading.Event) -> tuple[dict[str, Any], list[bytes]]:
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
        at = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        return message, [bytes(body[a:b]) for a, b in pairwise(at)]

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


def worker_command(file: Path, idle_seconds: float = IDLE_SECONDS) -> list[str]:
    """What starts a worker of a file that goes when nobody has asked for so long; nothing where no interpreter of ours
    can be run as a program of its own."""
    name = Path(sys.executable or "").name
    if os.name != "posix" or not name.startswith(("python", "pypy")) or getattr(sys, "frozen", False):
        return []
    return [sys.executable, "-I", "-W", "ignore", str(file), str(os.getpid()), str(idle_seconds)]
