"""The machine that measures, as the tuning database tells it from others: its part, rates, and what runs on it."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...ir.target import Target
from ...scheduler.tuning.database import NO_PART, Database, Part
from ...scheduler.tuning.database.shipped import Shipped
from ..cache.fingerprint import environment_fingerprint
from ..targets import is_here

_LIBRARIES = ("torch", "triton", "llvmlite", "numpy")
_COPIED, _SIDE, _ROUNDS = 64 << 20, 1024, 5


def tuning_database(path: str | os.PathLike[str], *, predicted: bool = False) -> Database:
    """The tuning database of a file, which knows this machine, and what comes with the package."""
    return Database(
        path, environment_fingerprint(), predicted=predicted, part=part_of, facts=machine_facts(), shipped=shipped()
    )


@cache
def shipped() -> Shipped:
    """What comes with the package, read once a process."""
    return Shipped()


@lru_cache(maxsize=16)
def part_of(target: Target) -> Part:
    """What a target is on this machine; a GPU that is not here is of no part."""
    if not target.is_gpu:
        return Part(_processor(), partial(_rates, "cpu"))
    if not is_here(target):
        return NO_PART
    number = torch.cuda.current_device()
    return Part(torch.cuda.get_device_name(number), partial(_rates, f"cuda:{number}"))


@cache
def _processor() -> str:
    """The processor's name as its vendor has it, without the rate that it is sold with."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return re.sub(r"\((R|TM|tm)\)|\bCPU\b|@.*", " ", value).strip()
    except OSError:
        pass
    return platform.processor()


def _rates(device: str) -> Mapping[str, float]:
    """What a device does a nanosecond: bytes copied, from memory and to it, and operations in products of float32. It
    takes a tenth of a second."""
    # Compilation may have torch make fake tensors.
    with _disable_current_modes(), suppress(RuntimeError):
        a = torch.ones(_COPIED, dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        m = torch.ones(_SIDE, _SIDE, device=device)
        return {
            "copy": 2 * _COPIED / _nanoseconds(partial(b.copy_, a), device),
            "float32": 2 * _SIDE**3 / _nanoseconds(partial(torch.mm, m, m), device),
        }
    return {}  # too little memory for that; nothing needs to know


def _nanoseconds(run: Callable[[], object], device: str) -> float:
    """The least of some runs."""

    def once() -> float:
        begun = time.perf_counter_ns()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return float(time.perf_counter_ns() - begun)

    once()
    return max(1.0, min(once() for _ in range(_ROUNDS)))


@cache
def machine_facts() -> tuple[tuple[str, str], ...]:
    """Versions of what makes and runs kernels, and the system: no names of people, hosts or paths."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return tuple(sorted(found.items()))
