"""What makes compiled code of another process ours: versions, and the text of this package itself."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOMS = ("ir", "scheduler", "codegen", "runtime", "dynamo_backend")
_LIBRARIES = ("torch", "sympy", "llvmlite", "triton")


@cache
def environment_fingerprint() -> str:
    """Hex digest over our own sources and the versions of Python and of what we generate code with; read once a
    process."""
    digest = hashlib.sha256(platform.python_version().encode())
    for name in _LIBRARIES:
        digest.update(f"{name}={_version(name)};".encode())
    for name, path in _sources():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def key_of(parts: Iterable[str]) -> str:
    """Hex digest of texts in order; no concatenation of different parts gives the same digest."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _sources() -> Iterable[tuple[str, Path]]:
    """Our files, each with its path in the package: files of different folders may have one name."""
    package = __name__.split(".")[0]
    for room in ROOMS:
        spec = find_spec(f"{package}.{room}")
        for folder in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                yield f"{room}/{path.relative_to(folder).as_posix()}", path
