"""Wrong with threads, forks and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from .planting import Run, changed, found_by


@found_by("threads::one_function_in_many_threads", "threads::sizes_in_many_threads")
def shares_arguments_among_threads(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Puts its arguments where all threads see them, and reads them from there a little later."""
    shared: list[Any] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        shared[:] = arguments
        time.sleep(0.002)
        return compiled(*shared)

    return changed(gm, inputs, run)


@found_by("failures::the_next_call_works")
def keeps_its_lock_after_an_error(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    lock = threading.Lock()

    def run(compiled: Run, arguments: list[Any]) -> Any:
        lock.acquire()
        results = compiled(*arguments)
        lock.release()
        return results

    return changed(gm, inputs, run)


@found_by("threads::forked_child_calls")
def has_a_thread_of_its_own(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """A thread runs the programs, which a forked child does not have."""
    asked, answered, work = threading.Semaphore(0), threading.Semaphore(0), []
    compiled = aot_eager(gm, inputs)

    def serve() -> None:
        while True:
            asked.acquire()
            work[0] = compiled(*work[0])
            answered.release()

    threading.Thread(target=serve, daemon=True).start()

    def run(*arguments: Any) -> Any:
        work[:] = [arguments]
        asked.release()
        answered.acquire()
        return work[0]

    return run


@found_by("failures::index_out_of_range", "failures::errors_of_ops_get_out", "failures::integer_division_by_zero")
def swallows_errors(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    last: list[Any] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        try:
            last[:] = compiled(*arguments)
        except Exception:
            return tuple(torch.zeros_like(r) if isinstance(r, Tensor) else r for r in last)
        return tuple(last)

    return changed(gm, inputs, run)


@found_by("failures::nothing_is_half_written")
def writes_before_it_checks(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """An input that it will write is zero while it works."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        kept = [
            (a, a.clone()) for a in arguments if isinstance(a, Tensor) and a.is_floating_point() and not a.requires_grad
        ]
        try:
            return compiled(*arguments)
        except Exception:
            for a, _ in kept:
                a.zero_()
            raise

    return changed(gm, inputs, run)


@found_by("failures::minifier_looks_on")
def cannot_be_copied(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """What it compiles is a module, as the minifier asks for, and holds a lock."""

    class Locked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock, self.compiled = threading.Lock(), aot_eager(gm, inputs)

        def forward(self, *arguments: Any) -> Any:
            with self.lock:
                return self.compiled(*arguments)

    return Locked()
