"""What differs between the systems that libraries are made for: numbers of system calls and instructions that wait."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernel import EmitError


@dataclass(frozen=True, slots=True)
class Platform:
    """Linux on one instruction set. ``futex`` and ``getaffinity`` are numbers of system calls, ``pause`` the
    intrinsic that a waiting loop runs, with the type of its argument."""

    machine: str
    triple: str
    futex: int
    getaffinity: int
    pause: str
    pause_type: str = ""


PLATFORMS = {
    p.machine: p
    for p in (
        Platform("x86-64", "x86_64-unknown-linux-gnu", 202, 204, "@llvm.x86.sse2.pause()"),
        Platform("aarch64", "aarch64-unknown-linux-gnu", 98, 123, "@llvm.aarch64.hint(i32 1)", "i32"),
    )
}


def platform_of(machine: str) -> Platform:
    """The platform of that name. Raises: EmitError for others."""
    found = PLATFORMS.get(machine)
    if found is None:
        raise EmitError(f"no libraries are made for {machine!r}; there are {', '.join(PLATFORMS)}")
    return found
