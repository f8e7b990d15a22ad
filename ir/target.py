"""What a kernel is compiled for: an explicit value, so that a machine can compile for one that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from .errors import MlcError
from .expr.dtypes import DType
from .machine import KNOWN, NO_LIBRARIES, ONLY_PRODUCTS, Libraries, Machine, capability, known_machine, oldest_machine

# Types of torch's devices whose tensors kernels are made for; what is computed on others is left to torch.
DEVICES = ("cpu", "cuda")


class TargetError(MlcError, ValueError):
    """A target was asked for by a name that names none."""


@dataclass(frozen=True, slots=True)
class Target:
    """A machine as schedules and emitters see it.

    ``kind`` is "cpu", "cuda" or "hip"; ``arch`` the processor ("znver3", "sm_90", "gfx942"). Sizes are bytes;
    ``cores`` are CPU cores or streaming multiprocessors (compute units); ``vector_bytes`` is the width of a SIMD
    register on a CPU; ``warp`` is threads per warp (wavefront); ``features`` are LLVM's feature flags of a CPU
    ("+avx2,+fma,…"), or "+tf32" of a GPU whose tensor cores may round float32 operands. ``gemm`` where kernels may call
    a BLAS library's ``sgemm`` from each thread of a team. ``onednn``: torch has that library beside MKL, which
    multiplies plain matrices too. ``libraries`` are those whose functions may be called:
    "aten", torch's, or "cblas", which multiplies matrices and nothing else; where there are none, kernels compute
    everything that they can, and call nothing but the C library's mathematics and a team's functions.
    """

    kind: str
    arch: str
    cores: int
    vector_bytes: int = 32
    l1_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    warp: int = 32
    shared_bytes: int = 0
    registers: int = 0
    max_threads: int = 1024
    features: str = ""
    gemm: bool = False
    onednn: bool = False
    libraries: tuple[str, ...] = ("aten",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "libraries", tuple(self.libraries))  # JSON, as which caches keep targets, has lists

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    # What a GPU can do follows from its compute capability, so that the members of a family agree, and what is newer
    # than this file has what the newest of its family has.

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of an NVIDIA GPU ((9, 0)); (0, 0) for others."""
        return capability(self.kind, self.arch) if self.kind == "cuda" else (0, 0)

    @property
    def has_ptx(self) -> bool:
        """Whether kernels may hold instructions of PTX."""
        return self.kind == "cuda"

    @property
    def has_pairs(self) -> bool:
        """Whether one instruction of PTX computes two elements of a half type, bfloat16 among them."""
        return self.capability >= (8, 0)

    @property
    def unpacks_operands(self) -> bool:
        """Whether operands of products in half types are made in registers of what packed weights hold: two elements at
        a time, or on AMD's matrix cores each by arithmetic in float32 that needs no more than its upper half."""
        return self.has_pairs or (self.kind == "hip" and self.multiplies(DType.BFLOAT16))

    @property
    def rounds_to_bfloat16(self) -> bool:
        """Whether one instruction makes the nearest bfloat16 of a float32: Ampere and later, CDNA 4."""
        return self.has_pairs or (self.kind == "hip" and capability(self.kind, self.arch) >= (9, 0x50))

    @property
    def has_tanh(self) -> bool:
        """Whether a hyperbolic tangent is one instruction."""
        return self.capability >= (7, 5)

    @property
    def has_tma(self) -> bool:
        """Whether it has a tensor memory accelerator, which copies tiles by descriptors."""
        return self.capability >= (9, 0)

    @property
    def has_dependent_launches(self) -> bool:
        """Whether a kernel may be launched before the one ahead of it has ended, and wait for that itself."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether four warps multiply together, their sums in registers: Hopper alone."""
        return self.capability[0] == 9

    @property
    def has_tcgen05(self) -> bool:
        """Whether four warps multiply together, their sums in tensor memory: Blackwell of data centers."""
        return self.capability[0] in (10, 11)

    @property
    def has_group_products(self) -> bool:
        """Whether tensor cores want the rows of four warps at once."""
        return self.has_wgmma or self.has_tcgen05

    def multiplies(self, dtype: DType) -> bool:
        """Whether tensor cores (matrix cores) multiply a type in kernels of ours."""
        return dtype in self.machine.in_kernels or (dtype is DType.FLOAT32 and "+tf32" in self.features)

    @property
    def has_operands_ahead(self) -> bool:
        """Whether Triton brings the next part of a product's operands from shared memory ahead: Ampere and Ada."""
        return self.capability[0] == 8

    def lacks(self, dtype: DType) -> bool:
        """Whether kernels have no elements of a float type of eight bits, and hold its bytes."""
        return dtype in self.machine.as_bytes

    @property
    def machine(self) -> Machine:
        """What it has and how fast it is: what was found of it, over the figures of the usual part."""
        return _machine(self)

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes and floating-point operations a second that all of its cores together reach at most."""
        machine, cores = self.machine, 1 if self.is_gpu else self.cores
        return machine.bandwidth * cores * 1e9, max(machine.float32, machine.matmul) * cores * 1e9

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.is_gpu else self.kind

    def lanes(self, itemsize: int) -> int:
        """Elements of that many bytes in one SIMD register."""
        return max(1, self.vector_bytes // itemsize)


# How many times as fast as float32 oneDNN multiplies bfloat16 with these features, the first that a processor has: as
# measured on Zen 5, and half of what a data sheet says of tiles.
_HALVES = {"+amx-bf16": 8.0, "+avx512bf16": 4.0}
# How many times as fast as float32 loops of ours add products of bytes up with these features: four of each lane, and
# with what is unpacked and scaled between.
_DOTS = {"+avx512vnni": 3.0, "+avxvnni": 3.0, "+dotprod": 3.0}
# Of vectors wider than this, products and what they read of memory keep their ratio; narrower ones multiply slower.
# MKL uses none wider on processors of AMD's: the share of oneDNN's rate that is left it there, which is more where
# wide vectors go through units of this width. Measured on Zen 4 at 1024 x 768 x 768, and on Zen 5.
_USUAL_VECTOR = 32
_NARROW_BLAS = {"znver4": 0.87}
_NARROW_USUALLY = 0.5


@lru_cache(maxsize=64)
def _machine(target: Target) -> Machine:
    usual = known_machine(target.kind, target.arch) or oldest_machine(target.kind)
    if target.is_gpu:  # all multiprocessors have the memory's rate, and each its own of instructions
        share, shared, warp = target.cores / usual.cores, target.shared_bytes or usual.block_shared, target.warp
    else:
        share, shared, warp = min(target.vector_bytes, _USUAL_VECTOR) / _USUAL_VECTOR, 0, 1
    amd = target.arch.startswith("znver")
    features = target.features.split(",")
    halves = next((rate for name, rate in _HALVES.items() if name in features), usual.halves)
    dots = next((rate for name, rate in _DOTS.items() if name in features), usual.dots)
    narrow = target.onednn and amd and target.vector_bytes > _USUAL_VECTOR
    blas = _NARROW_BLAS.get(target.arch, _NARROW_USUALLY) if narrow else 1.0
    return replace(
        usual, cores=target.cores, matmul=usual.matmul * share, float32=usual.float32 * share,
        issued=usual.issued * share, block_shared=shared, warp=warp, vector_bytes=target.vector_bytes,
        l1_bytes=target.l1_bytes, l2_bytes=target.l2_bytes, reads_ahead=amd, lanes_alone=amd,
        halves=halves, dots=dots, blas=blas, libraries=_libraries(target, usual),
    )  # fmt: skip


def _libraries(target: Target, usual: Machine) -> Libraries:
    """What may be called: all that torch does, or products of a library in the user's hands, or nothing."""
    if "aten" in target.libraries:
        return usual.libraries
    return ONLY_PRODUCTS if "cblas" in target.libraries and not target.is_gpu else NO_LIBRARIES


# Which machine a device ("cuda:0") is.
TargetOf: TypeAlias = Callable[[str], Target]


def usual_target(device: str) -> Target:
    """The machine that decisions are made for where nobody says which one a device is."""
    return Target("cpu", "znver3", 1, warp=1, max_threads=1) if device.startswith("cpu") else gpu_target("cuda:sm_90")


def waits_for_places(device: str) -> bool:
    """Whether a program stands still while it reads where something lies; a CPU's core goes on meanwhile."""
    return not device.startswith("cpu")


def fills_windows(device: str) -> bool:
    """Whether a kernel makes what windows read once for all that cover it, in a scratch; programs of a GPU make or load
    it for each of them."""
    return device.startswith("cpu")


def raises_errors(device: str) -> bool:
    """Whether kernels on a device tell of wrong data by an error: an assertion of a GPU is the end of its process."""
    return device.startswith("cpu")


def updates_in_order(device: str) -> bool:
    """Whether what a kernel combines in one place of memory is combined by one thread: programs of a GPU do not wait
    for one another, and need atomic operations and a result that is begun."""
    return device.startswith("cpu")


def multiplies_halves(device: str) -> bool:
    """Whether matrix products take half types as they are, and add up in float32; else they are converted before."""
    return not device.startswith("cpu")


def has_kernels(device: str) -> bool:
    """Whether kernels are made for tensors on a device ("cuda:0")."""
    return device.partition(":")[0] in DEVICES


def first_gpu(targets: Iterable[Target]) -> Target | None:
    """The first of some targets that is a GPU; None where all are CPUs."""
    return next((t for t in targets if t.is_gpu), None)


def gpu_target(name: str) -> Target:
    """The target called "cuda:sm_90" or "hip:gfx942", with the figures of the architecture's usual part; a processor
    that is newer than all known has those of the newest before it. Raises TargetError."""
    kind, _, arch = name.partition(":")
    arch = (
        arch.rstrip("af") if kind == "cuda" else arch
    )  # the names with which the assembler means this processor alone
    found = known_machine(kind, arch) if kind != "cpu" else None
    if found is None:
        raise TargetError(f"no target {name!r}; the known GPU targets are {', '.join(KNOWN)}, and there is 'cpu'")
    return Target(
        kind, arch, found.cores, warp=found.warp, shared_bytes=found.block_shared, registers=65536,
        l1_bytes=found.block_shared, l2_bytes=found.l2_bytes,
    )  # fmt: skip
