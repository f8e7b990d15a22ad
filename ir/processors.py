"""GPUs by name: what a multiprocessor (compute unit) of each has, and what its instructions can do.

Sources: "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++ Programming Guide 13, PTX ISA 9.0, and
AMD's CDNA 2, 3 and 4 instruction set architectures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_KB = 1 << 10


@dataclass(frozen=True, slots=True)
class Processor:
    """The usual part of an architecture.

    ``cores`` are its multiprocessors. What the programs on one of them share: ``threads`` and ``blocks`` are the most
    that are resident; ``shared`` is its shared memory in bytes, of which a block may ask for ``block_shared`` and costs
    ``reserved`` more than it asks for; ``registers`` are of 32 bits, given to a warp of ``warp`` threads in steps of
    ``step`` a thread, of which a thread has ``thread_registers`` at most.
    """

    cores: int
    threads: int
    blocks: int
    shared: int
    block_shared: int
    reserved: int = 1 << 10
    registers: int = 64 << 10
    thread_registers: int = 255
    step: int = 8
    warp: int = 32


def _nvidia(cores: int, threads: int, blocks: int, shared: int, reserved: int = 1) -> Processor:
    """``shared`` and ``reserved`` in KB: a block may ask for what none is reserved of."""
    return Processor(cores, threads, blocks, shared * _KB, (shared - reserved) * _KB, reserved * _KB)


def _amd(cores: int, shared: int) -> Processor:
    """Four SIMDs of 512 registers a lane and eight wavefronts; ``shared`` in KB."""
    return Processor(
        cores, 2048, 32, shared * _KB, shared * _KB, 0, registers=128 * _KB, thread_registers=512, warp=64
    )  # fmt: skip


# By compute capability.
_NVIDIA = {
    (7, 0): _nvidia(80, 2048, 32, 96, reserved=0), (7, 5): _nvidia(40, 1024, 16, 64, reserved=0),
    (8, 0): _nvidia(108, 2048, 32, 164), (8, 6): _nvidia(84, 1536, 16, 100), (8, 7): _nvidia(16, 1536, 16, 164),
    (8, 9): _nvidia(128, 1536, 24, 100), (9, 0): _nvidia(132, 2048, 32, 228), (10, 0): _nvidia(148, 2048, 32, 228),
    (10, 3): _nvidia(160, 2048, 32, 228), (11, 0): _nvidia(20, 1536, 24, 228), (12, 0): _nvidia(188, 1536, 24, 100),
    (12, 1): _nvidia(48, 1536, 24, 100),
}  # fmt: skip
_AMD = {0x90A: _amd(104, 64), 0x942: _amd(304, 64), 0x950: _amd(256, 160)}
_CDNA = 0x9
KNOWN = (*(f"cuda:sm_{a}{b}" for a, b in _NVIDIA), *(f"hip:gfx{n:x}" for n in _AMD))


def capability(kind: str, arch: str) -> tuple[int, int]:
    """The compute capability of "sm_103", (10, 3), and the version of "gfx942", (9, 66): its family and the rest of its
    hexadecimal number. (0, 0) for another name."""
    if kind == "cuda":
        found = re.fullmatch(r"sm_(\d{1,2})(\d)", arch)
        return (int(found[1]), int(found[2])) if found else (0, 0)
    found = re.fullmatch(r"gfx([0-9a-f]{1,2})([0-9a-f]{2})", arch)
    return (int(found[1], 16), int(found[2], 16)) if kind == "hip" and found else (0, 0)


def processor(kind: str, arch: str) -> Processor | None:
    """The processor of that name, or the nearest older one: of a family that has come since, the newest that is known,
    which has as much of everything as most. None for what is older than all of them, or no GPU that code is made for.
    """
    major, minor = capability(kind, arch)
    if kind == "cuda":
        older = [c for c in _NVIDIA if c <= (major, minor)]
        return _NVIDIA[max(older)] if older else None
    if major != _CDNA:
        return None
    numbers = [n for n in _AMD if n <= major << 8 | minor]
    return _AMD[max(numbers)] if numbers else None
