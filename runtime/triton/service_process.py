"""A process that does what a module says (``service_worker.py``), started when it is first asked, and again after it
was lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from .worker_process import LostError, Worker, worker_command

_FILE = Path(__file__).with_name("service_worker.py")


class ServiceProcess:
    """The process of one module. Whoever asks holds ``lock``."""

    def __init__(self, service: str, idle_seconds: float, command: list[str] | None = None) -> None:
        self._service = service
        self._command = worker_command(_FILE, idle_seconds) if command is None else command
        self._worker: Worker | None = None
        self.lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return None if self._worker is None else self._worker.pid

    def ask(
        self, request: dict[str, Any], seconds: float, *parts: bytes, again: bool = True
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to a request. With ``again`` a process that went away just as it was asked is started once more:
        the request is of nothing that it knew.

        Raises LostError where the process ended or took longer, and RefusedError where it tells a defect; it is gone
        then.
        """
        try:
            return self._living().ask({**request, "service": self._service}, parts, seconds, threading.Event())
        except LostError as lost:
            self.end()
            if lost.rested and again:
                return self.ask(request, seconds, *parts, again=again)
            raise
        except BaseException:
            self.end()
            raise

    def _living(self) -> Worker:
        self.refresh()
        if self._worker is None:
            if not self._command:
                raise LostError("cannot be started (no interpreter can be run as a program of its own)")
            self._worker = Worker(self._command)
        return self._worker

    def refresh(self) -> None:
        """Take notice of a process that went away."""
        if self._worker is not None and not self._worker.is_alive:
            self.end()

    def end(self) -> None:
        """End the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def disown(self) -> None:
        """In a fork: the process is the parent's."""
        if self._worker is not None:
            self._worker.disown()
        self._worker, self.lock = None, threading.RLock()
