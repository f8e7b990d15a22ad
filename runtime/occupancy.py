"""How many threads of a kernel a multiprocessor can hold at once, from what the kernel takes of it.

Sources: compute capabilities in NVIDIA's CUDA C++ Programming Guide ("Technical Specifications per Compute
Capability"), and AMD's CDNA 2, 3 and 4 instruction set architectures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What the programs on one multiprocessor (compute unit) share.

    ``threads`` and ``blocks`` are the most that are resident; ``registers`` are of 32 bits, given to a warp of
    ``warp`` threads in steps of ``step`` a thread; ``shared`` is in bytes, of which every block costs ``reserved`` more
    than it asks for.
    """

    threads: int
    blocks: int
    shared: int
    reserved: int = 1 << 10
    registers: int = 64 << 10
    step: int = 8
    warp: int = 32


_KB = 1 << 10
_MULTIPROCESSORS = {
    "sm_70": Multiprocessor(2048, 32, 96 * _KB, reserved=0),
    "sm_75": Multiprocessor(1024, 16, 64 * _KB, reserved=0),
    "sm_80": Multiprocessor(2048, 32, 164 * _KB),
    "sm_86": Multiprocessor(1536, 16, 100 * _KB),
    "sm_89": Multiprocessor(1536, 24, 100 * _KB),
    "sm_90": Multiprocessor(2048, 32, 228 * _KB),
    "sm_100": Multiprocessor(2048, 32, 228 * _KB),
    "sm_120": Multiprocessor(1536, 24, 100 * _KB),
    # Four SIMDs of 512 registers a lane and eight wavefronts.
    "gfx90a": Multiprocessor(2048, 32, 64 * _KB, reserved=0, registers=128 * _KB, warp=64),
    "gfx942": Multiprocessor(2048, 32, 64 * _KB, reserved=0, registers=128 * _KB, warp=64),
    "gfx950": Multiprocessor(2048, 32, 160 * _KB, reserved=0, registers=128 * _KB, warp=64),
}


def occupancy(arch: str, registers: int, shared: int, threads: int) -> float | None:
    """The share of an architecture's ("sm_90") resident threads that blocks of a kernel can fill, from 0 to 1.

    ``registers`` are per thread, ``shared`` bytes and ``threads`` per block. An estimate: what the grid fills is not
    asked. None for an architecture whose limits are not known.
    """
    unit = _MULTIPROCESSORS.get(arch)
    if unit is None or threads <= 0:
        return None
    warps = -(-threads // unit.warp)
    each = max(unit.step, -(-registers // unit.step) * unit.step) * unit.warp
    fit = (
        unit.blocks,
        unit.threads // (warps * unit.warp),
        unit.registers // each // warps,
        unit.shared // (shared + unit.reserved) if shared + unit.reserved else unit.blocks,
    )
    return min(fit) * warps * unit.warp / unit.threads
