"""Runs jobs in worker processes that may crash or hang, and writes every outcome down at once."""

from __future__ import annotations

import json
import queue
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..workers import Worker, WorkerLost, side_by_side
from .cases import Job

# What a sample may not end in.
FAULTS = ("wrong", "raises", "crash", "hang")


@dataclass(slots=True)
class Sweep:
    """``most`` bounds the samples of a job (0: all), ``patience`` is the seconds that one sample may take,
    ``again`` runs jobs once more in which something differed. So many samples are compiled ``at_once``, until a process
    is lost with them; one by itself goes through ``torch.compile``, which several do where they have to. With
    ``telling`` it is one sample of a job, which says most.
    """

    jobs: list[Job]
    results: Path
    most: int = 0
    workers: int = 1
    patience: float = 120.0
    again: bool = False
    at_once: int = 8
    telling: bool = False
    told: Callable[[dict[str, Any]], None] = lambda record: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Check every job, from the first sample on whose outcome is not written down."""
        written = read(self.results)
        before = {Job.of(r): r for r in written if r["sample"] is None}
        if self.again:
            for job in {job for (job, _), r in latest(written).items() if r["status"] in FAULTS}:
                before.pop(job, None)
        waiting: queue.SimpleQueue[tuple[Job, int]] = queue.SimpleQueue()
        for job in self.jobs:
            if job not in before:
                waiting.put((job, 0))
            elif not self.covers(before[job]):
                waiting.put((job, before[job]["samples"]))
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="opinfo_") as cache, self.results.open("a") as out:
            side_by_side(self.workers, lambda: self.serve(waiting, Path(cache), out))

    def covers(self, finished: dict[str, Any]) -> bool:
        """Whether a job that once took at most ``finished["most"]`` samples has all that are asked for."""
        before, found = finished["most"], finished["samples"]
        return not before or found < before or 0 < self.most <= before

    def serve(self, waiting: queue.SimpleQueue[tuple[Job, int]], cache: Path, out: Any) -> None:
        """One worker's jobs."""
        worker = Worker("tests.opinfo.worker", cache)
        try:
            while True:
                try:
                    job, first = waiting.get_nowait()
                except queue.Empty:
                    return
                for record in self.outcomes(worker, job, first):
                    entry = {"op": job.op, "dtype": job.dtype, "mode": job.mode, **record}
                    with self._lock:
                        out.write(json.dumps(entry) + "\n")
                        out.flush()
                        self.told(entry)
        finally:
            worker.end()

    def outcomes(self, worker: Worker, job: Job, first: int) -> Iterator[dict[str, Any]]:
        """The outcome of each sample from ``first`` on; at last a record with no sample, for the job is finished."""
        total, at_once = 0, self.at_once
        together: dict[str, Any] | None = None
        while True:
            running: int | None = None
            try:
                worker.ask(
                    job=[job.op, job.dtype, job.mode], first=first, most=self.most, at_once=at_once,
                    telling=self.telling,
                )  # fmt: skip
                while True:
                    message = worker.answer(self.patience)
                    if "samples" in message:
                        total = message["samples"]
                    elif "start" in message:
                        running = message["start"]
                    elif "done" in message:
                        yield {"sample": message["done"], **message["outcome"]}
                        running, first = None, message["done"] + 1
                    elif "job_done" in message:
                        if together is not None:
                            yield together
                        yield {"sample": None, "samples": total, "most": self.most, "detail": message.get("error", "")}
                        return
            except WorkerLost as lost:
                if running is None:  # not a sample's doing: the job as a whole
                    yield {"sample": None, "samples": total, "most": self.most, "detail": f"{lost}"}
                    return
                crash = {"sample": running, "status": lost.status, "graphs": 0, "kernels": 0, "library": []}
                if at_once > 1:  # which of them it was shows when each runs by itself
                    at_once = 1
                    if lost.status == "crash":
                        together = {**crash, "detail": f"in one graph with others: {lost}"}
                    continue
                together, first = None, running + 1
                yield {**crash, "detail": str(lost)}


def read(path: Path) -> list[dict[str, Any]]:
    """What a sweep has written down."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def latest(records: Iterable[dict[str, Any]]) -> dict[tuple[Job, int], dict[str, Any]]:
    """The last outcome of each sample."""
    return {(Job.of(r), r["sample"]): r for r in records if r["sample"] is not None}
