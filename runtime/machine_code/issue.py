"""The instruction slots that a launch of a GPU kernel takes, for a call of given sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ...codegen.kernel import KernelSource
from ...ir.machine import Machine
from ..gpu.launch import grid_function
from ..triton.compile import GpuBinary
from ..triton.report import access_bytes as amd_bytes
from .amdgcn import read_amdgcn
from .counts import Counted, count_runs
from .flight import bytes_in_flight
from .sass import DisassemblyError, disassembler, read_sass
from .sass import access_bytes as sass_bytes


@dataclass(frozen=True, slots=True)
class IssueReport:
    """``slots`` are the instructions that all threads of a launch execute together, those of the scalar unit of AMD's
    GPUs aside; ``asked`` the bytes of global memory that they name in loads and stores, those of switched-off lanes
    among them; ``guessed`` the lines of loops for which nothing tells how often they run (once is taken). ``programs``
    are those of the launch, and ``in_flight`` the bytes of loads that each of their threads has in flight while it
    waits for memory, None where the code does not tell."""

    slots: float
    asked: float
    guessed: tuple[int, ...] = ()
    programs: int = 0
    in_flight: float | None = None

    @property
    def known_slots(self) -> float | None:
        """The slots, None where how often a loop runs was guessed: where data decide it, they may be any number."""
        return None if self.guessed else self.slots

    def on_multiprocessor(self, threads: int, occupancy: float, machine: Machine) -> float | None:
        """Bytes of loads in flight on a multiprocessor whose ``occupancy`` programs of so many ``threads`` can fill,
        as far as the launch has so many programs."""
        resident = min(occupancy * machine.threads, threads * self.programs / machine.cores)
        return None if self.in_flight is None else self.in_flight * resident


def issue_report(
    binary: GpuBinary, source: KernelSource, sizes: Mapping[str, int], rows: float = 1.0
) -> IssueReport | None:
    """Count a kernel's machine code; ``sizes`` are the values of its size symbols by name. A launch does ``rows`` times
    as much as at those sizes, where it is over a table.

    None where nothing here reads such code: for NVIDIA's GPUs a disassembler is needed, which Triton brings along.
    """
    if binary.kind == "cuda" and disassembler() is None:
        return None
    return _issue_report(binary, source, tuple(sizes.get(s, 0) for s in source.symbols), rows)


@lru_cache(maxsize=512)
def _issue_report(binary: GpuBinary, source: KernelSource, sizes: tuple[int, ...], rows: float) -> IssueReport | None:
    counted = _counted(binary, source, sizes)
    if counted is None:
        return None
    programs = round(math.prod(grid_function(source)(*sizes)) * rows)
    threads = programs * binary.threads
    in_flight = bytes_in_flight(counted.code, counted.runs)
    return IssueReport(counted.slots * threads, asked_bytes(counted) * threads, counted.guessed, programs, in_flight)


def counted_code(binary: GpuBinary, source: KernelSource, sizes: Mapping[str, int]) -> Counted | None:
    """The instructions of a kernel and how often each runs, at sizes by name; None where nothing here reads them."""
    if binary.kind == "cuda" and disassembler() is None:
        return None
    return _counted(binary, source, tuple(sizes.get(s, 0) for s in source.symbols))


@lru_cache(maxsize=128)
def _counted(binary: GpuBinary, source: KernelSource, sizes: tuple[int, ...]) -> Counted | None:
    grid = grid_function(source)(*sizes)
    try:
        code = (
            read_sass(binary.code, binary.name) if binary.kind == "cuda" else read_amdgcn(binary.assembly, source.name)
        )
    except DisassemblyError:
        return None
    return count_runs(code, source.text, source.name, dict(zip(source.symbols, sizes, strict=True)), grid)


def asked_bytes(counted: Counted) -> float:
    """Bytes of global memory that a thread names."""
    total = 0.0
    for runs, i in zip(counted.runs, counted.code.instructions, strict=True):
        if i.opcode.partition(".")[0] in ("LDG", "STG", "LDGSTS"):
            total += runs * sass_bytes(i.opcode)
        elif i.opcode.startswith(("global_load", "global_store", "buffer_load", "buffer_store")):
            total += runs * amd_bytes(i.opcode.split("_", 2)[2])
    return total
