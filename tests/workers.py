"""Processes that may crash or hang, and how to speak with them: requests and answers are lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
# What a worker does with a request; it answers by calling its second argument with the parts of a message.
Handler: TypeAlias = "Callable[[dict[str, Any], Callable[..., None]], None]"


class WorkerLost(Exception):
    """A worker ended, or did not answer in time."""

    @property
    def status(self) -> str:
        """``hang`` or ``crash``."""
        return "hang" if "no answer" in str(self) else "crash"


@dataclass(slots=True)
class Worker:
    """One process of ``module``, which calls ``serve``. It is started when it is first needed."""

    module: str
    cache: Path
    process: subprocess.Popen[bytes] | None = None
    buffer: bytes = b""

    def ask(self, **request: Any) -> None:
        """Send a request. Raises WorkerLost, after which the worker is gone."""
        process = self.process or self.begin()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.end()
            raise WorkerLost("process ended before it was asked") from None

    def begin(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, "MLC_STRICT": "1", "MLC_CACHE_DIR": str(self.cache),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "torch"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.answer(300)
        return self.process

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next message. Raises WorkerLost, after which the worker is gone.

        ``seconds`` are those of the processor, since who shares the machine may leave a worker little of it; one that
        waits for something gets ten times as many on the clock.
        """
        assert self.process is not None and self.process.stdout is not None
        spent, last = processor_seconds(self.process.pid) + seconds, time.monotonic() + 10 * seconds
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], seconds)
            if not ready and (processor_seconds(self.process.pid) >= spent or time.monotonic() >= last):
                self.end()
                raise WorkerLost(f"no answer in {seconds:g} s")
            if not ready:
                continue
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                code = self.process.wait()
                self.end()
                raise WorkerLost(f"process ended with {code}")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def processor_seconds(pid: int) -> float:
    """The processor's time that a process has used, of all its threads."""
    # Behind the name, which may hold spaces: user and system time are fields 14 and 15 of proc(5)'s stat.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(load: Callable[[], Handler]) -> None:
    """In a worker: handle requests until the input ends. ``load`` imports what is slow and gives the handler."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    handle = load()
    say(ready=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            handle(json.loads(line), say)


def leave_guards_untimed() -> None:
    """Torch times the guards of each frame that it has compiled, and empties the processor's caches for that: a third
    of compiling something small, and a loss for whoever shares the machine. No test reads what it finds.
    """
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *_: 0.0


def side_by_side(count: int, serve: Callable[[], None]) -> None:
    """Run ``serve`` on so many threads, each of which talks to a worker of its own, until all have returned."""
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
