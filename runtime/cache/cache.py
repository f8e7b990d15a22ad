"""Compiled code on disk: data that is checked before it is used, never pickled, safe for many processes at once.

One file an entry, ``<folder>/v1/<kind>/<key>``, as ``cache/entry.py`` writes it. Entries appear by atomic rename, so
that a reader sees a whole file or none and a killed process leaves nothing half written. Folders are open to their
owner alone, because the code inside is run.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from ..log import CacheWarning
from .entry import DamagedEntry, Entry, decode_entry, encode_entry

_VERSION = "v1"
_LOCK_SECONDS = 60.0
DEFAULT_LIMIT = 4 << 30


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry as listings show it; ``used`` is seconds since the epoch."""

    kind: str
    key: str
    size: int
    used: float
    description: str
    path: Path = field(repr=False)


class DiskCache:
    """Entries under a folder, by kind ("graph", "kernel") and key (lower-case hex).

    Nothing here raises for the state of the disk: a folder that cannot be made, read or written, or that others may
    write, is warned of once and then done without. Above ``limit`` bytes the entries used longest ago are removed.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self._root = folder / _VERSION
        self._readable = True
        self._writable = True
        self._warned: set[str] = set()
        self._size: int | None = None
        self._check_owner()

    # --- entries ----------------------------------------------------------------------------------------------------

    def read(self, kind: str, key: str) -> Entry | None:
        """The entry, or None where there is none or where it is damaged (which is warned of, and the entry removed)."""
        if not self._readable:
            return None
        path = self._path(kind, key)
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._readable = self._writable = False
            self._warn("disk", f"cannot read the cache in {self.folder} ({error}); compiling without it")
            return None
        try:
            entry = decode_entry(data, kind, key)
        except DamagedEntry as error:
            self._warn("damaged", f"cache entry {path} {error}; it is compiled anew")
            self._remove(path)
            return None
        with suppress(OSError):  # only the order of eviction suffers
            os.utime(path)
        return entry

    def write(self, entry: Entry) -> bool:
        """Store an entry in place of any of the same kind and key; False where it could not be kept."""
        if not self._writable:
            return False
        data = encode_entry(entry)
        path = self._path(entry.kind, entry.key)
        try:
            self._make_folder(path.parent)
            _write_atomically(path, data)
        except OSError as error:
            self._writable = False
            self._warn("disk", f"cannot write the cache in {self.folder} ({error}); nothing is kept")
            return False
        self._count(len(data))
        return True

    @contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        """Hold the key against other processes, so that two do not compile the same thing at once.

        The lock is a courtesy: where it cannot be had (a read-only folder, a minute's wait) the body runs without it.
        """
        held: FileLock | None = None
        if self._writable:
            try:
                self._make_folder(self._root / "locks")
                held = FileLock(self._root / "locks" / f"{kind}-{key[:2]}", timeout=_LOCK_SECONDS, mode=0o600)
                held.acquire()
            except (OSError, Timeout, NotImplementedError):
                held = None
        try:
            yield
        finally:
            if held is not None:
                held.release()

    # --- the whole --------------------------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """Every entry, the last used first."""
        found = []
        for path, info in self._files():
            try:
                with path.open("rb") as file:
                    file.readline(), file.readline()
                    description = json.loads(file.readline()).get("description", "")
            except (OSError, ValueError, AttributeError):
                description = "unreadable"
            found.append(EntryInfo(path.parent.name, path.name, info.st_size, info.st_mtime, description, path))
        return sorted(found, key=lambda e: -e.used)

    def read_all(self, kind: str) -> Iterator[Entry]:
        """Every entry of a kind, the last used first; none of it counts as used, and what is damaged is left out."""
        files = [(path, info) for path, info in self._files() if path.parent.name == kind]
        for path, _ in sorted(files, key=lambda f: -f[1].st_mtime):
            with suppress(OSError, DamagedEntry):
                yield decode_entry(path.read_bytes(), kind, path.name)

    def size_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(info.st_size for _, info in self._files())

    def clear(self) -> int:
        """Remove every entry and say how many there were."""
        paths = [path for path, _ in self._files()]
        for path in paths:
            self._remove(path)
        self._size = None
        return len(paths)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _path(self, kind: str, key: str) -> Path:
        assert kind.isidentifier() and key.isalnum(), (kind, key)
        return self._root / kind / key

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._root.glob("*/*"):
            if path.parent.name == "locks" or path.name.startswith("."):
                continue
            try:
                yield path, path.stat()
            except OSError:
                continue  # Another process removed it.

    def _check_owner(self) -> None:
        """Code is run from here: a folder that somebody else owns or may write is not used, nor is a file."""
        if self.folder.is_file():
            self._readable = self._writable = False
            mend = "set MLC_CACHE_DIR to a folder, or remove it"
            self._warn("file", f"the cache folder {self.folder} is a file, so nothing is kept; {mend}")
            return
        for path in (self.folder, self._root):
            try:
                info = path.stat()
            except OSError:
                continue
            shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX
            if hasattr(os, "getuid") and ((info.st_uid != os.getuid() and path == self._root) or shared):
                self._readable = self._writable = False
                self._warn(
                    "owner",
                    f"{path} belongs to or can be written by others, so no compiled code is read from or kept in it; "
                    f"mend it with `chmod 700 {path}`, or set MLC_CACHE_DIR",
                )

    def _make_folder(self, path: Path) -> None:
        if not path.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._root.mkdir(exist_ok=True, mode=0o700)
            path.mkdir(exist_ok=True, mode=0o700)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._warn("remove", f"cannot remove {path} ({error})")

    def _count(self, added: int) -> None:
        self._size = self.size_bytes() if self._size is None else self._size + added
        if self._size <= self.limit:
            return
        # Room for a tenth more, so that not every write looks through the folder.
        files = sorted(self._files(), key=lambda f: f[1].st_mtime)
        total = sum(info.st_size for _, info in files)
        for path, info in files:
            if total <= self.limit * 9 // 10:
                break
            self._remove(path)
            total -= info.st_size
        self._size = total

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(CacheWarning(f"torch-mlc: {text}"), stacklevel=3)


def _write_atomically(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
