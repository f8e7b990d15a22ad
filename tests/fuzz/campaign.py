"""Runs programs in worker processes that may crash or hang, makes what fails smaller, and writes it down."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..workers import Worker, WorkerLost, side_by_side
from .program import Program
from .shrink import shrink

FAULTS = ("wrong", "raises", "crash", "hang")
# A process is replaced after so many programs: Dynamo and LLVM keep what they have compiled.
PROGRAMS = 250


@dataclass(slots=True)
class Campaign:
    """``patience`` is the seconds that one program may take; ``trials`` bounds the programs that are tried to make one
    smaller, and ``reduction`` the seconds, since each try of one that hangs takes all patience. ``results`` gets
    ``outcomes.jsonl`` and a script for each failure. ``target`` names a GPU, which need not be here.
    """

    results: Path
    workers: int = 1
    patience: float = 120.0
    trials: int = 120
    told: Callable[[dict[str, Any]], None] = lambda record: None
    reduction: float = 300.0
    target: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, seed: int, seconds: float, programs: int = 0) -> None:
        """Check programs from a seed on until the time is over, or so many were checked."""
        self.results.mkdir(parents=True, exist_ok=True)
        seeds, end = count(seed), time.monotonic() + seconds
        last = seed + programs if programs else None
        with tempfile.TemporaryDirectory(prefix="fuzz_") as cache:
            side_by_side(self.workers, lambda: self.serve(seeds, last, end, Path(cache)))

    def serve(self, seeds: count[int], last: int | None, end: float, cache: Path) -> None:
        """One worker's programs."""
        worker = Worker("tests.fuzz.worker", cache)
        try:
            for done in count(1):
                with self._lock:
                    seed = next(seeds)
                if time.monotonic() > end or (last is not None and seed >= last):
                    return
                program, outcome = self.first(worker, seed)
                record = {"seed": seed, **outcome, **(program.settings() if program is not None else {})}
                if program is not None and outcome["status"] in FAULTS:
                    self.fault(worker, program, record)
                with self._lock:
                    with (self.results / "outcomes.jsonl").open("a") as out:
                        out.write(json.dumps(record) + "\n")
                    self.told(record)
                if done % PROGRAMS == 0:
                    worker.end()
        finally:
            worker.end()

    def first(self, worker: Worker, seed: int) -> tuple[Program | None, dict[str, Any]]:
        """The program of a seed, None where its maker is lost, and what its check says."""
        program = None
        try:
            worker.ask(seed=seed, target=self.target)
            program = Program.of(worker.answer(self.patience)["program"])
            return program, worker.answer(self.patience)["outcome"]
        except WorkerLost as lost:
            status = lost.status if program is not None else "generator"
            return program, {"status": status, "detail": str(lost)}

    def again(self, worker: Worker, program: Program) -> dict[str, Any]:
        """What a check says of a program."""
        try:
            worker.ask(program=program.record())
            outcome: dict[str, Any] = worker.answer(self.patience)["outcome"]
            return outcome
        except WorkerLost as lost:
            return {"status": lost.status, "detail": str(lost)}

    def repeat(
        self, outcomes: Iterable[Mapping[str, Any]]
    ) -> Iterator[tuple[Mapping[str, Any], Program, dict[str, Any]]]:
        """Each failing program of earlier outcomes, whole and small, with what a check says of it now."""
        with tempfile.TemporaryDirectory(prefix="fuzz_") as cache:
            worker = Worker("tests.fuzz.worker", Path(cache))
            try:
                for outcome in outcomes:
                    for kept in (outcome.get("whole"), outcome.get("program")):
                        if kept is not None:
                            program = Program.of(kept)
                            yield outcome, program, self.again(worker, program)
            finally:
                worker.end()

    def fault(self, worker: Worker, program: Program, record: dict[str, Any]) -> None:
        """Make a failing program smaller, and keep it."""
        said, end = record, time.monotonic() + self.reduction

        def fails(candidate: Program) -> bool:
            nonlocal said
            if time.monotonic() > end:
                return False
            outcome = self.again(worker, candidate)
            if outcome["status"] != record["status"]:
                return False
            said = outcome
            return True

        small = shrink(program, fails, self.trials)
        record["script"] = small.snippet(f"Seed {program.seed}: {said['status']}: {said['detail']}")
        record["program"], record["whole"] = small.record(), program.record()
        record["smaller"] = said["detail"]
        (self.results / f"seed_{program.seed}.py").write_text(record["script"])
