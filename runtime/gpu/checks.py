"""Launches that are waited for, one by one, so that a kernel that fails is told under its own name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...codegen.kernel import KernelSource

# What CUDA's and HIP's own libraries wait by; none of them says which of our kernels it was.
_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")

# What is told of an error that may be another kernel's.
LATE = (
    "; a kernel that was launched before may be the cause: MLC_VERIFY=1 or CUDA_LAUNCH_BLOCKING=1 waits for each "
    "launch, and names the kernel that fails"
)


def launches_checked(verify: int = 0) -> bool:
    """Whether kernels that are loaded now are to be waited for at each launch: by the setting ``verify``, or where the
    environment asks for it."""
    return verify > 0 or any(os.environ.get(name, "0").strip() not in ("", "0") for name in _BLOCKING)


def launch_text(source: KernelSource, grid: Sequence[int], arguments: Sequence[int]) -> str:
    """What a launch was given: its grid, each tensor with its address, and the sizes."""
    if source.option("table"):
        given = ["a table of addresses"]
    else:
        shapes = dict(zip((b.name for b in source.params), str(source.option("shapes", "")).split(";"), strict=False))
        given = [
            f"{b.name}: {b.dtype.value}{shapes.get(b.name, '')} at {address:#x}"
            for b, address in zip(source.params, arguments, strict=False)
        ]
        given += [f"{s} = {n}" for s, n in zip(source.symbols, arguments[len(source.params) :], strict=False)]
    return f"over a grid of {tuple(grid)}, with {', '.join(given)}"
