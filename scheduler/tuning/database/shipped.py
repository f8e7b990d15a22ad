"""Measurements that come with the package: a file of lines for each architecture, read when it is first asked for.

They rank below whatever the user's own database knows. The file of a target is ``KIND-ARCH.jsonl``.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import warnings
from pathlib import Path
from typing import Any

from ...error import DatabaseWarning, ScheduleError
from .queries import best_rows, record_of, similar_rows
from .rows import Provenance, Record, Workload
from .schema import prepare
from .sharing import import_lines

FOLDER = Path(__file__).parent.parent / "tuned"


class Shipped:
    """What the files of a folder know. A damaged one costs one warning."""

    def __init__(self, folder: str | os.PathLike[str] = FOLDER) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._read: dict[str, sqlite3.Connection | None] = {}

    def __call__(self, workload: str, key: str, base: str) -> Record | None:
        """The best schedule of a workload on the target of a key, or on one of its ``base``."""
        kind, arch = base.split(":")[:2]
        name = f"{kind}-{re.sub(r'[^a-zA-Z0-9_-]', '_', arch)}.jsonl"
        with self._lock:
            connection = self._connection(name)
            if connection is None:
                return None
            for row in best_rows(connection, workload, key, base):
                try:
                    return record_of(row)
                except (ScheduleError, ValueError, TypeError):
                    warnings.warn(f"{self.folder / name} has damaged schedules", DatabaseWarning, stacklevel=3)
        return None

    @property
    def has_any(self) -> bool:
        """Whether there are files."""
        return any(self.folder.glob("*.jsonl"))

    def similar(self, workload: Workload) -> list[Any]:
        """Rows of what was faster than the default, of every file, for ``Similar.of``."""
        with self._lock:
            read = (self._connection(path.name) for path in sorted(self.folder.glob("*.jsonl")))
            return [row for c in read if c is not None for row in similar_rows(c, workload)]

    def _connection(self, name: str) -> sqlite3.Connection | None:
        if name not in self._read:
            self._read[name] = self._load(self.folder / name)
        return self._read[name]

    def _load(self, path: Path) -> sqlite3.Connection | None:
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
                prepare(connection)
                connection.execute("BEGIN")
                found = import_lines(connection, lines, path.name)
                connection.execute("UPDATE sessions SET provenance = ?", (Provenance.SHIPPED.value,))
                connection.execute("COMMIT")
        except OSError:
            return None
        if found.faults:
            warnings.warn(f"{path} is damaged ({found.faults[0]})", DatabaseWarning, stacklevel=4)
        return connection
