"""Machine code that is made while the caller goes on: LLVM needs no interpreter, so a thread of its own runs it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from .kernels import KernelCode


class Compilers:
    """What makes the kernels of one graph, in the order in which they are started; equal keys are made once.

    Leaving its ``with`` block ends the thread, so that none is there when a process forks; what nobody waited for and
    was not begun is not made.
    """

    def __init__(self, *, beside: bool = True) -> None:
        self._beside = beside
        self._pool: ThreadPoolExecutor | None = None
        self._making: dict[str, Future[KernelCode]] = {}

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def making(self, key: str) -> Future[KernelCode] | None:
        """The code that was started under a key."""
        return self._making.get(key)

    def start(self, key: str, make: Callable[[], KernelCode], *, beside: bool) -> Future[KernelCode]:
        """Have code made: by the thread where it leaves the interpreter alone (``beside``), else at once."""
        if beside and self._beside:
            # llvmlite lets one thread at a time into LLVM, so that a second one would only wait.
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="torch-mlc compiler")
            found = self._pool.submit(make)
        else:
            found = Future()
            try:
                found.set_result(make())
            except Exception as error:
                found.set_exception(error)
        self._making[key] = found
        return found
