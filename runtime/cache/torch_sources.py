"""torch's own Python text as a digest: what a traced graph depends on besides the version of torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from .cache import DiskCache
from .entry import Entry
from .fingerprint import key_of

_KIND = "sources"
# Folders of the package without Python text that is run.
_LEFT_OUT = frozenset({"__pycache__", "bin", "include", "lib", "share", "test"})


@lru_cache(maxsize=4)
def torch_sources(disk: DiskCache | None) -> str:
    """Hex digest over every Python file of the installed torch; a process looks once.

    Reading 50 MB takes an eighth of a second. So the digest is kept in the cache under the names, sizes and times of
    the files; the digest itself knows no times, and is the same on machines that have the same torch.
    """
    root = str(Path(torch.__file__).parent)
    files = sorted(_python_files(root), key=lambda file: file.path)
    paths = [file.path.removeprefix(root) for file in files]
    stats = [file.stat() for file in files]
    state = key_of([root, *(f"{p} {s.st_size} {s.st_mtime_ns}" for p, s in zip(paths, stats))])
    known = disk.read(_KIND, state) if disk is not None else None
    if known is not None:
        return str(known.meta["digest"])
    digest = hashlib.sha256(torch.__version__.encode())
    for path, file in zip(paths, files):
        text = Path(file.path).read_bytes()
        digest.update(f"{path} {len(text)}:".encode())
        digest.update(text)
    found = digest.hexdigest()
    if disk is not None:
        disk.write(Entry(_KIND, state, {"digest": found}, description=f"torch {torch.__version__}: its Python text"))
    return found


def _python_files(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _LEFT_OUT:
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry
