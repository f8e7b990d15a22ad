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
_OF_GPU_CODE = ("torch", "sympy", "triton")


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


@cache
def gpu_code_fingerprint() -> str:
    """The same for what machine code of a GPU comes from: not how torch was built ("+cpu", "+cu130"), which of Python's
    releases runs, and LLVM for the CPU. So a machine without the GPU can compile for one that has it."""
    digest = hashlib.sha256(".".join(platform.python_version_tuple()[:2]).encode())
    for name in _OF_GPU_CODE:
        known = _version(name)
        digest.update(f"{name}={known.partition('+')[0] if name == 'torch' else known};".encode())
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
