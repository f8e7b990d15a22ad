"""Trials of launches on GPUs: programs on a driver that the CPU plays, called by many threads at once while it fails.

    python -m tests.trials.driver                    every trial, 200 calls of each thread
    python -m tests.trials.driver --calls 20 --threads 4

Every thread calls the same program, as Python and as machine code, with arguments of its own, some of them aligned
otherwise, and compares the results with eager's. Launches fail now and then: then a call may raise GpuDriverError, and
no call after it may. What may never happen is a wrong answer, another error, or a guard that is not let go of.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import pytest
import torch

from torch_mlc.runtime.gpu.driver import GpuDriverError

from ..dynamo_backend.played_programs import Both, Function, Tensor, play
from ..runtime.played_driver import FAILED, NO_MEMORY, PlayedLibrary
from ..runtime.played_memory import PlayedMemory

# Seconds after which threads count as hanging.
PATIENCE = 300.0


def in_turns(x: Tensor) -> tuple[Tensor, ...]:
    """Rows and columns in turn: kernels with memory of their own between them."""
    for _ in range(3):
        x = x.softmax(0).softmax(1)
    return x.sum(0), x.amax(1)


def products(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Products of a library between kernels."""
    return ((torch.tanh(x @ a) @ b).softmax(-1), x.sum(0))


def steps(*args: Tensor) -> tuple[Tensor, ...]:
    """Many tensors in one launch over a table."""
    half = len(args) // 2
    return tuple(p * 0.99 - 0.1 * g.sign() for p, g in zip(args[:half], args[half:], strict=True))


SMALL = tuple((k + 2, 19) for k in range(6))
PROGRAMS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "kernels": (in_turns, ((30, 20),)),
    "products": (products, ((33, 24), (24, 40), (40, 24))),
    "a table": (steps, (*SMALL, *SMALL)),
    "a table, dynamic": (steps, (*SMALL, *SMALL)),
}


class UnhurriedMemory(PlayedMemory):
    """Copies take a while, in which other threads go on."""

    def upload(self, array: Any, device: int) -> torch.Tensor:
        made = super().upload(array, device)
        time.sleep(random.random() * 5e-4)
        return made


class Unhurried(PlayedLibrary):
    """A driver that lets other threads go first, as one does that waits for a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = UnhurriedMemory(self)

    def _launch(self, function: int, *rest: Any) -> int:
        time.sleep(random.random() * 1e-4)
        return super()._launch(function, *rest)


@dataclass(slots=True)
class Trial:
    """One program. ``faults`` is what went wrong; ``raised`` counts the calls that the driver let down."""

    both: Both
    eager: Function
    shapes: Sequence[tuple[int, ...]]
    calls: int
    failing: bool
    dynamic: bool
    faults: list[str] = field(default_factory=list)
    raised: list[int] = field(default_factory=list)

    def arguments(self, rng: random.Random) -> list[Tensor]:
        """Tensors at addresses that are aligned, and in some calls at others."""
        start = rng.choice((0, 0, 1))
        made = []
        more = rng.choice((0, 0, 50, 150)) if self.dynamic else 0
        for rows, *rest in self.shapes:
            shape = (rows + more, *rest)
            count = int(torch.Size(shape).numel())
            memory = torch.tensor([rng.gauss(0.0, 1.0) for _ in range(count + start)])
            made.append(memory[start:].view(shape))
        return made

    def thread(self, seed: int) -> None:
        """The calls of one thread."""
        rng = random.Random(seed)
        for k in range(self.calls):
            call = self.both.machine if rng.random() < 0.5 else self.both.python
            args = self.arguments(rng)
            expected = self.eager(*args)
            if self.failing and rng.random() < 0.2:
                # One launch that fails is tried again, and fails once more or not.
                self.both.library.failures += [rng.choice((FAILED, NO_MEMORY))] * rng.choice((1, 4))
            try:
                found = call(list(args))
                torch.testing.assert_close(list(found), list(expected), rtol=1e-4, atol=1e-5)
            except GpuDriverError as error:
                self.raised.append(k)
                if not self.failing:
                    self.faults.append(f"thread {seed}, call {k}: {error}")
            except Exception as error:
                self.faults.append(f"thread {seed}, call {k}: {type(error).__name__}: {error}"[:200])

    def run(self, threads: int) -> list[str]:
        """The faults of all threads, and of the driver afterwards."""
        library = self.both.library
        with ThreadPoolExecutor(threads) as pool:
            for waiting in [pool.submit(self.thread, seed) for seed in range(threads)]:
                waiting.result()
        library.failures.clear()
        failing, self.failing, self.calls = self.failing, False, 2
        self.thread(threads)  # what failed leaves nothing behind
        if failing and not self.raised:
            self.faults.append("no failure of the driver was seen by any call")
        made, dropped = library.guards
        if made != dropped:
            self.faults.append(f"{made} guards were made, {dropped} let go of")
        uploads = {u.memory.data_ptr(): u.memory for u in library.memory.uploads}
        for launch in library.launches:
            if library.kernels[launch.kernel].function.table:
                planned = len(uploads[launch.arguments[1]])
                if planned != launch.grid[0]:
                    self.faults.append(f"{launch.kernel}: {launch.grid[0]} programs read a plan of {planned}")
        return self.faults + [f"{type(e).__name__}: {e}" for e in library.errors]


def trial(name: str, threads: int, calls: int, failing: bool) -> list[str]:
    """What goes wrong with a program of ``PROGRAMS``."""
    fn, shapes = PROGRAMS[name]
    with pytest.MonkeyPatch.context() as patch:
        library = Unhurried()
        library.play(patch)
        dynamic = "dynamic" in name
        both = play(library, fn, *shapes, dynamic=dynamic)
        return Trial(both, fn, shapes, calls, failing, dynamic).run(threads)


@click.command()
@click.option("--calls", default=200, help="calls of each thread")
@click.option("--threads", default=4, help="threads that call at once")
def main(calls: int, threads: int) -> None:
    """Run every trial; the status is 1 where one fails."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # threads take turns as often as they can
    failed = 0
    for name in PROGRAMS:
        for failing in (False, True):
            began, what = time.monotonic(), f"{name}{', failing' if failing else ''}"
            over = threading.Timer(PATIENCE, partial(_hangs, what))
            over.daemon = True
            over.start()
            faults = trial(name, threads, calls, failing)
            over.cancel()
            failed += len(faults)
            click.echo(f"{what}: {threads} threads, {len(faults)} faults, {time.monotonic() - began:.1f} s")
            for fault in faults[:5]:
                click.echo(f"    {' '.join(fault.split())}")
    sys.exit(bool(failed))


def _hangs(what: str) -> None:
    print(f"{what}: hangs (no end in {PATIENCE:g} s)", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


if __name__ == "__main__":
    main()
