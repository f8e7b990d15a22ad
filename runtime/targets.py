"""The machines that kernels are compiled for: this one's processor, and GPUs by device or by name."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm
import torch

from ..ir.machine import known_machine
from ..ir.target import Target, TargetError, gpu_target
from .cpu import CpuCompileError, symbol_address
from .triton.architectures import check_architecture

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@lru_cache(maxsize=1)
def _host() -> tuple[str, str]:
    llvm.initialize_native_target()
    # Sorted, for the text is part of cache keys.
    return llvm.get_host_cpu_name(), ",".join(sorted(llvm.get_host_cpu_features().flatten().split(",")))


def cpu_target(cores: int | None = None, products: str = "auto", libraries: str = "aten") -> Target:
    """The processor of this machine, with as many cores as torch uses threads, or ``cores``. ``products`` is "blas"
    where products are not for oneDNN; ``libraries`` is "none" where kernels call none."""
    calls = libraries == "aten"
    name, features = _host()
    flags = set(features.split(","))
    width = 64 if "+avx512f" in flags else 32 if "+avx2" in flags or "+avx" in flags else 16
    return Target(
        "cpu",
        name,
        cores if cores is not None else torch.get_num_threads(),
        vector_bytes=width,
        l1_bytes=_cache_bytes(1, 32 << 10),
        l2_bytes=_cache_bytes(2, 1 << 20),
        warp=1,
        max_threads=1,
        features=features,
        gemm=calls and _has_gemm(),
        onednn=calls
        and products == "auto"
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available(),
        libraries=(libraries,) if libraries != "none" else (),
    )


_V2 = ("cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
# Features and bytes of vectors: the levels of x86-64 (its psABI), and what every AArch64 has (NEON).
_CPUS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "x86-64": ("x86-64", (), 16),
    "x86-64-v2": ("x86-64-v2", _V2, 16),
    "x86-64-v3": ("x86-64-v3", _V3, 32),
    "x86-64-v4": ("x86-64-v4", (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), 64),
    "aarch64": ("generic", (), 16),
}
CPU_NAMES = tuple(_CPUS)
"""Processors that code can be made for wherever it is, the least capable of a kind first."""


def named_cpu_target(name: str, cores: int | None = None, libraries: str = "aten") -> Target:
    """The processor of that name, of ``CPU_NAMES``. Caches and cores are those of the machine at hand, which says as
    much of others as anything; torch's libraries of products are never called on it."""
    arch, features, width = _CPUS[name]
    flags = ",".join(f"+{f}" for f in sorted(features))
    here = cpu_target(cores, "blas", libraries)
    return replace(here, arch=arch, features=flags, vector_bytes=width, gemm=False)


@lru_cache(maxsize=1)
def _has_gemm() -> bool:
    """Whether the library that torch multiplies with may be called by each thread of a team: MKL, which then uses one
    thread, in a torch whose teams are those of kernels."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return all(symbol_address(name) != 0 for name in ("sgemm_", "GOMP_parallel"))
    except CpuCompileError:
        return False


@lru_cache(maxsize=4)
def _cache_bytes(level: int, otherwise: int) -> int:
    """Size of the data cache of that level, where the system tells."""
    for index in sorted(_CACHES.glob("index*")):
        try:
            if (index / "level").read_text().strip() == str(level) and "Instr" not in (index / "type").read_text():
                text = (index / "size").read_text().strip()
                return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]
        except (OSError, KeyError, ValueError):
            continue
    name = f"SC_LEVEL{level}_DCACHE_SIZE" if level == 1 else f"SC_LEVEL{level}_CACHE_SIZE"
    known = os.sysconf(name) if name in getattr(os, "sysconf_names", {}) else 0
    return known if known > 0 else otherwise


def named_target(name: str, libraries: str = "aten") -> Target:
    """The GPU of that name ("cuda:sm_90", "hip:gfx942"), which need not be here. Raises TargetError where no code can
    be made for it."""
    target = _calling(gpu_target(name), libraries)
    check_architecture(target)
    return target


def target_for(
    device: str,
    override: str | None = None,
    cores: int | None = None,
    products: str = "auto",
    libraries: str = "aten",
) -> Target:
    """The target of tensors on ``device`` ("cpu", "cuda:0"), or the one of its kind that ``override`` names
    ("cuda:sm_90", "cpu:aarch64").
    ``cores`` and ``products`` are for CPUs, as in ``cpu_target``, and ``libraries`` is "none" where kernels call none.

    Raises: TargetError where the device is of a kind with no code, or there is no GPU to ask and no override.
    """
    if override is not None and override != "cpu" and not device.startswith("cpu"):
        return _as_torch_allows(named_target(override, libraries))
    if device.startswith("cpu"):
        if override is not None and override.startswith("cpu:"):
            return named_cpu_target(override.removeprefix("cpu:"), cores, libraries)
        return cpu_target(cores, products, libraries)
    kind, _, number = device.partition(":")
    if kind != "cuda":
        raise TargetError(f"no kernels for device {device!r}; they are generated for cpu and cuda tensors")
    if not torch.cuda.is_available():
        raise TargetError(
            f"tensors on {device} but no GPU here: say which one to compile for, MLC_TARGET=cuda:sm_90 or hip:gfx942"
        )
    properties = torch.cuda.get_device_properties(int(number or 0))
    hip = torch.version.hip is not None
    arch = properties.gcnArchName.partition(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    usual = known_machine("hip" if hip else "cuda", arch)
    # Zero, or no such field, where the driver does not tell.
    told = int(getattr(properties, "shared_memory_per_block_optin", 0))
    shared = told or (usual.block_shared if usual is not None else 48 << 10)
    found = Target(
        "hip" if hip else "cuda",
        arch,
        properties.multi_processor_count,
        l1_bytes=shared,
        l2_bytes=int(properties.L2_cache_size),
        warp=int(properties.warp_size),
        shared_bytes=shared,
        registers=int(getattr(properties, "regs_per_multiprocessor", 65536)),
    )
    return _as_torch_allows(_calling(found, libraries))


def _calling(target: Target, libraries: str) -> Target:
    """The target with the libraries that may be called."""
    return replace(target, libraries=()) if libraries == "none" else replace(target, libraries=(libraries,))


def is_here(target: Target) -> bool:
    """Whether this machine has what a target is: every CPU, and a GPU of the architecture of torch's current one."""
    if not target.is_gpu:
        return True
    if not torch.cuda.is_available() or (torch.version.hip is not None) != (target.kind == "hip"):
        return False
    return target_for(f"cuda:{torch.cuda.current_device()}").arch == target.arch


def _as_torch_allows(target: Target) -> Target:
    """The target with the tensor cores' shorter float32 where torch's flags let matrix products use it."""
    allowed = target.capability >= (8, 0) and torch.get_float32_matmul_precision() != "highest"
    return replace(target, features="+tf32") if allowed else target
