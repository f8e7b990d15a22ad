"""A place that machines share, behind the cache folder of each: any that fsspec reaches (``s3://…``, ``file://…``).

Entries are the very bytes of the folder's files, so damage is seen there too. Whoever may write to the place can have
code run on every machine that reads it. A place that fails or does not answer is warned of once and then done without.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..log import CacheWarning
from .cache import DiskCache
from .entry import DamagedEntry, Entry, decode_entry, encode_entry

ANSWER_SECONDS = 20.0
"""How long a read may take, and how long a process that ends waits for what it is still writing."""
_VERSION = "v1"


class RemoteCache:
    """Entries at a URL. Reads wait for an answer, writes go on beside the program; neither raises."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._usable = True
        self._writes: list[threading.Thread] = []
        self._process = os.getpid()
        atexit.register(self.finish)

    def read(self, kind: str, key: str) -> Entry | None:
        """The entry, or None where there is none, or none that is whole."""
        found: list[bytes] = []
        failed: list[Exception] = []

        def fetch() -> None:
            try:
                system, root = self._place()
                found.append(system.cat_file(f"{root}/{_VERSION}/{kind}/{key}"))
            except FileNotFoundError:
                pass
            except Exception as error:  # each kind of place has errors of its own
                failed.append(error)

        if not self._usable:
            return None
        worker = self._start(fetch)
        worker.join(ANSWER_SECONDS)
        if worker.is_alive() or failed:
            cause = f"{type(failed[0]).__name__}: {failed[0]}" if failed else f"no answer in {ANSWER_SECONDS:g} s"
            self._give_up("read", cause)
        if not found:
            return None
        try:
            return decode_entry(found[0], kind, key)
        except DamagedEntry as error:
            self._warn(f"entry {kind}/{key} at {self.url} {error}; it is compiled anew")
            return None

    def write(self, entry: Entry) -> None:
        """Begin to store an entry in place of any of the same kind and key."""
        if not self._usable:
            return
        data = encode_entry(entry)

        def send() -> None:
            try:
                system, root = self._place()
                folder = f"{root}/{_VERSION}/{entry.kind}"
                system.makedirs(folder, exist_ok=True)
                system.pipe_file(f"{folder}/{entry.key}", data)
            except Exception as error:  # each kind of place has errors of its own
                self._give_up("write", f"{type(error).__name__}: {error}")

        self._writes = [w for w in self._writes if w.is_alive()]
        self._writes.append(self._start(send))

    def finish(self) -> None:
        """Wait for what is being written, as long as for an answer."""
        if os.getpid() != self._process:
            return  # the threads are those of the process that this one was forked from
        end = time.monotonic() + ANSWER_SECONDS
        for writer in self._writes:
            writer.join(max(end - time.monotonic(), 0.0))

    def _place(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        system, root = url_to_fs(self.url)
        return system, str(root).rstrip("/")

    @staticmethod
    def _start(run: Callable[[], None]) -> threading.Thread:
        # A daemon: a place that never answers must not keep a process from ending.
        thread = threading.Thread(target=run, name="torch-mlc remote cache", daemon=True)
        thread.start()
        return thread

    def _give_up(self, what: str, cause: str) -> None:
        if self._usable:
            self._usable = False
            self._warn(f"cannot {what} the shared cache {self.url} ({cause}); going on without it")

    @staticmethod
    def _warn(text: str) -> None:
        warnings.warn(CacheWarning(f"torch-mlc: {text}"), stacklevel=4)


class CacheLevels:
    """The folder on this machine, then the place that machines share; either may be missing.

    What is found at the place is put into the folder, so that it is fetched once.
    """

    def __init__(self, disk: DiskCache | None, remote: RemoteCache | None = None) -> None:
        self.disk = disk
        self.remote = remote

    def read(self, kind: str, key: str) -> Entry | None:
        """The entry of the first level that has it."""
        entry = self.disk.read(kind, key) if self.disk is not None else None
        if entry is None and self.remote is not None:
            entry = self.remote.read(kind, key)
            if entry is not None and self.disk is not None:
                self.disk.write(entry)
        return entry

    def write(self, entry: Entry) -> None:
        """Store an entry at every level."""
        if self.disk is not None:
            self.disk.write(entry)
        if self.remote is not None:
            self.remote.write(entry)

    def lock(self, kind: str, key: str) -> AbstractContextManager[None]:
        """Hold a key against other processes of this machine."""
        return nullcontext() if self.disk is None else self.disk.lock(kind, key)
