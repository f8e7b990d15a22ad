"""What a kernel is compiled for: an explicit value, so that a machine can compile for one that it does not have."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import MlcError

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
    ("+avx2,+fma,…"), or "+tf32" of a GPU whose tensor cores may round float32 operands.
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

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def is_amd(self) -> bool:
        """Whether it is a processor of AMD's since Zen."""
        return self.kind == "cpu" and self.arch.startswith("znver")

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.is_gpu else self.kind

    def lanes(self, itemsize: int) -> int:
        """Elements of that many bytes in one SIMD register."""
        return max(1, self.vector_bytes // itemsize)


def has_kernels(device: str) -> bool:
    """Whether kernels are made for tensors on a device ("cuda:0")."""
    return device.partition(":")[0] in DEVICES


# Streaming multiprocessors, shared memory a block may use, registers a multiprocessor.
_CUDA = {
    "sm_70": (80, 96 << 10), "sm_75": (40, 64 << 10), "sm_80": (108, 163 << 10), "sm_86": (84, 99 << 10),
    "sm_89": (128, 99 << 10), "sm_90": (132, 227 << 10), "sm_100": (148, 227 << 10), "sm_120": (188, 99 << 10),
}  # fmt: skip
_HIP = {"gfx90a": (104, 64 << 10), "gfx942": (304, 64 << 10), "gfx950": (256, 160 << 10)}


def gpu_target(name: str) -> Target:
    """The target called "cuda:sm_90" or "hip:gfx942", with the figures of the architecture's usual part. Raises
    TargetError."""
    kind, _, arch = name.partition(":")
    table = {"cuda": _CUDA, "hip": _HIP}.get(kind)
    if table is None or arch not in table:
        known = ", ".join([f"cuda:{a}" for a in _CUDA] + [f"hip:{a}" for a in _HIP])
        raise TargetError(f"no target {name!r}; the known GPU targets are {known}, and there is 'cpu'")
    cores, shared = table[arch]
    return Target(
        kind, arch, cores, warp=64 if kind == "hip" else 32, shared_bytes=shared, registers=65536,
        l1_bytes=shared, l2_bytes=32 << 20,
    )  # fmt: skip
