"""A process with one exported model: ``python -m benchmarks.deploy.worker RUNTIME FOLDER`` does what each line of its
standard input asks for, as JSON, and answers each by a line.

``write`` exports the program in the folder, ``open`` loads what was written and calls it once, ``warm_up`` and then
``sample`` call and time it, and ``memory`` tells the most that the process has held. Nothing is imported that the
runtime does not need itself: a library is called without torch.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..stats import CLOCKS, seconds_each, warm


class Worker:
    """The model of a folder under one runtime."""

    def __init__(self, runtime: str, folder: Path) -> None:
        self.folder = folder
        started = time.perf_counter()
        self.runtime = importlib.import_module(f"{__package__}.runtimes.{runtime}")
        self.import_s = time.perf_counter() - started
        self.call: Any = None

    def write(self, threads: int) -> Mapping[str, Any]:
        """Export: seconds, and bytes of what a user would take along."""
        for name in getattr(self.runtime, "WRITES_WITH", ()):
            importlib.import_module(name)
        started = time.perf_counter()
        files = self.runtime.write(self.folder, threads)
        seconds = time.perf_counter() - started
        return {"write_s": seconds, "bytes": sum(p.stat().st_size for p in files)}

    def open(self, threads: int) -> Mapping[str, Any]:
        """Load and call once: seconds of importing, and of the rest. The results lie in the folder afterwards."""
        inputs = self.runtime.inputs(self.folder)
        started = time.perf_counter()
        self.call = self.runtime.load(self.folder, inputs, threads)
        results = self.call()
        seconds = time.perf_counter() - started
        self.runtime.keep(self.folder, results)
        return {"import_s": self.import_s, "open_s": seconds}

    def warm_up(self, seconds: float) -> Mapping[str, Any]:
        """Call for some seconds."""
        warm(self.call, seconds)
        return {}

    def sample(self, clock: str, calls: int) -> Mapping[str, Any]:
        """Mean seconds of some calls."""
        return {"seconds": seconds_each(self.call, calls, CLOCKS[clock])}

    def memory(self) -> Mapping[str, Any]:
        """The most bytes of memory that the process has held."""
        # What getrusage tells begins with what the parent had when it made this process.
        (line,) = [t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith("VmHWM:")]
        return {"resident": int(line.split()[1]) * 1024}


def main() -> None:
    runtime, folder = sys.argv[1:]
    # What libraries print does not come between answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    worker: Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            worker = worker or Worker(runtime, Path(folder))
            answer = dict(getattr(worker, asked.pop("do"))(**asked))
        except Exception as error:
            # Any failure of a runtime is a result of the benchmark.
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
