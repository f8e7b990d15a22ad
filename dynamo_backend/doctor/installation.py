"""Checks of what is installed: versions, imports, settings, the cache folder, the processor.

torch is imported in no check before the one that says whether it can be.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, metadata
from pathlib import Path

from .finding import Mark, Row, row

_PACKAGE = "torch-mlc"
# Less free space than this and a cache that may grow to its limit fills the disk.
_FREE_BYTES = 1 << 30
_ROOM = __name__.rpartition(".")[0].rpartition(".")[0].rpartition(".")[0]


def requirement(package: str) -> str:
    """The versions of a package that ours is made for, ">=2.11,<2.16"; "" where that is not known."""
    try:
        needed = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return ""
    for text in needed:
        found = re.match(rf"{re.escape(package)}\s*\(?([<>=!~][^;)]*)", text)
        if found:
            return ",".join(sorted((part.strip() for part in found[1].split(",")), reverse=True))
    return ""


def fits(version: str, needed: str) -> bool:
    """Whether a version is within bounds such as ">=2.11,<2.16"."""
    have = _numbers(version)
    for part in filter(None, needed.split(",")):
        bound = _numbers(part)
        size = max(len(have), len(bound))
        left, right = (tuple(n + [0] * (size - len(n))) for n in (have, bound))
        operator = re.match(r"[<>=!~]+", part)
        compared = {">=": left >= right, "<": left < right, "<=": left <= right, ">": left > right}
        if operator is not None and not compared.get(operator[0], True):
            return False
    return True


def _numbers(text: str) -> list[int]:
    found = re.search(r"\d+(\.\d+)*", text)
    return [int(n) for n in found[0].split(".")] if found else []


def python() -> Iterator[Row]:
    """The interpreter."""
    version, needed = platform.python_version(), ">=3.10"
    mark: Mark = "ok" if fits(version, needed) else "failed"
    yield row(mark, f"{version} ({sys.platform})", "" if mark == "ok" else f"use Python {needed}", version=version)
    if not sys.platform.startswith("linux"):
        yield row("warning", f"{sys.platform} is not tried; Linux is", what="system")


def packages() -> Iterator[Row]:
    """Versions of what code is generated with."""
    for package, always in (("torch", True), ("llvmlite", True), ("triton", False)):
        needed = requirement(package)
        asked = f"{package}{needed}"
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            mend = f"pip install '{asked}'" + ("" if always else ", where kernels for GPUs are wanted")
            yield row("failed" if always else "warning", "not installed", mend, what=package, version=None)
            continue
        good = fits(version, needed)
        found = version if good and needed else f"{version}, made for {needed or 'any'}"
        yield row("ok" if good else "warning", found, "" if good else f"pip install '{asked}'", what=package,
                  version=version)  # fmt: skip


def imports() -> Iterator[Row]:
    """Whether they can be imported."""
    for package in ("torch", "llvmlite.binding", "triton"):
        name = package.partition(".")[0]
        if name == "triton" and not _installed(name):
            continue  # told already
        try:
            import_module(package)
        except Exception as error:  # whatever its import does
            yield row("failed", f"{type(error).__name__}: {error}"[:300], f"pip install --force-reinstall {name}",
                      what=f"import {name}")  # fmt: skip
        else:
            yield row("ok", "imported", what=f"import {name}")


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def settings() -> Iterator[Row]:
    """What the environment sets."""
    options = import_module(f"{_ROOM}.runtime.settings.options")
    try:
        options.Options.resolve(None, None, os.environ)
    except options.OptionError as error:
        yield row("failed", str(error), "unset the variable, or give it one of these values")
        return
    given = sorted(f"{g.variable}={g.text}" for g in options.variables_in(os.environ).given.values())
    told = f"{', '.join(given)} (left out of the programs below)" if given else "the environment sets none"
    yield row("ok", told, given=given)
    if os.environ.get("TORCHDYNAMO_DISABLE", "0") not in ("", "0"):
        yield row("warning", "TORCHDYNAMO_DISABLE is set: torch.compile does nothing", "unset it", what="torch.compile")


def cache() -> Iterator[Row]:
    """The folder of the cache."""
    options = import_module(f"{_ROOM}.runtime.settings.options")
    try:
        now = options.Options.resolve(None, None, os.environ)
    except options.OptionError:
        return  # told already
    folder, mend = Path(now.cache_dir), "set MLC_CACHE_DIR to a folder that can be written"
    if not now.cache:
        yield row("warning", "switched off by MLC_CACHE=0: each process compiles anew", "unset MLC_CACHE")
        return
    if folder.exists() and not folder.is_dir():
        yield row("failed", f"{folder} is a file", mend)
        return
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0")
    except OSError as error:
        yield row("failed", f"{place} cannot be written ({error.strerror})", mend)
        return
    free = shutil.disk_usage(place).free
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.exists() else 0
    told = f"{folder}, {size / 1e6:.1f} MB of at most {now.cache_size / 1e9:.1f} GB" if folder.exists() else (
        f"{folder}, which is made when it is first needed")  # fmt: skip
    if free < _FREE_BYTES:
        yield row("warning", f"{told}; {free / 1e6:.0f} MB are free on its disk", "free some space, or " + mend)
    else:
        yield row("ok", told, bytes=size, free=free)


def processor() -> Iterator[Row]:
    """What code for the CPU is made for."""
    target = import_module(f"{_ROOM}.runtime.targets").cpu_target()
    found = f"{target.arch}, {target.cores} threads, vectors of {target.vector_bytes * 8} bits"
    yield row("ok", found, arch=target.arch, cores=target.cores, vector_bytes=target.vector_bytes)


CHECKS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "python": python, "packages": packages, "imports": imports, "settings": settings, "cache": cache,
    "processor": processor,
}  # fmt: skip
