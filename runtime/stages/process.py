"""Checks by name in a process of their own. One that crashes the process or takes too long ends that check alone: the
others go on in another process.

The process is given a request as its last argument, JSON with ``checks`` (names), ``each`` (seconds of one check) and
``rows`` (a file descriptor). It writes rows there, a JSON object a line: ``{"begin": name}``, then what the check
tells, then ``{"end": name}`` (``child.py``). What it prints goes nowhere, but for its end, which says why a process was
lost.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
OnRow: TypeAlias = Callable[[str, Row], None]
# Seconds that a process may take to start: it imports torch.
START_SECONDS = 90.0
# What a process that is too late may take beyond its time to tell where it stands, and how often that is looked at.
_GRACE_SECONDS, _SLICE_SECONDS = 5.0, 0.2
# Of what a process prints, the end.
_TAIL_BYTES = 8 << 10
# Longer lines are no rows.
_ROW_BYTES = 1 << 20
_TIME_UP = "was stopped: the time of all checks was up"
_PLACE = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')
_WATCH = re.compile(r"^Timeout \(\d+:", re.MULTILINE)
_FAULT = re.compile(r"^(Fatal Python error: .*|Timeout \(.*)$", re.MULTILINE)


@dataclass(slots=True)
class _Process:
    """One process. ``begun`` is the check that it is in, ``done`` are those that ended."""

    popen: subprocess.Popen[bytes]
    rows: int
    since: float
    begun: str = ""
    done: list[str] = field(default_factory=list)
    text: bytes = b""
    tail: bytes = b""
    unread: int = 0

    def take(self, data: bytes, names: Sequence[str], on_row: OnRow, on_end: Callable[[str], None]) -> None:
        """Rows that came; what is none is counted."""
        *lines, self.text = (self.text + data).split(b"\n")
        if len(self.text) > _ROW_BYTES:
            self.text, self.unread = b"", self.unread + 1
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                self.unread += 1
            elif row.get("begin") in names:
                self.begun, self.since = row["begin"], time.monotonic()
            elif row.get("end") in names:
                self.done.append(row["end"])
                self.begun, self.since = "", time.monotonic()
                on_end(row["end"])
            elif self.begun:
                on_row(self.begun, row)
            else:
                self.unread += 1

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> None:
        """Kill it with all that it started."""
        # It may have ended, and what it started not. Nobody has waited for it yet, so the number is still its own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def run_checks(
    command: Sequence[str],
    checks: Sequence[str],
    on_row: OnRow,
    *,
    each: float,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    on_end: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Run checks in processes of ``command``, and give their rows to ``on_row`` with their names as they come; a check
    that is done, or lost by its own fault, is told to ``on_end``.

    A check that took more than ``each`` seconds, or whose process ended in it, has a row ``{"lost": why, "output":
    text}`` last. All of them together may take ``seconds``: returns the names of those that did not begin in that time,
    or at all since no process starts. An interrupt ends the process and is raised.
    """
    left, deadline = list(checks), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        done, lost = _one_process(command, left, on_row, on_end, each, deadline, environment)
        left = [name for name in left if name not in done]
        if lost is None:
            continue
        name, row = lost
        if name:
            on_row(name, row)
            left.remove(name)
            if not row["lost"].startswith(_TIME_UP):
                on_end(name)
        elif not done:  # it does not even start
            on_row(left[0], row)
            return left[1:]
    return left


def _one_process(
    command: Sequence[str],
    checks: Sequence[str],
    on_row: OnRow,
    on_end: Callable[[str], None],
    each: float,
    deadline: float,
    environment: Mapping[str, str] | None,
) -> tuple[list[str], tuple[str, Row] | None]:
    """The checks that ended in one process, and in which it was lost and why, "" for between two."""
    reader, writer = os.pipe()
    request = {"checks": list(checks), "each": each, "rows": writer}
    try:
        popen = subprocess.Popen(
            [*command, json.dumps(request)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(writer,), start_new_session=True, env=None if environment is None else dict(environment),
        )  # fmt: skip
    except OSError as error:
        os.close(reader)
        return [], ("", {"lost": f"cannot be started ({error})", "output": ""})
    finally:
        os.close(writer)
    process = _Process(popen, reader, time.monotonic() + START_SECONDS)
    try:
        late = _follow(process, checks, on_row, on_end, each, deadline)
    finally:
        process.end()
        os.close(reader)
        assert popen.stdout is not None
        popen.stdout.close()
    return process.done, _why_lost(process, checks, each, late)


def _follow(
    process: _Process,
    checks: Sequence[str],
    on_row: OnRow,
    on_end: Callable[[str], None],
    each: float,
    deadline: float,
) -> str:
    """Take rows until the process ends; or why it is not waited for any longer."""
    assert process.popen.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.rows, selectors.EVENT_READ, "rows")
        selector.register(process.popen.stdout, selectors.EVENT_READ, "output")
        while selector.get_map():
            ended = process.ended
            ready = selector.select(0 if ended else _SLICE_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.data == "rows":
                    process.take(data, checks, on_row, on_end)
                else:
                    process.tail = (process.tail + data)[-_TAIL_BYTES:]
            if ended and not ready:
                break  # what it started may hold the pipes
            now = time.monotonic()
            if now > process.since + each + _GRACE_SECONDS:
                return f"took more than {each:g} s"
            if now > deadline + _GRACE_SECONDS:
                return _TIME_UP
    until = time.monotonic() + _GRACE_SECONDS
    while not process.ended and time.monotonic() < until:  # nothing more can come of it
        time.sleep(0.01)
    return ""


def _why_lost(process: _Process, checks: Sequence[str], each: float, late: str) -> tuple[str, Row] | None:
    status = process.popen.returncode
    if not process.begun:
        whole = set(process.done) >= set(checks)
        another = bool(process.done) and status == 0  # is to do the rest
        if late == _TIME_UP or (not late and (whole or another)):
            return None
    output = process.tail.decode(errors="replace")
    if not late and process.begun and _WATCH.search(output):  # it ended itself
        late = f"took more than {each:g} s"
    why = late or (f"was ended by {_signal(-status)}" if status < 0 else f"ended with status {status}")
    if process.unread:
        why += f", and wrote {process.unread} lines that are no rows"
    told = last_words(output)
    return process.begun, {"lost": f"{why}: {told}" if told else why, "output": output}


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(output: str) -> str:
    """What the end of a process's output says of why it ended: a fault with the innermost line, or the last line."""
    fault = None
    for fault in _FAULT.finditer(output):  # noqa: B007  # the last
        pass
    if fault is not None:
        place = _PLACE.search(output, fault.end())
        head = "" if fault[1].startswith("Timeout") else fault[1].removeprefix("Fatal Python error: ") + " "
        where = f"in {place[3]}, {place[1]}:{place[2]}" if place else ""
        return f"{head}{where}".strip()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
