"""The machines that code is made for, one table: what a GPU's multiprocessors (compute units) and a CPU's cores have,
how fast they are, and what passes between kernels.

``Target.machine`` puts what a driver or an operating system tells over these figures. Decisions by cost read them in
``scheduler/cost`` alone.

Sources: "Technical Specifications per Compute Capability" in NVIDIA's CUDA C++ Programming Guide 13, PTX ISA 9.0, and
AMD's CDNA 2, 3 and 4 instruction set architectures for what a multiprocessor has; the vendors' data sheets of the part
that ``part`` names for rates, of which a program reaches a share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from .expr.dtypes import DType
from .pipes import (
    ADA,
    AMPERE,
    AMPERE_SMALL,
    BLACKWELL,
    BLACKWELL_SMALL,
    CDNA2,
    CDNA3,
    CDNA4,
    HOPPER,
    ORIN,
    TURING,
    VOLTA,
    Pipes,
)  # fmt: skip

_KB = 1 << 10
_MB = 1 << 20
# What copies, products of half types and float32 reach of a data sheet's rates, as measured on an H200 (4.3 of 4.8
# TB/s, 790 of 989 and 50 of 67 TFLOP/s).
_COPY, _PRODUCT, _FLOAT32 = 0.896, 0.8, 0.746
# Nanoseconds between the kernels of a GPU.
_LAUNCH = 2000.0
# Bytes a nanosecond in one direction between devices that share nothing but 16 lanes of PCI Express 4.
_PCIE = 32.0
# What tensor (matrix) cores multiply, adding up in 32 bits: of 2017 and 2018, since then, and with bytes of floats.
_FIRST = frozenset({DType.FLOAT16})
_BYTES = _FIRST | {DType.INT8}
_HALVES = _BYTES | {DType.BFLOAT16}
_FLOAT8 = _HALVES | {DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2}
# On NVIDIA's GPUs Triton has the first, and instructions of its versions widen the second, only where tensor cores
# multiply them; on AMD's it has both.
_WHERE_MULTIPLIED = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})
# More steps in flight than any kernel wants: shared memory and registers bound them.
_MANY = 8


@dataclass(frozen=True, slots=True)
class Libraries:
    """What torch calls on a machine for products and for convolutions, by the names that reports give them."""

    products: str
    convolutions: str


# Where nothing may be called, and kernels compute everything that they can.
NO_LIBRARIES = Libraries("", "")
# Where products of float32 and float64 may be called alone.
ONLY_PRODUCTS = Libraries("CBLAS", "")


@dataclass(frozen=True, slots=True)
class Machine:
    """A part: its cores or multiprocessors, what each has, and the rates of all of them (of a CPU, of one core).

    ``bandwidth`` is bytes a nanosecond to and from memory; ``matmul`` operations a nanosecond in a library's products
    of half types (of float32 on a CPU), ``float32`` in loops of float32 in full precision, and ``issued`` instructions
    a nanosecond, counted by lanes. ``launch`` are the nanoseconds between kernels, of a CPU those of a library's call.
    ``l2_bytes`` is a cache that multiprocessors share, of a CPU a core's own; ``vector_bytes`` a SIMD register.

    What the programs on one multiprocessor share: ``threads`` and ``blocks`` are the most that are resident; ``shared``
    is its shared memory in bytes, of which a block may ask for ``block_shared`` and costs ``reserved`` more than it
    asks for; ``registers`` are of 32 bits, given to a warp of ``warp`` threads in steps of ``step`` a thread, of which
    a thread has ``thread_registers`` at most.

    ``multiplied`` are the types that tensor (matrix) cores multiply, at the rate of half types or more; what is none of
    them runs at ``float32``, by ``matrix_float32`` in those cores too. ``as_bytes`` are the float types of eight bits
    that Triton lacks for it, or some version of it. ``stages`` are the steps of a loop over tiles that a kernel has in
    flight at most: one where copies to shared memory make a program wait, two where the next one comes through
    registers. ``reads_ahead``: a core's prefetchers keep up with several arrays that are read evenly. ``lanes_alone``:
    lanes that are no neighbours are loaded and stored faster one by one than by gathers and scatters. ``halves``: how
    many times as fast as float32 a CPU's library multiplies bfloat16, with weights put in order. ``link`` is bytes a
    nanosecond in each direction to the other devices of a group, ``host_link`` to the host's memory from a GPU.
    ``blas`` is the share of oneDNN's rate that BLAS reaches on a CPU in products of float32. ``dots``: how many times
    as fast as loops of float32 a CPU adds products of bytes up; 0 where it has no instruction.
    """

    part: str
    cores: int
    bandwidth: float
    matmul: float
    float32: float
    issued: float
    launch: float
    l2_bytes: int
    l1_bytes: int = 0
    vector_bytes: int = 16
    threads: int = 1
    blocks: int = 1
    shared: int = 0
    block_shared: int = 0
    reserved: int = 0
    registers: int = 64 << 10
    thread_registers: int = 255
    step: int = 8
    warp: int = 1
    multiplied: frozenset[DType] = frozenset()
    matrix_float32: bool = False
    as_bytes: frozenset[DType] = frozenset()
    stages: int = 1
    reads_ahead: bool = False
    lanes_alone: bool = False
    halves: float = 1.0
    link: float = 12.5
    host_link: float = _PCIE
    libraries: Libraries = Libraries("BLAS", "oneDNN")
    blas: float = 1.0
    dots: float = 0.0
    pipes: Pipes | None = None
    boost: float = 0.0

    @property
    def calls_libraries(self) -> bool:
        """Whether a library may compute what kernels could, other than products."""
        return self.libraries.convolutions != ""

    @property
    def clock(self) -> float:
        """Clocks of a GPU a nanosecond, while all of it is busy."""
        return self.issued / self.cores / self.pipes.issue if self.pipes is not None else 0.0

    @property
    def slots_a_byte(self) -> float:
        """Instruction slots that a GPU issues, at its clock by the data sheet, in the time of a byte of its memory."""
        return self.cores * self.pipes.issue * self.boost / self.bandwidth if self.pipes is not None else 0.0

    @property
    def is_gpu(self) -> bool:
        return self.warp > 1

    @property
    def in_kernels(self) -> frozenset[DType]:
        """The types that those cores multiply in kernels of ours. Triton reaches none before compute capability 8.0, to
        which it gives one step at a time too; libraries do."""
        return self.multiplied if self.stages > 1 else frozenset()

    @property
    def has_async_copies(self) -> bool:
        """Whether copies to shared memory go on while the program does."""
        return self.stages > 2

    @property
    def through_registers(self) -> bool:
        """Whether the next step of a loop comes through registers."""
        return self.stages == 2


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A data sheet: TB/s of memory, TFLOP/s of half types in tensor (matrix) cores without sparsity, adding up in
    float32, and of float32; GHz; MB of L2."""

    part: str
    bandwidth: float
    matmul: float
    float32: float
    clock: float
    l2: int

    def machine(
        self, cores: int, pipes: Pipes, libraries: Libraries, multiplied: frozenset[DType], **has: Any
    ) -> Machine:  # fmt: skip
        return Machine(
            self.part, cores, self.bandwidth * 1e3 * _COPY, self.matmul * 1e3 * _PRODUCT, self.float32 * 1e3 * _FLOAT32,
            cores * pipes.issue * self.clock, _LAUNCH, self.l2 * _MB, libraries=libraries, multiplied=multiplied,
            pipes=pipes, boost=self.clock, **has,
        )  # fmt: skip


def _to_host(pcie: int) -> float:
    """Bytes a nanosecond over 16 lanes of a generation of PCI Express."""
    return _PCIE * 2.0 ** (pcie - 4)


def _nvidia(
    sheet: _Sheet, pipes: Pipes, cores: int, threads: int, blocks: int, shared: int, reserved: int = 1,
    multiplied: frozenset[DType] = _FLOAT8, stages: int = _MANY, link: float = _PCIE,
    pcie: int = 4,
) -> Machine:  # fmt: skip
    """Four schedulers of 32 lanes; ``shared`` and ``reserved`` in KB: a block may ask for what none is reserved of."""
    return sheet.machine(
        cores, pipes, Libraries("cuBLAS", "cuDNN"), multiplied, threads=threads, blocks=blocks, shared=shared * _KB,
        block_shared=(shared - reserved) * _KB, reserved=reserved * _KB, warp=32, stages=stages, link=link,
        host_link=_to_host(pcie), as_bytes=_WHERE_MULTIPLIED - multiplied,
    )  # fmt: skip


def _amd(
    sheet: _Sheet, pipes: Pipes, cores: int, shared: int, link: float, multiplied: frozenset[DType] = _FLOAT8,
    pcie: int = 5,
) -> Machine:  # fmt: skip
    """Four SIMDs of 16 lanes, 512 registers a lane and eight wavefronts; ``shared`` in KB. The next step of a loop
    comes through registers."""
    return sheet.machine(
        cores, pipes, Libraries("hipBLASLt", "MIOpen"), multiplied, threads=2048, blocks=32, shared=shared * _KB,
        block_shared=shared * _KB, registers=128 * _KB, thread_registers=512, warp=64, stages=2, matrix_float32=True,
        link=link, host_link=_to_host(pcie),
    )  # fmt: skip


# By compute capability. Rates are those of the part's data sheet ("Tesla V100", "T4", "A100 80GB", "RTX A6000", "Jetson
# AGX Orin Series", "H200", "HGX B200", "HGX B300", "Jetson Thor Series", "RTX PRO 6000 Blackwell", "DGX Spark"; of the
# RTX 4090 of the "Ada GPU Architecture" paper), a GPU's share of those of eight; half of what is told for sparse ones.
_NVIDIA = {
    (7, 0): _nvidia(_Sheet("V100 SXM2", 0.9, 125, 15.7, 1.53, 6), VOLTA, 80, 2048, 32, 96, 0, _FIRST, 1, 150, 3),
    (7, 5): _nvidia(_Sheet("T4", 0.32, 65, 8.1, 1.59, 4), TURING, 40, 1024, 16, 64, 0, _BYTES, 1, pcie=3),
    (8, 0): _nvidia(_Sheet("A100 80GB", 2.04, 312, 19.5, 1.41, 40), AMPERE, 108, 2048, 32, 164, 1, _HALVES, _MANY, 300),
    (8, 6): _nvidia(_Sheet("RTX A6000", 0.768, 155, 38.7, 1.8, 6), AMPERE_SMALL, 84, 1536, 16, 100, 1, _HALVES),
    (8, 7): _nvidia(_Sheet("Jetson AGX Orin", 0.205, 42, 5.3, 1.3, 4), ORIN, 16, 1536, 16, 164, 1, _HALVES),
    (8, 9): _nvidia(_Sheet("RTX 4090", 1.01, 165, 82.6, 2.52, 72), ADA, 128, 1536, 24, 100),
    (9, 0): replace(
        _nvidia(_Sheet("H200 SXM", 4.8, 989, 67, 1.98, 50), HOPPER, 132, 2048, 32, 228, link=450, pcie=5),
        bandwidth=4300.0, matmul=790e3, float32=50e3, issued=29.6e3,
    ),  # measured
    (10, 0): _nvidia(_Sheet("B200", 8.0, 2250, 75, 1.98, 126), BLACKWELL, 148, 2048, 32, 228, link=900, pcie=5),
    (10, 3): _nvidia(_Sheet("B300", 8.0, 2250, 75, 1.83, 126), BLACKWELL, 160, 2048, 32, 228, link=900, pcie=5),
    (11, 0): _nvidia(_Sheet("Jetson AGX Thor", 0.273, 258, 8.1, 1.57, 32), BLACKWELL, 20, 1536, 24, 228),
    (12, 0): _nvidia(
        _Sheet("RTX PRO 6000 Blackwell", 1.79, 500, 125, 2.6, 128), BLACKWELL_SMALL, 188, 1536, 24, 100, pcie=5
    ),
    (12, 1): _nvidia(_Sheet("DGX Spark (GB10)", 0.273, 125, 31, 2.4, 24), BLACKWELL_SMALL, 48, 1536, 24, 100),
}  # fmt: skip
# Rates are those of the data sheets "Instinct MI250", "MI300X" and "MI355X"; caches of "AMD GPU specifications" (ROCm).
_AMD = {
    0x90A: _amd(_Sheet("MI250, one die", 1.64, 181, 22.6, 1.7, 8), CDNA2, 104, 64, 300, _HALVES, 4),
    0x942: _amd(_Sheet("MI300X", 5.3, 1307, 163, 2.1, 32), CDNA3, 304, 64, 448),
    0x950: _amd(_Sheet("MI355X", 8.0, 2517, 157, 2.4, 32), CDNA4, 256, 160, 537),
}
# As measured; of other cores the ratios of these rates, which alone matter, are much the same.
_CPU = Machine(
    "one core of Zen 3", 1, bandwidth=14.0, matmul=73.0, float32=34.0, issued=50.0, launch=1100.0, l2_bytes=512 * _KB,
    l1_bytes=32 * _KB, vector_bytes=32,
)  # fmt: skip
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


def known_machine(kind: str, arch: str) -> Machine | None:
    """The machine of that name, or the nearest older one: of a family that has come since, the newest that is known,
    which has as much of everything as most. None for GPUs that are older than all of them, or that no code is made for.
    """
    major, minor = capability(kind, arch)
    if kind == "cpu":
        return _CPU
    if kind == "cuda":
        older = [c for c in _NVIDIA if c <= (major, minor)]
        return _NVIDIA[max(older)] if older else None
    if major != _CDNA:
        return None
    numbers = [n for n in _AMD if n <= major << 8 | minor]
    return _AMD[max(numbers)] if numbers else None


def oldest_machine(kind: str) -> Machine:
    """The oldest that is known of a kind of GPUs."""
    return _NVIDIA[min(_NVIDIA)] if kind == "cuda" else _AMD[min(_AMD)]
