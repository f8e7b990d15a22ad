"""Commands as parts of the net: what they print is passed on, and none runs for ever."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from ..workers import ROOT
from .report import Finding, Part, Say

# What a worker of pytest tells the processes that it starts.
_OURS = ("PYTEST_XDIST_", "PYTEST_CURRENT_TEST")


def run(arguments: Sequence[str], limit: float, say: Say) -> tuple[int | None, list[str]]:
    """Run ``python arguments`` in the root of the repository. Its status, None where it did not end within ``limit``
    seconds, for which it and all that it started are killed; and the lines that it printed.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)} | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process.pid)

    timer = threading.Timer(limit, end)
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            say(lines[-1])
        status = process.wait()
    finally:
        timer.cancel()
        _kill(process.pid)
        process.wait()
    return None if late.is_set() else status, lines


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def command(part: Part, module: str, options: Sequence[str], limit: float, say: Say) -> None:
    """``python -m module options`` has to end with status 0. Of its lines, those that end in seconds say what ran, and
    those that are indented what was found.
    """
    status, lines = run(["-m", module, *options], limit, say)
    part.ran = "; ".join(line for line in lines if re.search(r", [\d.]+ s$", line))
    if status != 0:
        why = f"no end in {limit:g} s" if status is None else f"ended with {status}"
        told = "; ".join(line.strip() for line in lines if line.startswith("    ")) or "; ".join(lines[-3:])
        part.found.append(Finding(f"{module} {why}: {told}"[:600], f"python -m {module} {' '.join(options)}"))
