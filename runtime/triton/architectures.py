"""GPUs that the compilers of this installation make code for: asked before they run, since what they do not know may
end the process in the middle of LLVM."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path

from ...ir.machine import KNOWN, capability
from ...ir.target import Target, TargetError

# From here on Triton makes code for one architecture alone ("sm_90a").
_ALONE = 90
# What the assembler knows and LLVM has no code for any more.
_OLDEST = 70
# NVIDIA's assemblers beside Triton, and the variables that name others: up to sm_99, and from sm_100 on.
_ASSEMBLERS = (
    ("ptxas", "TRITON_PTXAS_PATH", range(_OLDEST, 100)),
    ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH", range(100, 1000)),
)


def check_architecture(target: Target) -> None:
    """Raises TargetError for a GPU that the compilers here do not know; says which they do."""
    known = architectures(target.kind)
    if known and target.arch not in known:
        near = min(known, key=lambda arch: _distance(target, arch))
        raise TargetError(
            f"no code for {str(target)!r} can be made here: Triton and its assembler do not know {target.arch}; "
            f"did you mean {target.kind}:{near}? They know {', '.join(f'{target.kind}:{arch}' for arch in known)}"
        )


@lru_cache(maxsize=4)
def architectures(kind: str) -> tuple[str, ...]:
    """The GPUs of a kind ("cuda", "hip") that code is made for here, old ones first; none where nobody can tell."""
    if kind == "hip":  # Triton has no list; these have been compiled for
        return tuple(known.partition(":")[2] for known in KNOWN if known.startswith("hip:"))
    listed = [n for name, variable, ours in _ASSEMBLERS for n in _listed(name, variable, ours)]
    return tuple(f"sm_{n}" for n in sorted(listed))


def _listed(name: str, variable: str, ours: range) -> list[int]:
    """The architectures that an assembler lists under the names that Triton gives them."""
    spec = importlib.util.find_spec("triton")  # which is not imported for this
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = os.environ.get(variable) or next((str(Path(p, "backends", "nvidia", "bin", name)) for p in places), "")
    try:
        told = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = ((int(n), bool(a)) for n, a in re.findall(r"'sm_(\d+)(a?)'", told))
    return [n for n, alone in found if n in ours and alone == (n >= _ALONE)]


def _distance(target: Target, arch: str) -> int:
    (a, b), (c, d) = capability(target.kind, target.arch), capability(target.kind, arch)
    return abs((a - c) * 256 + b - d)
