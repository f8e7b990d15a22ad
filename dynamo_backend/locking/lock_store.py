"""Lock files on disk: read, and written by several processes at once."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from .lock_text import LockError, LockText, Section

_LOCK_SECONDS = 60.0
# How often a section is written again that another machine has written over.
_TRIES = 5


def read_lock(path: Path) -> LockText:
    """The file. Raises LockError where there is none, and LockFileError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LockError(
            f'there is no lock file {path}. Write it by one build with lock_mode="write" (MLC_LOCK_MODE=write), look '
            "at what it says, and keep it with the model"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"the lock file {path} cannot be read: {error}") from error
    return LockText.parse(text, path)


def write_graph(path: Path, sections: Sequence[Section]) -> bool:
    """Put the section of a graph and those of its programs into the file, which is made where there is none; whether
    anything was written. Others may write theirs at the same time. Raises LockError."""
    wrote = False
    for _ in range(_TRIES):
        with _held(path):
            before = read_lock(path) if path.exists() else LockText()
            after = before.having_graph(sections)
            if after is before:
                return wrote
            _replace(path, after.written())
            wrote = True
    raise LockError(f"{path}: somebody else writes another {sections[0].name!r} again and again")


def section_name(name: str, number: int) -> str:
    """What the section of a name is called, of several with one name."""
    return name if number == 1 else f"{name} #{number}"


def sections_of(text: LockText, name: str) -> list[Section]:
    """The sections that have a name."""
    found: list[Section] = []
    while (section := text.sections.get(section_name(name, len(found) + 1))) is not None:
        found.append(section)
    return found


@dataclass(slots=True)
class WrittenSections:
    """What this process has written into a file: different graphs of one name are sections of their own."""

    _graphs: dict[str, list[str]] = field(default_factory=dict)

    def number(self, name: str, graph: str) -> int:
        """Which of the graphs of a name a graph is, from 1 on."""
        known = self._graphs.setdefault(name, [])
        if graph not in known:
            known.append(graph)
        return known.index(graph) + 1


@cache
def written_sections(path: Path) -> WrittenSections:
    """One a file, until ``torch._dynamo.reset()``."""
    return WrittenSections()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from writing the file."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
    guard = FileLock(Path(tempfile.gettempdir(), f"torch_mlc_{user}_{digest}.guard"), timeout=_LOCK_SECONDS, mode=0o600)
    try:
        guard.acquire()
    except (OSError, Timeout, NotImplementedError) as error:
        raise LockError(f"{path} cannot be written: another process has held it for a minute ({error})") from error
    try:
        yield
    finally:
        guard.release()


def _replace(path: Path, text: str) -> None:
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise LockError(f"the lock file {path} cannot be written: {error}") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
