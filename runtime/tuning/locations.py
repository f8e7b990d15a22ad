"""Where measurements are shared: files of JSON lines in folders, and wherever fsspec reaches (``s3://bucket/folder``).

Each writer has files of its own and only appends, so that many may write to one folder at a time.
"""

from __future__ import annotations

import glob
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from ...ir.errors import MlcError
from ...scheduler.tuning.database import Database

SUFFIX = ".jsonl"
_DATABASES = (".sqlite", ".db")
# Characters of one line that are read at once; a longer one is nobody's, and comes in pieces that are none.
_MOST = 1 << 23


class LocationError(MlcError):
    """A place cannot be read or written."""


def write_lines(location: str, lines: Iterable[str]) -> tuple[str, int]:
    """Append lines to a file, or write them to a new one of a folder (that exists, or whose name ends in "/"); returns
    the file and how many lines that were. Raises LocationError."""
    files, path = _files_of(location)
    try:
        if location.endswith("/") or _is_folder(files, path):
            stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
            path = f"{path.rstrip('/')}/tuning-{stamp}-{uuid.uuid4().hex[:8]}{SUFFIX}"
            location = f"{location.rstrip('/')}/{path.rpartition('/')[2]}"
        elif not path.endswith(SUFFIX):
            raise LocationError(f"{location}: a file of measurements ends in {SUFFIX}, and a new folder in /")
        if files is None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab+") as file:
                return location, _append(file, lines)
        if files.exists(path):
            raise LocationError(f"{location} exists, and what is there cannot be appended to; name its folder")
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with files.open(path, "wb") as file:
            return location, _append(file, lines)
    except (OSError, ValueError) as error:
        raise LocationError(f"{location} cannot be written ({error})") from error


def _append(file: IO[bytes], lines: Iterable[str]) -> int:
    count = 0
    if file.seekable() and file.readable() and file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":  # a writer before us was cut off
            file.write(b"\n")
    for line in lines:
        file.write(line.encode() + b"\n")
        count += 1
    return count


def read_files(locations: Iterable[str]) -> Iterator[tuple[str, Iterator[str]]]:
    """The files of places (files, folders, patterns such as ``runs/*.jsonl``, and other databases), each with its
    lines. Raises LocationError, where a place holds nothing too."""
    for location in locations:
        files, path = _files_of(location)
        found = sorted(_found(files, path))
        if not found:
            raise LocationError(f"{location}: no such file, or a folder without files that end in {SUFFIX}")
        for name in found:
            yield name, _lines(files, name)


def _found(files: Any, path: str) -> list[str]:
    pattern = path if any(c in path for c in "*?[") else f"{path.rstrip('/')}/*{SUFFIX}"
    try:
        if pattern == path or _is_folder(files, path):
            return list(glob.glob(pattern) if files is None else files.glob(pattern))
        there = os.path.exists(path) if files is None else files.exists(path)
        return [path] if there else []
    except (OSError, ValueError) as error:
        raise LocationError(f"{path} cannot be read ({error})") from error


def _lines(files: Any, path: str) -> Iterator[str]:
    try:
        if files is None and path.endswith(_DATABASES):
            with Database(path) as other:
                yield from other.exported()
            return
        with closing(open(path, "rb") if files is None else files.open(path, "rb")) as file:
            while line := file.readline(_MOST):
                yield line.decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise LocationError(f"{path} cannot be read ({error})") from error


def _is_folder(files: Any, path: str) -> bool:
    return os.path.isdir(path) if files is None else bool(files.isdir(path))


def _files_of(location: str) -> tuple[Any, str]:
    """The file system of fsspec and the path in it; None for this machine's own."""
    if "://" not in location and "::" not in location:
        return None, os.path.expanduser(location)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise LocationError(f"{location} is reached by fsspec, which is not installed: pip install fsspec") from None
    try:
        files, path = url_to_fs(location)
    except (ImportError, ValueError, OSError) as error:
        raise LocationError(f"{location} is no place that fsspec reaches ({error})") from error
    return files, path
