"""The processors that a library is made for: the one at hand, and the levels of x86-64 that others agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.target import Target
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from .errors import ExportError

HOST = "host"
_V2 = ("cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
# Features and bytes of vectors, the least level first (the psABI of x86-64).
_LEVELS: dict[str, tuple[tuple[str, ...], int]] = {
    "x86-64": ((), 16),
    "x86-64-v2": (_V2, 16),
    "x86-64-v3": (_V3, 32),
    "x86-64-v4": ((*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), 64),
}


def targets_of(names: Sequence[str], options: Options) -> tuple[Target, ...]:
    """The targets of names, the least capable first. Raises ExportError for what is none."""
    host = target_for("cpu", options.target, options.threads, options.cpu_products, options.libraries)
    known = (*_LEVELS, HOST)
    wrong = [n for n in names if n not in known]
    if wrong or not names or len(set(names)) < len(names):
        what = f"and {', '.join(map(repr, wrong))} is none" if wrong else f"each once, and not {tuple(names)!r}"
        raise ExportError(f"targets= takes processors, of {', '.join(map(repr, known))}, {what}")
    if any(n != HOST for n in names) and not any(f in host.features for f in ("+sse2", "-sse2")):
        raise ExportError(f"this machine's processor is {host.arch}, and levels of x86-64 are made on x86-64 alone")
    return tuple(host if n == HOST else _level(n, host) for n in sorted(names, key=known.index))


def _level(name: str, host: Target) -> Target:
    features, width = _LEVELS[name]
    # Caches and cores are those of the machine at hand, which says as much of others as anything.
    return replace(host, arch=name, features=",".join(f"+{f}" for f in sorted(features)), vector_bytes=width)
