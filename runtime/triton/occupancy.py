"""How many threads of a kernel a multiprocessor can hold at once, from what the kernel takes of it."""

from __future__ import annotations

from ...ir.machine import Machine, known_machine


def occupancy(arch: str, registers: int, shared: int, threads: int) -> float | None:
    """The share of an architecture's ("sm_90") resident threads that blocks of a kernel can fill, from 0 to 1.

    ``registers`` are per thread, ``shared`` bytes and ``threads`` per block. An estimate: what the grid fills is not
    asked. None for an architecture whose limits are not known.
    """
    unit = known_machine("hip" if arch.startswith("gfx") else "cuda", arch)
    if unit is None or threads <= 0:
        return None
    warps = -(-threads // unit.warp)
    return resident_programs(unit, registers, shared, threads) * warps * unit.warp / unit.threads


def resident_programs(unit: Machine, registers: int, shared: int, threads: int) -> int:
    """How many programs of a kernel a multiprocessor holds at a time, zero where not even one fits.

    ``registers`` are per thread, ``shared`` bytes and ``threads`` per program.
    """
    warps = -(-threads // unit.warp)
    each = max(unit.step, -(-registers // unit.step) * unit.step) * unit.warp
    return min(
        unit.blocks,
        unit.threads // (warps * unit.warp),
        unit.registers // each // warps,
        unit.shared // (shared + unit.reserved) if shared + unit.reserved else unit.blocks,
    )
