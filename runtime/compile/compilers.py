"""Machine code that is made while the caller goes on.

LLVM needs no interpreter, so a thread of its own runs it. Triton does, so processes run it (``worker_pool.py``), and a
thread waits for each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType

from ..triton.compile import RunTriton
from ..triton.triton_stages import run_stages
from ..triton.worker_pool import worker_pool
from .kernels import KernelCode


class Compilers:
    """What makes the kernels of one graph, in the order in which they are started; equal keys are made once.

    GPU kernels are made by up to ``workers`` processes, and by this one where that is zero. Leaving its ``with`` block
    ends the threads, so that none is there when a process forks; what nobody waited for and was not begun is not made,
    and after an error nor is what was.
    """

    def __init__(self, *, beside: bool = True, workers: int = 0) -> None:
        self._beside = beside
        self._workers = workers if beside else 0
        self._llvm: ThreadPoolExecutor | None = None
        self._triton: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self._making: dict[str, Future[KernelCode]] = {}

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._stop.set()
        for pool in (self._llvm, self._triton):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    @property
    def run_triton(self) -> RunTriton:
        """Who runs Triton for what is made here."""
        return partial(worker_pool().run, stop=self._stop) if self._workers else run_stages

    def making(self, key: str) -> Future[KernelCode] | None:
        """The code that was started under a key."""
        return self._making.get(key)

    def start(self, key: str, make: Callable[[], KernelCode], *, gpu: bool = False) -> Future[KernelCode]:
        """Have code made, at once where nobody is beside this thread to make it."""
        pool = self._threads(gpu)
        if pool is not None:
            found = pool.submit(make)
        else:
            found = Future()
            try:
                found.set_result(make())
            except Exception as error:
                found.set_exception(error)
        self._making[key] = found
        return found

    def _threads(self, gpu: bool) -> ThreadPoolExecutor | None:
        if gpu and self._workers:
            self._triton = self._triton or ThreadPoolExecutor(self._workers, thread_name_prefix="torch-mlc worker")
            return self._triton
        if gpu or not self._beside:
            return None
        # llvmlite lets one thread at a time into LLVM, so that a second one would only wait.
        self._llvm = self._llvm or ThreadPoolExecutor(1, thread_name_prefix="torch-mlc compiler")
        return self._llvm


def workers_for(kernels: int, limit: int) -> int:
    """Processes that are worth their start for so many kernels: it takes as long as two small kernels do. The only one
    of a graph is waited for wherever it is made."""
    return min(limit, kernels // 2)
