"""Where a GPU's driver library is: the one that this process has mapped already, before any that the loader finds.

torch's wheels carry AMD's runtime under names with versions or hashes, and NVIDIA's driver lies in a folder of its own
under WSL. Two copies of one library in a process do not know of each other's contexts and streams.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

_MAPS = Path("/proc/self/maps")
_TORCH = Path(torch.__file__).parent / "lib"
# How the names of a kind's library look, whatever its version ("libamdhip64-6a1f.so.6.2" in wheels).
_FILES: Mapping[str, re.Pattern[str]] = {
    "cuda": re.compile(r"libcuda(-[0-9a-f]+)?\.so(\.\d+)*"),
    "hip": re.compile(r"libamdhip64(-[0-9a-f]+)?\.so(\.\d+)*"),
}
# What the loader is asked for, in this order.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1"),
    "hip": (*(f"libamdhip64.so{v}" for v in ("", ".7", ".6", ".5")), "/opt/rocm/lib/libamdhip64.so"),
}
_MEND: Mapping[str, str] = {
    "cuda": "install NVIDIA's driver, and start containers with access to the GPU (docker run --gpus all)",
    "hip": "install ROCm or a torch that was built for it, and give containers /dev/kfd and /dev/dri",
}


class NoGpuLibrary(OSError):
    """This machine has no driver library of a kind; the text says where it was looked for."""


def load_driver_library(
    kind: str, *, maps: Path = _MAPS, folder: Path = _TORCH, load: Callable[[str], Any] = ctypes.CDLL
) -> Any:
    """The driver library of a kind of GPUs ("cuda", "hip"). ``maps`` tells what is mapped, as Linux's
    /proc/self/maps; ``folder`` is that of torch's own libraries. Raises NoGpuLibrary."""
    tried: dict[str, str] = {}
    for name in library_names(kind, maps, folder):
        if name in tried:
            continue
        try:
            return load(name)
        except OSError as error:
            tried[name] = str(error)
    told = "; ".join(reason if name in reason else f"{name}: {reason}" for name, reason in tried.items())
    raise NoGpuLibrary(f"no {kind} driver on this machine ({told}); {_MEND[kind]}")


def library_names(kind: str, maps: Path, folder: Path) -> Iterator[str]:
    """Paths and names under which the library of a kind may be, the best first."""
    yield from _mapped(kind, maps)
    found = [p for p in folder.glob("lib*") if _FILES[kind].fullmatch(p.name)] if folder.is_dir() else []
    yield from (str(p) for p in sorted(found))
    yield from _NAMES[kind]


def _mapped(kind: str, maps: Path) -> Iterator[str]:
    """The files of a kind that are mapped. One that was deleted since cannot be opened by its name again."""
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return  # not a Linux
    for line in lines:
        fields = line.split(maxsplit=5)
        path = fields[5] if len(fields) == 6 else ""
        if _FILES[kind].fullmatch(PurePosixPath(path).name):
            yield path
